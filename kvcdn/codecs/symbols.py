"""Symbols: small integers, entropy-coded by pcodec in its wrapped form, without its searches for structure (FORMAT.md 4.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec
from pcodec.wrapped import FileCompressor, FileDecompressor

from kvcdn.codecs.pages import DECODE
from kvcdn.digest import Buffer
from kvcdn.errors import CorruptError

Symbols = NDArray[np.int16]

_LEVEL = 8
"""Bins enough for the alphabets at hand; more take longer and save nothing."""

_VERSION = bytes(FileCompressor().write_header())
"""What every stream begins with."""

_DECOMPRESSOR, _ = FileDecompressor.new(_VERSION)
"""Of that version; it keeps nothing of what it reads."""

_BEGINNING = _VERSION + b"\0"
"""And behind it the first byte of a chunk's description: classic mode, no deltas. Others may ask for memory of any size."""

_STOPPING = (KeyboardInterrupt, SystemExit, GeneratorExit)


def pack_symbols(symbols: Symbols) -> bytes:
    """A stream of `symbols`; empty for none."""
    if not symbols.size:
        return b""
    config = ChunkConfig(compression_level=_LEVEL, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    compressor = FileCompressor().chunk_compressor(np.ascontiguousarray(symbols.reshape(-1)), config)
    return b"".join((_VERSION, compressor.write_meta(), compressor.write_page(0)))


def read_streams(stored: Buffer, lengths: Sequence[int], symbols: Symbols, counts: Sequence[int], what: str) -> None:
    """Fills `symbols` from streams of so many bytes and symbols each, one behind another. Raises CorruptError."""
    done = np.zeros(len(counts), np.uint8)
    decode = DECODE.native()
    if decode is not None:
        sizes = np.array((lengths, counts), np.int64)
        decode(np.frombuffer(stored, np.uint8), sizes[0], sizes[1], symbols, done)
    view, start, begin = memoryview(stored), 0, 0
    for length, count, is_done in zip(lengths, counts, done.tolist(), strict=True):
        if not is_done:
            read_symbols(view[start : start + length], symbols[begin : begin + count], what)
        start, begin = start + length, begin + count


def read_symbols(stream: Buffer, symbols: Symbols, what: str) -> None:
    """Fills `symbols` from a stream of as many. Raises CorruptError."""
    if not symbols.size:
        if len(stream):
            raise CorruptError(f"{what}: a stream of no symbols has {len(stream)} bytes")
        return
    data = bytes(stream)
    if not data.startswith(_BEGINNING):
        raise CorruptError(f"{what}: a stream of symbols asks for what the format does not allow")
    try:
        used = len(_VERSION) + _read_chunk(data[len(_VERSION) :], symbols)
    except _STOPPING:
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of the library's is no Exception
        raise CorruptError(f"{what}: a stream of symbols does not decode ({type(error).__name__})") from None
    if used != len(data):
        raise CorruptError(f"{what}: a stream of symbols has {len(data)} bytes, {used} of them used")


def _read_chunk(data: bytes, symbols: Symbols) -> int:
    """Decodes a chunk, and returns its bytes; -1 where symbols are missing."""
    chunk: Any
    chunk, described = _DECOMPRESSOR.chunk_decompressor(data, "i16")
    progress, read = chunk.read_page_into(data[described:], len(symbols), symbols)
    return int(described + read) if progress.n_processed == len(symbols) else -1
