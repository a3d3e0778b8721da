"""The standing of a published document: are its blocks there, has it expired, who has revoked it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvcdn.digest import Digest
from kvcdn.errors import CorruptError
from kvcdn.keys import block_key
from kvcdn.manifest import Manifest
from kvcdn.origin.upkeep.catalog import Progress, silent
from kvcdn.origin.upkeep.revocation import newest_list
from kvcdn.revocation import RevocationList, Revocations
from kvcdn.signing import PublicKey, TrustList
from kvcdn.store import BlobStore

_ASKED_AT_ONCE = 16
"""Questions without a body: a distant store is all waiting."""


@dataclass(frozen=True)
class Revoking:
    """One signer's list that names the document, one of its blocks, its publisher or its model.

    Readers go by it if they trust the signer; `trusted` says whether the trust list given does.
    """

    what: str
    signer: PublicKey
    version: int
    trusted: bool

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "signer": self.signer.text, "list": self.version, "trusted": self.trusted}


@dataclass(frozen=True)
class Standing:
    """What a manifest does not say itself.

    `missing` blocks are not there; `resized` ones have another size than the manifest says. Their bytes are not read: `fsck`
    does that. `unreadable` names signers whose lists cannot be read.
    """

    blocks_there: int
    missing: tuple[Digest, ...]
    resized: tuple[Digest, ...]
    expired: bool
    revoked: tuple[Revoking, ...]
    unreadable: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return not self.missing and not self.resized

    def to_json(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "blocks_there": self.blocks_there,
            "blocks_missing": [str(address) for address in self.missing],
            "blocks_resized": [str(address) for address in self.resized],
            "expired": self.expired,
            "revoked": [revoking.to_json() for revoking in self.revoked],
            "revocations_unreadable": list(self.unreadable),
        }


def look_up_standing(
    store: BlobStore,
    manifest: Manifest,
    trust: TrustList,
    *,
    now: float,
    known: Revocations | None = None,
    progress: Progress = silent,
) -> Standing:
    """Asks `store` for every block of `manifest`, and for the lists of those on `trust` and of its own publisher.

    `known` lists, seen earlier, count where they are newer than the store's. Raises UnavailableError.
    """
    missing, resized = [], []
    with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="kvcdn-standing") as pool:
        keys = [block_key(manifest.tag, block.address) for block in manifest.blocks]
        for count, (block, info) in enumerate(zip(manifest.blocks, pool.map(store.stat, keys), strict=True), 1):
            progress("blocks looked for", count)
            if info is None:
                missing.append(block.address)
            elif info.size != block.size:
                resized.append(block.address)
    signers = {*trust.names, *([manifest.publisher] if manifest.publisher else [])}
    lists, unreadable = _newest_lists(store, sorted(signers), known or Revocations())
    return Standing(
        blocks_there=len(manifest.blocks) - len(missing) - len(resized),
        missing=tuple(missing),
        resized=tuple(resized),
        expired=manifest.expires is not None and manifest.expires <= now,
        revoked=tuple(revoking for found in lists for revoking in _revoking(found, manifest, trust)),
        unreadable=tuple(unreadable),
    )


def _newest_lists(
    store: BlobStore, signers: Iterable[PublicKey], known: Revocations
) -> tuple[list[tuple[PublicKey, RevocationList]], list[str]]:
    found, unreadable = [], []
    for signer in signers:
        seen = known.lists.get(signer)
        try:
            there = newest_list(store, signer)
            if there is not None and there.signer != signer:
                raise CorruptError(f"{store.url}: somebody else's list lies among those of {signer.text}")
        except CorruptError:
            unreadable.append(signer.text)
            there = None
        newest = max((each for each in (seen, there) if each), key=lambda each: each.version, default=None)
        if newest is not None:
            found.append((signer, newest))
    return found, unreadable


def _revoking(listed: tuple[PublicKey, RevocationList], manifest: Manifest, trust: TrustList) -> list[Revoking]:
    signer, found = listed
    named = {
        "document": manifest.address in found.addresses,
        "block": any(block.address in found.addresses for block in manifest.blocks),
        "publisher": manifest.publisher in found.publishers,
        "model": manifest.tag in found.models,
    }
    return [Revoking(what, signer, found.version, signer in trust.names) for what, holds in named.items() if holds]
