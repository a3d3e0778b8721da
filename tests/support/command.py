"""The `kvcdn` program as a user runs it: arguments in, exit code and both outputs out.

By default it runs in this process, through the very function that the console script calls: importing torch takes longer than
most commands. `process=True` starts the installed program.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kvcdn.cli.main import run
from support.waiting import PROCESS_SECONDS


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


def kvcdn(
    *arguments: str | Path, stdin: bytes = b"", home: Path | None = None, process: bool = False, **environment: str
) -> Ran:
    """Runs `kvcdn` with the arguments; `home` is where it keeps its files, by default the test's own."""
    words = [str(argument) for argument in arguments]
    if home is not None:
        environment |= {name: str(home / name.lower()) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    return _in_process(words, stdin, environment) if not process else _as_process(words, stdin, environment)


def _as_process(words: list[str], stdin: bytes, environment: Mapping[str, str]) -> Ran:
    program = str(Path(sys.executable).with_name("kvcdn"))
    variables = {**os.environ, **environment}
    done = subprocess.run(
        [program, *words], input=stdin, capture_output=True, timeout=PROCESS_SECONDS, env=variables, check=False
    )
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def _in_process(words: list[str], stdin: bytes, environment: Mapping[str, str]) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["kvcdn", *words]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _exit_code() as code,
    ):
        run()
    return Ran(code[0], out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _exit_code() -> Iterator[list[int]]:
    code = [0]
    try:
        yield code
    except SystemExit as left:
        code[0] = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
