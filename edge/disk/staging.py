"""Staging: where an object's bytes lie while they come, readable by many, until it is a cached object or nothing at all.

Space is allocated before the first byte, so that a full disk shows before anybody was promised an object. An object that the
cache has no room for passes through a nameless file; where no disk takes that either, through memory, of which there is little.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import TypeVar

from kvcdn.edge.disk.index import FileIndex
from kvcdn.edge.http.target import ObjectName

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a disk answers that takes no more: no space, no quota, no file this large."""

_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""What a file system answers that knows no allocation: the bytes themselves will show whether there is room."""

FOLDER_MODE = 0o700
"""What is cached here is ciphertext, yet which documents are in use is nobody else's business."""

FILE_MODE = 0o600

PASSING_SHARE = 0.25
"""What one object that only passes may take of the free space for temporary files, which others need too."""

MEMORY_BYTES = 64 << 20
"""What may pass through memory at once where no disk has room: four blocks of the usual size."""

T = TypeVar("T")

log = logging.getLogger("kvcdn.edge.disk.storage")


class Departed:
    """Files that the cache has forgotten and the disk still holds. Thread-safe."""

    def __init__(self, index: FileIndex) -> None:
        self._index = index
        self._paths: deque[Path] = deque()
        self._deleting = Lock()

    def add(self, paths: Iterable[Path]) -> None:
        """Notes `paths` for deletion; never waits."""
        self._paths.extend(paths)

    def delete_one(self, path: Path) -> None:
        """Deletes `path` and nothing else."""
        delete_files([path])
        self._index.remove([path.name])

    def delete(self) -> None:
        """On return everything noted before the call is deleted, whoever did it."""
        with self._deleting:
            gone = []
            while self._paths:
                gone.append(self._paths.popleft())
                delete_files(gone[-1:])
            self._index.remove([path.name for path in gone])


@dataclass(frozen=True)
class Room:
    """Space set aside for one object, free once `departed` are deleted."""

    name: ObjectName
    size: int
    id: str
    """Of the file, new for each."""
    staging: Path
    final: Path
    departed: Departed = field(repr=False)
    index: FileIndex = field(repr=False)


class Spool:
    """The bytes of one object, readable as long as somebody holds one of its files, whatever becomes of its name."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.closing = weakref.finalize(self, os.close, descriptor)

    def open(self) -> SpoolFile:
        """A file of its own for one reader. Raises OSError where the process has no file descriptors left."""
        return SpoolFile(os.dup(self._descriptor), self)


class SpoolFile(FileIO):
    """A reader's hold on a spool."""

    def __init__(self, descriptor: int, spool: Spool) -> None:
        super().__init__(descriptor)
        self.spool = spool


class Memory:
    """How much of MEMORY_BYTES is taken. Thread-safe."""

    def __init__(self) -> None:
        self._left = MEMORY_BYTES
        self._lock = Lock()

    def take(self, size: int) -> None:
        """Raises OSError (ENOSPC) where so much is not left."""
        with self._lock:
            if size > self._left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._left -= size

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size


class Staging:
    """The writing side of a spool. For one thread."""

    def __init__(self, descriptor: int, room: Room | None, size: int) -> None:
        self._descriptor, self._room = descriptor, room
        try:
            _allocate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            self._delete()
            raise
        self.spool = Spool(descriptor)

    @classmethod
    def within(cls, room: Room) -> Staging:
        """In the cache, once what left for it is deleted. Raises OSError, and nothing is left."""
        room.departed.delete()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = _with_folder(room.staging.parent, lambda: os.open(room.staging, flags, FILE_MODE))
        return cls(descriptor, room, room.size)

    @classmethod
    def nameless(cls, size: int, folder: Path) -> Staging:
        """On the cache's disk, in `folder`, and gone with the last who reads it. Raises OSError."""
        with _with_folder(folder, lambda: tempfile.TemporaryFile(buffering=0, dir=folder)) as file:
            return cls(os.dup(file.fileno()), None, size)

    @classmethod
    def passing(cls, size: int, memory: Memory) -> Staging:
        """Outside the cache, for those who wait for the object now. Raises OSError where there is no place for it."""
        try:
            if size > shutil.disk_usage(tempfile.gettempdir()).free * PASSING_SHARE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with tempfile.TemporaryFile(buffering=0) as file:
                return cls(os.dup(file.fileno()), None, size)
        except OSError:
            memory.take(size)
            try:
                staging = cls(os.memfd_create("kvcdn-passing", os.MFD_CLOEXEC), None, size)
            except BaseException:
                memory.give_back(size)
                raise
            weakref.finalize(staging.spool, memory.give_back, size)
            return staging

    def write(self, piece: bytes, position: int) -> None:
        """Writes `piece` at `position`. Raises OSError."""
        view = memoryview(piece)
        while view:
            written = os.pwrite(self._descriptor, view, position)
            view, position = view[written:], position + written

    def commit(self) -> None:
        """Makes the object durable under its final name, if it has a room. Raises OSError.

        What has left for objects to come is deleted then, when nobody waits for it.
        """
        room = self._room
        if room is not None:
            os.fsync(self._descriptor)
            room.index.add(room.final.name)
            _with_folder(room.final.parent, lambda: room.staging.rename(room.final))
            sync_folder(room.final.parent)
            room.departed.delete()

    def discard(self) -> None:
        """Leaves nothing behind, after a failure anywhere, `commit` included; who reads may go on."""
        self._delete()

    def _delete(self) -> None:
        if self._room is not None:
            delete_files([self._room.staging, self._room.final])
            self._room.index.remove([self._room.final.name])


def _with_folder(folder: Path, act: Callable[[], T]) -> T:
    """What `act` gives in `folder`, which is made anew where somebody removed it."""
    try:
        return act()
    except FileNotFoundError:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        return act()


def _allocate(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _CANNOT_ALLOCATE:
            raise


def delete_files(paths: Iterable[Path]) -> None:
    """Deletes `paths`; one that is gone already, or does not go, is no reason to stop serving."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot delete %s: %s", path, error.strerror)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
