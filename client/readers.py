"""Readers of objects at edges: one transfer front to back, or a transfer for each piece."""

from __future__ import annotations

from kvcdn.client.edges import EdgeGroup
from kvcdn.client.patience import Patience
from kvcdn.client.source import RANGE_BYTES
from kvcdn.client.transfer import Identity, Transfer
from kvcdn.errors import CorruptError


class StreamReader:
    """One GET of a whole object; bytes are received into a buffer that is used again for every piece."""

    def __init__(self, group: EdgeGroup, patience: Patience, key: str) -> None:
        self._whole, self._patience = patience, patience.part()
        self._key = key
        self._transfer = Transfer(group, self._patience, key, Identity())
        self._buffer = bytearray()

    def read_exact(self, count: int, ahead: int = RANGE_BYTES) -> memoryview:  # noqa: ARG002 - all of it is on its way
        if len(self._buffer) < count:
            # An eighth more: segments are of about the same size, and many a little larger than all before.
            self._buffer = bytearray(count + count // 8)
        view = memoryview(self._buffer)[:count]
        if self._transfer.read_into(view) < count:
            raise CorruptError(f"{self._key} is truncated: it ends before its header says")
        return view

    def skip(self, count: int) -> int:
        for done in range(0, count, RANGE_BYTES):
            self.read_exact(min(count - done, RANGE_BYTES))
        return count

    def at_end(self) -> bool:
        return self._transfer.complete

    def abort(self) -> None:
        self._patience.abort()

    def close(self) -> None:
        self._transfer.close()
        self._whole.forget(self._patience)


class RangedReader:
    """An object read in ranges of RANGE_BYTES or what is wanted; what was read too far is kept for the next call."""

    def __init__(self, group: EdgeGroup, patience: Patience, key: str) -> None:
        self._group = group
        self._whole, self._patience = patience, patience.part()
        self._key = key
        self._known = Identity()
        self._buffer = memoryview(b"")
        self._position = 0

    def read_exact(self, count: int, ahead: int = RANGE_BYTES) -> memoryview:
        missing = count - len(self._buffer)
        if missing > 0:
            wanted = max(missing, min(ahead - len(self._buffer), RANGE_BYTES))
            piece = bytearray(len(self._buffer) + wanted)
            view = memoryview(piece)
            view[: len(self._buffer)] = self._buffer
            received = self._read(view[len(self._buffer) :])
            self._position += received
            self._buffer = view[: len(self._buffer) + received]
            if received < missing:
                raise CorruptError(f"{self._key} is truncated: it ends before its header says")
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _read(self, view: memoryview) -> int:
        stop = self._position + len(view)
        transfer = Transfer(self._group, self._patience, self._key, self._known, start=self._position, stop=stop)
        try:
            return transfer.read_into(view)
        finally:
            transfer.close()

    def skip(self, count: int) -> int:
        received = min(count, len(self._buffer))
        self._buffer, self._position = self._buffer[received:], self._position + count - received
        return received

    def at_end(self) -> bool:
        position = self._position - len(self._buffer)
        return not self._buffer and (self._known.size is None or position >= self._known.size)

    def abort(self) -> None:
        self._patience.abort()

    def close(self) -> None:
        self._buffer = memoryview(b"")
        self._whole.forget(self._patience)
