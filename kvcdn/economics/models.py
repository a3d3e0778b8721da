"""Models: what the economics needs to know of one, and a table of well-known ones.

A model costs two FLOPs a parameter and token, and attention: four FLOPs a unit of width for every pair of a token and one it
attends to. Its KV grows with the text, up to the window in layers that have one, beside a state of fixed size in linear
layers. FLOPs count every active parameter, mostly with embedding tables, as the usual estimate does: for models below
a billion parameters that is up to a quarter too many, in favour of reuse; from 8 billion on under 15 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KV_ELEMENT_BYTES = 2
"""bfloat16 and float16, in which these models keep their KV."""


@dataclass(frozen=True)
class Attention:
    """Equal attention layers. `width` is heads x (query-key dimension + value dimension) / 2."""

    layers: int
    bytes_per_token: float
    """KV of one token in one of the layers."""
    width: float
    kept: int | None = None
    """Tokens whose KV stays: the window. None keeps all."""
    attended: int | None = None
    """Tokens that one token attends to at most, where fewer than all."""

    def kv_bytes(self, tokens: int) -> float:
        return self.layers * self.bytes_per_token * (tokens if self.kept is None else min(tokens, self.kept))

    def pairs(self, tokens: int) -> float:
        """Pairs of a token and an earlier one or itself that it attends to, in a text of `tokens`."""
        if self.attended is None or tokens <= self.attended:
            return tokens * (tokens + 1) / 2
        return self.attended * (self.attended + 1) / 2 + (tokens - self.attended) * self.attended


@dataclass(frozen=True)
class Model:
    """One model's sizes. `parameters` are those that must be held, `active` those that one token uses."""

    name: str
    parameters: float
    active: float
    attention: tuple[Attention, ...]
    state_bytes: float = 0.0
    weight_bytes: float = 0.0
    """The checkpoint as served; zero for two bytes a parameter."""
    kind: str = "full attention"
    source: str = ""
    date: str = ""

    @property
    def resident_bytes(self) -> float:
        return self.weight_bytes or 2 * self.parameters

    def kv_bytes(self, tokens: int) -> float:
        """Raw KV of a text of `tokens`, state included."""
        return self.state_bytes + sum(group.kv_bytes(tokens) for group in self.attention)

    def flops(self, start: int, end: int) -> float:
        """FLOPs of a forward pass over the tokens from `start` to `end`, given those before."""
        pairs = sum(4 * g.layers * g.width * (g.pairs(end) - g.pairs(start)) for g in self.attention)
        return 2 * self.active * (end - start) + pairs

    def read_bytes(self, start: int, end: int) -> float:
        """Bytes that such a pass must at least read from the device's memory: the weights it uses, and the KV before it.

        Of a mixture of experts, no more than each token's active share, as if no two tokens met in an expert, and at most all.
        """
        used = min(1.0, self.active * (end - start) / self.parameters) if self.parameters else 0.0
        return self.resident_bytes * used + self.kv_bytes(start)


def grouped(layers: int, heads: int, kv_heads: int, dim: int, window: int | None = None) -> Attention:
    """Grouped-query attention, full or in a window."""
    return Attention(layers, 2 * kv_heads * dim * KV_ELEMENT_BYTES, heads * dim, window, window)


def latent(layers: int, heads: int, rank: int, rope: int, nope: int, value: int) -> Attention:
    """Multi-head latent attention (MLA), of which the latent and the rotary key are kept."""
    return Attention(layers, (rank + rope) * KV_ELEMENT_BYTES, heads * (nope + rope + value) / 2)


def sparse(base: Attention, index_heads: int, index_dim: int, top: int) -> tuple[Attention, Attention]:
    """`base` with an indexer that chooses `top` tokens for each (DeepSeek sparse attention). The indexer itself sees all."""
    chosen = Attention(base.layers, base.bytes_per_token + index_dim * KV_ELEMENT_BYTES, base.width, None, top)
    return chosen, Attention(base.layers, 0, index_heads * index_dim / 2)


_CONFIGS = "KV: checkpoint config.json, as mirrored in ai-dynamo/aiconfigurator and AI-Hypercomputer/maxtext"

_DATE = "2026-11"


def _model(
    name: str,
    sizes: tuple[float, float],
    attention: Iterable[Attention],
    kind: str = "full attention",
    *,
    state: float = 0.0,
    weights: float = 0.0,
    counted: str = "model card",
) -> Model:
    source = f"{_CONFIGS}; parameters: {counted}"
    parameters, active = sizes
    return Model(name, parameters, active, tuple(attention), state, weights, kind, source, _DATE)


_GEMMA = "Gemma 3 technical report, table 1, without the vision encoder"

_GPT_OSS = "model card, as are the bytes of the checkpoint (MXFP4)"

_FP8 = "model card; weights at one byte each (FP8 checkpoint)"

_COUNTED = "counted from config.json"

_MLA = "MLA"

_SPARSE = "MLA, sparse"

_WINDOW = "sliding window"

