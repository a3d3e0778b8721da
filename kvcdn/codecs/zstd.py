"""zstd without blosc2 around it: the blocks of a plain chunk, by the very library that blosc2 has loaded (FORMAT.md 4.3).

blosc2 makes a context for every chunk, which takes as long as decoding 20 KB. Here each thread keeps one. Whatever is unusual,
or does not decode, is left to blosc2, which says what it is.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import numpy as np

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


def decode_blocks(chunk: Buffer, out: memoryview, file: str) -> bool:
    """Fills `out` from a chunk whose header was checked; False where blosc2 is to do it, `out` may then hold anything.

    `file` is blosc2's own part of machine code.
    """
    library = _library(file)
    usual = chunk[_FLAGS] & (_COPIED | _NOT_SPLIT) == _NOT_SPLIT and not chunk[_MORE_FLAGS] and not chunk[_SPECIAL]
    if library is None or not usual or bytes(chunk[: len(_VERSIONS)]) != _VERSIONS:
        return False
    (blocksize,) = _BLOCKSIZE.unpack_from(chunk, 8)
    blocks = -(-len(out) // blocksize)
    least = _HEADER_BYTES + 4 * blocks
    if least > len(chunk):
        return False
    source, target, context = _address(chunk), _address(out), _context(library)
    for number, start in enumerate(struct.unpack_from(f"<{blocks}I", chunk, _HEADER_BYTES)):
        (size,) = _SIZE.unpack_from(chunk, start) if least <= start <= len(chunk) - _SIZE.size else (0,)
        begin, room = start + _SIZE.size, min(blocksize, len(out) - number * blocksize)
        if context is None or not 0 < size < room or begin + size > len(chunk):
            return False
        # zstd writes up to the last byte of the room that it is given: it is given the block's own.
        if library.ZSTD_decompressDCtx(context, target + number * blocksize, room, source + begin, size) != room:
            return False
    return True


def _address(buffer: Buffer) -> int:
    place: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return place


@functools.cache
def _library(file: str) -> Any:
    """The functions of zstd that blosc2 brings, or None where it hides them."""
    try:
        library = ctypes.CDLL(file)
        make, free, decode = library.ZSTD_createDCtx, library.ZSTD_freeDCtx, library.ZSTD_decompressDCtx
    except (OSError, AttributeError):
        return None
    make.restype, free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    decode.restype = ctypes.c_size_t
    decode.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
    return library


class _Context:
    """What zstd works with. A thread's own, freed with the thread."""

    def __init__(self, library: Any) -> None:
        self._free = library.ZSTD_freeDCtx
        self.handle: int | None = library.ZSTD_createDCtx()

    def __del__(self) -> None:
        self._free(self.handle)


_OWN = threading.local()


def _context(library: Any) -> int | None:
    """None where there is no memory for one."""
    try:
        own: _Context = _OWN.context
    except AttributeError:
        own = _OWN.context = _Context(library)
    return own.handle
