"""Codecs: raw tensor bytes to encoded bytes and back (FORMAT.md 4.3). A codec is a value in the registry below.

Decoders take authenticated bytes, yet trust no length: what does not fit exactly ends in CorruptError. Codecs that know bytes
only are here; those that know numbers are loaded from kvcdn.codecs when the first of their parts is encoded or decoded.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvcdn.digest import Buffer
from kvcdn.errors import CorruptError
from kvcdn.layout import DTYPE_BYTES

MAX_EXPANSION_BYTES = 64
"""An encoded part exceeds its raw size by at most this (a chunk header); the writer falls back to `raw` long before."""

_BLOSC_HEADER = struct.Struct("<BBBBIII")
"""Version, codec version, flags, typesize, nbytes, blocksize, cbytes: the first 16 bytes of a chunk."""

_BLOSC_EXTENDED_HEADER_BYTES = 32
_BLOSC_ZSTD_LEVEL = 1
"""Real bf16 KV: level 1 and level 9 differ by less than 1 % in size, since exponents have little but their histogram."""

_BLOSC_EXTENDED_FLAGS = 0x05
"""Flag bits 0 and 2 together mark the 32-byte header."""

_BLOSC_DELTA_FLAG = 0x08
"""Flag bit 3: the delta filter, which reads another chunk."""

_BLOSC_ZSTD_FORMAT = 4
"""Bits 5 to 7 of the flags name the format; 4 is zstd, 6 a plug-in codec."""

_BLOSC_FILTER_CODES = slice(16, 22)
_BLOSC_FILTER_META = slice(24, 30)
_BLOSC_SHUFFLE = 1
"""The one filter in use, in any of the six places, the others empty: a lossy or plug-in filter would decode just as well."""

_BLOSC_FILTERS = 6

_BLOSC_PLAIN_OR_ZEROS = frozenset({0x00, 0x10})
"""Allowed values of blosc2_flags, the header's last byte: ordinary data, or a run of zeros. Others ask for a dictionary, lazy
data or instrumentation, or say that the values are not initialised, which decodes to whatever the memory held before."""


@dataclass(frozen=True)
class Rows:
    """The tensor that a part decodes to: what a lossy decoder has to know of it. `shape` is [tokens, heads, dim]."""

    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    """Position of the first token."""
    basis: Any = None
    """The tensor's own part of the model's basis, a kvcdn.codecs.basis.TensorBasis, for codecs that need one."""
    coarse: Buffer | None = None
    """The same tensor as the block that is refined decodes to, for codecs that hold what it lacks."""

    @property
    def typesize(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Encoded:
    """A tensor that has been encoded already, with the bytes that every reader will decode it to."""

    codec: str
    data: bytes
    decoded: Buffer


class Codec(Protocol):
    """Stateless and thread-safe."""

    def encode(self, raw: Buffer, typesize: int) -> bytes:
        """Encoded form of `raw`, whose elements have `typesize` bytes."""

    def decode_into(self, encoded: Buffer, typesize: int, out: memoryview, what: str) -> None:
        """Fills `out` (bytes, writable, of the raw size) from `encoded`. Raises CorruptError."""


class RawCodec:
    """The bytes as they are."""

    def encode(self, raw: Buffer, typesize: int) -> bytes:  # noqa: ARG002 - the protocol's signature
        return bytes(raw)

    def decode_into(self, encoded: Buffer, typesize: int, out: memoryview, what: str) -> None:  # noqa: ARG002 - as above
        if len(encoded) != len(out):
            raise CorruptError(f"{what}: {len(encoded)} raw bytes where {len(out)} belong")
        out[:] = encoded


class BloscCodec:
    """One C-Blosc2 chunk: byte shuffle where `shuffled`, then zstd. Exponent bytes shrink, mantissa bytes are kept."""

    def __init__(self, *, shuffled: bool) -> None:
        self._shuffled = shuffled

    def encode(self, raw: Buffer, typesize: int) -> bytes:
        if not self._shuffled and typesize == 1 and (chunk := _blocks_encoder()(raw)):
            return chunk
        blosc2 = _blosc2()
        return bytes(
            blosc2.compress2(
                raw,
                typesize=typesize,
                codec=blosc2.Codec.ZSTD,
                clevel=_BLOSC_ZSTD_LEVEL,
                filters=[blosc2.Filter.SHUFFLE] if self._shuffled else [],
                nthreads=1,
            )
        )

    def decode_into(self, encoded: Buffer, typesize: int, out: memoryview, what: str) -> None:
        filters = [*[0] * (_BLOSC_FILTERS - 1), _BLOSC_SHUFFLE if self._shuffled else 0]
        _check_chunk(encoded, typesize, len(out), filters, what)
        if not self._shuffled and _blocks_decoder()(encoded, out):
            return
        try:
            _blosc2().decompress2(encoded, dst=out, nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise CorruptError(f"{what}: blosc2 chunk does not decode ({error})") from None


@functools.cache
def _blosc2() -> Any:
    """The library. An edge never encodes or decodes: it does without."""
    import blosc2  # noqa: PLC0415

    # It keeps the interpreter's lock unless told otherwise; blocks are decoded on every core, beside a running model.
    blosc2.set_releasegil(True)
    return blosc2


@functools.cache
def _blocks_decoder() -> Callable[[Buffer, memoryview], bool]:
    from kvcdn.codecs.zstd import decode_blocks  # noqa: PLC0415 - an edge never decodes

    return decode_blocks


@functools.cache
def _blocks_encoder() -> Callable[[Buffer], bytes | None]:
    from kvcdn.codecs.zstd import encode_blocks  # noqa: PLC0415 - as above

    return encode_blocks


def load_codecs() -> None:
    """Loads what every block needs to be decoded: a tenth of a second that the first prompt would wait for."""
    _blosc2()
    from kvcdn.codecs.exponents import prepare  # noqa: PLC0415 - an edge never decodes

    prepare()


def _check_chunk(encoded: Buffer, typesize: int, raw_size: int, filters: list[int], what: str) -> None:
    if len(encoded) < _BLOSC_EXTENDED_HEADER_BYTES:
        raise CorruptError(f"{what}: a blosc2 chunk of {len(encoded)} bytes is too short")
    _, _, flags, chunk_typesize, nbytes, blocksize, cbytes = _BLOSC_HEADER.unpack_from(encoded)
    if (nbytes, cbytes, chunk_typesize) != (raw_size, len(encoded), typesize) or not 0 < blocksize <= max(nbytes, 1):
        raise CorruptError(
            f"{what}: blosc2 chunk says {nbytes} raw bytes in blocks of {blocksize}, {cbytes} stored, typesize "
            f"{chunk_typesize}; {raw_size}, {len(encoded)} and {typesize} belong"
        )
    extended = flags & (_BLOSC_EXTENDED_FLAGS | _BLOSC_DELTA_FLAG) == _BLOSC_EXTENDED_FLAGS
    zstd = flags >> 5 == _BLOSC_ZSTD_FORMAT
    filtered = sorted(encoded[_BLOSC_FILTER_CODES]) == filters and not any(encoded[_BLOSC_FILTER_META])
    ordinary = encoded[_BLOSC_EXTENDED_HEADER_BYTES - 1] in _BLOSC_PLAIN_OR_ZEROS
    if not (extended and zstd and filtered and ordinary):
        raise CorruptError(f"{what}: blosc2 chunk asks for features the format does not allow")


CODECS: Mapping[str, Codec] = {"raw": RawCodec(), "blosc2": BloscCodec(shuffled=True)}
"""The codecs that know bytes only."""

PLAIN_CHUNK = BloscCodec(shuffled=False)
"""A stream of bytes within another codec."""

LOSSLESS_CODECS = (*CODECS, "exponents")

ALL_CODECS = (*LOSSLESS_CODECS, "quant", "tc", "rest")
"""Two lossy ones as well, and what a lossy tensor lacks of the exact one."""

_LEAST_RATIO = 0.56
"""Exponents of one bit each, by `exponents`; those of real KV have 2.5."""

_SURE_BYTES = 1 << 16
"""Of smaller tensors, bases and headers are too large a part to tell anything."""


def encode_smallest(raw: Buffer, rows: Rows) -> tuple[str, bytes]:
    """Name and bytes of the smallest lossless encoding of `raw`."""
    found = []
    if rows.dtype == "bfloat16":
        from kvcdn.codecs.exponents import encode_exponents  # noqa: PLC0415 - an edge does without arrays

        apart = encode_exponents(raw, rows)
        if apart is not None:
            found.append(("exponents", apart))
            # `blosc2` takes longer than all else together, and is smaller only where a tensor repeats itself, as no real KV
            # does: then its exponents take hardly more than the half that signs and mantissas do.
            if len(raw) >= _SURE_BYTES and _LEAST_RATIO * len(raw) <= len(apart) < len(raw):
                return found[0]
    found.append(("blosc2", CODECS["blosc2"].encode(raw, rows.typesize)))
    codec, encoded = min(found, key=lambda one: len(one[1]))
    return (codec, encoded) if len(encoded) < len(raw) else ("raw", bytes(raw))


def decode_part(codec: str, encoded: Buffer, rows: Rows, out: memoryview, what: str) -> None:
    """Fills `out`, of exactly the size of `rows`, from a part's bytes. Raises CorruptError."""
    if codec in CODECS:
        CODECS[codec].decode_into(encoded, rows.typesize, out, what)
    else:
        _decoder(codec)(encoded, rows, out, what)


@functools.cache
def _decoder(codec: str) -> Callable[[Buffer, Rows, memoryview, str], None]:
    """The decoder of a codec that knows numbers."""
    # Each by itself: an edge does without arrays, and most readers without all but one.
    if codec == "exponents":
        from kvcdn.codecs.exponents import decode_exponents  # noqa: PLC0415

        return decode_exponents
    if codec == "quant":
        from kvcdn.codecs.quant import decode_grid  # noqa: PLC0415

        return decode_grid
    if codec == "rest":
        from kvcdn.codecs.rest import decode_rest  # noqa: PLC0415

        return decode_rest
    from kvcdn.codecs.transform import decode_transform  # noqa: PLC0415

    return decode_transform
