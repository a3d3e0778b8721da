"""The cache layer that models see: it must be a DynamicLayer to them, whatever happens to it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvcdn.errors import UnsupportedModelError
from kvcdn.layout import LayerSpec, TensorSpec
from kvcdn.model.cache import TokenMajorLayer, build_cache, cache_argument, output_cache, probe_layout
from kvcdn.model.load import load_model
from support.tiny import FULL_ATTENTION_KINDS, tiny_checkpoint

SPEC = LayerSpec("kv", (TensorSpec("k", 2, 4, "bfloat16"), TensorSpec("v", 2, 6, "bfloat16")))
CPU = torch.device("cpu")


def states(tokens: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(batch, 2, tokens, 4, dtype=torch.bfloat16),
        torch.randn(batch, 2, tokens, 6, dtype=torch.bfloat16),
    )


step = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 40)),
    st.tuples(st.just("crop"), st.integers(0, 20)),
    st.tuples(st.just("repeat"), st.just(2)),
    st.tuples(st.just("reorder"), st.just(0)),
    st.tuples(st.just("reset"), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(step, max_size=8), capacity=st.integers(1, 50))
def test_any_sequence_of_operations_leaves_what_a_dynamic_layer_would_hold(steps, capacity):
    """Appending, cropping, repeating, reordering and resetting give the library's own result at every step."""
    ours, theirs = TokenMajorLayer(SPEC, capacity, 0, CPU), DynamicLayer()
    batch = 1
    for name, argument in steps:
        if name == "update":
            pair = states(argument, batch)
            for got, expected in zip(ours.update(*pair), theirs.update(*pair), strict=True):
                assert torch.equal(expected, got)
        elif name == "crop" and theirs.get_seq_length() > argument:
            ours.crop(-argument)
            theirs.crop(-argument)
        elif name == "repeat" and theirs.get_seq_length() and batch < 4:
            ours.batch_repeat_interleave(argument)
            theirs.batch_repeat_interleave(argument)
            batch *= argument
        elif name == "reorder" and theirs.get_seq_length():
            order = torch.arange(batch).flip(0)
            ours.reorder_cache(order)
            theirs.reorder_cache(order)
        elif name == "reset":
            ours.reset()
            theirs.reset()
            batch = 1
        assert theirs.get_seq_length() == ours.get_seq_length()


def test_the_first_use_waits_for_the_bytes_and_later_ones_do_not():
    """A layer may be handed out before it is filled: `update` waits once."""
    calls = []
    layer = TokenMajorLayer(SPEC, 8, 3, CPU, wait=lambda: calls.append(1))
    assert 3 == layer.get_seq_length()
    assert [] == calls
    layer.update(*states(1))
    layer.update(*states(1))
    assert [1] == calls


def test_an_error_of_the_filler_reaches_the_model():
    """A layer whose bytes never came must not be computed with."""

    def wait() -> None:
        raise UnsupportedModelError("gone")

    layer = TokenMajorLayer(SPEC, 8, 3, CPU, wait=wait)
    with pytest.raises(UnsupportedModelError):
        layer.update(*states(1))


@pytest.mark.parametrize("kind", FULL_ATTENTION_KINDS)
def test_a_model_computes_the_same_bits_from_our_layers_as_from_its_own(tmp_path, kind):
    """Token-major memory is a matter of strides: logits and cache are equal to the bit, for each architecture."""
    loaded = load_model(str(tiny_checkpoint(tmp_path, kind)))
    layout = loaded.identity.layout
    ids = torch.randint(2, 500, (1, 70))
    ours = build_cache(loaded.model, [TokenMajorLayer(spec, 40, 0, CPU) for spec in layout.layers])
    theirs = DynamicCache(config=loaded.model.config)
    argument = cache_argument(loaded.model.forward)
    with torch.inference_mode():
        for start, end in ((0, 33), (33, 60), (60, 61), (61, 70)):
            outputs = [loaded.model(input_ids=ids[:, start:end], **{argument: cache}) for cache in (ours, theirs)]
            assert torch.equal(outputs[0].logits, outputs[1].logits)
    for mine, its in zip(ours.layers, output_cache(outputs[1]).layers, strict=True):
        assert torch.equal(mine.keys, its.keys)
        assert torch.equal(mine.values, its.values)


UNSUPPORTED = {
    "gemma3_text": ({}, "DynamicSlidingWindowLayer"),
    "mamba": ({}, "LinearAttentionLayer"),
    "qwen3_next": ({}, "LinearAttentionLayer"),
    "mistral": ({"sliding_window": 16}, "DynamicSlidingWindowLayer"),
    "llama": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, "dynamic rope"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_cache_is_of_another_kind_is_refused_by_name(tmp_path, kind):
    """What the format cannot carry is named, never guessed."""
    config, named = UNSUPPORTED[kind]
    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **config), dtype=torch.bfloat16).eval()
    with pytest.raises(UnsupportedModelError, match=named):
        probe_layout(model)
