"""A folder store: every object is one file under a root folder, named by its key.

How an object becomes visible whole or not at all: its bytes go to a file in `.tmp` under the root, which no key can name; the
file is synced; a hard link, which fails where the name is taken, gives it its final name; the folder is synced. So there is
nothing to repair after a crash, only files in `.tmp` that nobody waits for, and these are swept a day later.

How nobody leaves the root: keys are checked, and every part of a path is opened relative to the folder before it, without
following symbolic links. A symbolic link inside the store is not an object and not a folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from threading import Lock

from kvcdn.digest import Buffer
from kvcdn.errors import KvcdnError, NotFoundError, UnavailableError, UsageError
from kvcdn.store import FIRST_BYTES, MAX_KEY_CHARACTERS, STREAM_CHUNK_BYTES, BlobInfo, check_key, is_behind
from kvcdn.stores.direct import write_pieces
from kvcdn.stores.span import Pieces, Span

STAGING_FOLDER = ".tmp"
"""Where unfinished objects lie. Keys have no part that begins with a dot."""

STALE_SECONDS = 24 * 3600
"""Staging files untouched for this long have no writer: no object takes a day."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OBJECT = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_STAGED = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

OBJECT_MODE = 0o444
"""Objects are immutable, and their files say so."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class FolderStore:
    """A BlobStore in a folder of a local or network disk with hard links. Many processes may share it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens the folder, which the first `create` makes if need be.

        Raises UsageError where something else has its name, UnavailableError where not even the folder around it exists.
        """
        self._root = Path(path).absolute()
        self._making_folders = Lock()
        if self._root.exists():
            if not self._root.is_dir():
                raise UsageError(f"{self._root} is not a folder", hint="name a folder, or a new name in an existing folder")
        elif not self._root.parent.is_dir():
            raise UnavailableError(
                f"neither {self._root} nor the folder around it exists",
                hint=f"mount the disk, or: mkdir -p {self._root.parent}",
            )
        self._sweep()

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def __repr__(self) -> str:
        return f"FolderStore({self._root})"

    def stat(self, key: str) -> BlobInfo | None:
        check_key(key)
        with self._explained(f"looking up {key}"):
            try:
                with self._folder_of(key) as folder:
                    found = os.stat(_name(key), dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if error.errno in _NOT_THERE:
                    return None
                raise
        return _info(key, found)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return b"".join(self.stream(key, start, length))

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        check_key(key)
        span = Span.of(start, length)
        file, size = self._open(key)
        return Pieces(self._pieces(key, file, *span.clip(size)), size)

    def create(self, key: str, pieces: Sequence[Buffer]) -> bool:
        if self.stat(key) is not None:
            return False
        size = sum(len(piece) for piece in pieces)
        with (
            self._explained(f"writing {key} ({size:,} bytes)"),
            self._staged(pieces) as (staging, staged),
            self._folder_of(key, make=True) as folder,
        ):
            try:
                os.link(staged, _name(key), src_dir_fd=staging, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                return self._lost(key)
            os.fsync(folder)
        return True

    def list(self, prefix: str, after: str = "") -> Iterator[BlobInfo]:
        with self._explained(f"listing {prefix or 'everything'}"):
            try:
                root = os.open(self._root, _FOLDER)
            except FileNotFoundError:
                return
            try:
                yield from _walk(root, "", prefix, after)
            finally:
                os.close(root)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._explained(f"deleting {key}"):
            try:
                with self._folder_of(key) as folder:
                    os.unlink(_name(key), dir_fd=folder)
            except OSError as error:
                if error.errno not in (*_NOT_THERE, errno.EISDIR):
                    raise

    def _open(self, key: str) -> tuple[int, int]:
        """The open file of an object, and its size."""
        with self._explained(f"reading {key}"):
            try:
                with self._folder_of(key) as folder:
                    file = os.open(_name(key), _OBJECT, dir_fd=folder)
            except OSError as error:
                if error.errno in (*_NOT_THERE, errno.ENXIO):
                    raise self._missing(key) from None
                raise
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                os.close(file)
                raise self._missing(key)
            return file, found.st_size

    def _pieces(self, key: str, file: int, position: int, stop: int) -> Generator[bytes, None, None]:
        most = FIRST_BYTES
        try:
            yield b""
            while position < stop:
                with self._explained(f"reading {key}"):
                    piece = os.pread(file, min(most, stop - position), position)
                if not piece:
                    raise UnavailableError(f"{self._root}: {key} became shorter while it was read, at byte {position:,}")
                position, most = position + len(piece), STREAM_CHUNK_BYTES
                yield piece
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _folder_of(self, key: str, *, make: bool = False) -> Iterator[int]:
        """The open folder that holds `key`'s file."""
        # Within the lock, a new folder's entry is durable before another writer relies on it.
        with self._making_folders if make else contextlib.nullcontext():
            folder = self._open_root(make=make)
            try:
                for part in key.split("/")[:-1]:
                    inner = _enter(folder, part, make=make)
                    os.close(folder)
                    folder = inner
            except BaseException:
                os.close(folder)
                raise
        try:
            yield folder
        finally:
            os.close(folder)

    def _open_root(self, *, make: bool) -> int:
        if make and not self._root.is_dir():
            self._root.mkdir(exist_ok=True)
            with _opened(os.open(self._root.parent, _FOLDER)) as parent:
                os.fsync(parent)
        return os.open(self._root, _FOLDER)

    @contextlib.contextmanager
    def _staged(self, pieces: Sequence[Buffer]) -> Iterator[tuple[int, str]]:
        """The staging folder and the name of a synced file in it that holds `pieces`; the name is gone afterwards."""
        with self._folder_of(f"{STAGING_FOLDER}/staged", make=True) as staging:
            name = f"{os.getpid()}-{secrets.token_hex(12)}"
            try:
                file = os.open(name, _STAGED, OBJECT_MODE, dir_fd=staging)
                with _opened(file):
                    write_pieces(file, pieces)
                    os.fsync(file)
                yield staging, name
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=staging)

    def _lost(self, key: str) -> bool:
        """False, as `create` answers where an object exists already; UsageError where what exists is no object."""
        if self.stat(key) is None:
            raise UsageError(f"{self._root}: a folder or a link already has the name of {key}, so no object can")
        return False

    def _sweep(self) -> None:
        """Removes staging files whose writers died. A store that may only be read is left as it is."""
        with contextlib.suppress(OSError), self._folder_of(f"{STAGING_FOLDER}/staged") as staging:
            oldest = time.time() - STALE_SECONDS
            with os.scandir(staging) as entries:
                stale = [entry.name for entry in entries if entry.stat(follow_symlinks=False).st_mtime < oldest]
            for name in stale:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=staging)

    def _missing(self, key: str) -> NotFoundError:
        return NotFoundError(f"{self._root} has no object {key}")

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Turns what the operating system refuses into an error for people."""
        try:
            yield
        except OSError as error:
            raise self._explain(error, action) from error

    def _explain(self, error: OSError, action: str) -> KvcdnError:
        what = f"{self._root}: {action} failed: {error.strerror}"
        match error.errno:
            case code if code in _FULL:
                disk = _mount_point(self._root)
                return UnavailableError(
                    f"the disk of {disk} is full ({action} in {self._root}); nothing was written",
                    hint=f"free space there (see: df -h {disk}) and try again",
                )
            case errno.EFBIG:
                return UnavailableError(what, hint="the file system or `ulimit -f` limits the size of a file: raise that limit")
            case errno.ENOTDIR:
                return UsageError(f"{what}: a part of the key is the name of an object or a link, so it cannot be a folder")
            case code if code in _NO_LINKS:
                return UnavailableError(what, hint="use one local file system with hard links for the whole folder")
            case errno.EACCES | errno.EROFS:
                return UnavailableError(what, hint=f"give the user of this process access to {self._root}")
            case _:
                return UnavailableError(what)


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _info(key: str, found: os.stat_result) -> BlobInfo | None:
    return BlobInfo(key, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(folder: int, part: str, *, make: bool) -> int:
    """The folder `part` of an open folder, made durably if need be; never through a symbolic link."""
    if not make:
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    with contextlib.suppress(FileNotFoundError):
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, dir_fd=folder)
    os.fsync(folder)
    return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _walk(folder: int, path: str, prefix: str, after: str) -> Iterator[BlobInfo]:
    """The objects under an open folder in key order. Holds the names of one folder per level, no more."""
    for name in _sorted_names(folder):
        key = path + name
        if not ((key.startswith(prefix) or (name.endswith("/") and prefix.startswith(key))) and is_behind(key, after)):
            continue
        with contextlib.suppress(FileNotFoundError):  # deleted since its name was read
            if name.endswith("/"):
                with _opened(os.open(name[:-1], _FOLDER | os.O_NOFOLLOW, dir_fd=folder)) as inner:
                    yield from _walk(inner, key, prefix, after)
            elif info := _info(key, os.stat(name, dir_fd=folder, follow_symlinks=False)):
                yield info


def _sorted_names(folder: int) -> list[str]:
    """What a folder holds that can be part of a key; folders with the slash after them, which decides the order of keys."""
    with os.scandir(folder) as entries:
        names = (entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name for entry in entries)
        return sorted(name for name in names if _can_be_part(name.removesuffix("/")))


def _can_be_part(name: str) -> bool:
    try:
        return len(name) <= MAX_KEY_CHARACTERS and check_key(name) == name
    except UsageError:
        return False


def _mount_point(path: Path) -> Path:
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path
