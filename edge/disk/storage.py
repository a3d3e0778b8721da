"""Storage: the disk cache. One file an object, a hard cap, and a folder that any crash leaves usable.

    <folder>/lock                                              held by the one edge that uses the folder
    <folder>/index                                             the names of the files below, see `index`
    <folder>/staging/<file name>                               being written; removed at the next start
    <folder>/pins                                              what stays whatever happens, see `pins`
    <folder>/quarantine/<file name>                            rotten files kept aside, see `quarantine`
    <folder>/objects/<aa>/<address>.<tag>.<kind>.<size>.<id>   complete, synced and checked

An object's size is part of its file's name, so that a start needs no file opened: what is shorter or longer than its name
says is deleted. The id is new for every file, so that deleting an evicted file never touches its successor. The first use of
a file after a start checks its envelope again, against the trust list of today.

`DiskCache` belongs to the event loop's thread and only opens and forgets files; whatever may take long (`staging`, deleting
victims) is done by the threads that fill. Room is promised before victims are deleted, and may be promised to another fill than
the one that evicted them: so whoever begins to write first deletes all victims of everyone (`Departed`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from io import FileIO
from pathlib import Path

from kvcdn.edge.disk.eviction import Eviction
from kvcdn.edge.disk.index import FileIndex, StoredFile
from kvcdn.edge.disk.quarantine import Quarantine
from kvcdn.edge.disk.staging import FILE_MODE, FOLDER_MODE, Departed, Room, delete_files, sync_folder
from kvcdn.edge.http.target import ObjectName
from kvcdn.errors import RevokedError, UnavailableError, UntrustedError, UsageError

_FANOUT = 256
"""Folders of objects, by the address's first two digits: made once, so that a fill syncs one existing folder."""

_ID_BYTES = 4

_FILE = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{32})\.(block|manifest)\.([0-9]{1,11})\.([0-9a-f]{8})")

_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)
"""What opening a file says that is not there, or that somebody replaced by a link."""

log = logging.getLogger("kvcdn.edge.disk.storage")


class Harm(StrEnum):
    """What had become of a file that was dropped."""

    VANISHED = "vanished"
    RESIZED = "resized"
    DAMAGED = "damaged"
    """Its bytes are not what was stored, or the disk does not give them."""
    REVOKED = "revoked"
    """Nothing had: a list of revocations takes it back."""
    UNTRUSTED = "untrusted"
    """Nothing had: its publisher is not on the trust list any more."""

    @classmethod
    def of(cls, error: Exception) -> Harm:
        """What an envelope's check, or reading the file, ended with."""
        if isinstance(error, RevokedError):
            return cls.REVOKED
        return cls.UNTRUSTED if isinstance(error, UntrustedError) else cls.DAMAGED


@dataclass(slots=True)
class Entry:
    """One cached object."""

    id: str
    """Of its file: with the key and the size the whole of the file's name, of which there may be a million in memory."""
    size: int
    stored_at: float
    """Unix time in seconds."""
    etag: str | None
    """None until the envelope was checked in this process."""
    tokens: int = 0
    """Tokens whose KV it holds; known when `etag` is."""


@dataclass(frozen=True)
class OpenEntry:
    """A cached object, opened: stays readable even if it is evicted meanwhile. Whoever gets it closes the file."""

    file: FileIO
    entry: Entry


