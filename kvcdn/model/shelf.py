"""The shelf: bases of models in the user's data folder, each under its digest, so that a machine fetches or makes one once."""

from __future__ import annotations

import os
from pathlib import Path

from kvcdn.basis import MAX_BASIS_BYTES, BasisName
from kvcdn.codecs.basis import Basis
from kvcdn.digest import ModelTag, hash_bytes
from kvcdn.errors import CorruptError
from kvcdn.layout import Layout
from kvcdn.paths import data_dir


class Shelf:
    """The bases of one model."""

    def __init__(self, tag: ModelTag, layout: Layout) -> None:
        self._folder = data_dir() / "bases" / str(tag)
        self._layout = layout

    def latest(self) -> Basis | None:
        """The basis that was put here last, if there is a sound one."""
        try:
            files = sorted(self._folder.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            return None
        return next((basis for path in files if (basis := self._read(path)) is not None), None)

    def get(self, name: BasisName) -> Basis | None:
        """The basis `name`, if it is here and sound."""
        return self._read(self._folder / str(name.digest))

    def put(self, basis: Basis) -> None:
        """Keeps `basis`; where the disk does not take it, it is fetched again next time."""
        path = self._folder / str(basis.name.digest)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(basis.body)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)

    def _read(self, path: Path) -> Basis | None:
        try:
            if path.stat().st_size > MAX_BASIS_BYTES:
                return None
            body = path.read_bytes()
            return Basis.parse(body, self._layout, str(path)) if str(hash_bytes(body)) == path.name else None
        except (OSError, CorruptError):
            return None
