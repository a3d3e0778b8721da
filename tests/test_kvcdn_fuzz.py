"""A parser ends in a value or in one CorruptError: nothing else, whatever the bytes, in bounded time and memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from attacks.forge import (
    MODEL,
    NAMES,
    PUBLISHER,
    blosc_chunk,
    edited,
    envelope,
    fresh_chunk,
    sound_blocks,
    sound_manifest,
    split_envelope,
    tail,
    write_manifest,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvcdn import canonical, segment
from kvcdn.block import BlockHeader, SegmentVerifier, open_header, open_segment
from kvcdn.codec import ALL_CODECS, CODECS
from kvcdn.digest import Digest
from kvcdn.envelope import BLOCK_MAGIC, MANIFEST_MAGIC
from kvcdn.errors import CorruptError
from kvcdn.fields import Fields
from kvcdn.layout import DTYPE_BYTES, KINDS, STATE_NAMES, TENSOR_NAMES, Layout
from kvcdn.manifest import Manifest, open_manifest
from kvcdn.producer import Producer
from kvcdn.seal import ObjectKeys
from kvcdn.segment import MAX_SEGMENT_BYTES, Part

WHAT = "the object"

PATIENT = [HealthCheck.too_slow]
"""A busy machine is no fault of the test."""

FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=PATIENT)

MEMORY_FACTOR = 64
"""Python objects of a header, and the header written again, stay below this many times its size."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)

INTERESTING_NUMBERS = st.sampled_from([-1, 0, 1, 15, 16, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**53])


def either(parse: Callable[[], Any]) -> Any:
    """The value, or None where CorruptError names the object; anything else fails the test."""
    try:
        return parse()
    except CorruptError as error:
        message = str(error)
    assert WHAT in message or "block " in message
    assert len(message) < 1000
    return None


