"""The block container: reading, sealing and opening one block object (FORMAT.md section 4). Bytes in, values out.

A writer calls `seal_block`. A reader calls `open_header` on the first bytes, and then, in any order, `open_segment` for the
segments it wants. An edge, which holds no keys, calls `SegmentVerifier` with the bytes as they stream by.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from kvcdn.basis import BasisName, read_basis_name
from kvcdn.certificate import Certificate, read_certificate
from kvcdn.codec import LOSSLESS_CODECS, MAX_EXPANSION_BYTES, Encoded, Rows, decode_part, encode_smallest
from kvcdn.digest import Buffer, Digest, ModelTag, hash_bytes
from kvcdn.envelope import BLOCK_MAGIC, open_envelope, seal_envelope
from kvcdn.errors import CorruptError, QualityError
from kvcdn.fields import Fields
from kvcdn.keys import COARSE_OF, PRECISION_NATIVE, PRECISIONS, TRANSFORMED, BlockName, ModelIdentity
from kvcdn.layout import (
    DTYPE_BYTES,
    MAX_BLOCK_TOKENS,
    MAX_LAYERS,
    LayerSpec,
    StateSpec,
    TensorSpec,
)
from kvcdn.producer import Producer
from kvcdn.seal import TAG_BYTES, ObjectKeys, segment_associated_data
from kvcdn.segment import MAX_BLOCK_BYTES, MAX_SEGMENT_BYTES, Part, Segment, read_segments
from kvcdn.signing import PublicKey, SigningKey

_OWN_CODEC = {PRECISION_NATIVE: (), **dict.fromkeys(TRANSFORMED, ("tc",)), **dict.fromkeys(COARSE_OF, ("rest",))}

CODECS_OF = {precision: (*LOSSLESS_CODECS, *_OWN_CODEC.get(precision, ("quant",))) for precision in PRECISIONS}
"""The codecs that parts of each precision may have (FORMAT.md 2.5)."""

MAX_START = 1 << 24


@dataclass(frozen=True)
class BlockHeader:
    """A block's header after its signature was checked. `envelope_bytes` is where the first segment begins."""

    address: Digest
    model: ModelTag
    layout: Digest
    precision: str
    start: int
    tokens: int
    salt: Digest
    commitment: Digest
    producer: Producer
    certificate: Certificate | None
    basis: BasisName | None
    coarse: Digest | None
    """Of a refinement: the etag of the block that it makes exact."""
    segments: tuple[Segment, ...]
    publisher: PublicKey
    envelope_bytes: int
    etag: Digest

    @property
    def size(self) -> int:
        """Bytes of the whole object."""
        last = self.segments[-1]
        return self.envelope_bytes + last.offset + last.length

    @property
    def raw_bytes(self) -> int:
        """Bytes of the tensors it carries."""
        return sum(part.raw_bytes for segment in self.segments for part in segment.parts)

    def require(self, model: ModelIdentity, name: BlockName, what: str) -> None:
        """Raises CorruptError unless this is the block `name` of `model`, with the tensors its layout says."""
        found = (self.address, self.model, self.layout, self.precision, self.start, self.tokens)
        asked = (name.address, model.tag, model.layout.digest, model.precision, name.start, name.tokens)
        for field, is_, should in zip(
            ("address", "model", "layout", "precision", "start", "tokens"), found, asked, strict=True
        ):
            if is_ != should:
                raise CorruptError(f"{what}: {field} is {is_}, asked for {should}: another object under this name")
        if self.producer.chunk_tokens != model.layout.block_tokens:
            raise CorruptError(
                f"{what}: made in passes of {self.producer.chunk_tokens} tokens, not {model.layout.block_tokens}"
            )
        if len(self.segments) != len(model.layout.layers):
            raise CorruptError(f"{what}: {len(self.segments)} layers, the model has {len(model.layout.layers)}")
        checkpoint = model.layout.is_checkpoint(name.index, name.tokens)
        for segment, layer in zip(self.segments, model.layout.layers, strict=True):
            _require_layer(segment, layer, self.tokens, what, checkpoint=checkpoint)

    def require_quality(self, max_kl: float | None, what: str) -> None:
        """Raises QualityError where the block is lossy by more than a mean divergence of `max_kl` nats."""
        if self.certificate is not None and not self.certificate.meets(max_kl):
            raise QualityError(f"{what}: {self.certificate}; you accept a mean KL of {max_kl:g} at most")


