"""The doctor: tries at an origin what publishing, reading and keeping it in order need, and says what to mend."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from kvcdn.digest import Buffer
from kvcdn.envelope import BLOCK_MAGIC, MANIFEST_MAGIC
from kvcdn.errors import KvcdnError, NotFoundError, UsageError
from kvcdn.store import BlobInfo, BlobStore

PROBE_PREFIX = "v1/doctor/"
"""Under which probes lie; `gc` removes those that could not be removed at once."""

SKEW_SECONDS = 300.0
"""A clock that is wrong by more is not set by anybody: S3 refuses requests from 900 seconds on."""

_PROBE = b"kvcdn doctor: this object may be removed\n" * 100
_OTHER = b"kvcdn doctor: a second writer\n" * 100
_RANGE = (1000, 500)

_BEHIND_THE_FIRST_WRITE = (
    "create only where nothing is",
    "create only once",
    "read",
    "read a range",
    "list what was written",
    "clock",
)

RACERS = 8
"""Writers at once."""

RACE_SUFFIX = "-race"
"""Of the object for which they race."""


class Role(StrEnum):
    """On whose behalf it is tried."""

    EDGE = "edge"
    """Reads and lists; also a reader without an edge."""
    PUBLISHER = "publisher"
    """Creates besides."""
    OPERATOR = "operator"
    """Deletes besides."""


class Status(StrEnum):
    """How a trial ended."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Trial:
    """One thing that was tried, how it went, and what to do about it."""

    name: str
    status: Status
    detail: str
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@runtime_checkable
class CreatesUnseen(Protocol):
    """A store whose `create` looks before it writes; with this it does not."""

    def create_unseen(self, key: str, pieces: Sequence[Buffer]) -> bool:
        """As `create`, without the look."""


