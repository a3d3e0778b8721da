"""The publisher's choice: what each lossy precision does to each tensor. Readers need to know nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcdn.basis import BasisName
from kvcdn.codec import Buffer, Encoded, Rows
from kvcdn.codecs.basis import Basis, TensorBasis
from kvcdn.codecs.numbers import Floats
from kvcdn.codecs.quant import Grid, encode_grid
from kvcdn.codecs.transform import encode_transform
from kvcdn.keys import EXACT_TOKENS, BlockName
from kvcdn.layout import Layout, TensorSpec

BITS = {"int8": 8, "int4": 4}
"""Bits of a code in each precision."""

STEPS = {"tc-high": 0.00025, "tc-medium": 0.001, "tc-low": 0.0025}
"""Steps in the unit of the basis; docs/codecs.md has what such steps make."""

RECENT_TOKENS = 16
"""The last tokens of a document are exact on grids: what follows reads them most."""

KEY_GROUP_TOKENS = {8: 128, 4: 32}
"""Tokens that share one step for a channel of K: channels differ by orders of magnitude, tokens within one do not."""

_FINER_BY = 0.6
"""The power of a row's weight by which its error is made smaller: 1/2 of the weight's logarithm would be right if weights were
exact; they are estimates, of which the tails are mostly chance, and 0.6 of that half was best on three documents."""

_LEAST_WEIGHT = 1e-3
"""Of the mean: a row that the probe did not read may be read later."""

_LATE_WEIGHT = 4.0
"""Of the mean, for rows that no probe has read: what comes next reads the last rows most."""

_FEWEST_READERS = 64
"""Rows that fewer tokens of the probe have read count as not read: their worth would be mostly chance, and one that is wrongly
taken for worthless can cost more than all others together."""

_MOST_EXPONENT = 3


class TensorEncoder(Protocol):
    """One document's encoder. Thread-safe."""

    @property
    def basis(self) -> BasisName | None:
        """The basis that readers need."""

    def encode(self, raw: Buffer, layer: int, tensor: int, name: BlockName) -> Buffer | Encoded:
        """The rows `raw` of one tensor in the block `name`; as they are, for a lossless codec, where they do not fit."""


@dataclass(frozen=True)
class GridEncoder:
    """Numbers on grids, for a document of `tokens` tokens."""

    layout: Layout
    precision: str
    tokens: int
    basis: BasisName | None = None

    def encode(self, raw: Buffer, layer: int, tensor: int, name: BlockName) -> Buffer | Encoded:
        spec = self.layout.layers[layer].tensors[tensor]
        grid = choose_grid(spec, BITS[self.precision], first=name.start == 0, last=name.end == self.tokens)
        return _smaller(raw, encode_grid(raw, Rows(spec.dtype, spec.shape(name.tokens)), grid))


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


def _smaller(raw: Buffer, encoded: Encoded | None) -> Buffer | Encoded:
    return raw if encoded is None or len(encoded.data) >= len(raw) else encoded


def choose_grid(spec: TensorSpec, bits: int, *, first: bool, last: bool) -> Grid:
    """The grid of a tensor in the document's `first` or `last` block."""
    lead, trail = EXACT_TOKENS if first else 0, RECENT_TOKENS if last else 0
    coarse = bits < max(KEY_GROUP_TOKENS)
    if spec.name == "k":
        return Grid(bits, KEY_GROUP_TOKENS[4 if coarse else 8], 1, centred=False, lead=lead, trail=trail)
    return Grid(bits, 1, 32 if coarse and spec.dim % 32 == 0 else spec.dim, centred=False, lead=lead, trail=trail)


def row_exponents(slopes: Floats, basis: TensorBasis, tokens: int) -> NDArray[np.int16]:
    """The exponent of the step of each of `tokens` rows, smaller where a row is read more.

    `slopes` are gradients of the first of them, [fewer tokens, heads, dim]; they are used up.
    """
    if basis.rope is not None:
        basis.rope.turn(slopes, 0, back=True)
    groups, _, width = basis.matrices.shape
    parts = slopes.reshape(len(slopes), groups, width).transpose(1, 0, 2)
    synthesis = basis.synthesis * basis.scales[:, None, None]
    energies = np.square(np.matmul(parts, synthesis.transpose(0, 2, 1))).sum((0, 2), dtype=np.float64)
    read = energies[: len(energies) - min(_FEWEST_READERS, len(energies) // 4)]
    mean = read[EXACT_TOKENS:].mean() if len(read) > EXACT_TOKENS else 0.0
    if not mean > 0:
        return np.zeros(tokens, np.int16)
    known = np.log2(read / mean + _LEAST_WEIGHT)
    weights = np.concatenate((known, np.full(tokens - len(known), np.log2(_LATE_WEIGHT))))
    finer = np.rint(-_FINER_BY * (weights - known.mean()) / 2)
    exponents: NDArray[np.int16] = np.clip(finer, -_MOST_EXPONENT, _MOST_EXPONENT).astype(np.int16)
    return exponents
