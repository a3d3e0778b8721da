"""The publisher's choice: what each lossy precision does to each tensor. Readers need to know nothing of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcdn.basis import BasisName
from kvcdn.codec import Encoded, Rows, encode_smallest
from kvcdn.codecs.basis import Basis, TensorBasis
from kvcdn.codecs.grids import MAX_BITS
from kvcdn.codecs.numbers import Floats, to_float32
from kvcdn.codecs.quant import Grid, encode_grid
from kvcdn.codecs.rest import encode_rest
from kvcdn.codecs.transform import encode_transform
from kvcdn.digest import Buffer
from kvcdn.keys import EXACT_TOKENS, BlockName
from kvcdn.layout import Layout, TensorSpec

GROUP_TOKENS = {8: 256, 4: 171}
"""Tokens that share a step and an offset, for each channel: channels differ by orders of magnitude, tokens of one do not.
Halves and thirds of blocks of 512."""

FINE_SHARE = 1 / 20
"""Of all bytes, the tensors that have 8 bits in int4: a few, mostly K of single layers, do most of the harm at 4."""

STEPS = {"tc-high": 0.00028, "tc-medium": 0.0013, "tc-low": 0.0026, "tc-least": 0.0043}
"""Steps in the unit of the basis; docs/codecs.md has what such steps make."""

_RECENT_TOKENS = 16
"""The last tokens of a document that are exact in int4: what follows reads them most, and 4 bits are few."""

_EXACT_SHARE = 5 / 256
"""Of a document's tokens, how many are exact in int4, the first ones counted: of a short one 20 are many bytes."""

_FINER_BY = 0.7
"""The power of a row's weight by which its error is made smaller: 1/2 of the weight's logarithm would be right if weights were
exact; they are estimates, of which the tails are mostly chance, and 0.7 of that half was best on three documents."""

_CLIPPED_BY = 0.25
"""The power of a row's weight with which its error counts where a grid of int4 is cut: weights are estimates, as above."""

_LEAST_WEIGHT = 1e-3
"""Of the tensor's mean: a row that the probe did not read may be read later."""

_LATE_WEIGHT = 4.0
"""Of the tensor's mean, for rows that no probe has read: what comes next reads the last rows most. Where they are most of a
document, that would be most of its bytes: there they count as the mean."""

_FEWEST_READERS = 64
"""Rows that fewer tokens of the probe have read count as not read: their worth would be mostly chance, and one that is wrongly
taken for worthless can cost more than all others together."""

_MOST_EXPONENT = 3

TYPICAL_EXPONENTS = ((-2, 0, 2), (-2,))
"""Of rows that were read, equally many of each, and of those of which nothing is known."""


class TensorEncoder(Protocol):
    """One document's encoder. Thread-safe."""

    @property
    def basis(self) -> BasisName | None:
        """The basis that readers need."""

    def encode(self, raw: Buffer, layer: int, tensor: int, name: BlockName) -> Buffer | Encoded:
        """The rows `raw` of one tensor in the block `name`; as they are, for a lossless codec, where they do not fit."""


Place = tuple[int, int]
"""A layer, and a tensor of it."""


@dataclass(frozen=True)
class GridEncoder:
    """Numbers on grids, for a document of `tokens` tokens; in int4 the tensors `fine` have 8 bits.

    `weights` has, for tensors of 4 bits, what an error in each of the document's rows costs.
    """

    layout: Layout
    precision: str
    tokens: int
    fine: Collection[Place] = ()
    weights: Mapping[Place, Floats] = field(default_factory=dict)
    basis: BasisName | None = None

    def encode(self, raw: Buffer, layer: int, tensor: int, name: BlockName) -> Buffer | Encoded:
        spec = self.layout.layers[layer].tensors[tensor]
        bits = 4 if self.precision == "int4" and (layer, tensor) not in self.fine else MAX_BITS
        lead = EXACT_TOKENS if name.start == 0 else 0
        trail = recent_tokens(self.tokens) if self.precision == "int4" and name.end == self.tokens else 0
        grid = Grid(bits, GROUP_TOKENS[bits], 1, centred=False, lead=lead, trail=trail)
        weights = self.weights.get((layer, tensor)) if bits < MAX_BITS else None
        mine = None if weights is None else weights[name.start : name.end]
        return _smaller(raw, encode_grid(raw, Rows(spec.dtype, spec.shape(name.tokens)), grid, mine))


@dataclass(frozen=True)
class TransformEncoder:
    """Components of a basis. `exponents` has, for each layer and tensor, an integer for each token of the document."""

    layout: Layout
    precision: str
    whole: Basis
    exponents: Sequence[Sequence[NDArray[np.int16]]]

    @property
    def basis(self) -> BasisName:
        return self.whole.name

    def encode(self, raw: Buffer, layer: int, tensor: int, name: BlockName) -> Buffer | Encoded:
        spec = self.layout.layers[layer].tensors[tensor]
        rows = Rows(spec.dtype, spec.shape(name.tokens), name.start, self.whole.tensors[layer][tensor])
        exponents = self.exponents[layer][tensor][name.start : name.end]
        lead = EXACT_TOKENS if name.start == 0 else 0
        return _smaller(raw, encode_transform(raw, rows, exponents, STEPS[self.precision], lead=lead))


def recent_tokens(tokens: int) -> int:
    """How many of a document's last tokens are exact in int4."""
    return max(min(_RECENT_TOKENS, int(_EXACT_SHARE * tokens) - EXACT_TOKENS), 0)