class _TrialError(Exception):
    """A trial that worked, with a result that will not do: what it was, and what to do."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.hint = hint


def examine(store: BlobStore, role: Role = Role.OPERATOR) -> list[Trial]:
    """Tries everything that `role` needs. What it writes is a few small objects, and those it removes."""
    examination = _Examination(store)
    if not examination.reaches():
        return examination.trials
    examination.lists()
    if role is Role.EDGE:
        examination.reads_what_is_there()
    else:
        examination.writes(deletes=role is Role.OPERATOR)
    return examination.trials


class _Examination:
    def __init__(self, store: BlobStore) -> None:
        self.trials: list[Trial] = []
        self._store = store
        self._key = PROBE_PREFIX + secrets.token_hex(16)
        self._written = False

    @contextlib.contextmanager
    def _trial(self, name: str, detail: str, *, optional: bool = False) -> Iterator[None]:
        """Runs one trial, and records how it ended; an `optional` one is skipped where the store cannot do such a thing."""
        try:
            yield
            self.trials.append(Trial(name, Status.OK, detail))
        except _TrialError as error:
            self.trials.append(Trial(name, Status.FAILED, str(error), error.hint))
        except KvcdnError as error:
            skipped = optional and isinstance(error, UsageError)
            self.trials.append(Trial(name, Status.SKIPPED if skipped else Status.FAILED, str(error), error.hint))

    @property
    def _went_well(self) -> bool:
        return self.trials[-1].status is Status.OK

    def _skip(self, name: str, detail: str) -> None:
        self.trials.append(Trial(name, Status.SKIPPED, detail))

    def reaches(self) -> bool:
        """Whether the origin answers at all, and says of what is missing that it is missing."""
        with self._trial("reach", "answers, and tells a missing object from a forbidden one"):
            if self._store.stat(self._key) is not None:
                raise _TrialError("claims to have an object of a random name", "this is not an object store: check the URL")
        return self._went_well

    def lists(self) -> None:
        with self._trial("list", "may be listed", optional=True):
            next(iter(self._store.list("v1/")), None)

    def reads_what_is_there(self) -> None:
        """For those who may not write: reads the beginning of some object."""
        listed = self._went_well
        info = self._some_object() if listed else None
        if info is None:
            self._skip("read", "nothing is published there yet" if listed else "nothing is known that could be read")
            return
        with self._trial("read", f"may be read, ranges too ({info.key})"):
            try:
                magic = self._store.read(info.key, 0, len(BLOCK_MAGIC))
            except NotFoundError as error:
                raise _TrialError(f"{error}, though it is listed", "try again: it may just have been removed") from None
            if magic not in (BLOCK_MAGIC, MANIFEST_MAGIC):
                raise _TrialError(f"{info.key} begins with {magic!r}: no object of ours", "kvcdn fsck tells what is damaged")

    def _some_object(self) -> BlobInfo | None:
        return next((info for info in self._store.list("v1/") if "/blocks/" in info.key or "/manifests/" in info.key), None)

    def writes(self, *, deletes: bool) -> None:
        began = time.time()
        try:
            self._write(began)
        finally:
            self._remove(needed=deletes)

    def _write(self, began: float) -> None:
        """Creates the probe and looks at it from all sides."""
        with self._trial("write", f"an object could be created ({self._key})"):
            if not self._create(_PROBE):
                raise _TrialError("says that an object of a random name exists already", "this is not an object store we know")
        self._written = self._went_well
        if not self._written:
            for name in _BEHIND_THE_FIRST_WRITE:
                self._skip(name, "nothing could be written")
            return
        self._tries_to_overwrite()
        if self._went_well:
            self._races()
        else:
            self._skip("create only once", "conditions are ignored")
        with self._trial("read", "what was written can be read"):
            self._require(self._store.read(self._key) == _PROBE, "other bytes are read than written", "check the server's disk")
        with self._trial("read a range", "a part can be read"):
            start, length = _RANGE
            right = self._store.read(self._key, start, length) == _PROBE[start : start + length]
            self._require(right, "a range holds other bytes than asked for", "check proxies between here and the origin")
        with self._trial("list what was written", "it is listed at once"):
            listed = any(info.key == self._key for info in self._store.list(self._key))
            self._require(listed, "a new object is not listed", "use a server that lists what it has: gc and rm depend on it")
        self._compares_clocks(began)

    def _create(self, data: bytes, key: str = "") -> bool:
        if isinstance(self._store, CreatesUnseen):
            return self._store.create_unseen(key or self._key, [data])
        return self._store.create(key or self._key, [data])

    def _tries_to_overwrite(self) -> None:
        with self._trial("create only where nothing is", "a second writer is refused"):
            created = self._create(_OTHER)
            held = self._store.read(self._key)
            self._require(
                not created and held == _PROBE,
                "a second writer overwrote what was there: conditional writes (If-None-Match: *) are ignored",
                "use a newer version of this server, or another one: two publishers would damage each other's documents",
            )
        if self._went_well:
            return
        with contextlib.suppress(KvcdnError):  # the trials that follow read what they wrote
            self._store.delete(self._key)
            self._create(_PROBE)

    def _races(self) -> None:
        """Some servers look whether there is an object, and then write: who writes at the same time overwrites."""
        key = self._key + RACE_SUFFIX

        def write(number: int) -> bool:
            return self._create(_nth(number), key)

        with self._trial("create only once", f"of {RACERS} writers at once one is first, and stays"):
            try:
                with ThreadPoolExecutor(RACERS) as pool:
                    first = [number for number, won in enumerate(pool.map(write, range(RACERS))) if won]
                held = self._store.read(key)
            finally:
                with contextlib.suppress(KvcdnError):
                    self._store.delete(key)
            self._require(
                len(first) == 1 and held == _nth(first[0]),
                f"{len(first)} of {RACERS} writers at once were told that they are first",
                "use a newer version of this server, or another one: two publishers would damage each other's documents",
            )

    def _compares_clocks(self, began: float) -> None:
        with self._trial("clock", "agrees with this machine's"):
            info = self._store.stat(self._key)
            if info is None:
                raise _TrialError("what was written is gone", "something else deletes at this origin: see its lifecycle rules")
            skew = max(began - info.modified, info.modified - time.time())
            problem = f"the origin's clock and this machine's differ by {skew:,.0f} s"
            self._require(skew <= SKEW_SECONDS, problem, "set both clocks (see: timedatectl)")

    def _remove(self, *, needed: bool) -> None:
        """Takes the probe away again; whether that works is a trial where deleting is `needed`."""
        name = "delete" if needed else "remove the probe"
        with self._trial(name, "what was written could be removed"):
            self._store.delete(self._key)
            gone = self._store.stat(self._key) is None
            self._require(gone, f"{self._key} is still there", "see whether the bucket locks its objects")
        if not needed and not self._went_well:
            failed = self.trials.pop()
            left = f"{self._key} stays, kvcdn gc removes it" if self._written else "nothing was written"
            self._skip(name, f"publishers need not be allowed to: {left} ({failed.detail})")

    @staticmethod
    def _require(fine: bool, problem: str, hint: str) -> None:  # noqa: FBT001 - an assertion
        if not fine:
            raise _TrialError(problem, hint)


def _nth(number: int) -> bytes:
    """What one of several writers writes."""
    return b"kvcdn doctor: writer %d\n" % number
