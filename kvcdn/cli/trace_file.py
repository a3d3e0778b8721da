"""A trace's file: its lines, gzipped or not, each of bounded length."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvcdn.errors import UsageError

MAX_LINE_BYTES = 1 << 20
"""One request of a trace: some 100,000 blocks."""


@contextmanager
def trace_lines(path: Path) -> Iterator[Iterator[bytes]]:
    """The lines that are not empty. Raises UsageError where the file cannot be read, at the line where that shows."""
    try:
        with _open(path) as file:
            yield _lines(file, path)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read the trace {path}: {error}") from None


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(
                f"{path}: a line is longer than {MAX_LINE_BYTES:,} bytes", hint="a trace is JSON lines with hash_ids"
            )
        if line.strip():
            yield line
