"""Local prefixes: what this host has of a prompt already, mapped into the layers of a cache; and what was fetched, kept.

A prefix file is mapped privately: all processes share its pages, and what a model writes, behind the prefix or over it, goes
to pages of its own. What is used of a file is checked before its first use in a process (FORMAT.md section 10): a damaged file
is removed and fetched anew. Keeping happens behind the answer, in one thread; nobody waits for it, and what cannot be kept is
fetched again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from kvcdn.block import BlockHeader
from kvcdn.client.loading.delivery import Delivery
from kvcdn.client.loading.fetch import PrefixFetch
from kvcdn.errors import CorruptError, KvcdnError
from kvcdn.keys import BlockName, Chain, ModelIdentity
from kvcdn.model.cache import CacheLayer, make_layer
from kvcdn.model.layers import TORCH_DTYPES
from kvcdn.model.place import Devices
from kvcdn.model.prefill import tensor_bytes
from kvcdn.prefixfile import KINDS, ROOM_TOKENS, HeldBlock, Place, PrefixFile, PrefixVerifier, open_prefix_file
from kvcdn.signing import TrustList
from kvcdn.stores.local import LocalStore
from kvcdn.stores.mapped import FileKey, MappedFile

MAX_WAITING = 4
"""Prefixes waiting to be kept: each holds its tensors in memory until then."""

BEHIND_SECONDS = 2.0
"""How long keeping waits where a model is about to run: the two would take the cores from each other before its first token."""

MAX_REMEMBERED = 1024
"""Files whose check is remembered, with some kilobyte a block."""

Headers = tuple[BlockHeader | None, ...]


@dataclass(frozen=True)
class LocalPrefix:
    """A prompt's leading blocks, mapped and checked. `layers` show `length` tokens to the model.

    `headers` are those of the blocks that it has rows of, by index, without their segments; `envelope` gives all of one.
    """

    blocks: tuple[BlockName, ...]
    length: int
    layers: list[CacheLayer]
    headers: dict[int, BlockHeader]
    envelope: Callable[[int], bytes]

    @property
    def tokens(self) -> int:
        return self.blocks[-1].end

    def fill(self, delivery: Delivery) -> None:
        """Fills the block of `delivery` from here, if what is wanted of it is here: the rest of a longer prefix is fetched."""
        name, index = delivery.name, delivery.name.index
        if delivery.complete or index >= len(self.blocks) or self.blocks[index].address != name.address:
            return
        wanted = list(zip(self.layers, delivery.wanted, strict=True))
        if index in self.headers and all(layer.first <= name.start for layer, wants in wanted if wants):
            rows = [layer.rows(name.start, name.end) if wants else [] for layer, wants in wanted]
            delivery.take(self.headers[index], self.envelope(index), rows)

    def suffices(self, chain: Chain, boundaries: tuple[int, ...]) -> bool:
        """Whether no source need be asked for more.

        That is so where the document is here to its end (of a chat, the opening message; without a known end, all whole
        blocks), and what else of the prompt may have been published is less than a block: too little for a round trip.
        """
        whole = chain.tokens // chain.block_tokens * chain.block_tokens
        ends = [end for end in boundaries if 0 < end <= chain.tokens] or [whole]
        return self.tokens >= min(ends) and max(ends) - self.tokens < chain.block_tokens


@dataclass(frozen=True)
class FetchedPrefix:
    """A prefix on its way into memory: `rows[i]` are layer i's tensors from token `first[i]` on.

    Made before the model runs, which may move or drop rows; kept when everything has arrived.
    """

    fetch: PrefixFetch
    model: ModelIdentity
    blocks: tuple[BlockName, ...]
    trust: TrustList
    first: tuple[int, ...]
    rows: list[list[torch.Tensor]]

    @classmethod
    def of(cls, fetch: PrefixFetch, model: ModelIdentity, blocks: tuple[BlockName, ...], trust: TrustList) -> FetchedPrefix:
        """The rows of `blocks`, the first that `fetch` fills, from where on every block brings them."""
        end = blocks[-1].end if blocks else 0
        first = []
        for layer, spec in enumerate(model.layout.layers):
            start = end if spec.tensors else 0
            for one in reversed(fetch.deliveries[: len(blocks)] if spec.tensors else ()):
                if not (one.computed or one.wanted[layer]):
                    break
                start = one.name.start
            first.append(start)
        rows = [layer.rows(start, end) for layer, start in zip(fetch.layers, first, strict=True)] if blocks else []
        return cls(fetch, model, blocks, trust, tuple(first), rows)

    def header(self) -> PrefixFile:
        """The header of its file, once everything has arrived."""
        held = [HeldBlock(name.address, name.tokens, len(self.envelope(name))) for name in self.blocks]
        end = self.blocks[-1].end
        return PrefixFile(self.model.tag, self.model.name, end, end + ROOM_TOKENS, self.first, tuple(held))

    def envelope(self, name: BlockName) -> bytes:
        """A block's envelope as it was published; empty for a block of which nothing was read."""
        return self.fetch.deliveries[name.index].envelope


