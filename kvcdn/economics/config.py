"""Reading a model's sizes from its config.json: attention kinds, KV, fixed states, and a count of parameters.

A kind of cache that is not known here is refused by name, never guessed. Parameters are counted from the matrices that
the usual decoder has (embeddings, projections, dense or expert layers); norms, biases and encoders for images are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvcdn.economics.models import KV_ELEMENT_BYTES, Attention, Model, grouped, latent, sparse
from kvcdn.errors import UnsupportedModelError, UsageError

_MOST = 1 << 40
"""No dimension, count or vocabulary comes near; a larger one is a mistake or a joke."""

_FOREIGN = ("compress_ratios", "state_size", "ssm_cfg", "mamba_d_state", "ssm_state_size", "num_kv_shared_layers")
"""Keys of kinds of cache that are not known here: compressed, state space, shared between layers."""

_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class _Config:
    """A config.json, its text part where it has several, read with checks."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        text = values.get("text_config")
        self.values: Mapping[str, Any] = {**values, **text} if isinstance(text, dict) else values
        self.name = name

    def whole(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is set, a positive integer (zero where the default is zero)."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if type(value) is not int or not (0 if default == 0 else 1) <= value <= _MOST:
                raise UsageError(f"{self.name}: {key} must be a positive whole number, not {str(value)[:40]!r}")
            return value
        if default is None:
            raise UsageError(f"{self.name}: no {keys[0]}", hint="give --kv-bytes-per-token and --parameters instead")
        return default

    def flag(self, key: str, *, default: bool = False) -> bool:
        return bool(self.values.get(key, default))

    def strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        return [str(item) for item in value] if isinstance(value, list) else []


def model_from_config(values: Mapping[str, Any], name: str) -> Model:
    """The model that the contents of a config.json describe. Raises UsageError, or UnsupportedModelError for its kind."""
    config = _Config(values, name)
    foreign = [key for key in _FOREIGN if config.values.get(key)]
    if config.flag("is_encoder_decoder") or foreign:
        what = "an encoder-decoder" if not foreign else f"a kind of cache that is not known here ({foreign[0]})"
        raise UnsupportedModelError(
            f"{name}: {config.values.get('model_type')} is {what}", hint="give --kv-bytes-per-token and --parameters instead"
        )
    kinds = Counter(_layer_kinds(config))
    attention: list[Attention] = []
    for kind, layers in sorted(kinds.items()):
        if kind != "linear_attention":
            attention += _attention(config, kind, layers)
    state = kinds["linear_attention"] * _state_bytes(config) if kinds["linear_attention"] else 0
    parameters, active = _parameters(config, kinds)
    shown = ", ".join(f"{layers} {kind.replace('_', ' ')}" for kind, layers in sorted(kinds.items()))
    return Model(
        name, parameters, active, tuple(attention), state, kind=shown, source="config.json; parameters counted from it"
    )


def _layer_kinds(config: _Config) -> list[str]:
    layers = config.whole("num_hidden_layers", "n_layer", "num_layers")
    if layers > 1 << 16:
        raise UsageError(f"{config.name}: {layers} layers are more than any model has")
    listed = config.strings("layer_types")
    if listed:
        unknown = set(listed) - {"full_attention", "linear_attention", *_WINDOWED}
        if unknown or len(listed) != layers:
            what = f"a layer of the kind {min(unknown)!r}" if unknown else f"{len(listed)} layer types for {layers} layers"
            raise UnsupportedModelError(f"{config.name}: {what}", hint="give --kv-bytes-per-token and --parameters instead")
        return listed
    pattern = config.whole("sliding_window_pattern", default=0)
    interval = config.whole("full_attention_interval", default=0)
    rotary = config.values.get("no_rope_layers")
    if pattern:
        return ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]
    if interval:
        return ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]
    if config.whole("attention_chunk_size", default=0) and isinstance(rotary, list):
        # Llama 4: layers with rotary embeddings see a chunk, those without see all; an empty list means every fourth without.
        full = [not flag for flag in rotary] or [(layer + 1) % 4 == 0 for layer in range(layers)]
        return ["full_attention" if is_full else "chunked_attention" for is_full in full]
    windowed = config.values.get("sliding_window") is not None and config.flag("use_sliding_window", default=True)
    return ["sliding_attention" if windowed else "full_attention"] * layers


