"""Leases and sweeps: how publishers and those who delete keep out of each other's way (FORMAT.md section 8).

A publisher relies on blocks that no manifest names yet: its own, and old ones that it found and built upon. Whoever deletes
must not take those, and may not learn of them too late. So each side first says what it is about to do, and then looks for
the other:

    publisher  creates a lease that lists its blocks, waits while a sweep is on, looks for blocks, writes, names them in a
               manifest, removes the lease
    deleter    creates a sweep, reads the leases, then the manifests, deletes what neither names, removes the sweep

Of two who begin at once at least one sees the other: a deleter that saw no lease began its sweep before that lease was made,
and its publisher finds the sweep and waits. Leases are read before manifests, so that a publisher who finishes in between
is seen in the second look. Nobody has to clean up: both kinds count for a limited time, told by the store's own clock.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError, NotFoundError, UnavailableError
from kvcdn.manifest import MAX_BLOCKS
from kvcdn.store import BlobStore

LEASE_MAGIC = b"KVCDNL1\n"

LEASE_SECONDS = 24 * 3600.0
"""How long a lease counts: no publisher needs a day for one document."""

LEASE_USABLE_SECONDS = 23 * 3600.0
"""How long its owner relies on it; the hour between is for clocks that run at different speeds and for the last writes."""

SWEEP_SECONDS = 60.0
"""One sweep begins no deletion after this: publishers wait no longer than that."""

SWEEP_DEAD_SECONDS = 180.0
"""A sweep that is still there after this has lost its process. The last deletion of a living one, with all the retries of a
store, takes less than the two minutes in between."""

POLL_SECONDS = 0.25

_MAX_LEASE_BYTES = len(LEASE_MAGIC) + Digest.SIZE * MAX_BLOCKS


def lease_prefix(tag: ModelTag) -> str:
    """Under which a model's leases lie."""
    return f"v1/{tag}/leases/"


def sweep_prefix(tag: ModelTag) -> str:
    """Under which a model's sweeps lie."""
    return f"v1/{tag}/sweeps/"


class Lease:
    """A publisher's word that it relies on blocks. A context: on entry no sweep is on that does not know of it."""

    def __init__(self, store: BlobStore, tag: ModelTag, addresses: Sequence[Digest]) -> None:
        self._store = store
        self._tag = tag
        self._data = LEASE_MAGIC + b"".join(addresses)
        self._key = lease_prefix(tag) + secrets.token_hex(16)
        self._began = 0.0
        self._created = 0.0

    def __enter__(self) -> Self:
        self.take()
        try:
            while self.blocked():
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def take(self) -> None:
        """Creates the lease; look at nothing before `blocked` says no."""
        self._began = clock()
        self._created = _announced(self._store, self._key, self._data)

    def blocked(self) -> bool:
        """Whether a sweep is on that may not know of this lease."""
        now = self._created + clock() - self._began
        return any(now - info.modified < SWEEP_DEAD_SECONDS for info in self._store.list(sweep_prefix(self._tag)))

    def require(self) -> None:
        """Call before the manifest is created. Raises UnavailableError where the lease may count no more."""
        if clock() - self._began > LEASE_USABLE_SECONDS:
            raise UnavailableError(
                f"{self._store.url}: publishing took more than {LEASE_USABLE_SECONDS / 3600:.0f} hours, its blocks may be gone",
                hint="publish again: blocks that are still there are not computed again",
            )

    def release(self) -> None:
        """Removes the lease. A publisher that may not delete leaves it; it ends by itself, and `gc` removes it."""
        with contextlib.suppress(UnavailableError):
            self._store.delete(self._key)


class Sweep:
    """A deleter's word that it deletes blocks of one model. A context; read `held`, then the manifests, then delete."""

    def __init__(self, store: BlobStore, tag: ModelTag) -> None:
        self._store = store
        self._tag = tag
        self._key = sweep_prefix(tag) + secrets.token_hex(16)
        self._began = 0.0
        self._now = 0.0

    def __enter__(self) -> Self:
        self._began = clock()
        self._now = _announced(self._store, self._key, b"")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(UnavailableError):  # the first error is the one to tell; the sweep ends by itself
            self._store.delete(self._key)

    @property
    def began(self) -> float:
        """When it began, by the store's clock (Unix time)."""
        return self._now

    @property
    def over(self) -> bool:
        """Whether its time is up: delete nothing more, begin another."""
        return clock() - self._began > SWEEP_SECONDS

    def held(self) -> set[bytes]:
        """Every address that a lease lists. Raises CorruptError for a lease that cannot be read."""
        found: set[bytes] = set()
        for info in self._store.list(lease_prefix(self._tag)):
            if self._now - info.modified < LEASE_SECONDS:
                with contextlib.suppress(NotFoundError):  # released: its manifest is there, and is read after this
                    found |= read_lease(self._store.read(info.key, 0, _MAX_LEASE_BYTES + 1), info.key)
        return found


def read_lease(data: bytes, what: str) -> set[bytes]:
    """The addresses that a lease lists. Raises CorruptError."""
    body = data[len(LEASE_MAGIC) :]
    if not data.startswith(LEASE_MAGIC) or len(body) % Digest.SIZE or len(data) > _MAX_LEASE_BYTES:
        raise CorruptError(f"{what}: not a lease, so what it protects is not known", hint=f"remove {what} from the origin")
    return {body[start : start + Digest.SIZE] for start in range(0, len(body), Digest.SIZE)}


def clock() -> float:
    """Seconds that pass, also while the machine sleeps: what sleeps meanwhile is still counted by the store's clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def _announced(store: BlobStore, key: str, data: bytes) -> float:
    """Creates the object; its creation time by the store's clock."""
    store.create(key, [data])
    info = store.stat(key)
    if info is None:
        raise UnavailableError(f"{store.url}: {key} was created and is not there: something else deletes at this origin")
    return info.modified
