"""Layouts: what the KV of one token looks like, engine-neutral (FORMAT.md 2.3), and the block length that follows (2.4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvcdn import canonical
from kvcdn.digest import Digest, derive
from kvcdn.errors import CorruptError
from kvcdn.fields import Fields

BLOCK_RAW_BYTES = 16 * 1024 * 1024
"""A block's raw size stays at or below this: large enough for few requests, small enough to fetch, hold and evict singly."""

MIN_BLOCK_TOKENS = 64
"""A block is one forward pass of the publisher, and shorter passes waste the device."""

MAX_BLOCK_TOKENS = 1024
"""Bounds what a prompt loses when it leaves a document in mid-block."""

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_DIM = 65536
"""Sanity limits on hostile layouts; today's largest models have 126 layers, 128 KV heads, dim 576."""

MAX_WINDOW = 1 << 24
"""As many tokens as a prefix can have: a longer window is full attention."""

KINDS: Mapping[str, tuple[str, ...]] = {"kv": ("k", "v"), "window": ("k", "v"), "indexed": ("k", "v", "i"), "none": ()}
"""The kinds of layers, each with the names of its tensors in order (FORMAT.md 2.3)."""

TENSOR_NAMES = ("k", "v", "i")
"""Key, value, and the key of an indexer."""

STATE_NAMES = tuple(f"{kind}{index}" for kind in "cr" for index in range(8))
"""States of convolutions, then recurrent ones; a layer may have several of each."""

MAX_STATE_DIMENSIONS = 4
MAX_STATE_BYTES = (1 << 32) - 1

