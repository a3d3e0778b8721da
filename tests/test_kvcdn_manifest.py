"""Manifests and layouts: written, read back, and refused where they would not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attacks.forge import MODEL, PUBLISHER, sound_blocks, sound_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.digest import Digest, hash_bytes
from kvcdn.keys import PrefixNames
from kvcdn.layout import STATE_NAMES, LayerSpec, Layout, StateSpec, TensorSpec
from kvcdn.manifest import MAX_BLOCKS, MAX_MANIFEST_BYTES, BlockEntry, Manifest, open_manifest
from kvcdn.producer import Producer

SOUND = open_manifest(sound_manifest(), "manifest")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=256)

TENSOR = st.tuples(st.integers(1, 4096), st.integers(1, 65_536), st.sampled_from(["bfloat16", "float16", "float32"]))


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, TEXT, st.integers(0, 1 << 40), st.none() | st.integers(0, 1 << 40))
def test_manifest_comes_back(name: str, label: str, device: str, created: int, expires: int | None) -> None:
    """Any text and time survive; the bytes of a manifest follow from its contents."""
    producer = replace(SOUND.producer, device=device)
    manifest = replace(SOUND, model_name=name, label=label, created=created, expires=expires, producer=producer)
    data = manifest.seal(PUBLISHER)
    assert manifest == open_manifest(data, "manifest")
    assert data == manifest.seal(PUBLISHER)


def test_totals() -> None:
    """A manifest tells what it costs to fetch and to hold."""
    assert sum(len(data) for data in sound_blocks()) == SOUND.stored_bytes
    assert SOUND.tokens * MODEL.layout.bytes_per_token == SOUND.raw_bytes


def test_half_a_surrogate_pair_is_no_label() -> None:
    """What came from a command line in a broken encoding is refused by the writer already."""
    with pytest.raises(ValueError, match="surrogate"):
        replace(SOUND, label="\udc80").seal(PUBLISHER)


def test_longest_manifest_fits() -> None:
    """The limits agree: a manifest of the most blocks, for a model of 128 layers, is within the header's size."""
    layout = Layout.uniform_kv(128, 8, 128, "bfloat16")
    entry = BlockEntry(Digest(bytes(32)), layout.block_tokens, 16 << 20, hash_bytes(b"etag"))
    producer = Producer("2.6", "5.15", "cpu", "sdpa", layout.block_tokens)
    manifest = replace(
        SOUND, layout=layout, tokens=MAX_BLOCKS * layout.block_tokens, blocks=(entry,) * MAX_BLOCKS, producer=producer
    )
    data = manifest.seal(PUBLISHER)
    assert len(data) <= MAX_MANIFEST_BYTES
    assert manifest == open_manifest(data, "manifest")


def test_oversized_manifest_is_not_written() -> None:
    """What no reader would take is not written."""
    with pytest.raises(ValueError, match="exceeds"):
        replace(SOUND, blocks=SOUND.blocks * MAX_BLOCKS).seal(PUBLISHER)


def test_manifest_knows_its_names() -> None:
    """A manifest's address, and those of its blocks, are those that the text gives."""
    from attacks.forge import NAMES

    assert isinstance(NAMES, PrefixNames)
    assert NAMES.manifest_address == SOUND.address
    assert [name.address for name in NAMES.blocks] == [entry.address for entry in SOUND.blocks]
    assert isinstance(SOUND, Manifest)


PAIR = st.tuples(TENSOR, TENSOR).map(lambda pair: (TensorSpec("k", *pair[0]), TensorSpec("v", *pair[1])))

INDEX = TENSOR.map(lambda tensor: TensorSpec("i", 1, *tensor[1:]))

KEEPING = (
    st.builds(LayerSpec, st.just("kv"), PAIR)
    | st.builds(LayerSpec, st.just("window"), PAIR, st.integers(2, 1 << 24))
    | st.builds(LayerSpec, st.just("indexed"), st.tuples(PAIR, INDEX).map(lambda tensors: (*tensors[0], tensors[1])))
)

STATES = st.lists(st.sampled_from(STATE_NAMES), max_size=3, unique=True).map(
    lambda names: tuple(StateSpec(name, (3, 4), "float32") for name in sorted(names))
)

KEEPING = st.tuples(KEEPING, STATES).map(lambda layer: replace(layer[0], states=layer[1]))

LAYERS = st.tuples(KEEPING, st.lists(KEEPING | st.just(LayerSpec("none", ())), max_size=4)).flatmap(
    lambda layers: st.permutations([layers[0], *layers[1]])
)


@settings(max_examples=100, deadline=None)
@given(LAYERS)
def test_layout_comes_back(layers: list[LayerSpec]) -> None:
    """Any layout within the bounds reads back the same, and its block length is the largest that fits."""
    layout = Layout(tuple(layers))
    assert layout == Layout.from_json(layout.to_json(), "layout")
    length = layout.block_tokens
    assert length.bit_count() == 1
    assert length == 64 or length * layout.bytes_per_token <= 16 << 20
    assert length == 1024 or 2 * length * layout.bytes_per_token > 16 << 20


@pytest.mark.parametrize(("tokens", "first"), [(0, 0), (1, 0), (99, 0), (100, 1), (101, 2), (5000, 4901)])
def test_a_window_needs_its_last_rows(tokens: int, first: int) -> None:
    """Behind a prefix a window of 100 reads 99 tokens before; full attention reads all, and an empty layer nothing."""
    pair = (TensorSpec("k", 1, 2, "float32"), TensorSpec("v", 1, 1, "float32"))
    window, full, empty = LayerSpec("window", pair, 100), LayerSpec("kv", pair), LayerSpec("none", ())
    assert (first, 0, tokens) == tuple(spec.first_needed(tokens) for spec in (window, full, empty))
    assert 12 * (tokens - first) + 12 * tokens == Layout((window, full, empty)).needed_bytes(tokens)
