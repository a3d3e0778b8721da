"""Handing on: lists of revocations for edges, and others, that have this edge as their origin.

An edge cannot make up or change a list, as each is signed; it can only pass on what its own origins have, asked for anew, so
that what is revoked is known two tiers down one look later. Whether a list is believed is for who asked.
"""

from __future__ import annotations

import asyncio
import re

from kvcdn.edge.fills.origins import Origins
from kvcdn.edge.fills.revocations import Revoked, read_list
from kvcdn.edge.memory import FadingMemory
from kvcdn.edge.threads import in_thread
from kvcdn.errors import KvcdnError, UnavailableError
from kvcdn.revocation import open_revocations
from kvcdn.signing import PublicKey

LISTS_AT_ONCE = 2
"""Lists read from an origin at the same time, each up to a megabyte."""

ABSENT_SECONDS = 2.0
"""What is signed now is found two seconds later."""

ABSENT_REMEMBERED = 1024

LISTS_REMEMBERED = 4
"""The last ones: every edge behind this one asks for the same."""

LIST_SECONDS = 600.0

_KEY = re.compile(r"v1/revocations/([0-9a-f]{64})/([1-9][0-9]{0,9})")


class Handing:
    """Finds lists. For the event loop's thread."""

    def __init__(self, origins: Origins, revoked: Revoked) -> None:
        self._origins, self._revoked = origins, revoked
        self._absent: FadingMemory[bool] = FadingMemory(ABSENT_REMEMBERED)
        self._lists: FadingMemory[bytes] = FadingMemory(LISTS_REMEMBERED)
        self._places = asyncio.Semaphore(LISTS_AT_ONCE)

    @staticmethod
    def names(key: str) -> bool:
        """Whether `key` is a list's."""
        return _KEY.fullmatch(key) is not None

    async def get(self, key: str) -> bytes | None:
        """The list under `key`; None where there is none, or its signer is nobody to this edge. Raises UnavailableError."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        signer, version = PublicKey(bytes.fromhex(match[1])), int(match[2])
        if self._revoked.listed is not None and signer not in self._revoked.listed.names:
            return None
        async with self._places:
            found = self._lists.get(key)
            if found is not None or self._absent.get(key):
                return found
            found = await in_thread(_find, self._origins, key, signer, version)
            if found is None:
                self._absent.put(key, value=True, seconds=ABSENT_SECONDS)
            else:
                self._lists.put(key, found, LIST_SECONDS)
            return found


def _find(origins: Origins, key: str, signer: PublicKey, version: int) -> bytes | None:
    """A list that is what its name says, from the first origin that has it; None where none does. Raises UnavailableError."""
    failure: KvcdnError | None = None
    for origin in origins.each:
        try:
            data = read_list(origin, key)
            if data is None:
                continue
            found = open_revocations(data, f"{origin.url}: {key}")
            if (found.signer, found.version) == (signer, version):
                return data
        except KvcdnError as error:
            failure = error
    if failure is not None:
        raise UnavailableError(str(failure))
    return None
