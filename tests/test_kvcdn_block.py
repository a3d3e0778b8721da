"""Blocks: what goes in comes out, sizes are told before they are fetched, and a writer cannot lie by mistake."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from attacks.forge import MODEL, NAMES, PRODUCER, PUBLISHER, raw_tensors, sound_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn import canonical
from kvcdn.block import open_header, open_segment, seal_block
from kvcdn.digest import Digest, hash_bytes
from kvcdn.envelope import BLOCK_MAGIC, MAX_ENVELOPE_BYTES, PREAMBLE_BYTES, envelope_size
from kvcdn.errors import CorruptError
from kvcdn.keys import ModelIdentity, Namespace, PrefixNames
from kvcdn.layout import STATE_NAMES, LayerSpec, Layout, StateSpec, TensorSpec
from kvcdn.producer import Producer
from kvcdn.seal import ObjectKeys, segment_associated_data

TENSOR = st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from(["bfloat16", "float16", "float32"]))

PAIR = st.tuples(TENSOR, TENSOR).map(lambda pair: (TensorSpec("k", *pair[0]), TensorSpec("v", *pair[1])))

INDEX = TENSOR.map(lambda tensor: TensorSpec("i", 1, *tensor[1:]))

KEEPING = (
    st.builds(LayerSpec, st.just("kv"), PAIR)
    | st.builds(LayerSpec, st.just("window"), PAIR, st.integers(2, 99))
    | st.builds(LayerSpec, st.just("indexed"), st.tuples(PAIR, INDEX).map(lambda tensors: (*tensors[0], tensors[1])))
)

STATES = st.lists(st.sampled_from(STATE_NAMES), max_size=3, unique=True).map(
    lambda names: tuple(StateSpec(name, (3,) * (1 + index), "float32") for index, name in enumerate(sorted(names)))
)

KEEPING = st.tuples(KEEPING, STATES).map(lambda layer: replace(layer[0], states=layer[1]))

LAYOUT = st.tuples(KEEPING, st.lists(KEEPING | st.just(LayerSpec("none", ())), max_size=3)).map(
    lambda layers: Layout((layers[0], *layers[1]))
)


@settings(max_examples=60, deadline=None)
@given(LAYOUT, st.integers(1, 40), st.booleans(), st.integers(0, 1000))
def test_tensors_come_back(layout: Layout, tokens: int, repetitive: bool, seed: int) -> None:
    """Any layout, any data: segments open in any order to the tensors that were sealed, with one scratch for all."""
    rng = random.Random(seed)
    model = ModelIdentity(hash_bytes(b"model"), layout, "model")
    name = PrefixNames.of(model, Namespace.public(), [rng.randrange(2**32) for _ in range(tokens)]).blocks[0]
    unit = bytes if repetitive else rng.randbytes
    # The block is shorter than others, so it ends at a checkpoint.
    raw = [
        [unit(tokens * tensor.bytes_per_token) for tensor in layer.tensors] + [unit(state.raw_bytes) for state in layer.states]
        for layer in layout.layers
    ]
    producer = Producer("t", "f", "d", "a", layout.block_tokens)
    data = b"".join(seal_block(model, name, producer, raw, PUBLISHER))
    header = open_header(data, "block")
    header.require(model, name, "block")
    assert len(data) == header.size
    assert layout.raw_bytes(tokens) == tokens * layout.bytes_per_token + layout.state_bytes == header.raw_bytes
    keys = ObjectKeys(name.content_key, header.salt)
    scratch = bytearray()
    for index in rng.sample(range(len(layout.layers)), len(layout.layers)):
        segment = header.segments[index]
        outs = [bytearray(b"\xa5" * part.raw_bytes) for part in segment.parts]
        stored = data[header.envelope_bytes + segment.offset :][: segment.length]
        open_segment(header, keys, index, stored, scratch, [memoryview(out) for out in outs])
        assert raw[index] == [bytes(out) for out in outs]
        assert segment.raw_digest == keys.raw_digest(*outs)


def test_every_writing_has_its_own_salt_and_key() -> None:
    """The same tensors written twice share neither salt nor ciphertext, only their raw digests' meaning."""
    name = NAMES.blocks[-1]
    first, second = (seal_block(MODEL, name, PRODUCER, raw_tensors(name), PUBLISHER) for _ in range(2))
    one, two = open_header(first[0], "block"), open_header(second[0], "block")
    assert one.salt != two.salt
    assert one.commitment != two.commitment
    for left, right in zip(one.segments, two.segments, strict=True):
        assert left.blake3 != right.blake3
        assert left.raw_digest != right.raw_digest
        assert left.descriptor == right.descriptor


