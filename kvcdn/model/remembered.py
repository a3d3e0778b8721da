"""Remembered facts: small JSON files in the user's cache folder, that may be lost or damaged at any time without harm."""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcdn.paths import cache_dir

_MAX_ENTRIES = 256
"""The oldest go."""


class Remembered:
    """A dictionary on disk. What cannot be read is forgotten, what cannot be written is not remembered."""

    def __init__(self, name: str) -> None:
        self._path = cache_dir() / f"{name}.json"

    def get(self, key: str) -> Any:
        """The value of `key`, or None. It comes from a file: check its form."""
        return self._load().get(key)

    def items(self) -> list[tuple[str, Any]]:
        """Everything remembered, oldest first. The values come from a file: check their form."""
        return list(self._load().items())

    def put(self, key: str, value: Any, *, every_s: float = 0.0) -> None:
        """Remembers `value` (JSON) under `key`. Never raises.

        Not where the key is known and the file was written less than `every_s` seconds ago: that may take as long as a fetch,
        since file systems write a file to the disk before it replaces another.
        """
        entries = self._load()
        if key in entries and 0 <= time.time() - self._written() < every_s:
            return
        entries.pop(key, None)
        entries[key] = value
        kept = dict(list(entries.items())[-_MAX_ENTRIES:])
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False, encoding="utf-8") as file:
                json.dump(kept, file)
            Path(file.name).replace(self._path)

    def _written(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:
            return 0.0

    def _load(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
