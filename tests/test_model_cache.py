"""The cache layer that models see: it must be a DynamicLayer to them, whatever happens to it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from kvcdn.errors import UnsupportedModelError, UsageError
from kvcdn.layout import LayerSpec, Layout, TensorSpec
from kvcdn.model.cache import build_cache, cache_argument, make_layer, output_cache
from kvcdn.model.layers import GROWTH_TOKENS, EmptyLayer, IndexedLayer, TokenMajorLayer, WindowLayer
from kvcdn.model.load import bind_model, load_model
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.model.probe import probe_layout
from support.tiny import FULL_ATTENTION_KINDS, SHARED_KINDS, tiny_checkpoint

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


@settings(max_examples=120, deadline=None)
@given(
    steps=st.lists(step | st.tuples(st.just("record"), st.just(0)), max_size=10),
    capacity=st.integers(1, 50),
    window=st.integers(2, 45),
)
def test_any_sequence_of_operations_leaves_what_a_sliding_layer_would_hold(steps, capacity, window):
    """The same with a window: what attention reads, the mask's sizes and the position are the library's at every step."""
    spec = LayerSpec("window", SPEC.tensors, window)
    ours, theirs = WindowLayer(spec, capacity, 0, CPU), DynamicSlidingWindowLayer(window)
    batch, recorded = 1, 0
    for name, argument in steps:
        length = theirs.get_seq_length()
        if name == "update":
            pair = states(argument, batch)
            for got, expected in zip(ours.update(*pair), theirs.update(*pair), strict=True):
                assert torch.equal(expected, got)
            recorded += argument if theirs.record_past else 0
        elif name == "crop" and length > argument and (length < window or (theirs.record_past and recorded >= argument)):
            ours.crop(-argument)
            theirs.crop(-argument)
            recorded = 0
        elif name == "record" and not theirs.record_past:
            ours.activate_past_recording()
            theirs.activate_past_recording()
        elif name == "repeat" and length and batch < 4:
            ours.batch_repeat_interleave(argument)
            theirs.batch_repeat_interleave(argument)
            batch *= argument
        elif name == "reorder" and length:
            order = torch.arange(batch).flip(0)
            ours.reorder_cache(order)
            theirs.reorder_cache(order)
        elif name == "reset":
            ours.reset()
            theirs.reset()
            batch, recorded = 1, 0
        assert theirs.get_seq_length() == ours.get_seq_length()
        assert theirs.get_mask_sizes(3) == ours.get_mask_sizes(3)


def change(layer, name, argument, batch):
    """Does to a layer what is not appending."""
    if name == "crop" and layer.get_seq_length() > argument:
        layer.crop(-argument)
    elif name == "repeat" and layer.get_seq_length():
        layer.batch_repeat_interleave(argument)
    elif name == "reorder" and layer.get_seq_length():
        layer.reorder_cache(torch.arange(batch).flip(0))
    elif name == "reset":
        layer.reset()


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(step, max_size=8), capacity=st.integers(1, 50), first=st.booleans())
def test_any_sequence_of_operations_leaves_what_an_indexed_layer_would_hold(steps, capacity, first):
    """The same with indexer keys, whether a model appends them before K and V or after."""
    spec = LayerSpec("indexed", (*SPEC.tensors, TensorSpec("i", 1, 3, "float32")))
    both = IndexedLayer(spec, capacity, 0, CPU), DynamicIndexedLayer()
    batch = 1
    for name, argument in steps:
        if name == "update":
            pair, keys = states(argument, batch), torch.randn(batch, argument, 3)
            calls = [("update_indexer", (keys,)), ("update", pair)]
            for call, given in calls if first else calls[::-1]:
                ours, theirs = (getattr(layer, call)(*given) for layer in both)
                assert all(torch.equal(expected, got) for expected, got in zip(theirs, ours, strict=True))
        elif name != "repeat" or batch < 4:
            for layer in both:
                change(layer, name, argument, batch)
            length = both[1].get_seq_length()
            batch = batch * argument if name == "repeat" and length else 1 if name == "reset" else batch
        assert both[1].get_seq_length() == both[0].get_seq_length()
        assert not both[1].get_seq_length() or torch.equal(both[1].indexer_keys, both[0].indexer_keys)


def test_a_window_layer_is_cut_back_as_far_as_its_rows_reach():
    """What the library's layer cannot do unless told before; where rows are gone, it is refused, never wrong."""
    spec = LayerSpec("window", SPEC.tensors, 5)
    layer = WindowLayer(spec, 30, 0, CPU)
    pair = states(30)
    layer.update(*pair)
    layer.crop(-12)
    assert (18, 18) == (layer.get_seq_length(), layer.cumulative_length)
    assert torch.equal(pair[0][:, :, 14:18], layer.keys)
    # Room for more is only made by letting go of what no later token reads.
    layer.update(*states(20))
    assert 14 == layer.first
    assert layer.storage[0].shape[0] <= 4 + 20 + GROWTH_TOKENS
    with pytest.raises(UsageError, match="from 14 on"):
        layer.crop(-21)


def test_a_window_layer_filled_from_elsewhere_knows_how_many_tokens_came_before():
    """Rows 40 to 60 of 60 are held; position and mask count from 60, and fewer rows than a window are refused."""
    spec = LayerSpec("window", SPEC.tensors, 16)
    layer = make_layer(spec, 70, 60, CPU, first=40)
    assert (60, (16 - 1 + 3, 45)) == (layer.get_seq_length(), layer.get_mask_sizes(3))
    assert (1, 2, 15, 4) == tuple(layer.keys.shape)
    with pytest.raises(RuntimeError, match="from 46 on"):
        make_layer(spec, 70, 60, CPU, first=46)


