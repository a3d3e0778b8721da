"""Memory of caches: what held one prompt's tensors holds the next one's, when nobody has a view of it any more.

The system clears every page that it gives to a process, at the page's first use. For a cache of 87 MB these are 21,000
faults, a tenth of what a fetch costs, and the C library gives such memory back in between. So blocks of it are kept here, one a
layer, in huge pages where the system has them. A kept block is the system's for the taking (MADV_FREE): where memory gets
scarce it is gone, and reads as zeros. Blocks are private mappings: a child process of a fork writes to copies of its own.

Memory is handed out as torch.empty hands it out, with whatever it held: who takes it writes a row before he shows it. What is
kept never exceeds what was in use at once: whoever finds no block that fits drops as many bytes as he takes anew.
"""

from __future__ import annotations

import math
import mmap
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

MAX_KEPT_BYTES = 1 << 30
"""Kept for later at most; a cache beyond that is mostly made anew."""

KEPT_SECONDS = 60.0
"""A block that nobody has taken for so long is dropped when somebody next takes or leaves one."""

LEAST_BYTES = 256 * 1024
"""Smaller tensors are the C library's business: it keeps such memory by itself."""

_STEPS = 64
"""Sizes are rounded up to this part of the power of two below, so that a question of some more tokens finds a block to fit."""

_ALIGNMENT = 64
"""Bytes: a cache line, and what torch aligns its own tensors to."""


class MemoryPool:
    """Blocks of memory that were in use and will be again.

    Without a lock: a block comes back when the last view of it is collected, which may be in the midst of anything.
    """

    def __init__(self, most: int = MAX_KEPT_BYTES, seconds: float = KEPT_SECONDS) -> None:
        self._most, self._seconds = most, seconds
        self._kept: list[tuple[float, mmap.mmap]] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait for their next use."""
        return sum(len(block) for _, block in tuple(self._kept))

    def tensors(self, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
        """Tensors on the CPU, side by side in one block, that hold anything."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        try:
            memory = torch.from_numpy(self.take(end)) if end >= LEAST_BYTES else None
        except OSError:
            memory = None  # torch says it better
        if memory is None:
            return [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in shapes]
        return [
            memory[start : start + size].view(dtype).view(tuple(shape))
            for start, size, (shape, dtype) in zip(starts, sizes, shapes, strict=True)
        ]

    def take(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, that come back when the last view of them is gone. Raises OSError where there are none."""
        self._drop_old()
        wanted = _rounded(size)
        block = self._find(wanted)
        if block is None:
            self._drop(wanted)
            block = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _advise(block, "MADV_HUGEPAGE")
        lent = np.frombuffer(block, dtype=np.uint8, count=size)
        weakref.finalize(lent, self._give_back, block).atexit = False
        return lent

    def _find(self, size: int) -> mmap.mmap | None:
        """The smallest kept block for `size` bytes, up to twice as large; of equal ones the last that was used."""
        fitting = [one for one in reversed(tuple(self._kept)) if size <= len(one[1]) <= 2 * size]
        for one in sorted(fitting, key=lambda kept: len(kept[1])):
            with suppress(ValueError):  # another thread was faster
                self._kept.remove(one)
                return one[1]
        return None

    def _give_back(self, block: mmap.mmap) -> None:
        if self.kept_bytes + len(block) <= self._most:
            _advise(block, "MADV_FREE")
            self._kept.append((time.monotonic(), block))
        self._drop_old()

    def _drop_old(self) -> None:
        while self._kept and time.monotonic() - self._kept[0][0] > self._seconds:
            self._drop(1)

    def _drop(self, size: int) -> None:
        """Lets go of at least `size` bytes, the oldest first."""
        while size > 0:
            try:
                size -= len(self._kept.pop(0)[1])
            except IndexError:
                return


def _rounded(size: int) -> int:
    """The size of block for `size` bytes."""
    step = max((1 << (size.bit_length() - 1)) // _STEPS, mmap.PAGESIZE)
    return -(-size // step) * step


def _advise(block: mmap.mmap, name: str) -> None:
    """Tells the system what to do with the pages of `block`; not every system knows every advice."""
    with suppress(OSError, AttributeError):
        block.madvise(getattr(mmap, name))


_pool = MemoryPool()


def empty_tensors(shapes: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Tensors that hold anything; on the CPU in memory that earlier caches had."""
    if device.type == "cpu":
        return _pool.tensors(shapes)
    return [torch.empty(tuple(shape), dtype=dtype, device=device) for shape, dtype in shapes]


def empty_bytes(size: int) -> memoryview:
    """Bytes that hold anything, in memory that earlier ones, or caches, had."""
    try:
        return _pool.take(size).data if size >= LEAST_BYTES else memoryview(bytearray(size))
    except OSError:
        return memoryview(bytearray(size))  # Python says it better
