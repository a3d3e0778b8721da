"""The recorder: from whoever counts to a ledger, behind the back of the work that is counted.

`add` only adds numbers in memory; a thread writes them down a moment later, in one transaction. So a process that is killed
loses what it has counted since, at most `flush_s` and the time of one transaction, and nothing that was written before. The
thread begins with the first entry: who counts nothing has none.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from kvcdn.accounting.entry import Counts, Entry, Key, Part
from kvcdn.accounting.ledger import Ledger
from kvcdn.accounting.snapshot import RunId
from kvcdn.errors import KvcdnError

FLUSH_SECONDS = 0.5
"""How long numbers wait in memory, together with others: what a kill takes."""

WAITING_KEYS = 10_000
"""Sums that may wait. With more, prompts are not told apart any more, then documents, then all is added up as one tenant's."""

COMPLAIN_SECONDS = 60.0
"""Between two complaints about a disk that refuses."""

log = logging.getLogger("kvcdn.accounting")


class Recorder:
    """Counts for the ledger at `path`, as `part`. Thread-safe; nothing it does fails for the one who counts."""

    def __init__(self, path: Path, part: Part, *, flush_s: float = FLUSH_SECONDS) -> None:
        """Opens the ledger, so that a wrong path is told at once. Raises as `Ledger`."""
        self._ledger = Ledger(path)
        self.path = self._ledger.path
        self._part, self._flush_s = part, flush_s
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._fresh()

    def _fresh(self) -> None:
        self._pid = os.getpid()
        self._run = RunId(secrets.token_bytes(RunId.SIZE))
        self._begun = self._closed = False
        self._waiting: dict[Key, Counts] = {}
        self._dropped = 0
        self._folded_to = -1
        """Up to this hour, waiting keys may have lost their prompts."""
        self._complained = 0.0
        self._news = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, key: Key, counts: Mapping[str, int]) -> None:
        """Adds `counts` to what is to be written under `key`."""
        if self._pid != os.getpid():
            self._after_fork()
        with self._lock:
            if self._closed:
                self._dropped += 1
                return
            self._add(key, counts)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvcdn-usage", daemon=True)
                self._thread.start()
                atexit.register(self.close)
        self._news.set()

    def _add(self, key: Key, counts: Mapping[str, int]) -> None:
        waiting = self._waiting
        if len(waiting) >= WAITING_KEYS and key not in waiting:
            if key.prompt:
                self._folded_to = max(self._folded_to, key.hour)
            key = key._replace(prompt="")
            if len(waiting) >= 2 * WAITING_KEYS and key not in waiting:
                key = key._replace(document="", model="")
            if len(waiting) >= 3 * WAITING_KEYS and key not in waiting:
                self._dropped += 1
                return
        found = waiting.get(key)
        if found is None:
            waiting[key] = dict(counts)
            return
        for name, count in counts.items():
            found[name] = found.get(name, 0) + count

    def _after_fork(self) -> None:
        """A child of the process that opened it: another run, with a connection and a thread of its own."""
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._ledger = Ledger(self.path)
        self._fresh()

    def flush(self) -> None:
        """Returns when everything that was added before is written down, or cannot be."""
        with self._writing:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
                dropped, self._dropped = self._dropped, 0
                folded_to = self._folded_to
            if not waiting and not dropped:
                return
            try:
                if not self._begun:
                    self._ledger.begin_run(self._run, self._part)
                    self._begun = True
                entries = [Entry(key, counts) for key, counts in waiting.items()]
                self._ledger.write(self._run, entries, dropped, folded_to)
            except KvcdnError as error:
                with self._lock:
                    self._dropped += dropped
                    for key, counts in waiting.items():
                        self._add(key, counts)
                self._complain(error)

    def _complain(self, error: KvcdnError) -> None:
        if time.monotonic() - self._complained > COMPLAIN_SECONDS or not self._complained:
            self._complained = time.monotonic()
            log.warning("usage is not written down, which is tried again: %s", error)

    def _work(self) -> None:
        while not self._closed:
            self._news.wait()
            # Who comes meanwhile shares the transaction.
            time.sleep(self._flush_s)
            self._news.clear()
            self.flush()

    def close(self) -> None:
        """Writes down what is left, and that nothing is missing. May be called twice."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._news.set()
        atexit.unregister(self.close)
        self.flush()
        if self._begun and not self._waiting and not self._dropped:
            try:
                self._ledger.end_run(self._run)
            except KvcdnError as error:
                self._complain(error)
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