class DiskCache:
    """The index of a cache folder and the way to its files."""

    def __init__(self, folder: Path, capacity: int, quarantine: int = 0) -> None:
        """Takes the folder over, making it if need be, and indexes it; `quarantine` bytes of `capacity` are for rotten files.

        Raises UsageError where another edge uses it, UnavailableError where the disk refuses.
        """
        self._folder = folder.expanduser().absolute()
        self._objects = str(self._folder / "objects")
        self._eviction = Eviction(capacity - quarantine)
        self._entries: dict[str, Entry] = {}
        self._pinned: set[str] = set()
        self._index = FileIndex(self._folder / "index")
        self._departed = Departed(self._index)
        self.dropped: Counter[Harm] = Counter()
        """Objects dropped since the start, by what had become of them."""
        self.evicted = 0
        """Objects evicted since the start."""
        try:
            self._make_folders()
            self._lock = _take_lock(self._folder / "lock")
            try:
                self.quarantine = Quarantine(self._folder / "quarantine", quarantine)
                self._restore()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise UnavailableError(
                f"cannot use the cache folder {self._folder}: {error.strerror}", hint="name another folder with cache_dir"
            ) from None

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def capacity(self) -> int:
        return self._eviction.capacity

    @property
    def used(self) -> int:
        """Bytes charged for complete objects."""
        return self._eviction.used

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """Lets another edge use the folder."""
        self._departed.delete()
        self._index.close()
        os.close(self._lock)

    def size_of(self, key: str) -> int | None:
        """The size of a cached object; not a use of it."""
        entry = self._entries.get(key)
        return None if entry is None else entry.size

    def has_evicted(self, key: str) -> bool:
        """Whether an object was here, had to leave, and is not back; long ago is forgotten."""
        return self._eviction.evicted(key)

    def snapshot(self) -> list[str]:
        """The keys of all cached objects, as of now."""
        return list(self._entries)

    def open(self, key: str) -> OpenEntry | None:
        """Opens a cached object, which counts as a use. Otherwise as `peek`."""
        opened = self.peek(key)
        if opened is not None:
            self._eviction.touch(key, time.monotonic())
        return opened

    def peek(self, key: str) -> OpenEntry | None:
        """Opens a cached object; None where there is none, or none any more.

        A file that vanished or has another size than it should is forgotten: the caller fills again. Raises OSError where
        the process has no file descriptors left.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:
            name = _file_name(key, entry.size, entry.id)
            file = FileIO(os.open(f"{self._objects}/{name[:2]}/{name}", _OPEN_FLAGS))
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            self.drop(key, entry, Harm.VANISHED, "it vanished from the disk")
            return None
        if os.fstat(file.fileno()).st_size != entry.size:
            file.close()
            self.drop(key, entry, Harm.RESIZED, "its size changed on disk")
            return None
        return OpenEntry(file, entry)

    def pin(self, key: str) -> None:
        """The object under `key` is not evicted from now on, once it is here."""
        self._pinned.add(key)
        self._eviction.pin(key)

    def unpin(self, key: str) -> None:
        """Undoes `pin`."""
        self._pinned.discard(key)
        self._eviction.unpin(key)

    def is_pinned(self, key: str) -> bool:
        return key in self._pinned

    def announce(self, keys: Sequence[str]) -> None:
        """Notes that a chain of objects was looked up and will be asked for, in this order: what eviction learns from."""
        self._eviction.visit(keys)

    def drop(self, key: str, entry: Entry, harm: Harm, words: str) -> None:
        """Forgets and deletes an object that must not be served; does nothing where the cache holds a newer file."""
        if self._entries.get(key) is not entry:
            return
        log.warning("dropped %s from the cache: %s", key, words)
        self.dropped[harm] += 1
        del self._entries[key]
        self._eviction.remove(key)
        path = self._path(key, entry)
        if harm in (Harm.DAMAGED, Harm.RESIZED):
            self.quarantine.take(path)
        self._departed.delete_one(path)

    def drop_key(self, key: str, harm: Harm, words: str) -> None:
        """As `drop`, of whatever the cache holds under `key`."""
        entry = self._entries.get(key)
        if entry is not None:
            self.drop(key, entry, harm, words)

    def remove(self, keys: Iterable[str]) -> list[int]:
        """Forgets objects, whose files `delete_removed` deletes; the sizes of those that were here."""
        gone = [(key, self._entries.pop(key)) for key in keys if key in self._entries]
        for key, _ in gone:
            self._eviction.remove(key)
        self._departed.add([self._path(key, entry) for key, entry in gone])
        return [entry.size for _, entry in gone]

    def delete_removed(self) -> None:
        """On return the files of everything removed before are deleted. For any thread: it may take long."""
        self._departed.delete()

    def doubt(self) -> None:
        """Has every envelope checked again, at the next use."""
        for entry in self._entries.values():
            entry.etag = None

    def reserve(self, name: ObjectName, size: int) -> Room | None:
        """Sets room aside for an object of `size` bytes; None where the cap leaves none."""
        victims = self._eviction.reserve(size)
        if victims is None:
            return None
        self._forget(victims)
        return self.room(name, size)

    def room(self, name: ObjectName, size: int) -> Room:
        """Where an object of `size` bytes may lie; the room is the caller's to reserve. For any thread."""
        new = secrets.token_hex(_ID_BYTES)
        file = _file_name(name.key, size, new)
        return Room(name, size, new, self._folder / "staging" / file, self._place(file), self._departed, self._index)

    def set_aside(self, size: int) -> bool:
        """Sets room for `size` bytes aside, where nothing has to leave for that; whether it did."""
        return self._eviction.set_aside(size)

    def use(self, aside: int, room: Room | None) -> None:
        """Ends a `set_aside`: what of it is not `room`'s is free again."""
        self._eviction.release(aside)
        if room is not None and not self._eviction.set_aside(room.size):
            raise ValueError(f"a room of {room.size} bytes is not within {aside} set aside")

    def clear(self, size: int) -> None:
        """Forgets objects so that the next who comes can have `size` bytes set aside."""
        self._forget(self._eviction.clear(size))

    def commit(self, room: Room, etag: str, tokens: int = 0) -> None:
        """Adds the object that now lies, complete, in its room."""
        self._eviction.commit(room.name.key, room.size, time.monotonic())
        old = self._entries.pop(room.name.key, None)
        self._entries[room.name.key] = Entry(room.id, room.size, time.time(), etag, tokens)
        if old is not None:
            self._departed.delete_one(self._path(room.name.key, old))

    def release(self, room: Room) -> None:
        """Gives a room back in which nothing lies."""
        self._eviction.release(room.size)

    def relieve(self, size: int) -> None:
        """Forgets objects of `size` bytes or more together, because the disk is full below the cap."""
        self._forget(self._eviction.relieve(size))

    def _forget(self, victims: Sequence[str]) -> None:
        self._departed.add([self._path(key, self._entries.pop(key)) for key in victims])
        self.evicted += len(victims)

    def _path(self, key: str, entry: Entry) -> Path:
        return self._place(_file_name(key, entry.size, entry.id))

    def _place(self, file: str) -> Path:
        return Path(f"{self._objects}/{file[:2]}/{file}")

    def _make_folders(self) -> None:
        self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        for name in ("staging", "objects"):
            (self._folder / name).mkdir(mode=FOLDER_MODE, exist_ok=True)
        for number in range(_FANOUT):
            (self._folder / "objects" / f"{number:02x}").mkdir(mode=FOLDER_MODE, exist_ok=True)
        sync_folder(self._folder / "objects")
        sync_folder(self._folder)

    def _restore(self) -> None:
        """Takes over what an earlier edge left; deletes what is unfinished, double or over the cap."""
        delete_files(Path(item.path) for item in os.scandir(self._folder / "staging"))
        files = self._index.load()
        if files is None:
            found = sorted(self._walk(), key=lambda file: file.stored_at)
            self._index.rebuild(found)
            files = iter(found)
        with _collecting_no_garbage():
            for file, stored_at in files:
                match = _FILE.fullmatch(file)
                if match is None:
                    log.warning("the index names %s, which is none of ours", file)
                    continue
                address, tag, kind, size, file_id = match.groups()
                # As `keys.block_key` and `keys.manifest_key`, in a tenth of their time, which a million files make felt.
                key = f"v1/{tag}/blocks/{address[:2]}/{address}" if kind == "block" else f"v1/{tag}/manifests/{address}"
                old = self._entries.pop(key, None)
                if old is not None:
                    self._departed.add([self._path(key, old)])
                self._entries[key] = Entry(file_id, int(size), stored_at, None)
            self._eviction.restore((key, entry.size) for key, entry in self._entries.items())
        self._forget(self._eviction.trim())
        self._departed.delete()

    def _walk(self) -> Iterator[StoredFile]:
        """What lies in the folder, in any order; what is not as long as its name says is deleted."""
        for number in range(_FANOUT):
            for item in os.scandir(self._folder / "objects" / f"{number:02x}"):
                match = _FILE.fullmatch(item.name)
                if match is None or not item.name.startswith(f"{number:02x}"):
                    log.warning("%s is none of ours and counts for nothing", item.path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = item.stat(follow_symlinks=False)
                    if found.st_size == int(match[4]) and stat.S_ISREG(found.st_mode):
                        yield StoredFile(item.name, found.st_mtime)
                    else:
                        log.warning("deleted %s: it has %d bytes", item.path, found.st_size)
                        delete_files([Path(item.path)])


def _take_lock(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 16, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise UsageError(
            f"the cache folder {path.parent} is in use by another edge (process {holder})",
            hint="give every edge a cache_dir of its own, or stop the other one",
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)
    return handle


def _file_name(key: str, size: int, file_id: str) -> str:
    """What the file of an object is called; `key` as `_restore` makes it from this."""
    tag, address = key[3:35], key[-64:]
    return f"{address}.{tag}.{'block' if key[36] == 'b' else 'manifest'}.{size}.{file_id}"


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Nothing here is garbage, and a million new objects would be looked through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