class LocalPrefixes:
    """The prefixes of one local store, for the clients of this process. `close` waits for what is still being kept."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self._writer: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._waiting = 0
        self._closing = threading.Event()

    def find(self, chain: Chain, boundaries: tuple[int, ...], trust: TrustList, devices: Devices) -> LocalPrefix | None:
        """The longest prefix of `chain` that is here, ends with a block, and was published by somebody in `trust`.

        The chain's last token is left to the model. Raises UsageError for a store that others can get at, and
        UntrustedError.
        """
        if not can_hold(chain.model):
            return None
        for blocks in _candidates(chain, boundaries):
            mapped = self.store.find(chain.model.tag, blocks[-1].address)
            if mapped is None:
                continue
            try:
                found = _load(mapped, chain.model, blocks, min(blocks[-1].end, chain.tokens - 1), trust, devices)
            except CorruptError:
                self.store.discard(mapped)
                continue
            if found is not None:
                self.store.touch(mapped)
                return found
        return None

    def keep(self, prefix: FetchedPrefix, *, behind: bool = False) -> Future[bool] | None:
        """Keeps a prefix that has arrived whole, in the background; None where it cannot be, or too many are waiting already.

        `behind` a model that is about to run. The result says whether it was kept: not where it is there already, is being
        written by another, or does not fit.
        """
        with self._lock:
            if self._waiting >= MAX_WAITING or not prefix.blocks or not can_hold(prefix.model):
                return None
            self._waiting += 1
            if self._writer is None:
                self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvcdn-keep")
            return self._writer.submit(self._keep, prefix, BEHIND_SECONDS if behind else 0.0)

    def close(self) -> None:
        """Returns when everything has been kept."""
        with self._lock:
            writer, self._writer = self._writer, None
        self._closing.set()
        if writer is not None:
            writer.shutdown()
        self._closing.clear()

    def _keep(self, prefix: FetchedPrefix, delay: float) -> bool:
        try:
            self._closing.wait(delay)
            return _write(self.store, prefix)
        except KvcdnError:
            # A full disk, a folder that is not private, rows that the model has changed in the meantime: not kept.
            return False
        finally:
            with self._lock:
                self._waiting -= 1


class _Checked:
    """The leading blocks of files that were checked in this process: their headers, None for those without rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._headers: dict[FileKey, Headers] = {}

    def headers(self, key: FileKey) -> Headers:
        """Of the leading blocks that were checked."""
        with self._lock:
            return self._headers.get(key, ())

    def add(self, key: FileKey, headers: Headers) -> None:
        with self._lock:
            self._headers[key] = headers
            if len(self._headers) > MAX_REMEMBERED:
                del self._headers[next(iter(self._headers))]


_checked = _Checked()


