"""Revoking: a signer's list at an origin, made longer, shorter or anew (FORMAT.md section 11)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvcdn.digest import Digest, ModelTag, hash_bytes
from kvcdn.errors import NotFoundError, UnavailableError
from kvcdn.journal import Revoked
from kvcdn.origin.upkeep.catalog import Progress, read_manifest, silent
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.origin.upkeep.references import References
from kvcdn.revocation import (
    DEFAULT_LIFE_SECONDS,
    MAX_REVOCATIONS_BYTES,
    RevocationList,
    find_newest,
    open_revocations,
    revocation_key,
)
from kvcdn.signing import PublicKey, SigningKey
from kvcdn.store import BlobInfo, BlobStore

_TRIES = 8
"""Of one change, while others with the same key make changes at the same moment."""


@dataclass(frozen=True)
class Targets:
    """What is to be revoked, or taken back."""

    addresses: frozenset[Digest] = frozenset()
    publishers: frozenset[PublicKey] = frozenset()
    models: frozenset[ModelTag] = frozenset()


def newest_list(store: BlobStore, signer: PublicKey) -> RevocationList | None:
    """The list of `signer` that counts, expired or not. Raises CorruptError where something else lies in its place."""

    def read(version: int) -> bytes | None:
        try:
            return store.read(revocation_key(signer, version), 0, MAX_REVOCATIONS_BYTES + 1)
        except NotFoundError:
            return None

    data = find_newest(read, 0)
    return None if data is None else open_revocations(data, f"revocations by {signer.text} at {store.url}")


def change_revocations(
    store: BlobStore,
    key: SigningKey,
    targets: Targets,
    *,
    undo: bool = False,
    seconds: int = DEFAULT_LIFE_SECONDS,
    journal: Journal | None = None,
) -> tuple[RevocationList, bytes]:
    """Signs the next list, which revokes `targets` too, or, to `undo`, no more; it lasts `seconds`. The list, and its object.

    The `journal` is told afterwards: the list is signed and numbered itself. Raises UsageError for one that would be too long.
    """
    for _ in range(_TRIES):
        now = int(time.time())
        last = newest_list(store, key.public) or RevocationList(0, now, now + seconds)
        following = last.successor(now=now, seconds=seconds)
        for name in ("addresses", "publishers", "models"):
            before, named = getattr(last, name), getattr(targets, name)
            following = replace(following, **{name: before - named if undo else before | named})
        data = following.seal(key)
        if store.create(revocation_key(key.public, following.version), [data]):
            if journal:
                journal.append(Revoked(following.version, hash_bytes(data)))
            return following, data
    raise UnavailableError(f"{store.url}: others with this key revoke at the same time", hint="try again")


def document_addresses(store: BlobStore, infos: Iterable[BlobInfo], progress: Progress = silent) -> frozenset[Digest]:
    """What takes these documents back: their manifests' addresses, and of each the first block that only it has.

    The blocks behind one are revoked with it. Raises CorruptError where a manifest cannot be read.
    """
    listed = [found for info in infos if (found := read_manifest(store, info))]
    for found in listed:
        if found.problem:
            raise found.problem
    manifests = [found.manifest for found in listed if found.manifest]
    addresses = {manifest.address for manifest in manifests}
    for tag in {manifest.tag for manifest in manifests}:
        references = References(store, tag, progress)
        references.read(without=list(addresses))
        for manifest in manifests:
            own = [block.address for block in manifest.blocks if block.address not in references]
            addresses.update(own[:1] if manifest.tag == tag else ())
    return frozenset(addresses)
