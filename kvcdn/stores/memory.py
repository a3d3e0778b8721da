"""A memory store: objects in a dictionary, for tests, demonstrations and small caches. Gone with the process."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from threading import Lock

from kvcdn.digest import Buffer
from kvcdn.errors import NotFoundError
from kvcdn.store import STREAM_CHUNK_BYTES, BlobInfo, check_key
from kvcdn.stores.span import Span


class MemoryStore:
    """A BlobStore without a disk."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    @property
    def url(self) -> str:
        return "memory:"

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._objects)} objects)"

    def stat(self, key: str) -> BlobInfo | None:
        found = self._objects.get(check_key(key))
        return None if found is None else BlobInfo(key, len(found[0]), found[1])

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data, (first, last) = self._find(key, Span.of(start, length))
        return data[first:last]

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        data, (first, last) = self._find(key, Span.of(start, length))
        return _pieces(data, first, last)

    def create(self, key: str, pieces: Sequence[Buffer]) -> bool:
        check_key(key)
        entry = (b"".join(pieces), time.time())
        with self._lock:
            return self._objects.setdefault(key, entry) is entry

    def list(self, prefix: str, after: str = "") -> Iterator[BlobInfo]:
        with self._lock:
            found = sorted((key, entry) for key, entry in self._objects.items() if key.startswith(prefix) and key > after)
        return (BlobInfo(key, len(data), modified) for key, (data, modified) in found)

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def _find(self, key: str, span: Span) -> tuple[bytes, tuple[int, int]]:
        found = self._objects.get(check_key(key))
        if found is None:
            raise NotFoundError(f"memory: has no object {key}")
        return found[0], span.clip(len(found[0]))


def _pieces(data: bytes, first: int, last: int) -> Generator[bytes, None, None]:
    for position in range(first, last, STREAM_CHUNK_BYTES):
        yield data[position : min(position + STREAM_CHUNK_BYTES, last)]
