"""Revocations at an edge: the lists of the publishers whom it trusts, asked for again and again, and what they take back here.

What is known is looked at before every answer (`Revoked`), so that what is revoked is not served from the moment on at which
its list is adopted; `Watch` finds the lists, and then ends what is under way and deletes what lies in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kvcdn.access.tasks import beside
from kvcdn.edge.disk.staging import FOLDER_MODE, sync_folder
from kvcdn.edge.fills.origins import Origin, Origins, close_pieces
from kvcdn.edge.http.outcome import Refusal
from kvcdn.edge.http.target import ObjectName
from kvcdn.edge.threads import begin_in_thread, in_thread
from kvcdn.errors import CorruptError, KvcdnError, NotFoundError, UnavailableError, UntrustedError
from kvcdn.revocation import (
    MAX_REVOCATIONS_BYTES,
    RevocationList,
    Revocations,
    find_newest,
    open_revocations,
    revocation_key,
)
from kvcdn.signing import PublicKey, TrustList

ASK_SECONDS = 10.0
"""What an origin may take to send one list: of all that it sends, the smallest and most urgent."""

KEEP_SECONDS = 10.0
"""How long the end of an edge waits for a list to be written down: a disk may hang."""

log = logging.getLogger("kvcdn.edge.fills.revocations")


class Revoked:
    """What is revoked, as this edge knows it. For the event loop's thread."""

    def __init__(self, listed: TrustList | None, known: Revocations | None = None) -> None:
        """`listed`: the edge's trust list; without one nobody is asked, and nothing is revoked."""
        self.listed = listed
        self.adopt(known or Revocations())

    def adopt(self, known: Revocations) -> None:
        """Goes by `known` from now on."""
        self.known = known
        self.trust = self.listed and self.listed.revoking(known.publishers)
        """Whose objects may be cached and served."""
        self._addresses = {str(address) for found in known.lists.values() for address in found.addresses}
        self._models = {str(tag) for found in known.lists.values() for tag in found.models}

    def relist(self, listed: TrustList | None, kept: Revocations) -> None:
        """Goes by another trust list, and by what is `kept` of those who are on it now."""
        self.listed = listed
        known = self.known.of(listed) if listed is not None else Revocations()
        newer = {signer: found for signer, found in kept.lists.items() if found.version > known.version(signer)}
        self.adopt(Revocations({**known.lists, **newer}))

    def covers(self, key: str) -> bool:
        """Whether the object under `key` is revoked by its address or model; its publisher is in its envelope only."""
        return key[-64:] in self._addresses or key[3:35] in self._models

    def refusal(self, name: ObjectName, publisher: PublicKey | None = None) -> Refusal | None:
        """Why `name`, by `publisher` where that is known, must not be served; None where it may."""
        try:
            if self.covers(name.key):
                self.known.require_model(name.tag)
                self.known.require_address(name.address)
            if publisher is not None and self.trust is not None:
                self.trust.require(publisher, str(name))
        except UntrustedError as error:
            return Refusal.of(error)
        return None

    def lead(self, keys: Sequence[str]) -> Sequence[str]:
        """What of a chain comes before its first revoked block."""
        if self._addresses or self._models:
            for number, key in enumerate(keys):
                if self.covers(key):
                    return keys[:number]
        return keys


class KeptLists:
    """The last list of each signer, in a folder, so that after a restart no older one passes for the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, trust: TrustList) -> Revocations:
        """The lists of those on `trust`. One that is damaged is logged: like all else here it is fetched again."""
        found: dict[PublicKey, RevocationList] = {}
        for signer in trust.names:
            path = self._folder / str(signer)
            try:
                with path.open("rb") as file:
                    kept = open_revocations(file.read(MAX_REVOCATIONS_BYTES + 1), str(path))
                if kept.signer != signer:
                    raise CorruptError(f"{path}: somebody else's list")
            except FileNotFoundError:
                continue
            except (CorruptError, OSError) as error:
                log.warning("a kept list of revocations cannot be used: %s", error)
                continue
            found[signer] = kept
        return Revocations(found)

    def keep(self, signer: PublicKey, data: bytes) -> None:
        """Puts a sealed list in place of its signer's older one, durably. Raises OSError."""
        self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        # One draft a signer, whatever dies when: nobody else writes here, the cache folder is locked.
        draft = self._folder / f".{signer}"
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._folder / str(signer))
        sync_folder(self._folder)


