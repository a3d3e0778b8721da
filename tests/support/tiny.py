"""Tiny models of real architecture classes, with random weights and a real tokenizer, saved as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

TEXT = (ROOT / "LICENSE").read_text("utf-8")
"""A real text of some 3,000 tokens under the tiny tokenizer."""

FULL_ATTENTION_KINDS = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "phi", "qwen3_moe", "olmo2")
"""Architectures of full attention, tried in every test of layers and schedules."""

MORE_FULL_ATTENTION_KINDS = (
    "phi3", "mixtral", "gemma", "glm", "glm4", "glm4_moe", "minimax_m2", "falcon", "gpt_bigcode", "gpt2", "starcoder2",
    "cohere", "stablelm", "smollm3", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
"""More of them: mixtures of experts, one KV head for all queries, absolute positions, and latents (MLA)."""

WINDOW_KINDS = (
    "mistral-window", "qwen2-window", "ministral", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "olmo3", "exaone4",
    "llama4_text",
)  # fmt: skip
"""Sliding windows in all layers or in some, shorter and longer than a block of 64 tokens; chunked attention."""

INDEXED_KINDS = ("deepseek_v32", "glm_moe_dsa")
"""Attention that an indexer chooses tokens for; in the second, layers that attend by another's choice."""

STATE_KINDS = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mamba2", "bamba", "falcon_h1", "zamba2", "nemotron_h",
    "granitemoehybrid", "lfm2", "lfm2_moe", "olmo_hybrid", "kimi_linear",
)  # fmt: skip
"""Linear attention and convolutions, alone, beside attention in other layers, or in the same."""

REFUSED_STATE_KINDS = ("mamba", "falcon_mamba", "jamba", "zamba")
"""Mamba's first kind, which the library cannot continue by more than one token."""

SHARED_KINDS = ("gemma3n_text", "gemma4_text")
"""Layers that reuse another layer's KV, besides windows."""

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "head_dim": 8,
    "num_key_value_heads": 4,
}

_EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": _EXPERTS,
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "glm4_moe": _EXPERTS,
    "minimax_m2": _EXPERTS,
    "gemma": {"num_key_value_heads": 1},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "gpt_bigcode": {"multi_query": True},
    "starcoder2": {"sliding_window": None},
    "deepseek_v2": {**_EXPERTS, **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
}
"""What an architecture needs besides."""

_INDEXER: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 40}

_EXTRA |= {
    "deepseek_v32": {**_EXPERTS, **_LATENT, **_INDEXER},
    "glm_moe_dsa": {**_EXPERTS, **_LATENT, **_INDEXER, "indexer_types": ["full", "shared", "full"]},
    "mistral-window": {"sliding_window": 100},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "ministral": {"sliding_window": 2},
    "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 32, "num_hidden_layers": 7},
    "gpt_oss": {**_EXPERTS, "sliding_window": 65},
    "cohere2": {"sliding_window": 500, "num_hidden_layers": 4},
    "olmo3": {"sliding_window": 130, "num_hidden_layers": 4},
    "exaone4": {"sliding_window": 33, "num_hidden_layers": 4},
    "llama4_text": {**_EXPERTS, "attention_chunk_size": 48, "num_hidden_layers": 4},
    "gemma3n_text": {
        "sliding_window": 32,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 800,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "sliding_window": 32,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "vocab_size_per_layer_input": 800,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
    },
}

_MAMBA2: dict[str, Any] = {"n_groups": 1, "state_size": 8, "conv_kernel": 4, "expand": 2, "chunk_size": 16}

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}

_EXTRA |= {
    "qwen3_next": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": _DELTA,
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {**_MAMBA2, "num_heads": 8, "head_dim": 16},
    "jamba": {**_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16},
    "granitemoehybrid": {
        **_EXPERTS,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "zamba": {
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
    },
    "nemotron_h": {
        **_EXPERTS,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "kimi_linear": {
        **_EXPERTS,
        **_LATENT,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}

_ARCHITECTURE = {"mistral-window": "mistral", "qwen2-window": "qwen2"}
"""Kinds that are an architecture with another configuration."""

_NOT_SETTABLE = {"falcon": ("head_dim",)}
"""Settings that an architecture derives and does not take."""


def tiny_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on a real text, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def tiny_checkpoint(
    folder: Path,
    kind: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    strength: float = 1.0,
    **config: Any,
) -> Path:
    """Writes a checkpoint of the kind `kind` into `folder` and returns it. Equal arguments give equal weights.

    Random weights as the library makes them hardly let one token see another: with a `strength` above 1 they do.
    """
    tokenizer = tiny_tokenizer(folder)
    settings = {**_SMALL, **_EXTRA.get(kind, {}), "vocab_size": len(tokenizer), **config}
    for name in _NOT_SETTABLE.get(kind, ()):
        settings.pop(name)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(_ARCHITECTURE.get(kind, kind), **settings), dtype=dtype)
    strengthen(model, strength)
    model.save_pretrained(folder)
    return folder


def strengthen(model: Any, strength: float) -> None:
    """Makes every matrix of `model` so many times larger."""
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1 and tensor.is_floating_point():
                tensor.mul_(strength)
