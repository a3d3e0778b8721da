"""A forge: a publisher who holds the text and a signing key, and writes whatever it likes.

Attacks that stop at the signature prove little about the checks behind it. The forge re-signs, re-hashes and re-encrypts what
it changed, so that each attack reaches the one check that must catch it.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcdn import canonical
from kvcdn.block import open_header, seal_block
from kvcdn.codec import CODECS
from kvcdn.digest import Digest, hash_bytes
from kvcdn.envelope import BLOCK_MAGIC, MANIFEST_MAGIC, open_envelope
from kvcdn.keys import BlockName, ModelIdentity, Namespace, PrefixNames, block_key, manifest_key
from kvcdn.layout import DTYPE_BYTES, LayerSpec, Layout, TensorSpec
from kvcdn.manifest import BlockEntry, Manifest
from kvcdn.producer import Producer
from kvcdn.seal import TAG_BYTES, ObjectKeys, segment_associated_data
from kvcdn.signing import SIGNATURE_BYTES, SigningKey

PREAMBLE_BYTES = 12

TAIL_TOKENS = 8

_TENSORS = (TensorSpec("k", 2, 64, "bfloat16"), TensorSpec("v", 1, 16, "float32"))

MODEL = ModelIdentity(
    hash_bytes(b"the attacked model"),
    Layout((LayerSpec("window", _TENSORS, 512), LayerSpec("kv", _TENSORS), LayerSpec("kv", _TENSORS))),
    "attacked-model",
)

TOKEN_IDS = tuple((7919 * i) % 50_000 for i in range(MODEL.layout.block_tokens + TAIL_TOKENS))

NAMES = PrefixNames.of(MODEL, Namespace.public(), TOKEN_IDS)

PRODUCER = Producer("2.6", "5.15", "cpu", "sdpa", MODEL.layout.block_tokens)

PUBLISHER = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
"""The trusted publisher."""

MALLORY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(31, -1, -1))))
"""Somebody with a key that nobody trusts."""


def envelope(magic: bytes, header: bytes, key: SigningKey, *, length: int | None = None) -> bytes:
    """Signed envelope of any header bytes, canonical or not; `length` lies about them."""
    signed = magic + struct.pack("<I", len(header) if length is None else length) + header
    return signed + key.sign(signed)


def split_envelope(data: bytes) -> tuple[dict[str, Any], int]:
    """The parsed header of a sound object, and the envelope's size."""
    (length,) = struct.unpack_from("<I", data, 8)
    return json.loads(data[PREAMBLE_BYTES : PREAMBLE_BYTES + length]), PREAMBLE_BYTES + length + SIGNATURE_BYTES


