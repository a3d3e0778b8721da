"""zstd without blosc2 around it: the blocks of a plain chunk (FORMAT.md 4.3).

blosc2 makes a context of zstd for every chunk, which takes as long as decoding 20 KB. Here each thread keeps one. Whatever is
unusual, or does not decode, is left to blosc2, which says what it is.
"""

from __future__ import annotations

import struct
import threading

import zstandard

from kvcdn.codec import Buffer

_HEADER_BYTES = 32
_VERSIONS = b"\x05\x01"
"""Of the container and of zstd's part in it: another blosc2 may mean something else by the same bytes."""

_FLAGS, _MORE_FLAGS, _SPECIAL = 2, 30, 31
"""Places in the header."""

_COPIED, _NOT_SPLIT = 0x02, 0x10
"""Flag bits 1 and 4: the bytes as they are; one stream a block."""

_BLOCKSIZE = struct.Struct("<I")
_SIZE = struct.Struct("<i")


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


def _decompressor() -> zstandard.ZstdDecompressor:
    """The thread's own: it may not be used by two at once."""
    try:
        own: zstandard.ZstdDecompressor = _OWN.decompressor
    except AttributeError:
        own = _OWN.decompressor = zstandard.ZstdDecompressor()
    return own