def test_a_window_layer_without_its_count_is_wrong_without_a_word(tmp_path):
    """The mistake that the library does not see, and that comparing to the bit does: hence the test above can fail."""
    loaded = load_model(str(tiny_checkpoint(tmp_path, "gemma3_text", dtype=torch.float32)))
    model, argument = loaded.model, cache_argument(loaded.model.forward)
    ids = torch.randint(2, 500, (1, 90))
    logits = []
    with torch.inference_mode():
        for forget in (False, True):
            cache = DynamicCache(config=model.config)
            model(input_ids=ids[:, :80], **{argument: cache})
            for layer in cache.layers:
                if forget and isinstance(layer, DynamicSlidingWindowLayer):
                    layer.cumulative_length = layer.keys.shape[-2]
            logits.append(model(input_ids=ids[:, 80:], **{argument: cache}).logits)
    assert (logits[0] - logits[1]).norm() / logits[0].norm() > 0.01


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_layers_that_share_keep_nothing(tmp_path, kind):
    """The layers that reuse another's KV are in the layout, without tensors."""
    layout = load_model(str(tiny_checkpoint(tmp_path, kind))).identity.layout
    assert ["none", "none"] == [spec.kind for spec in layout.layers[-2:]]
    assert "none" not in [spec.kind for spec in layout.layers[:-2]]
    assert isinstance(make_layer(layout.layers[-1], 10, 5, CPU), EmptyLayer)


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


def test_a_model_that_is_partly_on_disk_computes_the_same_bits(tmp_path):
    """What accelerate offloads is brought back for every pass; a model spread over devices is refused by name."""
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    whole = load_model(str(folder))
    names = ("embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "rotary_emb")
    places = {"lm_head": "cpu", **{f"model.{name}": "disk" if name == "layers.1" else "cpu" for name in names}}
    offload = {"device_map": places, "offload_folder": str(tmp_path / "offloaded"), "dtype": "auto"}
    parted = AutoModelForCausalLM.from_pretrained(folder, **offload).eval()
    bound = bind_model(parted, whole.tokenizer)
    assert bound.identity == whole.identity
    ids = tuple(range(2, 102))
    found = []
    for loaded in (whole, bound):
        blocks = ScheduledPrefill(loaded.model, loaded.identity.layout, len(ids)).run(ids)
        found.append([bytes(tensor) for block in blocks for layer in block.raw_layers() for tensor in layer])
    assert found[0] == found[1]


UNSUPPORTED = {
    "mamba": ("mamba", {}, "begins anew"),
    "a window without a mask": ("moshi", {"ffn_dim": 64, "head_dim": 16}, "moshi: its cache has a window"),
    "a window of one": ("mistral", {"sliding_window": 1}, "a window of 1 tokens"),
    "both directions": ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
    "positions that are told are others": ("roberta", {"is_decoder": True}, "layer 0 keeps other keys and values"),
    "one token at a time": (
        "prophetnet",
        {"num_encoder_layers": 2, "num_decoder_layers": 2},
        "does not read several tokens",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_cache_is_of_another_kind_is_refused_by_name(case):
    """What the format cannot carry is named, never guessed."""
    kind, config, named = UNSUPPORTED[case]
    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    small = {name: value for name, value in small.items() if name != "num_hidden_layers" or kind != "prophetnet"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **config), dtype=torch.bfloat16).eval()
    with pytest.raises(UnsupportedModelError, match=named):
        probe_layout(model)


@pytest.mark.parametrize(("kind", "encoder"), [("whisper", 2), ("whisper", 4), ("bart", 2)])
@pytest.mark.filterwarnings("ignore")
def test_a_decoder_beside_an_encoder_has_a_layout_of_its_own_layers(kind, encoder):
    """Where the library makes room for as many layers as the encoder has, too."""
    decoder = 2
    sizes = {"d_model": 32, "vocab_size": 300, "encoder_layers": encoder, "decoder_layers": decoder, "pad_token_id": 0}
    sizes |= {
        f"{side}_{size}": count for side in ("encoder", "decoder") for size, count in (("attention_heads", 2), ("ffn_dim", 48))
    }
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32).eval()
    layers = probe_layout(model).layers
    assert [True] * decoder == [bool(spec.tensors) for spec in layers]


def test_a_layer_moves_once_when_decoding_has_begun():
    """Token by token its memory is contiguous by head, as attention on a CPU reads it fast; rows and bits stay the same."""
    spec = Layout.uniform_kv(1, 3, 16, "float32").layers[0]
    layer = make_layer(spec, 40, 0, torch.device("cpu"))
    stock = DynamicLayer()
    places = []
    for count in (30, 1, 1, 1, 1, 300, 1, 1):
        states = torch.randn(1, 3, count, 16), torch.randn(1, 3, count, 16)
        ours, theirs = layer.update(*states), stock.update(*states)
        assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
        places.append((layer.storage[0].data_ptr(), layer.storage[0].stride(0)))
    strides = [stride for _, stride in places]
    assert [48, 48, 16, 16, 16, 16, 16, 16] == strides
    # Moved at the second single token, and once more when it was full.
    assert 3 == len({place for place, _ in places})
    # A document's last block may have one token: whoever fills and reads rows then finds them where they were.
    filled = make_layer(spec, 40, 0, torch.device("cpu"))
    filled.update(torch.randn(1, 3, 30, 16), torch.randn(1, 3, 30, 16))
    filled.update(torch.randn(1, 3, 1, 16), torch.randn(1, 3, 1, 16))
    assert all(rows.is_contiguous() for rows in filled.rows(0, 31))
