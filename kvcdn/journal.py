"""The journal: one signed chain of entries at an origin that say who did what, and when (FORMAT.md section 12).

An entry names the digest of the one before it, so that none can be changed, removed or put in without a trace by anybody who
lacks the keys of all signers behind it. Where the chain ends it proves nothing: who looks keeps a `Head`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

from kvcdn.digest import Digest, ModelTag, hash_bytes
from kvcdn.envelope import JOURNAL_MAGIC, open_envelope, seal_envelope
from kvcdn.errors import CorruptError, UsageError
from kvcdn.fields import Fields
from kvcdn.manifest import MAX_TIME
from kvcdn.signing import PublicKey, SigningKey

MAX_ENTRY_BYTES = 1 << 16
"""An entry of MAX_ADDRESSES has 34 kB."""

MAX_NUMBER = 1 << 31
"""One entry a second for 68 years."""

MAX_ADDRESSES = 500
"""Documents in one entry; more take several."""

MAX_TENANT = 64

JOURNAL_PREFIX = "v1/journal/"

NOTHING = Digest(bytes(Digest.SIZE))
"""What entry 1 has before it."""


def journal_key(number: int) -> str:
    """The object key of entry `number`."""
    return f"{JOURNAL_PREFIX}{number}"


def chain_digest(data: bytes) -> Digest:
    """What the entry behind the object `data` calls `previous`."""
    return hash_bytes(data[:MAX_ENTRY_BYTES])


@dataclass(frozen=True)
class Head:
    """An entry that was seen: its number, and what the next one calls it."""

    number: int
    digest: Digest


START = Head(0, NOTHING)
"""Before the first entry."""


@dataclass(frozen=True)
class Published:
    """A manifest is created: published, or copied from another origin."""

    model: ModelTag
    address: Digest
    etag: Digest
    expires: int | None
    action: Literal["publish", "copy"] = "publish"

    def to_json(self) -> dict[str, Any]:
        return {
            "address": str(self.address),
            "etag": str(self.etag),
            "expires": self.expires,
            "model": str(self.model),
        }


@dataclass(frozen=True)
class Removed:
    """Manifests are deleted: on demand, or because they are damaged."""

    model: ModelTag
    addresses: tuple[Digest, ...]
    action: Literal["remove", "repair"] = "remove"

    def __post_init__(self) -> None:
        """Raises UsageError for none, or for more than an entry holds."""
        if not 1 <= len(self.addresses) <= MAX_ADDRESSES:
            raise UsageError(f"an entry names 1 to {MAX_ADDRESSES} documents, not {len(self.addresses)}")

    def to_json(self) -> dict[str, Any]:
        return {"addresses": sorted({str(address) for address in self.addresses}), "model": str(self.model)}


@dataclass(frozen=True)
class Retired:
    """All documents of a model are deleted."""

    model: ModelTag
    action: ClassVar[str] = "retire"

    def to_json(self) -> dict[str, Any]:
        return {"model": str(self.model)}


@dataclass(frozen=True)
class Revoked:
    """The signer's list of revocations number `version` was created."""

    version: int
    etag: Digest
    action: ClassVar[str] = "revoke"

    def to_json(self) -> dict[str, Any]:
        return {"etag": str(self.etag), "version": self.version}


@dataclass(frozen=True)
class Rotated:
    """The signer's statement of succession was created, in favour of `successor`."""

    etag: Digest
    successor: PublicKey
    action: ClassVar[str] = "rotate"

    def to_json(self) -> dict[str, Any]:
        return {"etag": str(self.etag), "successor": str(self.successor)}


Deed = Published | Removed | Retired | Revoked | Rotated

ACTIONS = ("publish", "copy", "remove", "repair", "retire", "revoke", "rotate")


@dataclass(frozen=True)
class Entry:
    """One entry. `signer` is set by reading; a writer signs with its own key. `time` is in Unix seconds."""

    number: int
    previous: Digest
    time: int
    deed: Deed
    tenant: str = ""
    signer: PublicKey | None = None

    def seal(self, key: SigningKey) -> bytes:
        """The signed object."""
        header = {
            "type": "journal",
            "v": 1,
            "number": self.number,
            "previous": str(self.previous),
            "time": self.time,
            "tenant": self.tenant,
            "action": self.deed.action,
            "deed": self.deed.to_json(),
        }
        return seal_envelope(JOURNAL_MAGIC, header, key)

    def to_json(self) -> dict[str, Any]:
        """What is shown of it."""
        return {
            "number": self.number,
            "time": self.time,
            "action": self.deed.action,
            **self.deed.to_json(),
            "tenant": self.tenant,
            "signer": self.signer.text if self.signer else None,
        }


def open_entry(data: bytes, number: int, what: str) -> Entry:
    """Parses entry `number` and checks its signature; chain and trust are the reader's to check. Raises CorruptError."""
    if len(data) > MAX_ENTRY_BYTES:
        raise CorruptError(f"{what}: longer than an entry of a journal")
    envelope = open_envelope(data, JOURNAL_MAGIC, what)
    if len(data) != envelope.size:
        raise CorruptError(f"{what}: {len(data) - envelope.size} trailing bytes")
    fields = Fields(envelope.header, f"{what}: header")
    fields.choice("type", ("journal",))
    fields.integer("v", 1, 1)
    found = Entry(
        number=fields.integer("number", 1, MAX_NUMBER),
        previous=fields.fixed("previous", Digest),
        time=fields.integer("time", 0, MAX_TIME),
        tenant=fields.string("tenant", MAX_TENANT),
        deed=_read_deed(fields.choice("action", ACTIONS), Fields(fields.any("deed"), f"{what}: deed"), what),
        signer=envelope.publisher,
    )
    fields.done()
    if found.number != number:
        raise CorruptError(f"{what}: this is entry {found.number}")
    return found


def _read_deed(action: str, fields: Fields, what: str) -> Deed:
    deed: Deed
    match action:
        case "publish" | "copy":
            deed = Published(
                model=fields.fixed("model", ModelTag),
                address=fields.fixed("address", Digest),
                etag=fields.fixed("etag", Digest),
                expires=fields.optional_integer("expires", 0, MAX_TIME),
                action="publish" if action == "publish" else "copy",
            )
        case "remove" | "repair":
            listed = fields.array("addresses", 1, MAX_ADDRESSES)
            addresses = tuple(Digest.parse(value, f"{what}: removed document") for value in listed)
            if any(first >= second for first, second in pairwise(addresses)):
                raise CorruptError(f"{what}: what is removed is not in order, or is there twice")
            deed = Removed(fields.fixed("model", ModelTag), addresses, "remove" if action == "remove" else "repair")
        case "retire":
            deed = Retired(fields.fixed("model", ModelTag))
        case "revoke":
            deed = Revoked(fields.integer("version", 1, MAX_NUMBER), fields.fixed("etag", Digest))
        case _:
            deed = Rotated(fields.fixed("etag", Digest), fields.fixed("successor", PublicKey))
    fields.done()
    return deed
