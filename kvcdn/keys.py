"""Names and keys of a prefix: seed, chain, addresses, content keys (FORMAT.md 2.5) and object keys (2.6).

The chain hashes are secrets: whoever can compute one has the text. From each follow, by domain separation, an address that
everyone may see and a content key that opens the block.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcdn.digest import Digest, ModelTag, Secret, derive
from kvcdn.errors import UsageError
from kvcdn.layout import Layout

PRECISION_NATIVE = "native"
"""The KV exactly as the model computed it, in the layout's dtypes."""

PRECISIONS = (PRECISION_NATIVE,)

MAX_PREFIX_TOKENS = 1 << 24
"""Longest prefix a manifest may describe: far above any model's positions."""

NAMESPACE_SECRET_MIN_BYTES = 32
"""Shorter secrets could be guessed together with the text."""

PUBLIC_NAMESPACE = bytes(32)


@dataclass(frozen=True)
class Namespace:
    """Who can find a document: everyone with the text, or only those who also hold a secret."""

    key: bytes
    name: str = "public"

    @classmethod
    def public(cls) -> Namespace:
        return cls(PUBLIC_NAMESPACE)

    @classmethod
    def private(cls, name: str, secret: bytes) -> Namespace:
        """Raises UsageError for a secret under 32 bytes."""
        if len(secret) < NAMESPACE_SECRET_MIN_BYTES:
            raise UsageError(
                f"the secret of namespace {name!r} has {len(secret)} bytes; at least {NAMESPACE_SECRET_MIN_BYTES} are needed",
                hint=f"make one with: kvcdn keygen --namespace {name}",
            )
        return cls(derive("kvcdn v1 namespace", secret), name)

    def __repr__(self) -> str:
        return f"Namespace({self.name})"


@dataclass(frozen=True)
class ModelIdentity:
    """What binds a KV cache to a model: its fingerprint, the layout of its cache, and the precision."""

    fingerprint: Digest
    layout: Layout
    name: str
    precision: str = PRECISION_NATIVE

    @property
    def tag(self) -> ModelTag:
        return model_tag(self.fingerprint)

    def seed(self, namespace: Namespace) -> Secret:
        """h_0 of FORMAT.md 2.5."""
        material = self.fingerprint + self.layout.digest + namespace.key + self.precision.encode("ascii")
        return Secret(derive("kvcdn v1 seed", material))


@dataclass(frozen=True)
class BlockName:
    """One block of a prefix: where its tokens are, its public address, and the key that opens it."""

    index: int
    start: int
    tokens: int
    address: Digest
    content_key: Secret

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class PrefixNames:
    """Every name of one prefix, from one walk along its chain."""

    model: ModelIdentity
    blocks: tuple[BlockName, ...]
    manifest_address: Digest
    tokens: int

    @classmethod
    def of(cls, model: ModelIdentity, namespace: Namespace, token_ids: Sequence[int]) -> PrefixNames:
        """Names the prefix `token_ids` (1 or more ids below 2^32). Raises UsageError for an empty or oversized one."""
        if not 1 <= len(token_ids) <= MAX_PREFIX_TOKENS:
            raise UsageError(f"a prefix has 1 to {MAX_PREFIX_TOKENS} tokens, not {len(token_ids)}")
        length = model.layout.block_tokens
        link = model.seed(namespace)
        blocks = []
        for index, (start, packed) in enumerate(_packed_blocks(token_ids, length)):
            link = Secret(derive("kvcdn v1 chain", link + struct.pack("<I", len(packed) // 4) + packed))
            address = Digest(derive("kvcdn v1 block address", link))
            content_key = Secret(derive("kvcdn v1 content key", link))
            blocks.append(BlockName(index, start, len(packed) // 4, address, content_key))
        manifest = Digest(derive("kvcdn v1 manifest address", link))
        return cls(model, tuple(blocks), manifest, len(token_ids))


def _packed_blocks(token_ids: Sequence[int], length: int) -> Iterator[tuple[int, bytes]]:
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError):
        raise UsageError("token ids must be integers from 0 to 4294967295") from None
    if sys.byteorder == "big":  # pragma: no cover - no big-endian machine runs torch
        packed.byteswap()
    data = packed.tobytes()
    for start in range(0, len(token_ids), length):
        yield start, data[4 * start : 4 * (start + length)]


def model_tag(fingerprint: Digest) -> ModelTag:
    """The 16 bytes under which a model's objects lie (FORMAT.md 2.1)."""
    return ModelTag(derive("kvcdn v1 model tag", fingerprint)[: ModelTag.SIZE])


def block_key(tag: ModelTag, address: Digest) -> str:
    """The object key of a block (FORMAT.md 2.6)."""
    text = str(address)
    return f"v1/{tag}/blocks/{text[:2]}/{text}"


def manifest_key(tag: ModelTag, address: Digest) -> str:
    """The object key of a manifest (FORMAT.md 2.6)."""
    return f"v1/{tag}/manifests/{address}"
