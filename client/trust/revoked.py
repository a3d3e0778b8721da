"""What is revoked, as a client knows it: the lists kept on this host, and, now and then, newer ones from its source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcdn.client.sources.source import Source
from kvcdn.client.sources.stored import StoreSource
from kvcdn.errors import KvcdnError, NotFoundError
from kvcdn.keyring import keep_revocations, load_revocations
from kvcdn.revocation import MAX_REVOCATIONS_BYTES, Revocations, find_newest, open_revocations, revocation_key
from kvcdn.signing import PublicKey, TrustList

REFRESH_SECONDS = 300.0
"""How often a source is asked for newer lists: how long what was revoked may still be used."""

ASK_SECONDS = 5.0
"""How long a prompt waits for the lists of all signers; what has not come by then is asked for again the next time."""


class Revoked:
    """The revocations of everybody on a trust list. Thread-safe; `problems` tells whose could not be had, or believed."""

    def __init__(self, trust: TrustList, source: Source, clock: Callable[[], float] = time.time) -> None:
        """Asks nothing of the source yet. Edges do not carry lists: through them, what this host keeps counts."""
        self._trust = trust
        self._source = source if isinstance(source, StoreSource) else None
        self._clock = clock
        self._known = load_revocations().of(trust)
        self._asked: float | None = None
        self._asking = threading.Lock()
        self.problems: dict[PublicKey, str] = {}

    @property
    def known(self) -> Revocations:
        """What is known now, without a question to anybody."""
        return self._known

    def current(self) -> Revocations:
        """What is known, after a look at the source where the last one is some minutes ago."""
        due = self._asked is None or time.monotonic() - self._asked > REFRESH_SECONDS
        if due and self._source is not None and self._asking.acquire(blocking=False):
            try:
                self._ask(self._source.session(ASK_SECONDS))
                self._asked = time.monotonic()
            finally:
                self._asking.release()
        return self._known

    def _ask(self, source: Source) -> None:
        try:
            for signer in self._trust.names:
                try:
                    self._ask_for(source, signer)
                    self.problems.pop(signer, None)
                except KvcdnError as error:
                    # What cannot be had, or believed, takes nothing back: what is known goes on counting.
                    self.problems[signer] = str(error)
        finally:
            source.close()

    def _ask_for(self, source: Source, signer: PublicKey) -> None:
        def read(version: int) -> bytes | None:
            try:
                return source.read(revocation_key(signer, version), MAX_REVOCATIONS_BYTES)
            except NotFoundError:
                return None

        data = find_newest(read, self._known.version(signer))
        if data is None:
            return
        found = open_revocations(data, f"revocations by {signer.text} at {source.url}")
        self._known = self._known.learn(found, self._trust, self._clock())
        keep_revocations(data)