@st.composite
def mutated(draw: st.DrawFn, sound: bytes) -> bytes:
    """`sound` after a few bit flips, splices, cuts and overwritten numbers."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "number", "repeat", "end"]))
        if kind == "flip" and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[place : place + draw(st.integers(1, 64))]
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=16))
        elif kind == "number":
            data[place : place + 4] = struct.pack(
                "<I", draw(st.integers(0, 2**32 - 1) | st.sampled_from([0, 2**31, 2**32 - 1]))
            )
        elif kind == "repeat":
            data[place:place] = data[place : place + draw(st.integers(1, 200))]
        else:
            del data[place:]
    return bytes(data)


@st.composite
def edited_header(draw: st.DrawFn, header: dict[str, Any]) -> dict[str, Any]:
    """`header` with one to three values, at any depth, replaced by any JSON."""
    for _ in range(draw(st.integers(1, 3))):
        path: tuple[str | int, ...] = ()
        value: Any = header
        while isinstance(value, dict | list) and value and (not path or draw(st.booleans())):
            step = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else list(range(len(value)))))
            path, value = (*path, step), value[step]
        header = edited(header, path, draw(INTERESTING_NUMBERS | JSON))
    return header


def signed(magic: bytes, header: dict[str, Any]) -> bytes:
    """An envelope of `header` as it is, floats and all."""
    encoded = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return envelope(magic, encoded, PUBLISHER)


@FUZZ
@given(st.binary(max_size=300) | mutated(sound_blocks()[-1]))
def test_block_of_any_bytes(data: bytes) -> None:
    """Random bytes and damaged blocks: a header that adds up to the object, or CorruptError."""
    header = either(lambda: open_header(data, WHAT))
    assert header is None or isinstance(header, BlockHeader)


@FUZZ
@given(edited_header(tail().header))
def test_block_of_any_fields(fields: dict[str, Any]) -> None:
    """Signed headers with any values: whatever is accepted is consistent."""
    header = either(lambda: open_header(signed(BLOCK_MAGIC, fields), WHAT))
    if header is not None:
        assert header.size == header.envelope_bytes + sum(segment.length for segment in header.segments)
        assert all(part.raw_bytes < 2**32 for segment in header.segments for part in segment.parts)
        assert header.start % header.producer.chunk_tokens == 0


@FUZZ
@given(st.binary(max_size=300) | mutated(sound_manifest()))
def test_manifest_of_any_bytes(data: bytes) -> None:
    """Random bytes and damaged manifests."""
    manifest = either(lambda: open_manifest(data, WHAT))
    assert manifest is None or isinstance(manifest, Manifest)


@FUZZ
@given(edited_header(split_envelope(sound_manifest())[0]))
def test_manifest_of_any_fields(fields: dict[str, Any]) -> None:
    """Signed manifests with any values: whatever is accepted adds up, and seals to the same bytes again."""
    data = signed(MANIFEST_MAGIC, fields)
    manifest = either(lambda: open_manifest(data, WHAT))
    if manifest is not None:
        assert manifest.tokens == sum(block.tokens for block in manifest.blocks)
        assert data == manifest.seal(PUBLISHER)


@FUZZ
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode) | JSON.map(lambda value: json.dumps(value).encode()))
def test_json_of_any_bytes(data: bytes) -> None:
    """Accepted bytes are the one form of their value."""
    value = either(lambda: canonical.decode(data, WHAT))
    if value is not None:
        assert data == canonical.encode(value)


@FUZZ
@given(JSON)
def test_json_of_any_value(value: Any) -> None:
    """Whatever the encoder takes, the decoder gives back."""
    try:
        data = canonical.encode(value)
    except (ValueError, TypeError):
        return
    assert value == canonical.decode(data, WHAT)


@pytest.mark.parametrize("value", ["\udc80", 2**53, -(2**53), 1.0, float("nan"), b"bytes", object()])
def test_what_canonical_json_cannot_hold_is_refused(value: Any) -> None:
    """Alone, and among hundreds of values that it can."""
    for whole in (value, [value], {"a": [*range(300), "\u00e9" * 300, None, True, {"deep": value}], "b": "sound"}):
        with pytest.raises((ValueError, TypeError)):
            canonical.encode(whole)


PART = Part("k", "blosc2", "bfloat16", (512, 2, 64), 4096).to_json()
_SIDES = st.lists(st.integers(-1, 3) | st.booleans() | st.just(MAX_SEGMENT_BYTES + 1) | st.none(), max_size=7)
_VALUES = {
    "codec": st.sampled_from([*ALL_CODECS, "?", ["raw"], 1, None]),
    "dtype": st.sampled_from([*DTYPE_BYTES, "?", ["bfloat16"], 1]),
    "length": st.sampled_from([0, 1, True, -1, MAX_SEGMENT_BYTES, MAX_SEGMENT_BYTES + 1, "1", None]),
    "name": st.sampled_from([*TENSOR_NAMES, *STATE_NAMES, "?", ["key"], None]),
    "shape": _SIDES | st.just("abc") | st.just({"0": 1, "1": 1, "2": 1}) | st.just([512, 2, 64]),
    "more": st.just(0),
}


@FUZZ
@given(st.fixed_dictionaries({}, optional=_VALUES), st.sets(st.sampled_from(list(PART))))
def test_a_part_is_read_in_one_way(changes: dict[str, Any], missing: set[str]) -> None:
    """What is read at once is what is read field by field, and the same is refused."""
    value = {name: field for name, field in {**PART, **changes}.items() if name not in missing or name in changes}
    plain = segment._plain_part(value)
    careful = either(lambda: segment._careful_part(value, WHAT))
    assert plain == careful


SEGMENT = segment.Segment(3, "kv", 0, 4096, Digest(bytes(32)), Digest(b"1" * 32), ()).to_json()
_HASHES = st.sampled_from(["0" * 64, "A" * 64, "0" * 63, " " + "0" * 63, "g" * 64, 1, None])
_NUMBERS = st.sampled_from(
    [0, 3, True, -1, 15, 16, MAX_SEGMENT_BYTES, MAX_SEGMENT_BYTES + 1, 1 << 36, (1 << 36) + 1, "3", None]
)
_PARTS = [{**PART, "name": name} for name in ("k", "v", "i", "c0", "?")]
_SEGMENT_VALUES = {
    "blake3": _HASHES,
    "raw_digest": _HASHES,
    "kind": st.sampled_from([*KINDS, "?", ["kv"], None]),
    "layer": _NUMBERS,
    "length": _NUMBERS,
    "offset": _NUMBERS,
    "parts": st.lists(st.sampled_from(_PARTS), max_size=4) | st.just({"k": 1, "v": 2}) | st.just("kv") | st.just(_PARTS[:2]),
    "more": st.just(0),
}


@FUZZ
@given(st.fixed_dictionaries({}, optional=_SEGMENT_VALUES), st.sets(st.sampled_from(list(SEGMENT)), max_size=1))
@example({"parts": _PARTS[:2]}, set())
@example({"kind": "none"}, set())
def test_a_segment_is_read_in_one_way(changes: dict[str, Any], missing: set[str]) -> None:
    """What is read at once is what is read field by field, and what is refused that way never passes this way."""
    value = {name: field for name, field in {**SEGMENT, **changes}.items() if name not in missing or name in changes}
    plain = segment._plain_segment(value, 3)
    careful = either(lambda: segment._careful_segment(value, 3, WHAT))
    states = careful is not None and any(part.is_state for part in careful.parts)
    assert plain == (None if states else careful)


@FUZZ
@given(JSON | edited_header(MODEL.layout.to_json()))
def test_layout_of_any_value(value: Any) -> None:
    """Accepted layouts are written back as they came, and have a block length within the format's bounds."""
    layout = either(lambda: Layout.from_json(value, WHAT))
    if layout is not None:
        assert value == layout.to_json()
        assert 64 <= layout.block_tokens <= 1024


