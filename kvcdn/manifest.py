"""The manifest: the signed table of contents of one published prefix (FORMAT.md section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcdn.certificate import Certificate, read_certificate
from kvcdn.digest import Digest, ModelTag
from kvcdn.envelope import MANIFEST_MAGIC, MAX_ENVELOPE_BYTES, open_envelope, seal_envelope
from kvcdn.errors import CorruptError
from kvcdn.fields import Fields
from kvcdn.keys import MAX_PREFIX_TOKENS, PRECISIONS, model_tag
from kvcdn.layout import MAX_BLOCK_TOKENS, Layout
from kvcdn.producer import MAX_TEXT, Producer
from kvcdn.segment import MAX_BLOCK_BYTES
from kvcdn.signing import PublicKey, SigningKey

MAX_MANIFEST_BYTES = MAX_ENVELOPE_BYTES

MAX_BLOCKS = 4096
"""Blocks of one prefix that a manifest's header can hold."""

MAX_TIME = 1 << 40
"""Latest Unix time accepted; far beyond any certificate's life, small enough for any clock type."""


@dataclass(frozen=True)
class BlockEntry:
    """One block as a manifest lists it."""

    address: Digest
    tokens: int
    size: int
    etag: Digest


SPARE_SHARE = 0.9
"""Of the time that a document is to last: one that lasts so long is not made anew for the rest."""


@dataclass(frozen=True)
class Manifest:
    """A manifest's contents. `publisher` is set by reading; a writer signs with its own key. Lossy ones have a certificate."""

    address: Digest
    fingerprint: Digest
    model_name: str
    layout: Layout
    precision: str
    tokens: int
    blocks: tuple[BlockEntry, ...]
    created: int
    expires: int | None
    label: str
    producer: Producer
    publisher: PublicKey | None = None
    certificate: Certificate | None = None

    @property
    def tag(self) -> ModelTag:
        return model_tag(self.fingerprint)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blocks as stored."""
        return sum(block.size for block in self.blocks)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the KV in memory."""
        return self.layout.raw_bytes(self.tokens)

    def lasts(self, until: int | None, now: float) -> bool:
        """Whether the document lasts, seen from `now`, about as long as one that expires at `until` (Unix time; None: never).

        A tenth less does: a publication that is taken up again, or somebody else's, has the same wish a little later.
        """
        if self.expires is None or until is None:
            return self.expires is None
        return self.expires - now >= SPARE_SHARE * (until - now)

    def seal(self, key: SigningKey) -> bytes:
        """The signed object. Raises ValueError where it would exceed the header limit."""
        header: dict[str, Any] = {
            "type": "manifest",
            "v": 1,
            "address": str(self.address),
            "model": str(self.tag),
            "fingerprint": str(self.fingerprint),
            "model_name": self.model_name,
            "layout": self.layout.to_json(),
            "precision": self.precision,
            "block_tokens": self.layout.block_tokens,
            "tokens": self.tokens,
            "blocks": [
                {"address": str(b.address), "etag": str(b.etag), "size": b.size, "tokens": b.tokens} for b in self.blocks
            ],
            "created": self.created,
            "expires": self.expires,
            "label": self.label,
            "producer": self.producer.to_json(),
            **({} if self.certificate is None else {"certificate": self.certificate.to_json()}),
        }
        return seal_envelope(MANIFEST_MAGIC, header, key)


def open_manifest(data: bytes, what: str) -> Manifest:
    """Parses and verifies a whole manifest object. Raises CorruptError."""
    envelope = open_envelope(data, MANIFEST_MAGIC, what)
    if len(data) != envelope.size:
        raise CorruptError(f"{what}: {len(data) - envelope.size} trailing bytes")
    fields = Fields(envelope.header, f"{what}: header")
    fields.choice("type", ("manifest",))
    fields.integer("v", 1, 1)
    tag = fields.fixed("model", ModelTag)
    block_tokens = fields.integer("block_tokens", 1, MAX_BLOCK_TOKENS)
    precision = fields.choice("precision", PRECISIONS)
    manifest = Manifest(
        address=fields.fixed("address", Digest),
        fingerprint=fields.fixed("fingerprint", Digest),
        model_name=fields.string("model_name", MAX_TEXT),
        layout=Layout.from_json(fields.any("layout"), f"{what}: layout"),
        precision=precision,
        tokens=fields.integer("tokens", 1, MAX_PREFIX_TOKENS),
        blocks=_read_blocks(fields.array("blocks", 1, MAX_BLOCKS), what),
        created=fields.integer("created", 0, MAX_TIME),
        expires=fields.optional_integer("expires", 0, MAX_TIME),
        label=fields.string("label", MAX_TEXT),
        producer=Producer.from_json(fields.any("producer"), what),
        publisher=envelope.publisher,
        certificate=read_certificate(fields, precision, what),
    )
    fields.done()
    if tag != manifest.tag or {block_tokens, manifest.producer.chunk_tokens} != {manifest.layout.block_tokens}:
        raise CorruptError(f"{what}: model tag or block length does not follow from fingerprint and layout")
    _check_counts(manifest, what)
    return manifest


def _read_blocks(values: Sequence[Any], what: str) -> tuple[BlockEntry, ...]:
    blocks = []
    for index, value in enumerate(values):
        fields = Fields(value, f"{what}: block {index}")
        address, etag = fields.fixed("address", Digest), fields.fixed("etag", Digest)
        tokens, size = fields.integer("tokens", 1, MAX_BLOCK_TOKENS), fields.integer("size", 1, MAX_BLOCK_BYTES)
        fields.done()
        blocks.append(BlockEntry(address, tokens, size, etag))
    return tuple(blocks)


def _check_counts(manifest: Manifest, what: str) -> None:
    length = manifest.layout.block_tokens
    whole, rest = divmod(manifest.tokens, length)
    expected = [length] * whole + ([rest] if rest else [])
    if [block.tokens for block in manifest.blocks] != expected:
        raise CorruptError(f"{what}: its blocks do not add up to {manifest.tokens} tokens in blocks of {length}")
    if not rest and manifest.layout.usable_blocks(whole) < whole:
        raise CorruptError(f"{what}: its layout keeps states, and its {manifest.tokens} tokens end at no checkpoint")
