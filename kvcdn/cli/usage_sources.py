"""Where ledgers are: files of this machine, snapshots, and edges that give theirs over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import urllib3

from kvcdn.accounting.books import Books
from kvcdn.accounting.ledger import Ledger
from kvcdn.accounting.snapshot import Snapshot
from kvcdn.cli.output import note, size
from kvcdn.errors import CorruptError, NotFoundError, UnavailableError, UntrustedError, UsageError

ASK_SECONDS = 30.0
"""To connect, and between two pieces of an answer."""

MAX_SNAPSHOT_BYTES = 1 << 30
"""A ledger that is full has some 160 MB."""

PIECE_BYTES = 1 << 16

SLOW_BYTES = 20 * 1000**2
"""Reading a larger ledger takes seconds."""

_SQLITE = b"SQLite format 3\x00"

MAX_HEAD_BYTES = 4 << 20
"""Of a snapshot's first line, which has the runs."""


def read_books(paths: Iterable[Path], edges: Iterable[str], token: str | None) -> Books:
    """All of them merged. Raises NotFoundError, UsageError, CorruptError, UntrustedError, UnavailableError."""
    found = [read_file(path) for path in paths]
    found += [ask_edge(url, token) for url in edges]
    return Books.of(found)


def read_file(path: Path) -> Snapshot:
    """A ledger, or a snapshot in its text form. Raises as `read_books`."""
    try:
        with path.open("rb") as file:
            length = path.stat().st_size
            if length > SLOW_BYTES:
                note(f"reading {path}, {size(length)}")
            if file.read(len(_SQLITE)) == _SQLITE:
                with Ledger(path, create=False) as ledger:
                    return ledger.snapshot()
            file.seek(0)
            return Snapshot.decode(_lines(file, str(path)), str(path))
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no ledger {path}", hint="clients keep one with KVCDN_USAGE=FILE, edges and services with usage_file"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def ask_edge(url: str, token: str | None) -> Snapshot:
    """The ledger of the edge at `url`. Raises as `read_books`."""
    where = f"{url.rstrip('/')}/v1/usage"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib3.PoolManager(timeout=ASK_SECONDS, retries=False) as pool:
            reply = pool.request("GET", where, headers=headers, preload_content=False, redirect=False)
            if isinstance(reply, urllib3.HTTPResponse):
                reply.auto_close = False  # its last piece would close it, under the buffer
            try:
                if reply.status != 200:  # noqa: PLR2004 - HTTP's own number
                    raise _refusal(url, reply.status, reply.read(500).decode("utf-8", "replace").strip())
                file = BufferedReader(reply, PIECE_BYTES)
                return Snapshot.decode(_lines(file, where), where)
            finally:
                reply.close()
    except (urllib3.exceptions.HTTPError, ValueError) as error:
        hint = "is the edge running, and is its address right? With admin_listen, name that address"
        raise UnavailableError(f"{url} gives no ledger: {type(error).__name__}", hint=hint) from None


def _refusal(url: str, status: int, said: str) -> UntrustedError | NotFoundError | UnavailableError:
    if status in (401, 403):
        return UntrustedError(f"{url} refuses us ({status})", hint="give a token with the scope stats: --token or KVCDN_TOKEN")
    if status == 404:  # noqa: PLR2004 - HTTP's own number
        return NotFoundError(f"{url} has no ledger: {said[:200]}", hint="set usage_file in its settings")
    return UnavailableError(f"{url} answers {status}: {said[:200]}")


def _lines(file: BinaryIO, what: str) -> Iterator[bytes]:
    """Its lines, each cut off where none of ours is so long: who reads them then refuses it."""
    total = 0
    while line := file.readline(MAX_HEAD_BYTES):
        total += len(line)
        if total > MAX_SNAPSHOT_BYTES:
            raise CorruptError(f"{what} is larger than a ledger can be")
        yield line