def _candidates(chain: Chain, boundaries: tuple[int, ...]) -> Iterator[tuple[BlockName, ...]]:
    """Prefixes of `chain` that end with a whole block or at a boundary, the longest first."""
    length = chain.block_tokens
    whole = chain.prefix(chain.tokens // length * length).blocks if chain.tokens >= length else ()
    ends = {name.end for name in whole} | {end for end in boundaries if 0 < end <= chain.tokens}
    for end in sorted(ends, reverse=True):
        yield chain.prefix(end).blocks if end % length else whole[: end // length]


def _load(
    mapped: MappedFile, model: ModelIdentity, blocks: tuple[BlockName, ...], length: int, trust: TrustList, devices: Devices
) -> LocalPrefix | None:
    """A mapped file as a prefix; None where it lacks rows that the model needs. Raises CorruptError or UntrustedError."""
    what = f"local prefix {mapped.name}"
    file = open_prefix_file(memoryview(mapped.memory), what)
    if file.leading(blocks[-1].address) != len(blocks):
        raise CorruptError(f"{what}: block {blocks[-1].address} is not where it belongs")
    if not file.reaches(model.layout, length):
        return None
    headers = _checked.headers(mapped.key)[: len(blocks)]
    for publisher in {header.publisher for header in headers if header is not None}:
        trust.require(publisher, what)
    if len(headers) < len(blocks):
        verifier = PrefixVerifier(file, memoryview(mapped.memory), model, what)
        headers = (*headers, *_check(verifier, blocks[len(headers) :], trust))
        _checked.add(mapped.key, headers)
    layers = [
        make_layer(spec, file.capacity, length, device, first=first, storage=_tensors(mapped, places, file.tokens, device))
        for spec, first, places, device in zip(model.layout.layers, file.first, file.places(model.layout), devices, strict=True)
    ]
    found = {index: header for index, header in enumerate(headers) if header is not None}
    return LocalPrefix(blocks, length, layers, found, lambda index: mapped.memory[file.envelope(index)])


def _check(verifier: PrefixVerifier, blocks: Sequence[BlockName], trust: TrustList) -> Headers:
    """Checks blocks on all cores: hashing releases the interpreter's lock."""

    def check(name: BlockName) -> BlockHeader | None:
        header = verifier.check_block(name, trust)
        # What is remembered is small: the segments have served.
        return None if header is None else replace(header, segments=())

    with ThreadPoolExecutor(min(len(blocks), os.cpu_count() or 1)) as pool:
        return tuple(pool.map(check, blocks))


def _tensors(mapped: MappedFile, places: Sequence[Place], tokens: int, device: torch.device) -> list[torch.Tensor]:
    """The tensors of one layer, [rows, heads, dim], over the mapped memory; copied where the model is on another device."""
    tensors = []
    for place in places:
        shape = place.tensor.shape(place.rows)
        flat = torch.frombuffer(
            mapped.memory, dtype=TORCH_DTYPES[place.tensor.dtype], count=shape[0] * shape[1] * shape[2], offset=place.offset
        )
        tensor = flat.view(shape)
        if device.type != "cpu":
            held, tensor = tensor[: tokens - place.first], torch.empty(shape, dtype=tensor.dtype, device=device)
            tensor[: tokens - place.first].copy_(held)
        tensors.append(tensor)
    return tensors


def can_hold(model: ModelIdentity) -> bool:
    """Whether a prefix file can hold this model's layers."""
    return {spec.kind for spec in model.layout.layers} <= KINDS and not model.layout.state_bytes


def _write(store: LocalStore, prefix: FetchedPrefix) -> bool:
    """Writes a prefix file and checks it as a reader would: rows that were written over in memory are not those published."""
    file, model = prefix.header(), prefix.model
    draft = store.begin(file, model.layout) if file.reaches(model.layout, file.tokens) else None
    if draft is None:
        return False
    prefix.fetch.uploads.join()
    with draft:
        draft.write(len(file.encoded), memoryview(b"".join(prefix.envelope(name) for name in prefix.blocks)))
        for places, tensors in zip(file.places(model.layout), prefix.rows, strict=True):
            for place, tensor in zip(places, tensors, strict=True):
                draft.write(place.offset, tensor_bytes(tensor.cpu()))
        verifier = PrefixVerifier(file, memoryview(draft.map()), model, str(draft.path))
        headers = _check(verifier, prefix.blocks, prefix.trust)
        key = draft.commit()
        if key is not None:
            _checked.add(key, headers)
        return key is not None
