"""The local store: prefix files (FORMAT.md section 10) that all processes of one user on one host map, under a cap.

    <folder>/lock                                   held for moments, by whoever changes names
    <folder>/prefixes/<id>.<bytes>                  complete files, never changed; the bytes are what they take of the disk
    <folder>/index/<model tag>/<block address>      a symbolic link: the name of a file that holds this block
    <folder>/writing/<address>.<id>.<bytes>         being written, and locked by the writer for as long as it lives

Readers take no lock: they follow the index. A file that vanishes under them is a miss; one that is mapped stays until the last
process lets go of it. A writer announces its bytes before it writes, so that all writers together stay below the cap; what a
killed one leaves is recognised by its lock being free. Nothing is synced to the disk: after a power cut a file may hold
anything, which readers find out, since they check what they map.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError, UnavailableError, UsageError
from kvcdn.layout import Layout
from kvcdn.paths import cache_dir
from kvcdn.prefixfile import MAX_HEAD_BYTES, PrefixFile, open_prefix_file
from kvcdn.sizes import parse_size
from kvcdn.stores.mapped import FileKey, MappedFile, file_key, map_file

DEFAULT_CAPACITY = 20 * 1000**3
DEFAULT_DISK_SHARE = 0.1
"""Of the disk, where that is less."""

FREE_DISK_SHARE = 0.02
"""A disk that would have less than this left is full: nothing more is kept."""

TOUCH_SECONDS = 60
"""The time of last use is written at most once in this time: the order of eviction needs no more."""

LOCK_SECONDS = 5.0
"""Changing names takes milliseconds; who waits longer waits for a process that was stopped."""

_LOCK_POLL_SECONDS = 0.01

_FILE = re.compile(r"[0-9a-f]{16}\.([0-9]{1,15})")
_DRAFT = re.compile(r"([0-9a-f]{64})\.[0-9a-f]{16}\.([0-9]{1,15})")

_CACHE_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Made by kvcdn. It can be made again: no backup needs it.\n"
"""The content of CACHEDIR.TAG (https://bford.info/cachedir/), by which backups pass a folder over."""


@dataclass(frozen=True)
class StoredPrefix:
    """A prefix file as listed. `header` is None where it cannot be read; `used` is Unix time in seconds."""

    name: str
    header: PrefixFile | None
    bytes: int
    used: float


class LocalStore:
    """One folder of prefix files. Safe for any number of threads and processes; nothing is kept open between calls."""

    def __init__(self, folder: str | Path | None = None, capacity: int | None = None) -> None:
        """`folder` is by default the user's own; `capacity` is in bytes, by default 20 GB, or a tenth of a smaller disk.

        Raises UsageError for a capacity that is no number.
        """
        if capacity is not None and (not isinstance(capacity, int) or isinstance(capacity, bool)):
            raise UsageError(f"a capacity of {capacity!r} is no number of bytes", hint="give a number, such as 50 * 10**9")
        self.folder = Path(folder) if folder else cache_dir() / "local"
        self._capacity = capacity
        self._files = self.folder / "prefixes"
        self._index = self.folder / "index"
        self._drafts = self.folder / "writing"

    @classmethod
    def configured(cls) -> LocalStore | None:
        """The store that the environment names: KVCDN_LOCAL (a folder, or 0 for none), KVCDN_LOCAL_CAPACITY.

        Raises UsageError.
        """
        folder, capacity = os.environ.get("KVCDN_LOCAL", ""), os.environ.get("KVCDN_LOCAL_CAPACITY", "")
        if folder == "0":
            return None
        try:
            return cls(Path(folder).absolute() if folder else None, parse_size(capacity) if capacity else None)
        except ValueError as error:
            raise UsageError(f"KVCDN_LOCAL_CAPACITY: {error}") from None

    @property
    def capacity(self) -> int:
        """Bytes of disk that all files together may take."""
        if self._capacity is None:
            there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            self._capacity = min(DEFAULT_CAPACITY, int(DEFAULT_DISK_SHARE * shutil.disk_usage(there).total))
        return self._capacity

    # -- reading ----------------------------------------------------------------------------------------------------------

    def find(self, tag: ModelTag, address: Digest) -> MappedFile | None:
        """A file that holds the block `address`, mapped and unchecked; None where there is none.

        Raises UsageError for a folder that others can get at.
        """
        try:
            require_private(self.folder)
        except OSError:
            return None
        name = _target(self._index / str(tag) / str(address))
        return map_file(self._files / name) if _FILE.fullmatch(name) else None

    def touch(self, file: MappedFile) -> None:
        """Notes that `file` is in use."""
        with contextlib.suppress(OSError):
            path, now = self._files / file.name, time.time()
            found = path.stat()
            if now - found.st_atime > TOUCH_SECONDS:
                os.utime(path, ns=(int(now * 1e9), found.st_mtime_ns))

    def discard(self, file: MappedFile) -> None:
        """Removes a file that failed its check."""
        _remove(self._files / file.name)

    # -- writing ----------------------------------------------------------------------------------------------------------

    def begin(self, file: PrefixFile, layout: Layout) -> Draft | None:
        """A file to be written; None where it is there already, being written, or would not fit. Evicts what must go for it.

        Raises UsageError for a folder that others can get at, UnavailableError where the disk fails.
        """
        wanted = file.disk_bytes(layout)
        with self._changing():
            last = file.blocks[-1].address
            promised = self._sweep()
            # What others are writing cannot be evicted.
            room = self.capacity - wanted - sum(promised.values())
            if room < 0 or str(last) in promised or self._held(file):
                return None
            usage = shutil.disk_usage(self.folder)
            if usage.free - wanted < FREE_DISK_SHARE * usage.total:
                return None
            self._evict(room)
            path = self._drafts / f"{last}.{secrets.token_hex(8)}.{wanted}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return Draft(self, file, path, descriptor, file.size(layout))

    def commit(self, draft: Draft) -> FileKey | None:
        """Gives a draft its names; None where it was cleared away, or another writer was faster."""
        name = draft.path.name.partition(".")[2]
        with self._changing():
            if self._held(draft.file) or not draft.path.exists():
                return None
            folder = self._index / str(draft.file.model)
            folder.mkdir(mode=0o700, exist_ok=True)
            links = {folder / str(block.address) for block in draft.file.blocks}
            before = {target: self._header(target) for target in {_target(link) for link in links}}
            for link in links:
                old = before[_target(link)]
                # Two prefixes that begin alike hold different rows of layers with windows: a block leads to the one with more.
                if old is None or draft.file.reaches_as_far(old):
                    new = link.with_name(f".{link.name}")
                    _remove(new)
                    new.symlink_to(name)
                    new.replace(link)
            # The links come first: a writer killed between them leaves links to nothing, and no file that nobody finds.
            draft.path.rename(self._files / name)
            for target, old in before.items():
                if old is not None and draft.file.covers(old):
                    _remove(self._files / target)
            return file_key((self._files / name).stat())

    # -- upkeep -----------------------------------------------------------------------------------------------------------

    def stored(self) -> list[StoredPrefix]:
        """Every file, last used first. Raises UsageError for a folder that others can get at."""
        if not self.folder.exists():
            return []
        require_private(self.folder)
        found = [StoredPrefix(path.name, self._header(path.name), size, used) for path, size, used in self._all()]
        return sorted(found, key=lambda one: -one.used)

    def clear(self, tag: ModelTag | None = None) -> tuple[int, int]:
        """Removes all files, or those of one model; what is being written as well. Returns how many, and their bytes."""
        count = total = 0
        if not self.folder.exists():
            return count, total
        with self._changing():
            for path, size, _ in self._all():
                header = self._header(path.name)
                if tag is None or (header is not None and header.model == tag):
                    _remove(path)
                    count, total = count + 1, total + size
            for path in self._drafts.iterdir():
                header = _read_header(path)
                if tag is None or header is None or header.model == tag:
                    _remove(path)
            self._sweep()
        return count, total

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds the lock by which names change. Raises UsageError or UnavailableError."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_private(self.folder)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._lock(descriptor)
                for folder in (self._files, self._index, self._drafts):
                    folder.mkdir(mode=0o700, exist_ok=True)
                tag = self.folder / "CACHEDIR.TAG"
                if not tag.exists():
                    tag.write_bytes(_CACHE_TAG)
                yield
            finally:
                # A process that was forked meanwhile has the descriptor as well, and would hold the lock until it ends.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)
        except OSError as error:
            raise UnavailableError(f"the local store {self.folder} cannot be written: {error.strerror or error}") from None

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UnavailableError(f"the local store {self.folder} is locked by another process") from None
                time.sleep(_LOCK_POLL_SECONDS)

    def _sweep(self) -> dict[str, int]:
        """Removes what dead writers left, and links to nothing; returns the last address and the bytes of each live draft."""
        promised: dict[str, int] = {}
        for path in self._drafts.iterdir():
            match = _DRAFT.fullmatch(path.name)
            if match and _in_use(path):
                promised[match[1]] = promised.get(match[1], 0) + int(match[2])
            else:
                _remove(path)
        names = set(os.listdir(self._files))  # noqa: PTH208 - names are wanted, of thousands
        for folder in self._index.iterdir():
            for entry in os.scandir(folder):
                if entry.name.startswith(".") or _target(Path(entry.path)) not in names:
                    _remove(Path(entry.path))
            with contextlib.suppress(OSError):
                folder.rmdir()
        return promised

    def _evict(self, room: int) -> None:
        """Removes files, the longest unused first, until the others take at most `room` bytes."""
        files = sorted(self._all(), key=lambda one: one[2])
        total = sum(size for _, size, _ in files)
        for path, size, _ in files:
            if total <= room:
                return
            _remove(path)
            total -= size

    def _all(self) -> list[tuple[Path, int, float]]:
        """Every file with the bytes it takes and when it was last used."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._files):
                match = _FILE.fullmatch(entry.name)
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    # The disk may take more where it keeps no holes, and says less while it has not written yet.
                    size = max(int(match[1]) if match else 0, 512 * status.st_blocks)
                    found.append((Path(entry.path), size, status.st_atime))
        return found

    def _held(self, file: PrefixFile) -> bool:
        """Whether what `file` would serve is served already."""
        header = self._header(_target(self._index / str(file.model) / str(file.blocks[-1].address)))
        return header is not None and header.covers(file)

    def _header(self, name: str) -> PrefixFile | None:
        return _read_header(self._files / name) if name else None


class Draft:
    """A prefix file being written. Leaving the `with` block removes it, unless it was committed."""

    def __init__(self, store: LocalStore, file: PrefixFile, path: Path, descriptor: int, size: int) -> None:
        self.file = file
        self.path = path
        self._store = store
        self._descriptor = descriptor
        self._size = size

    def __enter__(self) -> Self:
        try:
            with self._telling():
                os.truncate(self._descriptor, self._size)
            self.write(0, memoryview(self.file.encoded))
        except UnavailableError:
            self.__exit__()
            raise
        return self

    def write(self, offset: int, data: memoryview) -> None:
        """Writes `data` at `offset`. Raises UnavailableError."""
        with self._telling():
            while data:
                count = os.pwrite(self._descriptor, data, offset)
                offset, data = offset + count, data[count:]

    def map(self) -> mmap.mmap:
        """What was written, as a reader will see it."""
        with self._telling():
            return mmap.mmap(self._descriptor, self._size, access=mmap.ACCESS_READ)

    def commit(self) -> FileKey | None:
        """Makes it a file of the store, if it is still wanted. Raises UnavailableError."""
        return self._store.commit(self)

    def __exit__(self, *_: object) -> None:
        _remove(self.path)
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError(f"the local store cannot write {self.path}: {error.strerror or error}") from None


def require_private(folder: Path) -> None:
    """Raises UsageError unless `folder` is a folder of this user that nobody else can read or write."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(
            f"the local store {folder} is not a folder of yours, and is not used", hint="name another in KVCDN_LOCAL"
        )
    if found.st_mode & 0o077:
        raise UsageError(
            f"the local store {folder} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}), and is not used",
            hint=f"chmod 700 {folder}, after a look at who wrote to it",
        )


def _target(link: Path) -> str:
    """The name that a link of the index holds; empty where it is no link."""
    try:
        return link.readlink().name
    except OSError:
        return ""


def _remove(path: Path) -> None:
    """Removes a file that may be gone already. What cannot be removed stays, and counts."""
    with contextlib.suppress(OSError):
        path.unlink()


def _in_use(path: Path) -> bool:
    """Whether the writer of a draft is alive."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read_header(path: Path) -> PrefixFile | None:
    try:
        with path.open("rb") as file:
            return open_prefix_file(memoryview(file.read(MAX_HEAD_BYTES)), path.name)
    except (OSError, CorruptError):
        return None
