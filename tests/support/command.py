"""The `kvcdn` program as a user runs it: a process of its own, with its exit code and both its outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 240
"""Longest run: the real model on two slow cores."""


@dataclass(frozen=True)
class Ran:
    """A finished run."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which must be exactly one JSON object on one line."""
        lines = self.out.splitlines()
        assert 1 == len(lines), self.out + self.err
        value: dict[str, Any] = json.loads(lines[0])
        return value

    @property
    def complaint(self) -> str:
        """What a failed run said: one line, and perhaps one with a hint. Never a traceback."""
        assert "Traceback" not in self.err, self.err
        return self.err.strip()


def kvcdn(*arguments: str | Path, stdin: bytes = b"", home: Path | None = None, **environment: str) -> Ran:
    """Runs `kvcdn` with the arguments; `home` is where it keeps its files, by default the test's own."""
    variables = {**os.environ, **environment}
    if home is not None:
        variables |= {name: str(home / name.lower()) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    program = Path(sys.executable).with_name("kvcdn")
    done = subprocess.run(
        [str(program), *map(str, arguments)], input=stdin, capture_output=True, timeout=SECONDS, env=variables, check=False
    )
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())