class Watch:
    """Asks the origins for lists, now and every `seconds`; not at all where that is 0 or nobody is trusted by name."""

    def __init__(
        self, revoked: Revoked, origins: Origins, kept: KeptLists, seconds: float, recall: Callable[[], Awaitable[None]]
    ) -> None:
        """`recall` is awaited after each change, to end and delete what may not be served any more."""
        self._revoked, self._origins, self._kept = revoked, origins, kept
        self._seconds, self._recall = seconds, recall
        self._troubled: set[tuple[str, PublicKey]] = set()
        self._at_once = asyncio.Event()

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Watches while the context lasts."""
        return beside(self._watch(), "revocations")

    def trust(self, listed: TrustList | None) -> None:
        """Goes by another trust list from now on, before each answer; ends and deletes what may not be served any more."""
        self._revoked.relist(listed, self._kept.load(listed) if listed is not None else Revocations())
        self._at_once.set()

    async def _watch(self) -> None:
        # A signer may have come onto the trust list, or off it, while the edge was down.
        done = self._revoked.trust if not self._revoked.known.lists else None
        while True:
            self._at_once.clear()
            listed = self._revoked.listed
            try:
                if self._revoked.trust is not done:
                    done = await self._recalled()
                if listed is not None and self._seconds:
                    for signer in listed.names:
                        for origin in self._origins.each:
                            await self._ask(origin, signer, listed)
                if self._revoked.trust is not done:
                    done = await self._recalled()
            except Exception:
                # Whatever it was: what is known is honoured before each answer, and the next round tries again.
                log.exception("the recall of what is revoked failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._at_once.wait(), self._seconds if listed is not None and self._seconds else None)

    async def _recalled(self) -> TrustList | None:
        """Recalls; by which list."""
        trust = self._revoked.trust
        await self._recall()
        return trust

    async def _ask(self, origin: Origin, signer: PublicKey, trust: TrustList) -> None:
        """Adopts a newer list of `signer` if `origin` has one. Whatever else it has takes nothing back."""
        if self._revoked.listed is not trust:
            return
        trouble = origin.url, signer
        try:
            data = await in_thread(_newest, origin, signer, self._revoked.known.version(signer))
            if data is not None and self._revoked.listed is trust:
                found = open_revocations(data, f"revocations by {signer.text} at {origin.url}")
                if found.signer != signer:
                    raise CorruptError(f"{origin.url}: the list of {signer.text} is signed by another")
                self._revoked.adopt(self._revoked.known.learn(found, trust, time.time()))
                log.warning("adopted list %d of what %s revokes", found.version, signer.text)
                await self._keep(signer, data)
        except (KvcdnError, OSError) as error:
            if trouble not in self._troubled:
                log.warning("revocations stay as they are known: %s", error)
            self._troubled.add(trouble)
        except Exception:
            if trouble not in self._troubled:
                log.exception("asking for revocations failed")
            self._troubled.add(trouble)
        else:
            self._troubled.discard(trouble)

    async def _keep(self, signer: PublicKey, data: bytes) -> None:
        """Keeps a list, also where the edge ends just now: it counts, and is to count after a restart. Raises OSError."""
        keeping = begin_in_thread(self._kept.keep, signer, data)
        try:
            await asyncio.shield(keeping)
        finally:
            await asyncio.wait((keeping,), timeout=KEEP_SECONDS)


def _newest(origin: Origin, signer: PublicKey, known: int) -> bytes | None:
    return find_newest(lambda version: read_list(origin, revocation_key(signer, version)), known)


def read_list(origin: Origin, key: str) -> bytes | None:
    """A list, whole; None where there is none. Raises CorruptError where it is too long for one, UnavailableError."""
    deadline = time.monotonic() + ASK_SECONDS
    try:
        pieces = origin.stream(key)
    except NotFoundError:
        return None
    data = bytearray()
    try:
        for piece in pieces:
            data += piece
            if len(data) > MAX_REVOCATIONS_BYTES:
                raise CorruptError(f"{origin.url}: {key} is longer than a list of revocations")
            if time.monotonic() > deadline:
                raise UnavailableError(f"{origin.url}: {key} does not come within {ASK_SECONDS:.0f} s")
    finally:
        close_pieces(pieces)
    return bytes(data)
