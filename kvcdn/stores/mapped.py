"""Mapped files: a prefix file in the memory of this process, sharing its pages with all others."""

from __future__ import annotations

import mmap
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

FileKey = tuple[int, int, int, int]
"""Device, inode, time of change in nanoseconds, size: one state of one file."""


@dataclass(frozen=True)
class MappedFile:
    """A file in memory, privately: what is written to `memory` stays in this process. Unmapped with the last view of it."""

    name: str
    key: FileKey
    memory: mmap.mmap


def map_file(path: Path) -> MappedFile | None:
    """Maps a regular file of this user; None for anything else, and where it cannot be mapped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or not found.st_size:
            return None
        return MappedFile(path.name, file_key(found), _map_privately(descriptor, found.st_size))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _map_privately(descriptor: int, size: int) -> mmap.mmap:
    """Readable and writable. No memory is reserved: only the pages that are written to take any."""
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    if sys.version_info >= (3, 13):
        # Otherwise every mapping holds a descriptor, of which a process has few.
        return mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, trackfd=False)
    return mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def file_key(found: os.stat_result) -> FileKey:
    """Which state of which file `found` is of. The time of last use is not part of it."""
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