_WINDOW_EXPERTS = "sliding window, MoE"

_HYBRID = "hybrid linear"

_TABLE = (
    _model("smollm2-135m", (134.5e6, 134.5e6), [grouped(30, 9, 3, 64)], counted=_COUNTED),
    _model("qwen3-0.6b", (0.596e9, 0.596e9), [grouped(28, 16, 8, 128)], counted=_COUNTED),
    _model("qwen3-1.7b", (1.72e9, 1.72e9), [grouped(28, 16, 8, 128)], counted=_COUNTED),
    _model("qwen3-4b", (4.02e9, 4.02e9), [grouped(36, 32, 8, 128)], counted=_COUNTED),
    _model("qwen3-8b", (8.19e9, 8.19e9), [grouped(36, 32, 8, 128)], counted=_COUNTED),
    _model("qwen3-14b", (14.8e9, 14.8e9), [grouped(40, 40, 8, 128)]),
    _model("qwen3-32b", (32.8e9, 32.8e9), [grouped(64, 64, 8, 128)]),
    _model("qwen3-30b-a3b", (30.5e9, 3.3e9), [grouped(48, 32, 4, 128)], "full attention, MoE"),
    _model("qwen3-235b-a22b", (235e9, 22e9), [grouped(94, 64, 4, 128)], "full attention, MoE"),
    _model("qwen3.6-27b", (27e9, 27e9), [grouped(16, 24, 4, 256)], _HYBRID, state=75.5e6),
    _model("qwen3.6-35b-a3b", (35e9, 3e9), [grouped(10, 16, 2, 256)], f"{_HYBRID}, MoE", state=31.5e6),
    _model("llama-3.1-8b", (8.03e9, 8.03e9), [grouped(32, 32, 8, 128)], counted=_COUNTED),
    _model("llama-3.1-70b", (70.6e9, 70.6e9), [grouped(80, 64, 8, 128)], counted=_COUNTED),
    _model("llama-4-scout", (109e9, 17e9), [grouped(12, 40, 8, 128), grouped(36, 40, 8, 128, 8192)], _WINDOW_EXPERTS),
    _model("gpt-oss-20b", (20.9e9, 3.6e9), [grouped(12, 64, 8, 64), grouped(12, 64, 8, 64, 128)], _WINDOW_EXPERTS,
           weights=12.8 * 2**30, counted=_GPT_OSS),
    _model("gpt-oss-120b", (116.8e9, 5.1e9), [grouped(18, 64, 8, 64), grouped(18, 64, 8, 64, 128)], _WINDOW_EXPERTS,
           weights=60.8 * 2**30, counted=_GPT_OSS),
    _model("deepseek-v3", (671e9, 37e9), [latent(61, 128, 512, 64, 128, 128)], f"{_MLA}, MoE", weights=671e9, counted=_FP8),
    _model("deepseek-v3-expanded", (671e9, 37e9), [Attention(61, 128 * (192 + 128) * 2, 128 * 160)], "MLA kept expanded, MoE",
           weights=671e9, counted=_FP8),
    _model("deepseek-v3.2", (671e9, 37e9), sparse(latent(61, 128, 512, 64, 128, 128), 64, 128, 2048), f"{_SPARSE}, MoE",
           weights=671e9, counted=_FP8),
    _model("kimi-k2", (1000e9, 32e9), [latent(61, 64, 512, 64, 128, 128)], f"{_MLA}, MoE", weights=1000e9, counted=_FP8),
    _model("gemma-3-4b", (3.88e9, 3.88e9), [grouped(5, 8, 4, 256), grouped(29, 8, 4, 256, 1024)], _WINDOW, counted=_GEMMA),
    _model("gemma-3-12b", (11.8e9, 11.8e9), [grouped(8, 16, 8, 256), grouped(40, 16, 8, 256, 1024)], _WINDOW, counted=_GEMMA),
    _model("gemma-3-27b", (27.0e9, 27.0e9), [grouped(10, 32, 16, 128), grouped(52, 32, 16, 128, 1024)], _WINDOW,
           counted=_GEMMA),
    _model("glm-4.6", (355e9, 32e9), [grouped(92, 96, 8, 128)], "full attention, MoE"),
    _model("glm-5", (744e9, 40e9), sparse(latent(78, 64, 512, 64, 192, 256), 32, 128, 2048), f"{_SPARSE}, MoE",
           weights=744e9, counted=_FP8),
    _model("mistral-small-3", (24e9, 24e9), [grouped(40, 32, 8, 128)]),
    _model("minimax-m2.5", (230e9, 10e9), [grouped(62, 48, 8, 128)], "full attention, MoE"),
)  # fmt: skip

MODELS: Mapping[str, Model] = {model.name: model for model in _TABLE}


def plain(name: str, kv_bytes_per_token: float, parameters: float, source: str) -> Model:
    """A model of which only KV bytes per token and parameters are known: attention's own FLOPs are left out."""
    return Model(name, parameters, parameters, (Attention(1, kv_bytes_per_token, 0),), source=source)
