"""Rotating: an old key names a new one at an origin, and readers follow such statements (FORMAT.md section 13)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvcdn.digest import hash_bytes
from kvcdn.errors import CorruptError, NotFoundError, RevokedError, UsageError
from kvcdn.journal import Rotated
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.origin.upkeep.revocation import Targets, change_revocations, newest_list
from kvcdn.revocation import RevocationList, Revocations
from kvcdn.signing import PublicKey, SigningKey, TrustList
from kvcdn.store import BlobStore
from kvcdn.succession import (
    MAX_STEPS,
    MAX_SUCCESSION_BYTES,
    Succession,
    open_succession,
    seal_succession,
    succession_key,
)


@dataclass(frozen=True)
class Announced:
    """What was done at one origin; `existed` where the statement was there already."""

    existed: bool
    revocations: RevocationList | None
    revocations_object: bytes | None


def announce_successor(store: BlobStore, old: SigningKey, new: SigningKey) -> Announced:
    """Says at `store` that `new` comes after `old`, and has `new` revoke what `old` does. May be repeated.

    Raises UsageError where `old` has another successor there, CorruptError where something else lies in its place.
    """
    data = seal_succession(old, new, now=int(time.time()))
    created = store.create(succession_key(old.public), [data])
    if not created:
        found = find_successor(store, old.public)
        if found is None or found.successor != new.public:
            other = found.successor.text if found else "something else"
            raise UsageError(
                f"the successor of {old.public.text} at {store.url} is {other}, and a key has one",
                hint="if that was not you, somebody else has the key: have the new one revoke it (kvcdn revoke --publisher)",
            )
    revocations, made = None, None
    revoked = newest_list(store, old.public)
    if revoked is not None:
        own = newest_list(store, new.public)
        targets = Targets(revoked.addresses, revoked.publishers - {new.public}, revoked.models)
        if own is None or not (
            targets.addresses <= own.addresses and targets.publishers <= own.publishers and targets.models <= own.models
        ):
            revocations, made = change_revocations(store, new, targets, journal=Journal(store, new))
    if created:
        Journal(store, old).append(Rotated(hash_bytes(data), new.public))
    return Announced(not created, revocations, made)


def find_successor(store: BlobStore, old: PublicKey) -> Succession | None:
    """The statement of `old` at `store`, if there is one. Raises CorruptError where something else lies in its place."""
    try:
        data = store.read(succession_key(old), 0, MAX_SUCCESSION_BYTES + 1)
    except NotFoundError:
        return None
    return open_succession(data, old, f"the succession of {old.text} at {store.url}")


def follow_successors(store: BlobStore, key: PublicKey, trust: TrustList, known: Revocations) -> list[Succession]:
    """The successors of `key`, one after another, as far as they go: none of them refused or revoked, nor is `key`.

    Goes by the lists of everybody on `trust` that are `known` or at `store`. Raises UntrustedError where `key` is not
    trusted or any of them is refused, CorruptError for a statement that is none.
    """
    trust.revoking(revoked_publishers(store, trust, known)).require(key, "this key")
    steps: list[Succession] = []
    while len(steps) < MAX_STEPS:
        found = find_successor(store, steps[-1].successor if steps else key)
        if found is None:
            break
        steps.append(found)
        if found.successor in {key, *(step.old for step in steps)}:
            raise CorruptError(f"the successors of {key.text} at {store.url} go in a circle")
        # The new key speaks for itself from here on: as if it were on the list, what it revokes counts.
        trust = TrustList({**trust.names, found.successor: ""}, trust.refused)
        revoked = revoked_publishers(store, trust, known)
        if found.successor in revoked or key in revoked:
            which = found.successor if found.successor in revoked else key
            raise RevokedError(f"{which.text} was {revoked[which]}", hint="its successors are not to be followed")
        trust.require(found.successor, "the successor")
    return steps


def revoked_publishers(store: BlobStore, trust: TrustList, known: Revocations) -> dict[PublicKey, str]:
    """Whose keys somebody on `trust` revokes."""
    revoked = dict(known.of(trust).publishers)
    for signer in trust.names:
        listed = newest_list(store, signer)
        if listed is not None and listed.signer == signer:
            revoked |= dict.fromkeys(listed.publishers, f"revoked by {signer.text}")
    return revoked