CHECKPOINT_BLOCKS = 16
"""Whole blocks from one checkpoint to the next: states weigh as much as the KV of thousands of tokens."""

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer: for S tokens its shape is [S, heads, dim], row-major, little-endian."""

    name: str
    heads: int
    dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.dim * DTYPE_BYTES[self.dtype]

    def shape(self, tokens: int) -> tuple[int, int, int]:
        """The shape of this tensor for `tokens` tokens."""
        return (tokens, self.heads, self.dim)


@dataclass(frozen=True)
class StateSpec:
    """A tensor of fixed shape that every token changes: what linear attention or a convolution keeps."""

    name: str
    dims: tuple[int, ...]
    dtype: str

    @property
    def raw_bytes(self) -> int:
        return math.prod(self.dims) * DTYPE_BYTES[self.dtype]

    def shape(self, tokens: int) -> tuple[int, ...]:  # noqa: ARG002 - as for other tensors
        """Its shape, after however many tokens."""
        return self.dims


@dataclass(frozen=True)
class LayerSpec:
    """One model layer's share of the KV.

    `window` is set for the kind of that name, and None for others: tokens that attention reads at most, its own included.
    `states` are kept at checkpoints only.
    """

    kind: str
    tensors: tuple[TensorSpec, ...]
    window: int | None = None
    states: tuple[StateSpec, ...] = ()

    @cached_property
    def bytes_per_token(self) -> int:
        return sum(tensor.bytes_per_token for tensor in self.tensors)

    @cached_property
    def state_bytes(self) -> int:
        return sum(state.raw_bytes for state in self.states)

    def parts(self, *, checkpoint: bool) -> tuple[TensorSpec | StateSpec, ...]:
        """The tensors that a block holds of this layer, in order; `checkpoint` tells whether it ends at one."""
        return self.tensors + self.states if checkpoint else self.tensors

    def first_needed(self, tokens: int) -> int:
        """The first of `tokens` tokens whose rows a model still reads when it goes on behind them; `tokens` for none."""
        if not self.tensors:
            return tokens
        return 0 if self.window is None else max(tokens - (self.window - 1), 0)

    def to_json(self) -> dict[str, Any]:
        """The JSON form, ready for the canonical encoder."""
        tensors = [{"dtype": t.dtype, "name": t.name, "shape": [t.heads, t.dim]} for t in self.tensors]
        window = {} if self.window is None else {"window": self.window}
        states = [{"dtype": s.dtype, "name": s.name, "shape": list(s.dims)} for s in self.states]
        return {"kind": self.kind, "tensors": tensors, **window, **({"state": states} if states else {})}


@dataclass(frozen=True)
class Layout:
    """The KV of one token, layer by layer."""

    layers: tuple[LayerSpec, ...]

    @classmethod
    def uniform_kv(cls, layers: int, heads: int, dim: int, dtype: str, value_dim: int | None = None) -> Layout:
        """`layers` equal layers of full attention: K [S, heads, dim] and V [S, heads, value_dim or dim]."""
        key = TensorSpec("k", heads, dim, dtype)
        value = TensorSpec("v", heads, dim if value_dim is None else value_dim, dtype)
        return cls((LayerSpec("kv", (key, value)),) * layers)

    @classmethod
    def from_json(cls, value: Any, what: str) -> Layout:
        """Reads the JSON form. Raises CorruptError for any other value, NaN-free and bounded by the limits above."""
        fields = Fields(value, what)
        fields.integer("v", 1, 1)
        layers = fields.array("layers", 1, MAX_LAYERS)
        fields.done()
        layout = cls(tuple(_read_layer(layer, f"{what}: layer {i}") for i, layer in enumerate(layers)))
        if not layout.bytes_per_token and not layout.state_bytes:
            raise CorruptError(f"{what}: no layer keeps anything")
        return layout

    def to_json(self) -> dict[str, Any]:
        """The JSON form, ready for the canonical encoder."""
        return {"layers": [layer.to_json() for layer in self.layers], "v": 1}

    @cached_property
    def digest(self) -> Digest:
        return Digest(derive("kvcdn v1 layout", canonical.encode(self.to_json())))

    @cached_property
    def bytes_per_token(self) -> int:
        """Raw KV bytes of one token, all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @cached_property
    def state_bytes(self) -> int:
        """Raw bytes of the states at one checkpoint, all layers; 0 for a layout without states."""
        return sum(layer.state_bytes for layer in self.layers)

    def needed_bytes(self, tokens: int) -> int:
        """Raw KV bytes a model needs to go on behind `tokens` tokens: of a window layer only the window's, and one state."""
        rows = sum((tokens - layer.first_needed(tokens)) * layer.bytes_per_token for layer in self.layers)
        return rows + (self.state_bytes if tokens else 0)

    def raw_bytes(self, tokens: int) -> int:
        """Raw bytes of all blocks of a prefix of `tokens` tokens."""
        whole, rest = divmod(tokens, self.block_tokens)
        checkpoints = whole // CHECKPOINT_BLOCKS + (1 if rest else 0)
        return tokens * self.bytes_per_token + checkpoints * self.state_bytes

    def is_checkpoint(self, index: int, tokens: int) -> bool:
        """Whether block `index`, of `tokens` tokens, ends at a checkpoint, and so carries the states that there are."""
        return tokens < self.block_tokens or (index + 1) % CHECKPOINT_BLOCKS == 0

    def usable_blocks(self, whole: int) -> int:
        """How many of the first `whole` whole blocks of a prefix a model can go on behind: all, or those up to a checkpoint."""
        return whole // CHECKPOINT_BLOCKS * CHECKPOINT_BLOCKS if self.state_bytes else whole

    def document_end(self, tokens: int) -> int:
        """How many of a document's `tokens` tokens are published (FORMAT.md 2.3, states); 0 where it is too short."""
        if not self.state_bytes:
            return tokens
        end = tokens - 1
        whole, rest = divmod(end, self.block_tokens)
        return max(end if rest or self.usable_blocks(whole) == whole else end - 1, 0)

    @cached_property
    def block_tokens(self) -> int:
        """N of FORMAT.md 2.4: tokens of every block of a prefix but, perhaps, its last."""
        affordable = max(BLOCK_RAW_BYTES // max(self.bytes_per_token, 1), 1)
        power = 1 << (affordable.bit_length() - 1)
        return min(max(power, MIN_BLOCK_TOKENS), MAX_BLOCK_TOKENS)


def _read_layer(value: Any, what: str) -> LayerSpec:
    fields = Fields(value, what)
    kind = fields.choice("kind", tuple(KINDS))
    names = KINDS[kind]
    tensors = tuple(_read_tensor(item, what) for item in fields.array("tensors", len(names), len(names)))
    window = fields.integer("window", 2, MAX_WINDOW) if kind == "window" else None
    # A layer without states has no such field.
    states = fields.array("state", 1, len(STATE_NAMES)) if isinstance(value, dict) and "state" in value else ()
    fields.done()
    if tuple(tensor.name for tensor in tensors) != names:
        raise CorruptError(f"{what}: a {kind} layer holds the tensors {', '.join(names)}, in this order")
    return LayerSpec(kind, tensors, window, _read_states(states, what))


def _read_states(values: Sequence[Any], what: str) -> tuple[StateSpec, ...]:
    states = tuple(_read_state(value, f"{what}: state") for value in values)
    places = [STATE_NAMES.index(state.name) for state in states]
    if places != sorted(set(places)):
        raise CorruptError(f"{what}: states come in the order of their names, each once")
    return states


def _read_state(value: Any, what: str) -> StateSpec:
    fields = Fields(value, what)
    name = fields.choice("name", STATE_NAMES)
    dtype = fields.choice("dtype", tuple(DTYPE_BYTES))
    dims = Fields.integers(fields.array("shape", 1, MAX_STATE_DIMENSIONS), f"{what}: shape", 1, MAX_DIM)
    fields.done()
    state = StateSpec(name, tuple(dims), dtype)
    if state.raw_bytes > MAX_STATE_BYTES:
        raise CorruptError(f"{what}: {name} has {state.raw_bytes} bytes, more than {MAX_STATE_BYTES}")
    return state


def _read_tensor(value: Any, what: str) -> TensorSpec:
    fields = Fields(value, f"{what}: tensor")
    name = fields.choice("name", TENSOR_NAMES)
    dtype = fields.choice("dtype", tuple(DTYPE_BYTES))
    shape = Fields.integers(fields.array("shape", 2, 2), f"{what}: shape", 1, max(MAX_HEADS, MAX_DIM))
    fields.done()
    if shape[0] > MAX_HEADS:
        raise CorruptError(f"{what}: more than {MAX_HEADS} heads")
    if name == "i" and shape[0] != 1:
        raise CorruptError(f"{what}: indexer keys have one head")
    return TensorSpec(name, shape[0], shape[1], dtype)
