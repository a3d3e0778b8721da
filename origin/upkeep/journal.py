"""An origin's journal: making the next entry, and reading them in order (FORMAT.md section 12)."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Literal

from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError, NotFoundError, UnavailableError
from kvcdn.journal import (
    JOURNAL_PREFIX,
    MAX_ADDRESSES,
    MAX_ENTRY_BYTES,
    MAX_NUMBER,
    START,
    Deed,
    Entry,
    Head,
    Removed,
    chain_digest,
    journal_key,
)
from kvcdn.keyring import keep_journal_head, load_journal_head
from kvcdn.numbered import find_last
from kvcdn.signing import PublicKey, SigningKey
from kvcdn.store import BlobStore

_TRIES = 100
"""Of one entry, while others write theirs: each that fails is an entry of somebody else."""

_READERS = 16
"""Entries read at once: they are small, so that a distant store is all waiting."""

_READ_AHEAD = 256


class Journal:
    """Writes entries of one signer. Thread-safe; any number of writers may share a journal."""

    def __init__(self, store: BlobStore, key: SigningKey) -> None:
        self._store = store
        self._key = key
        self._lock = Lock()
        self._head: Head | None = None
        # What is in memory is gone with the process, and its name says nothing.
        self._keeps = store.url != "memory:"

    @property
    def signer(self) -> PublicKey:
        """Whose entries these are."""
        return self._key.public

    def append(self, deed: Deed, tenant: str = "") -> Entry:
        """Creates the next entry; durable on return. Raises UnavailableError."""
        with self._lock:
            head = self._head or self._first_head()
            for _ in range(_TRIES):
                if head.number >= MAX_NUMBER:
                    break
                entry = Entry(head.number + 1, head.digest, int(time.time()), deed, tenant, self._key.public)
                data = entry.seal(self._key)
                if self._store.create(journal_key(entry.number), [data]):
                    self._head = Head(entry.number, chain_digest(data))
                    self._keep(self._head)
                    return entry
                head = find_head(self._store, head)
        raise UnavailableError(f"the journal of {self._store.url} takes no entry: others are always faster", hint="try again")

    def remove(self, model: ModelTag, addresses: Sequence[Digest], action: Literal["remove", "repair"] = "remove") -> None:
        """Says of any number of documents that they are removed: an entry for every MAX_ADDRESSES of them."""
        for start in range(0, len(addresses), MAX_ADDRESSES):
            self.append(Removed(model, tuple(addresses[start : start + MAX_ADDRESSES]), action))

    def _first_head(self) -> Head:
        """Where the journal ends, found from the last entry that this user has seen, if that still is where it was."""
        try:
            kept = load_journal_head(self._store.url) if self._keeps else None
            sound = kept is None or read_head(self._store, kept.number) == kept
        except CorruptError:
            sound = False
        if not sound:
            # Somebody has cut or rewritten the journal. Who verifies it is to see that: what was kept stays as it is.
            self._keeps, kept = False, None
        return find_head(self._store, kept or START)

    def _keep(self, head: Head) -> None:
        """Keeps it for whoever verifies. A home that cannot be written is no reason not to publish."""
        with contextlib.suppress(UnavailableError, CorruptError):
            kept = load_journal_head(self._store.url) if self._keeps else head
            if kept is None or kept.number < head.number:
                keep_journal_head(self._store.url, head)


def find_head(store: BlobStore, known: Head) -> Head:
    """The last entry of the journal, not before `known`, which is there."""

    def there(number: int) -> bool | None:
        return True if store.stat(journal_key(number)) is not None else None

    number, _ = find_last(there, known.number, MAX_NUMBER)
    if number == known.number:
        return known
    head = read_head(store, number)
    if head is None:
        raise UnavailableError(f"entry {number} of the journal of {store.url} has just been there, and is no more")
    return head


def read_head(store: BlobStore, number: int) -> Head | None:
    """What the entry behind `number` chains to; None where nothing is there."""
    if number == 0:
        return START
    data = _read(store, number)
    return None if data is None else Head(number, chain_digest(data))


def list_numbers(store: BlobStore) -> list[int]:
    """The numbers under which something lies at `store`, in order, gaps or not."""
    numbers = (info.key.removeprefix(JOURNAL_PREFIX) for info in store.list(JOURNAL_PREFIX))
    return sorted(int(text) for text in numbers if _is_number(text))


def read_entries(store: BlobStore, numbers: Iterable[int]) -> Iterator[tuple[int, bytes | None]]:
    """The objects of these numbers, several read at once, in the order given; None where nothing is there."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="kvcdn-journal") as pool:
        waiting: deque[tuple[int, Future[bytes | None]]] = deque()
        try:
            for number in numbers:
                waiting.append((number, pool.submit(_read, store, number)))
                if len(waiting) >= _READ_AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _read(store: BlobStore, number: int) -> bytes | None:
    try:
        return store.read(journal_key(number), 0, MAX_ENTRY_BYTES + 1)
    except NotFoundError:
        return None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]{0,9}", text) is not None and int(text) <= MAX_NUMBER
