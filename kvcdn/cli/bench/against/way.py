"""A way: one manner of having a document's KV without prefilling it, as the benchmark drives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvcdn.cli.bench.processes import cpu_seconds

_STAT_BLOCK_BYTES = 512
"""Of the blocks that stat(2) counts."""


@dataclass(frozen=True)
class Document:
    """A text that ways keep the KV of, and what people call it."""

    name: str
    text: str
    tokens: int


@dataclass(frozen=True)
class Checks:
    """What a way checks before it gives KV to the model, in a few words each; `key` is what it finds KV by."""

    key: str
    integrity: str
    authenticity: str
    model: str
    confidentiality: str


@dataclass(frozen=True)
class Reading:
    """One prompt answered. `reused` counts tokens that were not prefilled.

    `said` is what whoever asked is told of a failure: the words of an error or of a report; "" where nothing was said. An
    error, after which there is no answer, has no `token_ids`.
    """

    token_ids: tuple[int, ...] = ()
    first_token_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of the reader's process until the first token, of all its threads."""
    reused: int = 0
    said: str = ""


@dataclass(frozen=True)
class Stored:
    """One object at rest, as its store believes it is right. Faults read and write it."""

    name: str
    read: Callable[[], bytes]
    write: Callable[[bytes], None]
    disk_bytes: Callable[[], int]


def stored_file(path: Path) -> Stored:
    """The file at `path`. It is replaced, not written over: a server may have it open."""

    def write(data: bytes) -> None:
        draft = path.with_name(f".{path.name}"[:200])
        draft.write_bytes(data)
        draft.replace(path)

    def disk_bytes() -> int:
        found = path.stat()
        return min(found.st_size, found.st_blocks * _STAT_BLOCK_BYTES)  # a file may have holes

    return Stored(path.name, path.read_bytes, write, disk_bytes)


class Way(Protocol):
    """What the benchmark needs of each. Documents are kept before they are read."""

    name: str
    setup: str
    """How it is configured, in words."""
    checks: Checks
    lossy: bool

    def keep(self, document: Document) -> None:
        """Stores the KV of `document`."""

    def read(self, document: Document, question: str, tokens: int, *, port: int | None = None) -> Reading:
        """Answers with `tokens` greedy tokens; over `port` of this machine in place of the server's own, if given."""

    def renew(self) -> None:
        """Forgets what readers and caches remember of earlier reads; what is at rest stays."""

    def stored(self, document: Document) -> Sequence[Stored]:
        """The objects at rest, the largest first where that matters; in the same order for documents of one length."""

    def other_weights(self, folder: Path | None) -> None:
        """From now on the reader's model has the weights in `folder`, under the same name; None for the first ones again."""

    @property
    def server(self) -> Server | None:
        """What it reads from over a socket, if it does."""


@dataclass(frozen=True)
class Server:
    """A server process of this machine: its port, and the processes that serve."""

    port: int
    pids: Callable[[], Sequence[int]] = field(default=lambda: ())

    def cpu_s(self) -> float:
        """Processor seconds it has used so far."""
        return sum(cpu_seconds(pid) for pid in self.pids())


class Stopwatch:
    """Wall time and processor time of this process, from now on."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._busy = time.process_time()

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._busy