def encode_refinement(raw: Buffer, rows: Rows) -> Buffer | Encoded:
    """What `rows.coarse` lacks of `raw`; as it is, for a lossless codec, where that is no larger."""
    encoded = encode_rest(raw, rows)
    return raw if encoded is None or len(encode_smallest(raw, rows)[1]) <= len(encoded.data) else encoded


def _smaller(raw: Buffer, encoded: Encoded | None) -> Buffer | Encoded:
    return raw if encoded is None or len(encoded.data) >= len(raw) else encoded


def grid_weights(slopes: Floats, tokens: int) -> Floats:
    """What an error in each of a tensor's `tokens` rows costs where a grid is cut; `slopes` are gradients of the first rows."""
    logs = _logs(_read_enough(np.square(slopes).sum((1, 2), dtype=np.float64)), tokens)
    if not np.isfinite(logs).all():
        return np.ones(tokens, np.float32)
    weights: Floats = np.exp2(_CLIPPED_BY * (logs - logs.max())).astype(np.float32)
    return weights


def grid_harm(raw: Buffer, spec: TensorSpec, slopes: Floats, weights: Floats | None = None) -> float:
    """What 4 bits for a tensor do to what is read: the sum over rows of (gradient x error) squared.

    `slopes` are gradients of its first rows, [tokens, heads, dim], `weights` those of `grid_weights` for all rows.
    """
    rows = Rows(spec.dtype, spec.shape(len(raw) // spec.bytes_per_token))
    encoded = encode_grid(raw, rows, Grid(4, GROUP_TOKENS[4], 1, centred=False), weights)
    if encoded is None:
        return 0.0
    known = _read_enough(slopes)
    before, after = (to_float32(data, spec.dtype).reshape(rows.shape)[: len(known)] for data in (raw, encoded.decoded))
    return float(np.square(((after - before) * known).sum((1, 2), dtype=np.float64)).sum())


def choose_fine(layout: Layout, harms: Mapping[Place, float]) -> frozenset[Place]:
    """The tensors that do the most harm for their bytes, up to FINE_SHARE of the bytes of all."""
    sizes = {
        (layer, tensor): one.bytes_per_token
        for layer, spec in enumerate(layout.layers)
        for tensor, one in enumerate(spec.tensors)
    }
    left = FINE_SHARE * sum(sizes.values())
    found = set()
    for place in sorted(sizes, key=lambda place: harms.get(place, 0.0) / sizes[place], reverse=True):
        if sizes[place] <= left:
            found.add(place)
            left -= sizes[place]
    return frozenset(found)


def unknown_rows(tokens: int, seen: int) -> int:
    """How many of `tokens` rows nothing is known of when the first `seen` are looked at."""
    return tokens - seen + min(_FEWEST_READERS, seen // 4)


def _read_enough(rows: NDArray[Any]) -> NDArray[Any]:
    """The first of `rows`, gradients or what is made of them: those that enough tokens of the probe have read."""
    return rows[: len(rows) - min(_FEWEST_READERS, len(rows) // 4)]


def row_weights(slopes: Floats, basis: TensorBasis) -> NDArray[np.float64]:
    """What an error in each row of a tensor does to what is read, in the unit of the basis: of the first rows, read by enough.

    `slopes` are gradients of the first rows, [tokens, heads, dim]; they are used up.
    """
    if basis.rope is not None:
        basis.rope.turn(slopes, 0, back=True)
    groups, _, width = basis.matrices.shape
    parts = slopes.reshape(len(slopes), groups, width).transpose(1, 0, 2)
    synthesis = basis.synthesis * basis.scales[:, None, None]
    energies = np.square(np.matmul(parts, synthesis.transpose(0, 2, 1))).sum((0, 2), dtype=np.float64)
    weights: NDArray[np.float64] = _read_enough(energies)
    return weights


def row_exponents(weights: Sequence[Sequence[NDArray[np.float64]]], tokens: int) -> list[list[NDArray[np.int16]]]:
    """For each layer and tensor, the exponents of the steps of its `tokens` rows, smaller where a row is read more.

    Rows are compared across all tensors: what those of one of them are worth hangs on the document.
    """
    logs = [[_logs(rows, tokens) for rows in layer] for layer in weights]
    read = [one[: len(rows)] for layer, ones in zip(weights, logs, strict=True) for rows, one in zip(layer, ones, strict=True)]
    found = np.concatenate(read)
    centre = found[np.isfinite(found)].mean() if np.isfinite(found).any() else 0.0
    return [[_exponents(one - centre) for one in layer] for layer in logs]


def _logs(weights: NDArray[np.float64], tokens: int) -> NDArray[np.float64]:
    """Logarithms of the weights of `tokens` rows; minus infinity for a tensor of which nothing is read."""
    mean = weights[EXACT_TOKENS:].mean() if len(weights) > EXACT_TOKENS else 0.0
    unknown = np.full(tokens - len(weights), (_LATE_WEIGHT if 2 * len(weights) >= tokens else 1.0) * mean)
    with np.errstate(divide="ignore"):
        return np.log2(np.concatenate((weights + _LEAST_WEIGHT * mean, unknown)) if mean > 0 else np.zeros(tokens))


def _exponents(logs: NDArray[np.float64]) -> NDArray[np.int16]:
    finer = np.rint(-_FINER_BY / 2 * logs) if np.isfinite(logs).all() else np.zeros(len(logs))
    exponents: NDArray[np.int16] = np.clip(finer, -_MOST_EXPONENT, _MOST_EXPONENT).astype(np.int16)
    return exponents