def open_header(data: Buffer, what: str) -> BlockHeader:
    """Parses and verifies a block's envelope at the start of `data`. Raises CorruptError."""
    envelope = open_envelope(memoryview(data), BLOCK_MAGIC, what)
    fields = Fields(envelope.header, f"{what}: header")
    fields.choice("type", ("block",))
    fields.integer("v", 1, 1)
    precision = fields.choice("precision", PRECISIONS)
    header = BlockHeader(
        address=fields.fixed("address", Digest),
        model=fields.fixed("model", ModelTag),
        layout=fields.fixed("layout", Digest),
        precision=precision,
        start=fields.integer("start", 0, MAX_START),
        tokens=fields.integer("tokens", 1, MAX_BLOCK_TOKENS),
        salt=fields.fixed("salt", Digest),
        commitment=fields.fixed("commitment", Digest),
        producer=Producer.from_json(fields.any("producer"), what),
        certificate=read_certificate(fields, precision, what),
        basis=read_basis_name(fields, precision, what),
        coarse=fields.fixed("coarse", Digest) if precision in COARSE_OF else None,
        segments=read_segments(fields.array("segments", 1, MAX_LAYERS), what),
        publisher=envelope.publisher,
        envelope_bytes=envelope.size,
        etag=envelope.etag,
    )
    fields.done()
    if header.start % header.producer.chunk_tokens or header.tokens > header.producer.chunk_tokens:
        raise CorruptError(
            f"{what}: {header.tokens} tokens from {header.start} are not one block of {header.producer.chunk_tokens}"
        )
    _check_parts(header, what)
    return header


def open_segment(  # noqa: PLR0913 - by name
    header: BlockHeader,
    keys: ObjectKeys,
    index: int,
    stored: Buffer,
    scratch: bytearray,
    outs: Sequence[memoryview],
    basis: Sequence[Any] = (),
    *,
    coarse: Sequence[Buffer] = (),
) -> None:
    """Verifies, decrypts and decodes segment `index` into `outs`, one writable byte view a part, of exactly its raw size.

    `scratch` is working memory that is grown as needed and may be reused by the same thread. `basis` has the layer's parts of
    the basis that `header.basis` names, one a tensor; `coarse` the layer's tensors of the block that is refined, which may be
    `outs` themselves. Raises CorruptError; `outs` may then hold anything.
    """
    what = f"block {header.address}, layer {index}"

    def decode(number: int, codec: str, piece: Buffer, rows: Rows, part: str) -> None:
        own = replace(rows, coarse=coarse[number]) if number < len(coarse) else rows
        decode_part(codec, piece, own, outs[number], part)

    open_parts(header, keys, index, stored, scratch, decode, basis)
    # What is refined comes from memory, or from another object: exact is what the publisher signed as exact (FORMAT.md 4.7).
    if header.coarse is not None and keys.raw_digest(*outs) != header.segments[index].raw_digest:
        raise CorruptError(f"{what}: refined numbers are not the exact ones, they were refined from other coarse ones")


