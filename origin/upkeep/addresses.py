"""A packed set of addresses: millions of them at little more than their 32 bytes each."""

from __future__ import annotations

from collections.abc import Iterable

from kvcdn.digest import Digest

_FANOUT = 256
"""Buckets, by the first byte of an address: object keys are listed in that order, so that one bucket is used at a time."""

_PACK_BYTES = 64 * Digest.SIZE
"""A bucket below this is never worth removing duplicates from."""


class AddressSet:
    """Addresses joined in buckets. Adding is cheap; asking is cheap while the questions come in order of address."""

    def __init__(self) -> None:
        self._buckets = [bytearray() for _ in range(_FANOUT)]
        self._limits = [_PACK_BYTES] * _FANOUT
        self._open: tuple[int, set[bytes]] = (-1, set())

    def add(self, addresses: Iterable[bytes]) -> None:
        """Adds them; one that is there already does no harm."""
        for address in addresses:
            first = address[0]
            bucket = self._buckets[first]
            bucket += address
            if len(bucket) >= self._limits[first]:
                self._pack(first)
        self._open = (-1, set())

    def __contains__(self, address: bytes) -> bool:
        if self._open[0] != address[0]:
            self._open = (address[0], self._unpacked(address[0]))
        return address in self._open[1]

    def __len__(self) -> int:
        return sum(len(self._unpacked(first)) for first in range(_FANOUT))

    def _unpacked(self, first: int) -> set[bytes]:
        bucket = bytes(self._buckets[first])
        return {bucket[start : start + Digest.SIZE] for start in range(0, len(bucket), Digest.SIZE)}

    def _pack(self, first: int) -> None:
        """Removes duplicates: documents that begin alike list the same blocks."""
        self._buckets[first] = bytearray(b"".join(self._unpacked(first)))
        self._limits[first] = max(_PACK_BYTES, 2 * len(self._buckets[first]))
