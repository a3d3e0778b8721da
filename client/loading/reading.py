"""A reading: one block's object, front to back, verified piece by piece (FORMAT.md section 6)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kvcdn.block import BlockHeader, open_header, open_parts, open_segment
from kvcdn.client.sources.source import Source
from kvcdn.codec import Rows
from kvcdn.digest import Buffer
from kvcdn.envelope import BLOCK_MAGIC, PREAMBLE_BYTES, envelope_size
from kvcdn.errors import CorruptError
from kvcdn.keys import BlockName, ModelIdentity, block_key
from kvcdn.model.bases import Bases
from kvcdn.model.dequantise import decode_to
from kvcdn.model.staging import Staging, Uploads
from kvcdn.seal import ObjectKeys
from kvcdn.signing import TrustList

EVERYTHING = 1 << 40
"""Of a block of which no layer is passed over, all bytes will be asked for."""

_HEADER_BYTES_PER_LAYER = 640
"""What a header has for each layer, two parts and four hashes and numbers, rounded up."""

REMEMBERED_HEADERS = 128
REMEMBERED_BYTES = 64 * 1024
"""Headers that are read once, if no longer than this: a prompt's blocks are often those of the prompt before, and reading the
header of one of 30 layers takes a millisecond."""

_remembered_header = lru_cache(REMEMBERED_HEADERS)(open_header)


@dataclass(frozen=True)
class Terms:
    """Where blocks of one precision come from, and what is taken."""

    source: Source
    model: ModelIdentity
    trust: TrustList
    bases: Bases
    max_kl: float | None = None


class Reading:
    """Of one block. Used by one thread at a time, but for `abort`; layers are read in order."""

    def __init__(self, terms: Terms, name: BlockName, wanted: Sequence[bool], *, ranged: bool, passing: bool) -> None:
        """Asks for the block. `passing` over layers that are not `wanted` is worth a request, or `ranged` is all the same."""
        self._terms = terms
        self._name = name
        self._wanted = wanted
        self._passing = passing
        self._what = f"block {name.address}"
        self._reader = terms.source.open(block_key(terms.model.tag, name.address), ranged=ranged or passing)
        self._keys: ObjectKeys | None = None
        self.header: BlockHeader | None = None
        self.envelope = b""
        self.waited = 0.0

    def read_header(self) -> BlockHeader:
        """The header, once it has passed all checks. Raises KvcdnError."""
        ahead = _HEADER_BYTES_PER_LAYER * len(self._wanted) if self._passing else EVERYTHING
        preamble = bytes(self._reader.read_exact(PREAMBLE_BYTES, ahead))
        rest = self._reader.read_exact(envelope_size(preamble, BLOCK_MAGIC, self._what) - PREAMBLE_BYTES)
        envelope = preamble + bytes(rest)
        # The same bytes are the same header, and their signature holds; whether its publisher is trusted is asked anew.
        header = (_remembered_header if len(envelope) <= REMEMBERED_BYTES else open_header)(envelope, self._what)
        self._terms.trust.require(header.publisher, self._what)
        header.require(self._terms.model, self._name, self._what)
        header.require_quality(self._terms.max_kl, self._what)
        self._keys = ObjectKeys(self._name.content_key, header.salt)
        self._keys.check_commitment(header.commitment, self._what)
        self.envelope, self.header = envelope, header
        return header

    def read_layer(self, layer: int) -> tuple[memoryview, int]:
        """The stored bytes of a layer, empty where it is not wanted, and how many were received for it."""
        header, stored = self._header, memoryview(b"")
        length = header.segments[layer].length
        if self._wanted[layer]:
            asked = time.perf_counter()
            stored = self._reader.read_exact(length, self._run_bytes(header, layer) if self._passing else EVERYTHING)
            self.waited += time.perf_counter() - asked
            received = len(stored)
        else:
            received = self._reader.skip(length)
        if layer == len(self._wanted) - 1 and not self._reader.at_end():
            raise CorruptError(f"{self._what}: trailing bytes behind the last segment")
        return stored, received

    def decode(
        self,
        layer: int,
        stored: memoryview,
        scratch: bytearray,
        outs: Sequence[memoryview],
        *,
        coarse: Sequence[memoryview] = (),
    ) -> None:
        """Verifies and decodes what `read_layer` gave into `outs`, as `open_segment` does."""
        header, keys, basis = self._opening(layer)
        open_segment(header, keys, layer, stored, scratch, outs, basis, coarse=coarse)

    def decode_to(
        self, layer: int, stored: memoryview, staging: Staging, places: Sequence[torch.Tensor], uploads: Uploads
    ) -> None:
        """The same to tensors of any device, in the lane of each; what is refined is not for it."""
        header, keys, basis = self._opening(layer)

        def decode(number: int, codec: str, piece: Buffer, rows: Rows, what: str) -> None:
            with uploads.lane(places[number].device):
                decode_to(places[number], codec, piece, rows, staging, uploads, what)

        open_parts(header, keys, layer, stored, staging.scratch, decode, basis)

    def _opening(self, layer: int) -> tuple[BlockHeader, ObjectKeys, Sequence[Any]]:
        """What a layer is opened with: header, keys, and its part of the basis."""
        header, terms = self._header, self._terms
        if self._keys is None:
            raise RuntimeError("a layer is read before its header")
        return header, self._keys, terms.bases.get(header.basis, terms.trust).tensors[layer] if header.basis else ()

    def bytes_from(self, layer: int) -> int:
        """Bytes still to come where `layer` is the next to be read."""
        return sum(one.length for one in self._header.segments[layer:] if self._wanted[one.layer])

    def abort(self) -> None:
        """From any thread: ends a read that waits."""
        self._reader.abort()

    def close(self) -> None:
        """Lets go of the reader; may be called twice."""
        self._reader.close()

    @property
    def _header(self) -> BlockHeader:
        if self.header is None:
            raise RuntimeError("a layer is read before its header")
        return self.header

    def _run_bytes(self, header: BlockHeader, layer: int) -> int:
        """Bytes from `layer` on up to the next that is not wanted."""
        total = 0
        for segment in header.segments[layer:]:
            if not self._wanted[segment.layer]:
                break
            total += segment.length
        return total
