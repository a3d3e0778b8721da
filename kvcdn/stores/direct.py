"""Direct writing: an object's bytes to the disk past the page cache.

Copying into the page cache is most of what writing a block costs, since each of its pages has to be found and cleared first:
7.9 MB took 12 to 20 ms of a processor on a virtual machine, and 0.5 ms directly, which a model that computes beside gets back.
A publisher does not read again what it writes.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence

from kvcdn.digest import Buffer

if sys.platform == "linux":
    import fcntl

LEAST_BYTES = 1 << 20
"""Smaller objects are written through the page cache: waiting for the disk each time is not worth it."""

_UNIT_BYTES = 4096
"""What direct writes are multiples of, in place, length and memory: no usual disk asks for more."""

_BUFFER_BYTES = 1 << 20

_PIECES_AT_ONCE = 1024
"""As many as Linux takes in one call."""

_own = threading.local()
"""Each thread's buffer: pages that are new to a process cost as much as copying."""


def write_pieces(file: int, pieces: Sequence[Buffer]) -> None:
    """Writes all of them to an open file, from its beginning on. Raises OSError."""
    views = deque(memoryview(piece).cast("B") for piece in pieces if piece)
    if sum(map(len, views)) >= LEAST_BYTES and _set_direct(file, on=True):
        _write_directly(file, views)
        _set_direct(file, on=False)
    while views:
        # Many at a time: each call may have to wait for the interpreter, which a model uses beside.
        _drop(views, os.writev(file, list(itertools.islice(views, _PIECES_AT_ONCE))))


def _write_directly(file: int, views: deque[memoryview]) -> None:
    """Writes whole units as long as the disk takes them so, and leaves the rest in `views`."""
    if not hasattr(_own, "buffer"):
        _own.buffer = mmap.mmap(-1, _BUFFER_BYTES)
    buffer: mmap.mmap = _own.buffer
    with memoryview(buffer) as whole:
        while count := _fill(whole, views) // _UNIT_BYTES * _UNIT_BYTES:
            try:
                written = os.write(file, whole[:count])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return
            _drop(views, written)
            if written % _UNIT_BYTES:
                return


def _fill(buffer: memoryview, views: deque[memoryview]) -> int:
    """Copies as much of the front of `views` as there is room for; how much."""
    filled = 0
    for view in views:
        part = view[: len(buffer) - filled]
        buffer[filled : filled + len(part)] = part
        filled += len(part)
        if filled == len(buffer):
            break
    return filled


def _drop(views: deque[memoryview], written: int) -> None:
    while views and written >= len(views[0]):
        written -= len(views.popleft())
    if written:
        views[0] = views[0][written:]


def _set_direct(file: int, *, on: bool) -> bool:
    """Whether the file system knows direct writes, and does them from now on, or no longer."""
    if sys.platform != "linux":
        return False
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True
