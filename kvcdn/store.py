"""The BlobStore protocol: what every place that keeps objects must do. Implementations are in `kvcdn.stores`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcdn.digest import Buffer
from kvcdn.errors import UsageError

STREAM_CHUNK_BYTES = 1 << 20
"""Piece size of `stream`: large enough that per-piece costs vanish, small enough to hold many."""

FIRST_BYTES = 64 * 1024
"""A stream's pieces are no larger until so much has come: an envelope is in it, and who waits for that waits for no more."""

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
MAX_KEY_CHARACTERS = 512


@dataclass(frozen=True)
class BlobInfo:
    """What a store knows of an object without reading it."""

    key: str
    size: int
    modified: float
    """Unix time in seconds of its creation at this store."""


class BlobStore(Protocol):
    """Immutable objects under keys such as `v1/<tag>/blocks/ab/ab...`. Thread-safe. One suite tests every implementation.

    - An object is visible completely or not at all, whatever dies when.
    - A key names at most one object, ever: `create` never overwrites, and of many racing creators one wins.
    - Transient failures are retried inside, within a bound; what remains is UnavailableError, naming store and key.
    - A key that `check_key` refuses raises UsageError before anything is touched.
    """

    @property
    def url(self) -> str:
        """Where this is, for people; never holds a secret."""

    def stat(self, key: str) -> BlobInfo | None:
        """The object's size and age, or None where there is none."""

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes `start` to `start + length`, or to the end without `length`.

        Fewer where the object ends before, none past its end. Raises NotFoundError.
        """

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """As `read`, in pieces of at most STREAM_CHUNK_BYTES.

        NotFoundError comes at the call, not at the first piece. Raises UnavailableError in
        mid-stream rather than end early. It is a generator: close it to let go of the connection.
        """

    def create(self, key: str, pieces: Sequence[Buffer]) -> bool:
        """Writes the joined `pieces` as a new object; durable on return. False where one exists, which then is untouched."""

    def list(self, prefix: str, after: str = "") -> Iterator[BlobInfo]:
        """Every object whose key starts with `prefix` and comes behind `after`, in key order; nothing before is looked at."""

    def delete(self, key: str) -> None:
        """Removes the object; no error where there is none."""


def is_behind(name: str, after: str) -> bool:
    """Whether the key `name` comes behind `after`; of a folder, with its slash, whether a key in it may."""
    return name > after or (name.endswith("/") and after.startswith(name))


def check_key(key: str) -> str:
    """`key` itself. Raises UsageError for one that could leave the store or that some store cannot hold."""
    if len(key) > MAX_KEY_CHARACTERS or not _KEY.fullmatch(key):
        raise UsageError(f"{key[:80]!r} is not an object key")
    return key