def _attention(config: _Config, kind: str, layers: int) -> list[Attention]:
    heads = config.whole("num_attention_heads", "n_head")
    window = config.whole(_WINDOWED[kind]) if kind in _WINDOWED else None
    if config.whole("kv_lora_rank", default=0):
        base = latent(
            layers,
            heads,
            config.whole("kv_lora_rank"),
            config.whole("qk_rope_head_dim"),
            config.whole("qk_nope_head_dim"),
            config.whole("v_head_dim"),
        )
        top = config.whole("index_topk", default=0)
        return list(sparse(base, config.whole("index_n_heads"), config.whole("index_head_dim"), top)) if top else [base]
    return [grouped(layers, heads, config.whole("num_key_value_heads", default=heads), _head_dim(config), window)]


def _head_dim(config: _Config) -> int:
    return config.whole("head_dim", default=0) or config.whole("hidden_size", "n_embd") // config.whole(
        "num_attention_heads", "n_head"
    )


def _linear(config: _Config) -> tuple[int, int, int]:
    """Of a gated delta layer: width of Q and K together, width of V, elements of the state."""
    keys, values = config.whole("linear_num_key_heads"), config.whole("linear_num_value_heads")
    key_dim, value_dim = config.whole("linear_key_head_dim"), config.whole("linear_value_head_dim")
    return 2 * keys * key_dim, values * value_dim, values * key_dim * value_dim


def _state_bytes(config: _Config) -> int:
    """One linear layer's state: the recurrence, and the convolution's last inputs."""
    query_key, value, recurrent = _linear(config)
    return (recurrent + (query_key + value) * config.whole("linear_conv_kernel_dim", default=4)) * KV_ELEMENT_BYTES


def _parameters(config: _Config, kinds: Counter[str]) -> tuple[float, float]:
    """All parameters, and those that a token uses."""
    layers, hidden = sum(kinds.values()), config.whole("hidden_size", "n_embd")
    tied = config.flag("tie_word_embeddings", default=str(config.values.get("model_type")).startswith("gemma"))
    both = config.whole("vocab_size") * hidden * (1 if tied else 2)
    both += (layers - kinds["linear_attention"]) * _projections(config, hidden)
    if kinds["linear_attention"]:
        query_key, value, _ = _linear(config)
        both += kinds["linear_attention"] * hidden * (query_key + 3 * value)
    experts = config.whole("num_local_experts", "num_experts", "n_routed_experts", default=0)
    if not experts:
        dense = layers * 3 * hidden * config.whole("intermediate_size", "n_inner")
        return both + dense, both + dense
    size = 3 * hidden * config.whole("moe_intermediate_size", "intermediate_size")
    sparse_layers = _expert_layers(config, layers)
    dense = 3 * hidden * config.whole("intermediate_size_mlp", "intermediate_size", default=0) * (layers - sparse_layers)
    shared = 3 * hidden * config.whole("shared_expert_intermediate_size", default=0) or size * _shared_experts(config)
    both += dense + sparse_layers * (shared + hidden * experts)
    used = config.whole("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
    return both + sparse_layers * experts * size, both + sparse_layers * used * size


def _shared_experts(config: _Config) -> int:
    llama4 = str(config.values.get("model_type")).startswith("llama4")
    return config.whole("n_shared_experts", default=0) or int(llama4)


def _expert_layers(config: _Config, layers: int) -> int:
    """Layers with experts; the others are dense."""
    first = config.whole("first_k_dense_replace", default=0)
    dense = config.values.get("mlp_only_layers")
    every = config.whole("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    left = layers - first - (len(dense) if isinstance(dense, list) else 0)
    return max(left // every, 0)


def _projections(config: _Config, hidden: int) -> int:
    """Query, key, value and output matrices of one layer."""
    heads = config.whole("num_attention_heads", "n_head")
    rank = config.whole("kv_lora_rank", default=0)
    if not rank:
        dim = _head_dim(config)
        key_value = 2 * config.whole("num_key_value_heads", default=heads) * dim
        gate = heads * dim if config.flag("attn_output_gate") else 0
        return hidden * (2 * heads * dim + key_value + gate)
    nope, rope, value = (config.whole(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank = config.whole("q_lora_rank", default=0)
    query = heads * (nope + rope)
    queries = hidden * query_rank + query_rank * query if query_rank else hidden * query
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
