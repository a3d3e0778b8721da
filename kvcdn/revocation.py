"""Revocations: signed, versioned, expiring lists of what must not be used any more (FORMAT.md section 11).

Every signer has lists of its own, numbered from 1 without gaps; the last of them counts. A reader goes by the lists of all
signers that it trusts together, so that nobody can take back what somebody else has revoked. What a false list can do is make
readers prefill: no list makes anything believed.

`RevocationList` is one list, `Revocations` what a reader knows. Both are values: fetching and keeping are the reader's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

from kvcdn.digest import Digest, FixedBytes, ModelTag
from kvcdn.envelope import MAX_ENVELOPE_BYTES, REVOCATIONS_MAGIC, open_envelope, seal_envelope
from kvcdn.errors import CorruptError, RevokedError, UntrustedError, UsageError
from kvcdn.fields import F, Fields
from kvcdn.manifest import MAX_TIME
from kvcdn.numbered import find_last
from kvcdn.signing import PublicKey, SigningKey, TrustList

MAX_REVOCATIONS_BYTES = MAX_ENVELOPE_BYTES

MAX_VERSION = 1 << 31
"""One list a second for 68 years."""

MAX_ADDRESSES = 10_000
MAX_PUBLISHERS = 1_000
MAX_MODELS = 1_000
"""Together 770 kB of a header's 1 MiB."""

MAX_LIFE_SECONDS = 400 * 24 * 3600
"""A list lasts at most so long and then has to be signed anew: until then an old one can be passed off as the last."""

DEFAULT_LIFE_SECONDS = 90 * 24 * 3600

CLOCK_SECONDS = 300
"""By how much the clocks of signer and reader may differ."""


def revocation_key(signer: PublicKey, version: int) -> str:
    """The object key of `signer`'s list number `version`."""
    return f"v1/revocations/{signer}/{version}"


def find_newest(read: Callable[[int], bytes | None], known: int) -> bytes | None:
    """The list with the greatest number above `known`, or None; `read` gives the list of a number, if it is there."""
    return find_last(read, known, MAX_VERSION)[1]


