"""Purge: objects leave this edge's disk because its operator says so, by address, by model, or all of them.

The files are deleted before the answer is sent, so that nothing has to be remembered. What was on its way meanwhile is passed
on to who waits for it and not kept. An object that the origin has comes back when somebody asks for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvcdn.digest import Digest, FixedBytes, ModelTag
from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.http.body import read_fields
from kvcdn.edge.reads.fetch import Fetcher
from kvcdn.edge.reads.presence import Presence
from kvcdn.edge.threads import in_thread
from kvcdn.errors import CorruptError

MAX_ADDRESSES = 4096

MAX_MODELS = 1000

KEYS_TOGETHER = 4096
"""Keys looked at between two turns of the loop: a millisecond or two."""


@dataclass(frozen=True)
class PurgeRequest:
    """What is to go: the objects at these addresses, those of these models, or all."""

    addresses: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    all: bool = False

    @classmethod
    def parse(cls, body: bytes) -> PurgeRequest:
        """Reads the JSON of a request, which has one field. Raises CorruptError for anything else."""
        fields = read_fields(body, "purge request")
        match fields.names:
            case ("addresses",):
                found = cls(addresses=_texts(fields.array("addresses", 1, MAX_ADDRESSES), Digest))
            case ("models",):
                found = cls(models=_texts(fields.array("models", 1, MAX_MODELS), ModelTag))
            case ("all",):
                if fields.any("all") is not True:
                    raise CorruptError("purge request: all is true, or not there")
                found = cls(all=True)
            case _:
                raise CorruptError("purge request: has one field, which is addresses, models or all")
        return found

    def covers(self, key: str) -> bool:
        return self.all or key[-64:] in self.addresses or key[3:35] in self.models


@dataclass(frozen=True)
class Purged:
    """What went."""

    objects: int
    size: int
    """In bytes."""

    def encode(self) -> bytes:
        return json.dumps({"objects": self.objects, "bytes": self.size}).encode("ascii")


async def purge(chosen: Callable[[str], bool], cache: DiskCache, fetcher: Fetcher, presence: Presence) -> Purged:
    """Deletes all objects whose keys are `chosen`, as of now; on return their files are gone."""
    fetcher.disown(chosen)
    presence.forget(chosen)
    sizes = await delete_chosen(chosen, cache)
    return Purged(len(sizes), sum(sizes))


async def delete_chosen(chosen: Callable[[str], bool], cache: DiskCache) -> list[int]:
    """Deletes what the cache holds, as of now, under `chosen` keys: the sizes, once the files are gone. The loop goes on."""
    sizes: list[int] = []
    keys = iter(cache.snapshot())
    while some := list(islice(keys, KEYS_TOGETHER)):
        sizes += cache.remove(key for key in some if chosen(key))
        await asyncio.sleep(0)
    await in_thread(cache.delete_removed)
    return sizes


def _texts(values: list[Any], kind: type[FixedBytes]) -> frozenset[str]:
    return frozenset(str(kind.parse(value, f"purge request: {kind.__name__}")) for value in values)