def edited(header: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """A copy of `header` with the value at `path` replaced, or set where there was none."""
    result = copy.deepcopy(header)
    place: Any = result
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return result


def without(header: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    """A copy of `header` that lacks the field at `path`."""
    result = copy.deepcopy(header)
    place: Any = result
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return result


@dataclass(frozen=True)
class ForgedBlock:
    """One block taken apart: header fields, encrypted segments, and the encoded parts inside them."""

    name: BlockName
    header: dict[str, Any]
    stored: tuple[bytes, ...]
    encoded: tuple[tuple[bytes, ...], ...]
    """By layer and part."""

    @classmethod
    def take_apart(cls, data: bytes, name: BlockName) -> ForgedBlock:
        """From a sound object and its name."""
        fields, start = split_envelope(data)
        keys = ObjectKeys(name.content_key, Digest.parse(fields["salt"], "salt"))
        stored, encoded = [], []
        for index, segment in enumerate(open_header(data, "the forge").segments):
            piece = data[start + segment.offset :][: segment.length]
            plain = bytearray(segment.length - TAG_BYTES)
            keys.open_into(index, segment_associated_data(name.address, segment.descriptor), piece, plain, "the forge")
            cut = segment.parts[0].length
            stored.append(piece)
            encoded.append((bytes(plain[:cut]), bytes(plain[cut:])))
        return cls(name, fields, tuple(stored), tuple(encoded))

    def write(self, key: SigningKey = PUBLISHER) -> bytes:
        """The object, signed by `key`, with the publisher named accordingly."""
        header = {**self.header, "publisher": str(key.public)}
        return envelope(BLOCK_MAGIC, canonical.encode(header), key) + b"".join(self.stored)

    def with_field(self, path: tuple[str | int, ...], value: Any) -> ForgedBlock:
        """A header field replaced; nothing else follows the change."""
        return replace(self, header=edited(self.header, path, value))

    def with_stored(self, stored: tuple[bytes, ...]) -> ForgedBlock:
        """Other stored bytes, with offsets, lengths and hashes that fit them."""
        segments, offset = copy.deepcopy(self.header["segments"]), 0
        for segment, piece in zip(segments, stored, strict=True):
            segment.update(offset=offset, length=len(piece), blake3=str(hash_bytes(piece)))
            offset += len(piece)
        return replace(self, header=edited(self.header, ("segments",), segments), stored=stored)

    def with_parts(self, layer: int, parts: tuple[bytes, bytes], **fields: Any) -> ForgedBlock:
        """Other encoded parts in `layer`, encrypted with the right key; `fields` go into the first part's descriptor."""
        header = copy.deepcopy(self.header)
        segment = header["segments"][layer]
        for part, piece in zip(segment["parts"], parts, strict=True):
            part["length"] = len(piece)
        segment["parts"][0].update(fields)
        segment["length"] = sum(map(len, parts)) + TAG_BYTES
        descriptor = {name: segment[name] for name in ("kind", "layer", "length", "parts")}
        keys = ObjectKeys(self.name.content_key, Digest.parse(header["salt"], "salt"))
        associated = segment_associated_data(self.name.address, canonical.encode(descriptor))
        stored = list(self.stored)
        stored[layer] = sealed_by(keys, layer, associated, b"".join(parts))
        return replace(self, header=header).with_stored(tuple(stored))


def sealed_by(keys: ObjectKeys, index: int, associated: bytes, encoded: bytes) -> bytes:
    """A segment as a publisher seals it."""
    sealed = bytearray(len(encoded) + TAG_BYTES)
    keys.seal_into(index, associated, encoded, memoryview(sealed))
    return bytes(sealed)


def raw_tensors(name: BlockName, seed: int = 0) -> list[list[bytes]]:
    """Raw layers of a block: K repeats itself, so that it is stored as blosc2, V is random, so that it is stored raw."""
    rng = random.Random(f"{seed} {name.index}")
    layers = []
    for _ in MODEL.layout.layers:
        key = (rng.randbytes(128) * (2 * name.tokens))[: name.tokens * 2 * 64 * 2]
        layers.append([key, rng.randbytes(name.tokens * 16 * 4)])
    return layers


@cache
def sound_blocks() -> tuple[bytes, ...]:
    """Every block of the prefix as an honest publisher writes it."""
    return tuple(b"".join(seal_block(MODEL, name, PRODUCER, raw_tensors(name), PUBLISHER)) for name in NAMES.blocks)


@cache
def tail() -> ForgedBlock:
    """The prefix's last block, of 8 tokens from position 1,024, ready for the forge."""
    return ForgedBlock.take_apart(sound_blocks()[-1], NAMES.blocks[-1])


@cache
def republished_tail() -> ForgedBlock:
    """The same block published once more: same key, another salt."""
    name = NAMES.blocks[-1]
    return ForgedBlock.take_apart(b"".join(seal_block(MODEL, name, PRODUCER, raw_tensors(name, 1), PUBLISHER)), name)


@cache
def sound_manifest() -> bytes:
    """The prefix's manifest as an honest publisher writes it."""
    entries = [
        BlockEntry(name.address, name.tokens, len(data), open_envelope(data, BLOCK_MAGIC, "the forge").etag)
        for name, data in zip(NAMES.blocks, sound_blocks(), strict=True)
    ]
    manifest = Manifest(
        NAMES.manifest_address,
        MODEL.fingerprint,
        MODEL.name,
        MODEL.layout,
        MODEL.precision,
        len(TOKEN_IDS),
        tuple(entries),
        1_700_000_000,
        None,
        "",
        PRODUCER,
    )
    return manifest.seal(PUBLISHER)


def write_manifest(header: dict[str, Any], key: SigningKey = PUBLISHER) -> bytes:
    """A manifest with any fields, signed by `key`."""
    return envelope(MANIFEST_MAGIC, canonical.encode({**header, "publisher": str(key.public)}), key)


def tail_key() -> str:
    """Where the tail lies."""
    return block_key(MODEL.tag, NAMES.blocks[-1].address)


def manifest_object_key() -> str:
    """Where the manifest lies."""
    return manifest_key(MODEL.tag, NAMES.manifest_address)


def blosc_chunk(layer: int = 0) -> bytes:
    """The sound chunk of the tail's K tensor."""
    return tail().encoded[layer][0]


def fresh_chunk(raw: bytes) -> bytes:
    """A sound chunk of any bytes of K's dtype."""
    return CODECS["blosc2"].encode(raw, DTYPE_BYTES["bfloat16"])