@dataclass(frozen=True)
class RevocationList:
    """One signer's list. `signer` is set by reading; a writer signs with its own key. Times are Unix seconds."""

    version: int
    created: int
    expires: int
    addresses: frozenset[Digest] = frozenset()
    publishers: frozenset[PublicKey] = frozenset()
    models: frozenset[ModelTag] = frozenset()
    signer: PublicKey | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for a list that no reader would take."""
        for name, most in (("addresses", MAX_ADDRESSES), ("publishers", MAX_PUBLISHERS), ("models", MAX_MODELS)):
            if len(getattr(self, name)) > most:
                raise UsageError(
                    f"a list revokes at most {most:,} {name}", hint="retire the model, or revoke the publisher's key"
                )
        if not self.created < self.expires <= self.created + MAX_LIFE_SECONDS:
            raise UsageError(f"a list of revocations lasts more than no time and at most {MAX_LIFE_SECONDS // 86400} days")

    def successor(self, *, now: int, seconds: int = DEFAULT_LIFE_SECONDS) -> Self:
        """The next list, of the same content, that lasts for `seconds` from `now`."""
        created = max(now, self.created)
        return replace(self, version=self.version + 1, created=created, expires=created + seconds, signer=None)

    def seal(self, key: SigningKey) -> bytes:
        """The signed object."""
        header: dict[str, Any] = {
            "type": "revocations",
            "v": 1,
            "version": self.version,
            "created": self.created,
            "expires": self.expires,
            "addresses": _texts(self.addresses),
            "publishers": _texts(self.publishers),
            "models": _texts(self.models),
        }
        return seal_envelope(REVOCATIONS_MAGIC, header, key)


def open_revocations(data: bytes, what: str) -> RevocationList:
    """Parses a list and checks its signature; whether its signer is trusted is for `Revocations.learn`. Raises CorruptError."""
    envelope = open_envelope(data, REVOCATIONS_MAGIC, what)
    if len(data) != envelope.size:
        raise CorruptError(f"{what}: {len(data) - envelope.size} trailing bytes")
    fields = Fields(envelope.header, f"{what}: header")
    fields.choice("type", ("revocations",))
    fields.integer("v", 1, 1)
    try:
        found = RevocationList(
            version=fields.integer("version", 1, MAX_VERSION),
            created=fields.integer("created", 0, MAX_TIME),
            expires=fields.integer("expires", 0, MAX_TIME),
            addresses=_read_set(fields.array("addresses", 0, MAX_ADDRESSES), Digest, what),
            publishers=_read_set(fields.array("publishers", 0, MAX_PUBLISHERS), PublicKey, what),
            models=_read_set(fields.array("models", 0, MAX_MODELS), ModelTag, what),
            signer=envelope.publisher,
        )
    except UsageError as error:
        raise CorruptError(f"{what}: {error}") from None
    fields.done()
    return found


def _texts(values: Iterable[FixedBytes]) -> list[str]:
    return sorted(str(value) for value in values)


def _read_set(values: list[Any], kind: type[F], what: str) -> frozenset[F]:
    """Values in their one order. Raises CorruptError for another order or one that is there twice."""
    found = [kind.parse(value, f"{what}: revoked {kind.__name__}") for value in values]
    if any(first >= second for first, second in pairwise(found)):
        raise CorruptError(f"{what}: what is revoked is not in order, or is there twice")
    return frozenset(found)


@dataclass(frozen=True)
class Revocations:
    """What a reader knows: the last list of each signer. Kept lists go on counting when they have expired."""

    lists: Mapping[PublicKey, RevocationList] = field(default_factory=dict)

    def version(self, signer: PublicKey) -> int:
        """The number of the last list known of `signer`; 0 without one."""
        return self.lists[signer].version if signer in self.lists else 0

    def learn(self, found: RevocationList, trust: TrustList, now: float) -> Revocations:
        """With `found`, which somebody has sent. Raises UntrustedError for a stranger's list, or one that is old or expired.

        Who is revoked by others still speaks: two who revoke each other are both out.
        """
        signer = found.signer
        if signer is None or signer not in trust.names:
            raise UntrustedError("a list of revocations by nobody on the trust list")
        what = f"list {found.version} of what {signer.text} revokes"
        known = self.version(signer)
        if found.version < known:
            raise UntrustedError(f"{what} is old: number {known} has been here")
        if found.version == known and found != self.lists[signer]:
            raise UntrustedError(f"{what} is not the list that has been here under this number")
        if not found.created - CLOCK_SECONDS <= now < found.expires:
            raise UntrustedError(
                f"{what} has expired, or is of a time to come", hint="its signer makes a new one with: kvcdn revoke --renew"
            )
        return Revocations({**self.lists, signer: found})

    def of(self, trust: TrustList) -> Revocations:
        """Those lists whose signers are on `trust`."""
        return Revocations({signer: found for signer, found in self.lists.items() if signer in trust.names})

    @property
    def publishers(self) -> dict[PublicKey, str]:
        """The keys that are revoked, each with who did it."""
        return {key: f"revoked by {signer.text}" for signer, found in self.lists.items() for key in found.publishers}

    def require_model(self, tag: ModelTag) -> None:
        """Raises RevokedError where everything of a model is revoked."""
        for signer, found in self.lists.items():
            if tag in found.models:
                raise RevokedError(f"everything published of model {tag} was revoked by {signer.text}")

    def require_address(self, address: Digest) -> None:
        """Raises RevokedError for a revoked block or manifest."""
        for signer, found in self.lists.items():
            if address in found.addresses:
                raise RevokedError(f"{address} was revoked by {signer.text}")

    def lead(self, addresses: Iterable[Digest]) -> int:
        """How many blocks of a chain come before the first that is revoked: those behind one are revoked with it."""
        count = 0
        for address in addresses:
            if any(address in found.addresses for found in self.lists.values()):
                break
            count += 1
        return count
