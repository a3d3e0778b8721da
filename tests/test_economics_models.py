"""The economics' models: KV sizes equal to the checkpoints', growth in windows, and what a config.json tells."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.economics.config import model_from_config
from kvcdn.economics.models import MODELS, Attention, grouped
from kvcdn.errors import UnsupportedModelError, UsageError

KV = {
    "smollm2-135m": (23_040, 23_040, 0),
    "qwen3-0.6b": (114_688, 114_688, 0),
    "qwen3-1.7b": (114_688, 114_688, 0),
    "qwen3-4b": (147_456, 147_456, 0),
    "qwen3-8b": (147_456, 147_456, 0),
    "qwen3-14b": (163_840, 163_840, 0),
    "qwen3-32b": (262_144, 262_144, 0),
    "qwen3-30b-a3b": (98_304, 98_304, 0),
    "qwen3-235b-a22b": (192_512, 192_512, 0),
    "qwen3.6-27b": (65_536, 65_536, 75.5e6),
    "qwen3.6-35b-a3b": (20_480, 20_480, 31.5e6),
    "llama-3.1-8b": (131_072, 131_072, 0),
    "llama-3.1-70b": (327_680, 327_680, 0),
    "llama-4-scout": (196_608, 49_152, 0),
    "gpt-oss-20b": (49_152, 24_576, 0),
    "gpt-oss-120b": (73_728, 36_864, 0),
    "deepseek-v3": (70_272, 70_272, 0),
    "deepseek-v3-expanded": (4_997_120, 4_997_120, 0),
    "deepseek-v3.2": (85_888, 85_888, 0),
    "kimi-k2": (70_272, 70_272, 0),
    "gemma-3-4b": (139_264, 20_480, 0),
    "gemma-3-12b": (393_216, 65_536, 0),
    "gemma-3-27b": (507_904, 81_920, 0),
    "glm-4.6": (376_832, 376_832, 0),
    "glm-5": (109_824, 109_824, 0),
    "mistral-small-3": (163_840, 163_840, 0),
    "minimax-m2.5": (253_952, 253_952, 0),
}
"""Bytes a token in bfloat16 at first, beyond the window, and of state, as read from the checkpoints' configurations."""

QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip

KIMI_K2 = {
    "model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64,
    "intermediate_size": 18432, "vocab_size": 163840, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 1, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip

DEEPSEEK_V32 = {**KIMI_K2, "model_type": "deepseek_v32", "num_attention_heads": 128, "n_routed_experts": 256,
                "vocab_size": 129280,
                "first_k_dense_replace": 3, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}  # fmt: skip

QWEN35_35B = {
    "model_type": "qwen3_5_moe", "text_config": {
        "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "moe_intermediate_size": 512,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512, "vocab_size": 248320, "attn_output_gate": True,
    },
}  # fmt: skip

GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
}  # fmt: skip

GEMMA_3_4B = {
    "model_type": "gemma3", "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 1024, "sliding_window_pattern": 6, "vocab_size": 262208, "model_type": "gemma3_text",
    },
}  # fmt: skip

LLAMA_4_SCOUT = {
    "model_type": "llama4", "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "vocab_size": 202048, "attention_chunk_size": 8192,
        "no_rope_layers": [], "tie_word_embeddings": False,
    },
}  # fmt: skip

CONFIGS = {
    "qwen3-4b": QWEN3_4B,
    "llama-3.1-70b": LLAMA_70B,
    "kimi-k2": KIMI_K2,
    "deepseek-v3.2": DEEPSEEK_V32,
    "qwen3.6-35b-a3b": QWEN35_35B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gemma-3-4b": GEMMA_3_4B,
    "llama-4-scout": LLAMA_4_SCOUT,
}


def test_table_holds_these_models():
    """Every model of the table has its size checked below."""
    assert set(KV) == set(MODELS)


@pytest.mark.parametrize("name", KV)
def test_kv_is_the_checkpoints(name):
    """Bytes of a token at the beginning, of one far beyond any window, and of the state."""
    first, later, state = KV[name]
    model = MODELS[name]
    assert state == model.state_bytes
    assert first == model.kv_bytes(1) - state
    assert later == model.kv_bytes(500_001) - model.kv_bytes(500_000)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_and_table_agree(name):
    """A config.json gives the table's KV, attention and, within a few per cent, its parameters: two ways to the same sizes."""
    table, read = MODELS[name], model_from_config(CONFIGS[name], name)
    for tokens in (1, 100, 5000, 100_000):
        assert table.kv_bytes(tokens) - table.state_bytes == read.kv_bytes(tokens) - read.state_bytes
        shown = [sum(g.layers * g.width * g.pairs(tokens) for g in model.attention) for model in (table, read)]
        assert shown[0] == shown[1]
    assert read.state_bytes == pytest.approx(table.state_bytes, rel=0.08)
    assert read.parameters == pytest.approx(table.parameters, rel=0.04)
    assert read.active == pytest.approx(table.active, rel=0.17)  # a card may leave embeddings out


@given(st.integers(1, 300), st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_pairs_are_counted_one_by_one(tokens, window):
    """The closed form equals a count over every token."""
    group = Attention(1, 1, 1, None, window)
    assert sum(min(position, window) for position in range(1, tokens + 1)) == group.pairs(tokens)


def test_flops_of_a_pass_add_up():
    """A text in two passes costs what it costs in one."""
    model = MODELS["gemma-3-4b"]
    assert model.flops(0, 9000) == pytest.approx(model.flops(0, 700) + model.flops(700, 9000), rel=1e-12)
    assert grouped(2, 4, 2, 8).width == 32


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"layer_types": ["full_attention"] * 35 + ["mamba"]}, "mamba"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer types for 36 layers"),
    ],
)
def test_unknown_kind_is_refused_by_name(change, word):
    """A kind of cache that is not known is never guessed."""
    with pytest.raises(UnsupportedModelError, match=word):
        model_from_config({**QWEN3_4B, **change}, "folder")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", None), ("num_hidden_layers", -3), ("num_hidden_layers", 1 << 30), ("hidden_size", "x"),
     ("num_key_value_heads", 2.5), ("vocab_size", True), ("head_dim", float("nan")), ("num_attention_heads", [8])],
)  # fmt: skip
def test_bad_config_is_one_sentence(key, value):
    """Wherever a number should be and none is, the error names the key's trouble."""
    with pytest.raises(UsageError, match="folder: "):
        model_from_config({**QWEN3_4B, key: value}, "folder")