def open_parts(
    header: BlockHeader,
    keys: ObjectKeys,
    index: int,
    stored: Buffer,
    scratch: bytearray,
    decode: Callable[[int, str, Buffer, Rows, str], None],
    basis: Sequence[Any] = (),
) -> None:
    """Verifies and decrypts segment `index`, and has each of its parts decoded: number, codec, bytes, tensor, and its name.

    Bytes are good until `decode` returns. Raises CorruptError.
    """
    segment = header.segments[index]
    what = f"block {header.address}, layer {index}"
    if len(stored) != segment.length or blake3(memoryview(stored)).digest() != segment.blake3:
        raise CorruptError(f"{what}: hash does not match, the bytes were damaged or replaced after publishing")
    size = segment.length - TAG_BYTES
    if len(scratch) < size:
        # An eighth more: segments are of about the same size, and many a little larger than all before.
        scratch.extend(bytes(size + size // 8 - len(scratch)))
    with memoryview(scratch) as whole, whole[:size] as encoded:
        associated = segment_associated_data(header.address, segment.descriptor)
        keys.open_into(index, associated, stored, encoded, what)
        for number, (part, place) in enumerate(segment.places):
            rows = Rows(part.dtype, part.shape, header.start, basis[number] if number < len(basis) else None)
            # Released here: a view kept alive by an error's traceback would stop `scratch` from ever growing again.
            with encoded[place] as piece:
                decode(number, part.codec, piece, rows, f"{what}, {part.name}")


def seal_block(  # noqa: PLR0913 - by name
    model: ModelIdentity,
    name: BlockName,
    producer: Producer,
    layers: Sequence[Sequence[Buffer | Encoded]],
    key: SigningKey,
    certificate: Certificate | None = None,
    basis: BasisName | None = None,
    *,
    coarse: Digest | None = None,
    each: Callable[..., Iterable[Any]] = map,
    memory: Callable[[int], Buffer] = bytearray,
) -> list[Buffer]:
    """A block's bytes in pieces, envelope first; `layers[i][j]` are the raw bytes of tensor j of layer i (FORMAT.md 2.3).

    Raw bytes are stored losslessly, whatever the precision; what is encoded already is stored as it is. A lossy precision has
    a certificate, a refinement the etag of the `coarse` block.
    States come last, in a block that ends at a checkpoint. `each` is `map`, or one that works at several layers at once.
    The pieces lie in what `memory` gives: a publisher's from the block before, as new memory costs more.
    """
    salt = Digest(os.urandom(Digest.SIZE))
    keys = ObjectKeys(name.content_key, salt)
    checkpoint = model.layout.is_checkpoint(name.index, name.tokens)

    def seal(layer: tuple[int, tuple[LayerSpec, Sequence[Buffer | Encoded]]]) -> tuple[Segment, Buffer]:
        number, (spec, raw) = layer
        return _seal_segment(keys, name, _Place(number, spec.kind), spec.parts(checkpoint=checkpoint), raw, memory)

    segments: list[Segment] = []
    stored: list[Buffer] = []
    offset = 0
    for segment, sealed in each(seal, list(enumerate(zip(model.layout.layers, layers, strict=True)))):
        segments.append(replace(segment, offset=offset))
        stored.append(sealed)
        offset += len(sealed)
    header = {
        "type": "block",
        "v": 1,
        "address": str(name.address),
        "model": str(model.tag),
        "layout": str(model.layout.digest),
        "precision": model.precision,
        "start": name.start,
        "tokens": name.tokens,
        "salt": str(salt),
        "commitment": str(keys.commitment),
        "producer": producer.to_json(),
        "segments": [segment.to_json() for segment in segments],
        **({} if certificate is None else {"certificate": certificate.to_json()}),
        **({} if basis is None else {"basis": basis.to_json()}),
        **({} if coarse is None else {"coarse": str(coarse)}),
    }
    return [seal_envelope(BLOCK_MAGIC, header, key), *stored]


class SegmentVerifier:
    """Checks the hashes of a whole block as its bytes stream by, in constant memory: what an edge does before it passes on."""

    def __init__(self, header: BlockHeader) -> None:
        self._what = f"block {header.address}"
        self._segments = iter(header.segments)
        self._to_skip = header.envelope_bytes
        self._passed = header.envelope_bytes
        self._next()

    def _next(self) -> None:
        self._segment = next(self._segments, None)
        self.restart()

    @property
    def verified(self) -> int:
        """How many bytes from the first were taken and are proven: the envelope by its signature, segments by their hashes."""
        return 0 if self._to_skip else self._passed

    def restart(self) -> None:
        """Forgets what it took behind `verified`, the envelope's end or later: those bytes will come again."""
        self._left = self._segment.length if self._segment else 0
        self._hasher = blake3()

    def update(self, piece: Buffer) -> None:
        """Takes the next bytes of the object, envelope included. Raises CorruptError at the first segment that is wrong."""
        view = memoryview(piece)
        skipped = min(self._to_skip, len(view))
        self._to_skip -= skipped
        view = view[skipped:]
        while len(view):
            if self._segment is None:
                raise CorruptError(f"{self._what}: trailing bytes behind the last segment")
            taken = view[: self._left]
            self._hasher.update(taken)
            self._left -= len(taken)
            view = view[len(taken) :]
            if self._left == 0:
                if self._hasher.digest() != self._segment.blake3:
                    raise CorruptError(f"{self._what}: hash of layer {self._segment.layer} does not match")
                self._passed += self._segment.length
                self._next()

    def finish(self) -> None:
        """Call at the end of the object. Raises CorruptError where bytes are missing."""
        if self._segment is not None or self._to_skip:
            raise CorruptError(f"{self._what}: truncated, the object ends before its last segment")


@dataclass(frozen=True)
class _Place:
    """Which segment it is."""

    layer: int
    kind: str


def _seal_segment(
    keys: ObjectKeys,
    name: BlockName,
    place: _Place,
    specs: Sequence[TensorSpec | StateSpec],
    tensors: Sequence[Buffer | Encoded],
    memory: Callable[[int], Buffer],
) -> tuple[Segment, Buffer]:
    parts = []
    encoded = []
    raw = [data.decoded if isinstance(data, Encoded) else data for data in tensors]
    for spec, data, size in zip(specs, tensors, map(len, raw), strict=True):
        shape = spec.shape(name.tokens)
        if size != DTYPE_BYTES[spec.dtype] * math.prod(shape):
            raise ValueError(f"layer {place.layer}: {spec.name} has {size} bytes, its layout says {spec.dtype} {shape}")
        if isinstance(data, Encoded):
            codec, piece = data.codec, data.data
        else:
            codec, piece = encode_smallest(data, Rows(spec.dtype, shape))
        parts.append(Part(spec.name, codec, spec.dtype, shape, len(piece)))
        encoded.append(piece)
    joined = b"".join(encoded)
    length = len(joined) + TAG_BYTES
    nothing = Digest(bytes(Digest.SIZE))
    draft = Segment(place.layer, place.kind, 0, length, nothing, nothing, tuple(parts))
    sealed = memory(length)
    with memoryview(sealed) as out:
        keys.seal_into(place.layer, segment_associated_data(name.address, draft.descriptor), joined, out)
    return replace(draft, blake3=hash_bytes(sealed), raw_digest=keys.raw_digest(*raw)), sealed


def _check_parts(header: BlockHeader, what: str) -> None:
    """Sizes add up: no gaps, no overlaps, nothing trailing (FORMAT.md 4.1)."""
    end = 0
    for segment in header.segments:
        if segment.offset != end:
            raise CorruptError(f"{what}: segment {segment.layer} begins at {segment.offset}, not at {end}: a gap or an overlap")
        if segment.length != sum(part.length for part in segment.parts) + TAG_BYTES:
            raise CorruptError(f"{what}: segment {segment.layer} is not as long as its parts")
        for part in segment.parts:
            if part.raw_bytes > MAX_SEGMENT_BYTES or part.length > part.raw_bytes + MAX_EXPANSION_BYTES:
                raise CorruptError(f"{what}: segment {segment.layer}: part {part.name} is too long for its shape")
            if part.codec not in (LOSSLESS_CODECS if part.is_state else CODECS_OF[header.precision]):
                raise CorruptError(
                    f"{what}: segment {segment.layer}: the codec {part.codec} is not one of {header.precision} precision"
                )
            if not part.is_state and part.shape[0] != header.tokens:
                raise CorruptError(f"{what}: segment {segment.layer} holds {part.shape[0]} tokens, the block {header.tokens}")
        end += segment.length
    if end > MAX_BLOCK_BYTES:
        raise CorruptError(f"{what}: the block claims {end} bytes, more than {MAX_BLOCK_BYTES}")


def _require_layer(segment: Segment, layer: LayerSpec, tokens: int, what: str, *, checkpoint: bool) -> None:
    found = [(part.name, part.dtype, part.shape) for part in segment.parts]
    asked = [(tensor.name, tensor.dtype, tensor.shape(tokens)) for tensor in layer.parts(checkpoint=checkpoint)]
    if segment.kind != layer.kind or found != asked:
        raise CorruptError(
            f"{what}: layer {segment.layer} holds {segment.kind} {found}, the model's layout says {layer.kind} {asked}"
        )
