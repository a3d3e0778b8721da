"""Attacks on a block: structure, identity, encryption and codecs (FORMAT.md section 4), by a publisher with every key."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

from attacks.attack import Attack, Reader
from attacks.forge import (
    MALLORY,
    MODEL,
    NAMES,
    ForgedBlock,
    blosc_chunk,
    edited,
    fresh_chunk,
    republished_tail,
    sealed_by,
    sound_blocks,
    tail,
)

from kvcdn import canonical
from kvcdn.digest import Digest
from kvcdn.seal import ObjectKeys, segment_associated_data

TAG_BYTES = 16


def structure_attacks() -> Iterator[Attack]:
    """Lengths, offsets, shapes and indices that do not add up."""
    block = tail()
    second = block.header["segments"][1]
    first_length = block.header["segments"][0]["length"]
    shape = ("segments", 0, "parts", 0, "shape")
    part_length = ("segments", 0, "parts", 0, "length")
    sound_part = block.header["segments"][0]["parts"][0]["length"]
    changes: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
        "gap-before-the-first-segment": (("segments", 0, "offset"), 1, "a gap or an overlap"),
        "gap": (("segments", 1, "offset"), second["offset"] + 1, "a gap or an overlap"),
        "overlap": (("segments", 1, "offset"), second["offset"] - 1, "a gap or an overlap"),
        "second-segment-is-the-first": (("segments", 1, "offset"), 0, "a gap or an overlap"),
        "offset-beyond-every-object": (("segments", 1, "offset"), 2**53 - 1, "offset"),
        "segment-longer-than-its-parts": (("segments", 0, "length"), first_length + 1, "not as long as its parts"),
        "segment-shorter-than-its-parts": (("segments", 0, "length"), first_length - 1, "not as long as its parts"),
        "segment-of-2^32-1": (("segments", 0, "length"), 2**32 - 1, "not as long as its parts"),
        "segment-of-2^32": (("segments", 0, "length"), 2**32, "length"),
        "segment-shorter-than-a-tag": (("segments", 0, "length"), 15, "length"),
        "layer-index-repeated": (("segments", 1, "layer"), 0, "layer"),
        "layer-index-ahead": (("segments", 1, "layer"), 2, "layer"),
        "part-longer": (part_length, sound_part + 1, "not as long as its parts"),
        "part-of-2^32-1": (part_length, 2**32 - 1, "not as long as its parts"),
        "shape-product-overflows-64-bits": (shape, [8, 2**32 - 1, 2**32 - 1], "too long for its shape"),
        "shape-product-wraps-to-right-size": (shape, [8, 2**31, 2**31], "too long for its shape"),
        "shape-zero-heads": (shape, [8, 0, 64], "shape"),
        "shape-zero-tokens": (shape, [0, 2, 64], "shape"),
        "shape-negative": (shape, [8, -2, -64], "shape"),
        "shape-two-dimensions": (shape, [8, 128], "shape"),
        "shape-four-dimensions": (shape, [8, 2, 64, 1], "shape"),
        "shape-other-tokens": (shape, [16, 1, 64], "holds 16 tokens"),
        "shape-with-a-bool": (shape, [8, True, 128], "shape"),
        "tokens-other-than-shapes": (("tokens",), 7, "holds 8 tokens, the block 7"),
        "tokens-more-than-a-block": (("tokens",), 1025, "tokens"),
        "tokens-more-than-one-pass": (("producer", "chunk_tokens"), 4, "not one block"),
        "start-inside-a-block": (("start",), 1, "not one block"),
        "start-beyond-every-model": (("start",), (1 << 24) + 1024, "start"),
        "lossy-codec-in-native-precision": (("segments", 0, "parts", 0, "codec"), "quant", "not one of native precision"),
        "basis-of-native-precision": (("basis",), {}, "unknown field 'basis'"),
        "lossy-without-a-certificate": (("precision",), "int8", "'certificate' is missing"),
        "native-with-a-certificate": (("certificate",), {}, "unknown field 'certificate'"),
        "two-parts-named-k": (("segments", 0, "parts", 1, "name"), "k", "layer 0 holds"),
    }
    for name, (path, value, says) in changes.items():
        reader = Reader.CLIENT if says == "layer 0 holds" else Reader.EVERYONE
        yield Attack(name, block.with_field(path, value).write(), says, reader)
    yield from _expansion(block)
    yield from _segment_lists(block)


def _expansion(block: ForgedBlock) -> Iterator[Attack]:
    raw = 8 * 2 * 64 * 2
    longer = bytes(raw + 65)
    forged = block.with_parts(0, (longer, block.encoded[0][1]))
    yield Attack("part-longer-than-raw-and-64", forged.write(), "too long for its shape")
    part = {**block.header["segments"][0]["parts"][0], "length": 2**32 - 1, "shape": [8, 2**26, 2]}
    header = edited(block.header, ("segments", 0, "parts", 0), part)
    header = edited(header, ("segments", 0, "length"), 2**32 - 1)
    yield Attack("claims-4-GiB", ForgedBlock(block.name, header, block.stored, block.encoded).write(), "segment 0")


def _segment_lists(block: ForgedBlock) -> Iterator[Attack]:
    segments = block.header["segments"]
    lists = {
        "segments-none": ([], "segments"),
        "segments-reordered": (segments[::-1], "layer"),
        "segment-twice": ([segments[0], segments[0], segments[1]], "layer"),
        "segments-1025": (segments * 342, "segments"),
    }
    for name, (value, says) in lists.items():
        yield Attack(name, block.with_field(("segments",), value).write(), says)
    fewer = ForgedBlock(block.name, edited(block.header, ("segments",), segments[:2]), block.stored[:2], block.encoded[:2])
    yield Attack("a-layer-less-than-the-model", fewer.write(), "2 layers, the model has 3", Reader.CLIENT)
    last = {**segments[2], "layer": 3, "offset": segments[2]["offset"] + segments[2]["length"]}
    header = edited(block.header, ("segments",), [*segments, last])
    more = ForgedBlock(block.name, header, (*block.stored, block.stored[2]), block.encoded)
    yield Attack("a-layer-more-than-the-model", more.write(), "4 layers, the model has 3", Reader.CLIENT)


def identity_attacks() -> Iterator[Attack]:
    """Sound blocks, each the answer to another question."""
    block = tail()
    zeros = "0" * 64
    yield Attack("another-block-under-this-name", sound_blocks()[0], "address is")
    yield Attack("another-address", block.with_field(("address",), zeros).write(), "address is")
    changes: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
        "another-model": (("model",), "0" * 32, "model is"),
        "another-layout": (("layout",), zeros, "layout is"),
        "another-position": (("start",), 2048, "start is 2048"),
        "another-salt": (("salt",), zeros, "key commitment"),
        "another-commitment": (("commitment",), zeros, "key commitment"),
        "heads-and-dim-exchanged": (("segments", 0, "parts", 0, "shape"), [8, 64, 2], "layer 0 holds"),
        "dtype-of-the-same-size": (("segments", 0, "parts", 0, "dtype"), "float16", "layer 0 holds"),
        "k-and-v-exchanged": (("segments", 0, "parts"), block.header["segments"][0]["parts"][::-1], "layer 0 holds"),
        "window-passed-off-as-full-attention": (("segments", 0, "kind"), "kv", "layer 0 holds"),
        "full-attention-passed-off-as-window": (("segments", 1, "kind"), "window", "layer 1 holds"),
        "another-schedule": (("producer", "chunk_tokens"), 512, "passes of 512"),
    }
    for name, (path, value, says) in changes.items():
        yield Attack(name, block.with_field(path, value).write(), says, Reader.CLIENT)
    yield Attack("precision-unknown", block.with_field(("precision",), "int9").write(), "precision")
    yield Attack("kind-unknown", block.with_field(("segments", 0, "kind"), "linear").write(), "kind")
    yield from _state_attacks(block)
    yield Attack("kind-indexed-without-an-index", block.with_field(("segments", 1, "kind"), "indexed").write(), "parts")
    index = block.with_field(("segments", 1, "parts", 1, "name"), "i").write()
    yield Attack("an-index-for-a-value", index, "layer 1 holds", Reader.CLIENT)
    yield Attack("kind-none-with-parts", block.with_field(("segments", 0, "kind"), "none").write(), "parts")
    yield Attack("kind-none-without-parts", _emptied(block), "layer 1 holds none", Reader.CLIENT)
    yield Attack("codec-unknown", block.with_field(("segments", 0, "parts", 0, "codec"), "pickle").write(), "codec")
    yield Attack("dtype-unknown", block.with_field(("segments", 0, "parts", 0, "dtype"), "float64").write(), "dtype")
    yield Attack("mallory-signs-a-sound-block", block.write(MALLORY), "trust list", untrusted=True)


def _state_attacks(block: ForgedBlock) -> Iterator[Attack]:
    """States where the layout has none, and in places and forms that no layout has."""
    parts = ("segments", 0, "parts")
    first, second = block.header["segments"][0]["parts"]
    state = {**second, "name": "r0", "shape": [8 * 16]}
    yield Attack("a-state-for-a-value", block.with_field(parts, [first, state]).write(), "parts")
    yield Attack(
        "a-state-that-the-layout-lacks",
        block.with_field(("segments", 0), _with_state(block)).write(),
        "layer 0 holds",
        Reader.CLIENT,
    )
    forms = {"no-dimensions": ([], "shape"), "five-dimensions": ([1] * 5, "shape"), "no-elements": ([0], "shape")}
    for name, (shape, says) in forms.items():
        changed = [first, second, {**state, "shape": shape}]
        yield Attack(f"state-of-{name}", block.with_field(parts, changed).write(), says)
    yield Attack("17-states", block.with_field(parts, [first, second, *[state] * 17]).write(), "parts")


def _with_state(block: ForgedBlock) -> dict[str, Any]:
    """The first segment, its value said to be a value and an empty state behind it."""
    segment = block.header["segments"][0]
    return {**segment, "parts": [*segment["parts"], {**segment["parts"][1], "length": 0, "name": "c0", "shape": [1]}]}


def _emptied(block: ForgedBlock) -> bytes:
    """The second layer without its tensors, sealed as a layer that keeps nothing is."""
    header = edited(edited(block.header, ("segments", 1, "kind"), "none"), ("segments", 1, "parts"), [])
    header = edited(header, ("segments", 1, "length"), TAG_BYTES)
    keys = ObjectKeys(block.name.content_key, Digest.parse(header["salt"], "salt"))
    descriptor = {name: header["segments"][1][name] for name in ("kind", "layer", "length", "parts")}
    sealed = sealed_by(keys, 1, segment_associated_data(block.name.address, canonical.encode(descriptor)), b"")
    forged = ForgedBlock(block.name, header, block.stored, block.encoded)
    return forged.with_stored((block.stored[0], sealed, block.stored[2])).write()


def encryption_attacks() -> Iterator[Attack]:
    """Stored bytes changed, moved, or taken from elsewhere."""
    block = tail()
    for layer, piece in enumerate(block.stored):
        for place in (0, len(piece) // 2, len(piece) - TAG_BYTES, len(piece) - 1):
            flipped = piece[:place] + bytes([piece[place] ^ 0x80]) + piece[place + 1 :]
            stored = (*block.stored[:layer], flipped, *block.stored[layer + 1 :])
            name = f"flip-in-layer-{layer}-byte-{place}"
            changed = ForgedBlock(block.name, block.header, stored, block.encoded).write()
            yield Attack(f"client-{name}", changed, f"layer {layer}: hash", Reader.CLIENT)
            yield Attack(f"edge-{name}", changed, f"hash of layer {layer}", Reader.EDGE)
            yield Attack(f"{name}-rehashed", block.with_stored(stored).write(), "authentication failed", Reader.CLIENT)
    swapped = (block.stored[1], block.stored[0], block.stored[2])
    yield Attack("layers-swapped-and-rehashed", block.with_stored(swapped).write(), "authentication failed", Reader.CLIENT)
    other = (republished_tail().stored[0], *block.stored[1:])
    yield Attack("layer-of-a-republished-block", block.with_stored(other).write(), "authentication failed", Reader.CLIENT)
    garbage = tuple(random.Random(layer).randbytes(len(piece)) for layer, piece in enumerate(block.stored))
    yield Attack("garbage-rehashed", block.with_stored(garbage).write(), "authentication failed", Reader.CLIENT)
    yield Attack("sealed-under-another-address", _bound_to(Digest(bytes(32))), "authentication failed", Reader.CLIENT)
    yield Attack("sealed-for-another-descriptor", _redescribed(), "authentication failed", Reader.CLIENT)
    yield Attack("descriptor-changed-after-sealing", _other_codec(), "authentication failed", Reader.CLIENT)


def _bound_to(address: Digest) -> bytes:
    """Segments sealed with the right keys, bound to another address."""
    block = tail()
    return _resealed(block, lambda descriptor: segment_associated_data(address, descriptor))


def _redescribed() -> bytes:
    """Segments sealed with the right keys and address, bound to no descriptor."""
    block = tail()
    return _resealed(block, lambda descriptor: segment_associated_data(block.name.address, descriptor[:0]))


def _resealed(block: ForgedBlock, associated: Any) -> bytes:
    keys = ObjectKeys(block.name.content_key, Digest.parse(block.header["salt"], "salt"))
    stored = []
    for index, (segment, parts) in enumerate(zip(block.header["segments"], block.encoded, strict=True)):
        descriptor = canonical.encode({name: segment[name] for name in ("kind", "layer", "length", "parts")})
        stored.append(sealed_by(keys, index, associated(descriptor), b"".join(parts)))
    return block.with_stored(tuple(stored)).write()


def _other_codec() -> bytes:
    """The random tensor, stored raw, said to be blosc2: the descriptor is bound, so the codec never sees it."""
    return tail().with_field(("segments", 0, "parts", 1, "codec"), "blosc2").write()


def codec_attacks() -> Iterator[Attack]:
    """Chunks that a malicious publisher seals with the right keys: the decoder is the last line."""
    block = tail()
    value = block.encoded[0][1]
    raw = 8 * 2 * 64 * 2
    chunks: dict[str, tuple[bytes, str]] = {
        "chunk-empty": (b"", "too short"),
        "chunk-of-16-bytes": (blosc_chunk()[:16], "too short"),
        "chunk-of-31-bytes": (blosc_chunk()[:31], "too short"),
        "chunk-header-only": (_chunk(cbytes=32)[:32], "does not decode"),
        "chunk-truncated": (_chunk(cbytes=len(blosc_chunk()) - 1)[:-1], "does not decode"),
        "chunk-says-it-is-longer": (_chunk(cbytes=2**31 - 1), "stored"),
        "chunk-says-it-is-shorter": (_chunk(cbytes=40), "stored"),
        "chunk-with-a-tail": (blosc_chunk() + bytes(8), "stored"),
        "chunk-of-a-larger-tensor": (fresh_chunk(bytes(range(256)) * 16), "raw bytes"),
        "chunk-of-a-smaller-tensor": (fresh_chunk(bytes(raw - 2)), "raw bytes"),
        "chunk-nbytes-2^31": (_chunk(nbytes=2**31), "raw bytes"),
        "chunk-nbytes-2^32-1": (_chunk(nbytes=2**32 - 1), "raw bytes"),
        "chunk-nbytes-0": (_chunk(nbytes=0), "raw bytes"),
        "chunk-typesize-1": (_chunk(typesize=1), "typesize"),
        "chunk-typesize-0": (_chunk(typesize=0), "typesize"),
        "chunk-typesize-255": (_chunk(typesize=255), "typesize"),
        "chunk-blocksize-0": (_chunk(blocksize=0), "in blocks of 0,"),
        "chunk-blocksize-2^31": (_chunk(blocksize=2**31), "in blocks of 2147483648,"),
        "chunk-blocksize-2^32-1": (_chunk(blocksize=2**32 - 1), "in blocks of 4294967295,"),
        "chunk-blocksize-1": (_chunk(blocksize=1), "does not decode"),
        "chunk-blocksize-odd": (_chunk(blocksize=raw - 1), "does not decode"),
        "chunk-first-block-far-away": (_patched(32, struct.pack("<i", 2**31 - 1)), "does not decode"),
        "chunk-first-block-before-the-chunk": (_patched(32, struct.pack("<i", -1)), "does not decode"),
        "chunk-stream-longer-than-the-chunk": (_patched(36, struct.pack("<i", 2**31 - 1)), "does not decode"),
        "raw-bytes-as-a-chunk": (random.Random(1).randbytes(raw), "blosc2 chunk"),
        "garbage-as-a-chunk": (random.Random(2).randbytes(200), "blosc2 chunk"),
        "zstd-garbage-in-a-chunk": (blosc_chunk()[:44] + random.Random(3).randbytes(len(blosc_chunk()) - 44), "not decode"),
    }
    for name, (chunk, says) in chunks.items():
        yield Attack(name, block.with_parts(0, (chunk, value)).write(), says, Reader.CLIENT)
    yield from _features(block)
    for name, piece in {"short": bytes(raw - 1), "long": bytes(raw + 1), "empty": b""}.items():
        forged = block.with_parts(0, (piece, value), codec="raw")
        yield Attack(f"raw-part-{name}", forged.write(), "raw bytes where", Reader.CLIENT)
    forged = block.with_parts(0, (blosc_chunk(), value), codec="raw")
    yield Attack("chunk-as-raw-bytes", forged.write(), "raw bytes where", Reader.CLIENT)


def _features(block: ForgedBlock) -> Iterator[Attack]:
    """Everything a C-Blosc2 chunk could ask for and the format forbids."""
    flags = blosc_chunk()[2]
    features = {
        "blosc1-header": _patched(2, bytes([flags & ~0x05])),
        "delta": _patched(2, bytes([flags | 0x08])),
        **{f"format-{code}": _patched(2, bytes([(flags & 0x1F) | code << 5])) for code in (0, 1, 3, 5, 6, 7)},
        **{f"filter-{code}": _patched(16, bytes([code])) for code in (0, 2, 3, 4, 5, 6, 32, 160, 255)},
        "two-shuffles": _patched(17, b"\x01"),
        "shuffle-then-truncation": _patched(17, b"\x04"),
        "filter-meta": _patched(24, b"\x08"),
        **{f"flags-{value:#04x}": _patched(31, bytes([value])) for value in (1, 2, 4, 8, 0x20, 0x30, 0x40, 0x50, 0x70, 0x80)},
        "zeros-and-lazy": _patched(31, b"\x18"),
    }
    for name, chunk in features.items():
        forged = block.with_parts(0, (chunk, block.encoded[0][1]))
        yield Attack(f"chunk-asks-for-{name}", forged.write(), "features the format does not allow", Reader.CLIENT)


def _patched(place: int, replacement: bytes) -> bytes:
    chunk = blosc_chunk()
    return chunk[:place] + replacement + chunk[place + len(replacement) :]


def _chunk(
    *, nbytes: int | None = None, blocksize: int | None = None, cbytes: int | None = None, typesize: int | None = None
) -> bytes:
    chunk = bytearray(blosc_chunk())
    for place, value in ((4, nbytes), (8, blocksize), (12, cbytes)):
        if value is not None:
            struct.pack_into("<I", chunk, place, value)
    if typesize is not None:
        chunk[3] = typesize
    return bytes(chunk)


def other_namespace_name() -> Any:
    """The tail's name for a reader in another namespace; its keys do not open the public block."""
    from attacks.forge import TOKEN_IDS

    from kvcdn.keys import Namespace, PrefixNames

    return PrefixNames.of(MODEL, Namespace.private("team", bytes(32)), TOKEN_IDS).blocks[len(NAMES.blocks) - 1]
