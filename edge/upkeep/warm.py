"""Warming: objects are fetched ahead of their readers, in the background, a few at a time.

An order is answered at once with how much of it is here. Who waits for all of it gives the same order again: what is on its way
or waits is not taken twice, so that orders need no names and nothing has to be remembered of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvcdn.access.tasks import beside
from kvcdn.digest import Digest, ModelTag
from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.http.body import read_fields
from kvcdn.edge.http.target import Kind, ObjectName
from kvcdn.edge.memory import FadingMemory
from kvcdn.edge.reads.fetch import Fetcher, Refused
from kvcdn.edge.upkeep.pins import Pins
from kvcdn.errors import CorruptError
from kvcdn.manifest import MAX_MANIFEST_BYTES, open_manifest
from kvcdn.trail import Trail, current, following

WARMERS = 4
"""Objects fetched at once: half of the places for fills, so that readers find one."""

WAITING_OBJECTS = 65_536
"""Objects that may wait, some 20 MB: sixteen of the longest documents."""

MAX_ADDRESSES = 4096

FAILURE_SECONDS = 10.0
"""How long an order is told why an object is not here, before the next one has it tried again."""

PINS_SECONDS = 60.0
"""Between two looks at whether what is pinned is here."""

PEER_SECONDS = 60.0
"""How long an object counts as here that a peer was seen to keep: what waits for an order asks several times a second."""

log = logging.getLogger("kvcdn.edge.upkeep.warm")


@dataclass(frozen=True)
class WarmRequest:
    """What is to be here: of the model `tag` a document, or blocks."""

    tag: ModelTag
    manifest: ObjectName | None
    blocks: tuple[ObjectName, ...]
    pin: bool = False
    """Whether the document is to stay whatever else is asked for."""

    @classmethod
    def parse(cls, body: bytes) -> WarmRequest:
        """Reads the JSON of a request. Raises CorruptError for anything else."""
        fields = read_fields(body, "warm request")
        tag = fields.fixed("model", ModelTag)
        match fields.names:
            case ("manifest",):
                return cls(tag, ObjectName(Kind.MANIFEST, tag, fields.fixed("manifest", Digest)), ())
            case ("manifest", "pin"):
                if fields.any("pin") is not True:
                    raise CorruptError("warm request: pin is true, or not there")
                return cls(tag, ObjectName(Kind.MANIFEST, tag, fields.fixed("manifest", Digest)), (), pin=True)
            case ("addresses",):
                addresses = fields.array("addresses", 1, MAX_ADDRESSES)
                parsed = [Digest.parse(address, "warm request: address") for address in addresses]
                return cls(tag, None, tuple(ObjectName(Kind.BLOCK, tag, address) for address in dict.fromkeys(parsed)))
            case _:
                raise CorruptError("warm request: besides model it has manifest, also with pin, or addresses")


@dataclass(frozen=True)
class Warmed:
    """How much of an order is here, or at a peer that keeps it. What is neither that nor `waiting` could not be had."""

    objects: int
    here: int
    size: int
    """Bytes of what is here, without what peers keep."""
    waiting: int
    trouble: str

    def encode(self) -> bytes:
        value = {"objects": self.objects, "here": self.here, "bytes": self.size}
        return json.dumps({**value, "waiting": self.waiting, "trouble": self.trouble}).encode("ascii")


class Warming:
    """Fetches what was ordered. For the event loop's thread."""

    def __init__(self, fetcher: Fetcher, cache: DiskCache, pins: Pins) -> None:
        self._fetcher, self._cache, self.pins = fetcher, cache, pins
        self._waiting: deque[tuple[ObjectName, Trail]] = deque()
        """With the trail of the order."""
        self._taken: set[str] = set()
        """Keys of what waits or is on its way."""
        self._failures: FadingMemory[str] = FadingMemory(WAITING_OBJECTS)
        self._at_peers: FadingMemory[bool] = FadingMemory(WAITING_OBJECTS)
        self._more = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Fetches while the context lasts; fills that run then are the fetcher's to end."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(WARMERS):
                await stack.enter_async_context(beside(self._work(), "warm"))
            await stack.enter_async_context(beside(self._keep_pins(), "pins"))
            yield

    async def order(self, asked: WarmRequest) -> Warmed | Refused | None:
        """Has what was asked for fetched in the background; Refused where its manifest is not to be had.

        None where it cannot be pinned, for there is no room beside other pins. Raises OSError of the disk.
        """
        if asked.manifest is None:
            return self._take(asked.blocks)
        data = await self._read(asked.manifest)
        if isinstance(data, Refused):
            return data
        manifest = open_manifest(data, str(asked.manifest))
        blocks = [ObjectName(Kind.BLOCK, asked.tag, block.address) for block in manifest.blocks]
        if asked.pin:
            sizes = {name.key: block.size for name, block in zip(blocks, manifest.blocks, strict=True)}
            if not await self.pins.add(asked.manifest, {asked.manifest.key: len(data), **sizes}):
                return None
        return self._take([asked.manifest, *blocks])

    async def _keep_pins(self) -> None:
        """Has what is pinned and not here fetched: after a start, and after a disk damaged it."""
        while True:
            missing = map(ObjectName.from_path, (f"/{key}" for key in self.pins.missing()))
            self._take([name for name in missing if name is not None and not self._fetcher.refuses(name)])
            await asyncio.sleep(PINS_SECONDS)

    def _take(self, names: Sequence[ObjectName]) -> Warmed:
        missing = [name for name in names if not self._is_here(name.key)]
        trouble = ""
        trail = current() or Trail.of(None)
        for name in missing:
            failure = self._failures.get(name.key)
            if failure is not None:
                trouble = trouble or failure
            elif name.key not in self._taken and len(self._waiting) < WAITING_OBJECTS:
                self._taken.add(name.key)
                self._waiting.append((name, trail))
        self._more.set()
        waiting = sum(name.key in self._taken for name in missing)
        size = sum(self._cache.size_of(name.key) or 0 for name in names)
        return Warmed(len(names), len(names) - len(missing), size, waiting, trouble)

    def _is_here(self, key: str) -> bool:
        """Whether an order has nothing to wait for: the object is here, or it need not be, as a peer keeps it."""
        if self._cache.size_of(key) is not None:
            return True
        return not self._cache.is_pinned(key) and self._at_peers.get(key) is not None

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._more.clear()
                await self._more.wait()
            name, trail = self._waiting.popleft()
            with following(trail):
                await self._warm(name)

    async def _warm(self, name: ObjectName) -> None:
        """Has `name` here, or says in the log why not, and remembers it for who asks."""
        try:
            failure = await self._fetch(name)
        except OSError as error:
            failure = f"{name}: the edge cannot open a file ({error.strerror})"
        except Exception:
            log.exception("warming %s failed", name)
            failure = f"{name}: the edge failed, its log says how"
        finally:
            self._taken.discard(name.key)
        if failure is not None:
            log.warning("not warmed: %s", failure)
            self._failures.put(name.key, failure, FAILURE_SECONDS)

    async def _fetch(self, name: ObjectName) -> str | None:
        """Waits until `name` is in the cache; why it is not."""
        if self._cache.size_of(name.key) is not None:
            return None
        found = await self._fetcher.get(name)
        if isinstance(found, Refused):
            return found.refusal.message
        found.file.close()
        refusal = None if found.fill is None else await found.fill.ended()
        if refusal is not None:
            return refusal.message
        if found.fill is not None and found.fill.guest:
            self._at_peers.put(name.key, value=True, seconds=PEER_SECONDS)
            return None
        return None if self._cache.size_of(name.key) is not None else f"{name}: the cache has no room for it"

    async def _read(self, name: ObjectName) -> bytes | Refused:
        """A manifest, whole."""
        found = await self._fetcher.get(name)
        if isinstance(found, Refused):
            return found
        with found.file as file:
            refusal = None if found.fill is None else await found.fill.ended()
            if refusal is not None:
                return Refused(refusal, found.outcome)
            return os.pread(file.fileno(), MAX_MANIFEST_BYTES, 0)