def test_a_descriptor_is_canonical_json() -> None:
    """What encryption binds is a part of the header, in the same form."""
    for data in sound_blocks():
        for segment in open_header(data, "block").segments:
            described = {key: segment.to_json()[key] for key in ("kind", "layer", "length", "parts")}
            assert canonical.encode(described) == segment.descriptor


def test_size_is_known_from_the_preamble() -> None:
    """Twelve bytes tell how many to fetch for the header, and the header how many there are."""
    data = sound_blocks()[-1]
    size = envelope_size(data[:PREAMBLE_BYTES], BLOCK_MAGIC, "block")
    header = open_header(data[:size], "block")
    assert size == header.envelope_bytes <= MAX_ENVELOPE_BYTES
    assert len(data) == header.size
    assert hash_bytes(data[:size]) == header.etag


def test_header_reads_from_any_buffer() -> None:
    """Bytes, a bytearray or a view, with more behind the envelope or not: the same header."""
    data = sound_blocks()[-1]
    expected = open_header(data, "block")
    assert expected == open_header(bytearray(data), "block") == open_header(memoryview(data), "block")


def test_places_of_parts_cover_a_segment() -> None:
    """The places of a segment's parts lie end to end and leave only the tag."""
    segment = open_header(sound_blocks()[-1], "block").segments[0]
    slices = [place for _, place in segment.places]
    assert [0, slices[0].stop] == [place.start for place in slices]
    assert segment.length - 16 == slices[-1].stop


def test_sealed_parts_are_small() -> None:
    """No part exceeds its raw size, and repetitive tensors shrink."""
    parts = [part for segment in open_header(sound_blocks()[0], "block").segments for part in segment.parts]
    assert all(part.length <= part.raw_bytes for part in parts)
    assert {"blosc2", "raw"} == {part.codec for part in parts}
    assert all(part.length < part.raw_bytes / 10 for part in parts if part.codec == "blosc2")


@pytest.mark.parametrize("change", ["short", "long", "layer missing", "tensor missing", "layer too many"])
def test_writer_refuses_tensors_of_another_shape(change: str) -> None:
    """Tensors that are not the layout's are a programming error, found before anything is written."""
    name = NAMES.blocks[-1]
    raw = raw_tensors(name)
    if change == "short":
        raw[1][0] = raw[1][0][:-2]
    elif change == "long":
        raw[1][1] += bytes(4)
    elif change == "layer missing":
        raw.pop()
    elif change == "tensor missing":
        raw[0].pop()
    else:
        raw.append(raw[0])
    with pytest.raises(ValueError, match=r"layer 1|zip\(\)"):
        seal_block(MODEL, name, PRODUCER, raw, PUBLISHER)


def test_associated_data_is_what_the_format_says() -> None:
    """FORMAT.md 4.2: domain, NUL, address, descriptor without hashes and offset."""
    header = open_header(sound_blocks()[-1], "block")
    data = segment_associated_data(header.address, header.segments[0].descriptor)
    assert data.startswith(b"kvcdn v1 segment\x00" + header.address + b'{"kind":"window","layer":0,"length":')
    for absent in (b"blake3", b"offset", b"raw_digest"):
        assert absent not in data


def test_commitment_is_the_readers_first_question() -> None:
    """A reader with another text's key is told so before anything is decrypted."""
    header = open_header(sound_blocks()[-1], "block")
    ObjectKeys(NAMES.blocks[-1].content_key, header.salt).check_commitment(header.commitment, "block")
    with pytest.raises(CorruptError, match=r"^block: key commitment"):
        ObjectKeys(NAMES.blocks[0].content_key, header.salt).check_commitment(header.commitment, "block")
    with pytest.raises(CorruptError, match="key commitment"):
        ObjectKeys(NAMES.blocks[-1].content_key, Digest(bytes(32))).check_commitment(header.commitment, "block")
