"""Match: how many blocks lead a chain (FORMAT.md section 7).

Where block i of a chain exists, so do those before it. So the end of what exists is searched from the right: the last block
is asked for first, together with the next unknown one and some between, then the gap that is left. Every size that is answered
was seen, here or at the origin.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvcdn.digest import ModelTag
from kvcdn.edge.http.body import read_fields
from kvcdn.edge.reads.presence import RUNNING_STATS, Presence
from kvcdn.errors import CorruptError, UnavailableError

MAX_ADDRESSES = 4096

ASKED_TOGETHER = 4 * RUNNING_STATS
"""Sizes asked for in one go: keeps the threads busy, and bounds what a chain that is no chain costs the origin."""

_ADDRESS_LINES = re.compile(r"(?:[0-9a-f]{64}\n)*")

_ADDRESS_DIGITS = 64


@dataclass(frozen=True)
class MatchRequest:
    """A chain to look up: the object keys of its blocks, in order."""

    tag: ModelTag
    keys: tuple[str, ...]

    @classmethod
    def parse(cls, body: bytes) -> MatchRequest:
        """Reads the JSON of a request. Raises CorruptError for anything else."""
        fields = read_fields(body, "match request")
        tag = fields.fixed("model", ModelTag)
        addresses = fields.array("addresses", 0, MAX_ADDRESSES)
        fields.done()
        # One expression over all of them: a warm match of a long chain is mostly this check.
        if not all(
            isinstance(item, str) and len(item) == _ADDRESS_DIGITS for item in addresses
        ) or not _ADDRESS_LINES.fullmatch("".join(f"{item}\n" for item in addresses)):
            raise CorruptError(f"match request: an address has {_ADDRESS_DIGITS} lowercase hexadecimal digits")
        prefix = f"v1/{tag}/blocks/"
        return cls(tag, tuple(f"{prefix}{item[:2]}/{item}" for item in addresses))


@dataclass(frozen=True)
class MatchResult:
    """Sizes of the blocks that lead the chain. `complete` is false where the origin could not be asked about the next one."""

    sizes: tuple[int, ...]
    complete: bool = True

    def encode(self) -> bytes:
        return json.dumps({"matched": len(self.sizes), "sizes": self.sizes}, separators=(",", ":")).encode("ascii")


async def match_chain(keys: Sequence[str], presence: Presence) -> MatchResult:
    """How the chain `keys` begins. Raises UnavailableError where the origin cannot be asked and nothing of it is here."""
    sizes = [presence.known_size(key) for key in keys]
    if None not in sizes:
        return MatchResult(_leading(sizes))
    try:
        end = await _search_end(keys, sizes, presence)
        await _ask_missing(keys, sizes, end, presence)
    except UnavailableError:
        leading = _leading(sizes)
        if not leading:
            raise
        return MatchResult(leading, complete=False)
    return MatchResult(_leading(sizes[:end]))


async def _search_end(keys: Sequence[str], sizes: list[int | None], presence: Presence) -> int:
    """Index of the first block that does not exist; fills in `sizes` that it comes to know."""
    low = max((i for i, size in enumerate(sizes) if size is not None), default=-1)
    high = len(keys)
    while low + 1 < high:
        probes = _probes(low, high)
        await _ask_all(keys, sizes, probes, presence)
        low = max([low, *(i for i in probes if sizes[i] is not None)])
        high = min([high, *(i for i in probes if i > low and sizes[i] is None)])
    return high


async def _ask_missing(keys: Sequence[str], sizes: list[int | None], end: int, presence: Presence) -> None:
    """Asks for the sizes not known of the first `end` blocks, from the left, and stops where one is missing after all."""
    missing = [i for i in range(end) if sizes[i] is None]
    for start in range(0, len(missing), ASKED_TOGETHER):
        batch = missing[start : start + ASKED_TOGETHER]
        await _ask_all(keys, sizes, batch, presence)
        if any(sizes[i] is None for i in batch):
            return


def _probes(low: int, high: int) -> list[int]:
    """Up to RUNNING_STATS indices between `low` and `high`, both excluded: the first, the last, and evenly some between."""
    first, last = low + 1, high - 1
    count = min(RUNNING_STATS, last - first + 1)
    return sorted({first + (last - first) * step // max(count - 1, 1) for step in range(count)})


async def _ask_all(keys: Sequence[str], sizes: list[int | None], indices: Sequence[int], presence: Presence) -> None:
    results = await asyncio.gather(*(presence.size(keys[i]) for i in indices), return_exceptions=True)
    failure: BaseException | None = None
    for index, result in zip(indices, results, strict=True):
        if isinstance(result, BaseException):
            failure = failure or result
        else:
            sizes[index] = result
    if failure is not None:
        raise failure


def _leading(sizes: Sequence[int | None]) -> tuple[int, ...]:
    leading = []
    for size in sizes:
        if size is None:
            break
        leading.append(size)
    return tuple(leading)
