"""Readers of objects at edges: one transfer front to back, or a transfer for each piece."""

from __future__ import annotations

from kvcdn.client.network.edges import EdgeGroup
from kvcdn.client.network.patience import Patience
from kvcdn.client.sources.source import RANGE_BYTES
from kvcdn.client.sources.transfer import Identity, Transfer
from kvcdn.errors import CorruptError

STREAM_BYTES = 1 << 20
"""Of a stream, received at once where so much has come: some four layers of a block, for each of which it would be a call."""


class StreamReader:
    """One GET of a whole object; bytes are received into a buffer that is used again for every piece."""

    def __init__(self, group: EdgeGroup, patience: Patience, key: str) -> None:
        self._whole, self._patience = patience, patience.part()
        self._key = key
        self._transfer = Transfer(group, self._patience, key, Identity())
        self._buffer = bytearray()
        self._begin = self._end = 0
        """Where in the buffer what has come and was not read yet lies."""

    def read_exact(self, count: int, ahead: int = RANGE_BYTES) -> memoryview:  # noqa: ARG002 - all of it is on its way
        if self._end - self._begin < count:
            self._receive(count)
        begin = self._begin
        self._begin = begin + count
        return memoryview(self._buffer)[begin : begin + count]

    def _receive(self, count: int) -> None:
        """Has `count` bytes at the front of the buffer, and behind them what else has come."""
        kept = self._end - self._begin
        buffer = self._buffer
        if len(buffer) < count or not buffer:
            buffer = bytearray(max(count + count // 8, STREAM_BYTES))
        memoryview(buffer)[:kept] = memoryview(self._buffer)[self._begin : self._end]
        self._buffer, self._begin, self._end = buffer, 0, kept
        self._end += self._transfer.read_into(memoryview(buffer)[kept:], count - kept)
        if self._end < count:
            raise CorruptError(f"{self._key} is truncated: it ends before its header says")

    def skip(self, count: int) -> int:
        for done in range(0, count, RANGE_BYTES):
            self.read_exact(min(count - done, RANGE_BYTES))
        return count

    def at_end(self) -> bool:
        return self._begin == self._end and self._transfer.complete

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