READERS: dict[str, Callable[[Fields], object]] = {
    "integer": lambda fields: fields.integer("f", 0, 10),
    "optional integer": lambda fields: fields.optional_integer("f", 0, 10),
    "string": lambda fields: fields.string("f", 5),
    "choice": lambda fields: fields.choice("f", ("a", "b")),
    "fixed": lambda fields: fields.fixed("f", Digest),
    "array": lambda fields: fields.array("f", 1, 2),
    "producer": lambda fields: Producer.from_json(fields.any("f"), WHAT),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@settings(max_examples=40, deadline=None, suppress_health_check=PATIENT)
@given(value=JSON | st.dictionaries(st.sampled_from(["f", "g"]), JSON))
def test_fields_of_any_value(read: Callable[[Fields], object], value: Any) -> None:
    """Each accessor gives a value of its type or the one error, for a field that is there, missing, or of another type."""

    def parse() -> object:
        fields = Fields(value, WHAT)
        found = read(fields)
        fields.done()
        return found

    either(parse)
    either(lambda: read(Fields({"f": value}, WHAT)))


@settings(max_examples=300, deadline=None, suppress_health_check=PATIENT)
@given(
    mutated(blosc_chunk()) | mutated(fresh_chunk(bytes(range(256)) * 300)) | st.binary(max_size=400), st.booleans(), st.data()
)
def test_chunk_of_any_bytes(chunk: bytes, mended: bool, data: st.DataObject) -> None:
    """Damaged chunks, with lengths that fit and that lie: decoded in place or refused, and never a byte beside the place."""
    size = data.draw(st.sampled_from([2048, 76_800]))
    if mended and len(chunk) >= 16:
        chunk = chunk[:3] + b"\x02" + struct.pack("<I", size) + chunk[8:12] + struct.pack("<I", len(chunk)) + chunk[16:]
    memory = bytearray(b"\xa5" * (size + 8192))
    with memoryview(memory) as view, view[4096 : 4096 + size] as out:
        either(lambda: CODECS["blosc2"].decode_into(chunk, 2, out, WHAT))
    assert b"\xa5" * 4096 == bytes(memory[:4096]) == bytes(memory[-4096:])


@FUZZ
@given(st.integers(0, len(MODEL.layout.layers) - 1), st.data())
def test_segment_of_any_bytes(layer: int, data: st.DataObject) -> None:
    """Stored bytes of a segment, damaged, cut or random: the sound ones open, all others are refused."""
    header = open_header(sound_blocks()[-1], WHAT)
    sound = tail().stored[layer]
    stored = data.draw(mutated(sound) | st.binary(max_size=64))
    keys = ObjectKeys(NAMES.blocks[-1].content_key, header.salt)
    outs = [memoryview(bytearray(part.raw_bytes)) for part in header.segments[layer].parts]

    def opened() -> bool:
        open_segment(header, keys, layer, stored, bytearray(), outs)
        return True

    assert (True if stored == sound else None) == either(opened)


def verdict(header: BlockHeader, pieces: list[bytes]) -> str:
    """What a verifier says of an object that comes in these pieces."""
    verifier = SegmentVerifier(header)
    try:
        for piece in pieces:
            verifier.update(piece)
        verifier.finish()
    except CorruptError as error:
        return str(error)
    return "sound"


@settings(max_examples=30, deadline=None, suppress_health_check=PATIENT)
@given(st.just(sound_blocks()[-1]) | mutated(sound_blocks()[-1]), st.lists(st.integers(0, 4100), max_size=12))
def test_pieces_do_not_change_the_verdict(data: bytes, cuts: list[int]) -> None:
    """Whole, in random pieces or byte by byte: a verifier says the same, and calls only the sound object sound."""
    header = open_header(sound_blocks()[-1], WHAT)
    ends = [0, *sorted(cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(ends)]
    whole = verdict(header, [data])
    assert whole == verdict(header, pieces)
    assert whole == verdict(header, [data[place : place + 1] for place in range(len(data))])
    behind = slice(header.envelope_bytes, None)
    assert (whole == "sound") == (data[behind] == sound_blocks()[-1][behind])


def hostile_headers(room: int) -> dict[str, bytes]:
    """Signed headers of about `room` bytes, each of a shape that is dear to some parser."""
    block = tail().header
    manifest, _ = split_envelope(sound_manifest())
    blocks = manifest["blocks"] * (room // 400)
    shape = [8, 2**32 - 1, 2**32 - 1]
    return {
        "open arrays": envelope(BLOCK_MAGIC, b"[" * room, PUBLISHER),
        "open objects": envelope(BLOCK_MAGIC, b'{"a":' * (room // 5), PUBLISHER),
        "empty arrays": envelope(BLOCK_MAGIC, b"[" + b"[]," * (room // 3) + b"[]]", PUBLISHER),
        "empty strings": envelope(BLOCK_MAGIC, b"[" + b'"",' * (room // 3) + b'""]', PUBLISHER),
        "escapes": envelope(BLOCK_MAGIC, b'"' + b"\\u0001" * (room // 6) + b'"', PUBLISHER),
        "surrogate pairs": envelope(BLOCK_MAGIC, b'"' + b"\\ud83d\\ude00" * (room // 12) + b'"', PUBLISHER),
        "digits": envelope(BLOCK_MAGIC, b"9" * room, PUBLISHER),
        "small numbers": envelope(BLOCK_MAGIC, b"[" + b"1," * (room // 2) + b"1]", PUBLISHER),
        "one long string": envelope(BLOCK_MAGIC, b'"' + b"x" * room + b'"', PUBLISHER),
        "many keys": envelope(BLOCK_MAGIC, canonical.encode({f"{n:06}": 0 for n in range(room // 11)}), PUBLISHER),
        "many blocks": write_manifest({**manifest, "blocks": blocks}),
        "huge shapes": signed(BLOCK_MAGIC, edited(block, ("segments", 0, "parts", 0, "shape"), shape)),
        "1024 layers of 64 GiB": write_manifest(
            edited(manifest, ("layout",), Layout.uniform_kv(1024, 4096, 65_536, "float32").to_json())
        ),
    }


@pytest.mark.parametrize("name", hostile_headers(1000))
def test_hostile_headers_cost_little(name: str) -> None:
    """Neither time nor memory follow from what a header claims, only from its own size, which is bounded."""
    data = hostile_headers((1 << 20) - 100)[name]
    with pytest.raises(CorruptError, match=WHAT):
        read(data)
    smaller = hostile_headers(1 << 16)[name]
    tracemalloc.start()
    with pytest.raises(CorruptError, match=WHAT):
        read(smaller)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEMORY_FACTOR * len(smaller) + (1 << 20)


def read(data: bytes) -> object:
    """The header of whichever kind it is."""
    return open_manifest(data, WHAT) if data[:8] == MANIFEST_MAGIC else open_header(data, WHAT)


def test_claimed_length_allocates_nothing() -> None:
    """A segment that claims 4 GiB and brings 16 bytes is refused before any memory is set aside for it."""
    tokens, heads = 8, 2**25
    part = {"codec": "raw", "dtype": "bfloat16", "length": 2 * tokens * heads - 16, "name": "k", "shape": [tokens, heads, 1]}
    segment = {
        **tail().header["segments"][0],
        "parts": [part, {**part, "name": "v", "length": 2 * tokens * heads - 64}],
        "length": 4 * tokens * heads - 64,
    }
    header = open_header(signed(BLOCK_MAGIC, edited(tail().header, ("segments",), [segment])), WHAT)
    scratch = bytearray()
    tracemalloc.start()
    with pytest.raises(CorruptError, match="hash"):
        open_segment(header, ObjectKeys(NAMES.blocks[-1].content_key, header.salt), 0, bytes(16), scratch, [])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert header.segments[0].length > 1 << 29
    assert peak < 1 << 20
    assert len(scratch) == 0
