"""Quarantine: files whose bytes turned out wrong, kept aside under a bound, for whoever wants to know what the disk did.

Nobody is served from here, and nothing here is read again by the edge: the objects are fetched anew. The bytes are part of the
edge's capacity, so that the cap holds. The oldest file leaves for a new one.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from pathlib import Path

from kvcdn.edge.disk.eviction import charge
from kvcdn.edge.disk.staging import FOLDER_MODE, delete_files

log = logging.getLogger("kvcdn.edge.disk.storage")


class Quarantine:
    """The folder of rotten files. For the event loop's thread; a limit of 0 keeps none."""

    def __init__(self, folder: Path, limit: int) -> None:
        """`limit`: bytes of disk for all files. Raises OSError."""
        self._folder, self._limit = folder, limit
        self._files: OrderedDict[str, int] = OrderedDict()
        """Names and what they are charged, oldest first."""
        self.used = 0
        if folder.is_dir():
            found = [(item.stat(follow_symlinks=False), item.name) for item in os.scandir(folder)]
            for stat, name in sorted(found, key=lambda item: item[0].st_mtime):
                self._add(name, charge(stat.st_size))
        self._bound(0)

    def __len__(self) -> int:
        return len(self._files)

    def take(self, path: Path) -> bool:
        """Puts the file at `path` aside; False where it is to be deleted instead: it is gone, too large, or nothing is kept."""
        try:
            size = charge(path.lstat().st_size)
            if size > self._limit:
                return False
            self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            self._bound(size)
            path.rename(self._folder / path.name)
        except OSError as error:
            log.warning("cannot keep %s aside: %s", path, error.strerror)
            return False
        self._add(path.name, size)
        return True

    def _add(self, name: str, size: int) -> None:
        self._files[name] = size
        self.used += size

    def _bound(self, room: int) -> None:
        while self._files and self.used + room > self._limit:
            name, size = self._files.popitem(last=False)
            self.used -= size
            delete_files([self._folder / name])
