"""Objects to measure an edge with: signed and hashed as an edge checks them, of any size, and nothing a model could read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvcdn.digest import Digest, ModelTag, hash_bytes
from kvcdn.envelope import BLOCK_MAGIC, seal_envelope
from kvcdn.keys import block_key
from kvcdn.layout import DTYPE_BYTES
from kvcdn.producer import Producer
from kvcdn.seal import TAG_BYTES
from kvcdn.segment import Part, Segment
from kvcdn.signing import SigningKey

HEADS, TOKENS = 8, 1024
"""The shape that a layer claims; its third dimension follows from the size of its segment."""


@dataclass(frozen=True)
class BenchObject:
    """One object in an origin's folder."""

    key: str
    size: int
    blake3: str


def write_object(origin: Path, segments: int, segment_bytes: int) -> BenchObject:
    """A block of `segments` segments of `segment_bytes`, all of the same random bytes, so that large ones cost little."""
    body = os.urandom(segment_bytes)
    digest = hash_bytes(body)
    address, tag, nothing = Digest(os.urandom(32)), ModelTag(os.urandom(16)), Digest(bytes(32))
    halves = ((segment_bytes - TAG_BYTES) // 2, (segment_bytes - TAG_BYTES + 1) // 2)
    dim = -(-halves[1] // (TOKENS * HEADS * DTYPE_BYTES["bfloat16"]))
    shape = (TOKENS, HEADS, dim)
    parts = tuple(Part(name, "raw", "bfloat16", shape, half) for name, half in zip("kv", halves, strict=True))
    listed = [
        Segment(layer, "kv", layer * segment_bytes, segment_bytes, digest, nothing, parts).to_json()
        for layer in range(segments)
    ]
    header = {
        "type": "block",
        "v": 1,
        "address": str(address),
        "model": str(tag),
        "layout": str(nothing),
        "precision": "native",
        "start": 0,
        "tokens": TOKENS,
        "salt": str(nothing),
        "commitment": str(nothing),
        "producer": Producer("none", "none", "none", "none", TOKENS).to_json(),
        "segments": listed,
    }
    envelope = seal_envelope(BLOCK_MAGIC, header, SigningKey.generate())
    key = block_key(tag, address)
    path = origin / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(envelope)
        for _ in range(segments):
            file.write(body)
    hasher = blake3(envelope)
    for _ in range(segments):
        hasher.update(body)
    return BenchObject(key, len(envelope) + segments * segment_bytes, hasher.hexdigest())
