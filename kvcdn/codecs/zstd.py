"""zstd without blosc2 around it: the blocks of a plain chunk (FORMAT.md 4.3).

blosc2 makes a context of zstd for every chunk, which takes as long as decoding 20 KB, or encoding 10. Here each thread keeps
one. Whatever is unusual, or does not decode, is left to blosc2, which says what it is.
"""

from __future__ import annotations

import struct
import threading

import zstandard

from kvcdn.digest import Buffer

_HEADER_BYTES = 32
_VERSIONS = b"\x05\x01"
"""Of the container and of zstd's part in it: another blosc2 may mean something else by the same bytes."""

_FLAGS, _MORE_FLAGS, _SPECIAL = 2, 30, 31
"""Places in the header."""

_COPIED, _NOT_SPLIT = 0x02, 0x10
"""Flag bits 1 and 4: the bytes as they are; one stream a block."""

_BLOCKSIZE = struct.Struct("<I")
_SIZE = struct.Struct("<i")

_HEADER = struct.Struct("<2sBBIII6xB9x")
"""Versions, flags, typesize, raw bytes, bytes a block, bytes of all; the format once more, all else zero."""

_PLAIN_FLAGS = 0x95
"""zstd, not split, a header of 32 bytes."""

_ZSTD_CODE = 5
_LEVEL = 1
_BLOCK_BYTES = 1 << 16
"""A block and what it decodes to stay in a core's cache. Half of it, as blosc2 has, makes two blocks of a usual tensor's codes:
a tenth slower to decode, and of nearly the same size."""


def encode_blocks(raw: Buffer) -> bytes | None:
    """A plain chunk of bytes; None where a block of it becomes no smaller, which is blosc2's to store."""
    view, compressor = memoryview(raw), _compressor()
    starts = range(0, len(view), _BLOCK_BYTES)
    frames = [compressor.compress(view[start : start + _BLOCK_BYTES]) for start in starts]
    pieces = []
    places = []
    end = _HEADER_BYTES + 4 * len(frames)
    for start, frame in zip(starts, frames, strict=True):
        if len(frame) >= min(_BLOCK_BYTES, len(view) - start):
            return None
        places.append(end)
        end += _SIZE.size + len(frame)
        pieces += [_SIZE.pack(len(frame)), frame]
    block_bytes = min(_BLOCK_BYTES, len(view))
    header = _HEADER.pack(_VERSIONS, _PLAIN_FLAGS, 1, len(view), block_bytes, end, _ZSTD_CODE)
    return b"".join((header, struct.pack(f"<{len(places)}I", *places), *pieces))


def decode_blocks(chunk: Buffer, out: memoryview) -> bool:
    """Fills `out` from a chunk whose header was checked; False where blosc2 is to do it, `out` may then hold anything."""
    usual = chunk[_FLAGS] & (_COPIED | _NOT_SPLIT) == _NOT_SPLIT and not chunk[_MORE_FLAGS] and not chunk[_SPECIAL]
    if not usual or bytes(chunk[: len(_VERSIONS)]) != _VERSIONS:
        return False
    (blocksize,) = _BLOCKSIZE.unpack_from(chunk, 8)
    blocks = -(-len(out) // blocksize)
    least = _HEADER_BYTES + 4 * blocks
    if least > len(chunk):
        return False
    source, decompressor = memoryview(chunk), _decompressor()
    for number, start in enumerate(struct.unpack_from(f"<{blocks}I", chunk, _HEADER_BYTES)):
        (size,) = _SIZE.unpack_from(chunk, start) if least <= start <= len(chunk) - _SIZE.size else (0,)
        begin, place = start + _SIZE.size, number * blocksize
        room = min(blocksize, len(out) - place)
        if not 0 < size < room or begin + size > len(chunk):
            return False
        frame = source[begin : begin + size]
        try:
            # A frame says how much memory it is given: no more than belongs.
            if zstandard.frame_content_size(frame) != room:
                return False
            out[place : place + room] = decompressor.decompress(frame, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError):
            return False
    return True


_OWN = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """The thread's own, as below."""
    try:
        own: zstandard.ZstdCompressor = _OWN.compressor
    except AttributeError:
        own = _OWN.compressor = zstandard.ZstdCompressor(_LEVEL)
    return own


def _decompressor() -> zstandard.ZstdDecompressor:
    """The thread's own: it may not be used by two at once."""
    try:
        own: zstandard.ZstdDecompressor = _OWN.decompressor
    except AttributeError:
        own = _OWN.decompressor = zstandard.ZstdDecompressor()
    return own
