"""Calibration: the basis of a model's transform codec, made once, from texts that are not published with it.

Per tensor: rope is undone where that makes the numbers more alike, heads are taken in groups, and the covariance of their
numbers is diagonalised in the metric of the Fisher matrix (kvcdn.model.sensitivity). In the components that result, equal
errors do equal harm, to second order, in every layer: one step serves the whole model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from html.entities import html5
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray

from kvcdn.codecs.basis import Basis, TensorBasis
from kvcdn.codecs.numbers import Floats
from kvcdn.codecs.rope import Rope
from kvcdn.errors import UnsupportedModelError
from kvcdn.keys import EXACT_TOKENS
from kvcdn.layout import TensorSpec
from kvcdn.model.load import LoadedModel
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.model.sensitivity import probe_tokens, row_gradients

CALIBRATION_TOKENS = 2048
"""Tokens of each text: ten times the dimensions of a group, so that covariances are not mostly chance."""

_GROUP_DIMS = 256
"""Dimensions of a group at most: the time of a matrix product grows with them."""

_UNIFORM_SHARE = 0.15
"""Of the metric, in a group: gradients of some thousand rows do not know every direction."""

_MOST_CONDITION = 1e4
"""A matrix of integers beyond it would lose accuracy when it is inverted; the metric is then made more uniform."""

Matrix = NDArray[np.float64]


def calibration_texts() -> list[str]:
    """Prose, code and a table that come with Python."""
    prose = "\n\n".join(str(text) for text in topics.values())
    table = "\n".join(f"{name}\t{character}\t{ord(character[0])}" for name, character in html5.items())
    return [prose, inspect.getsource(inspect), table]


def calibrate(loaded: LoadedModel, texts: Sequence[str], *, progress: Callable[[str], None] = lambda _: None) -> Basis:
    """The basis of `loaded`, from the first tokens of each of `texts`. Raises UnsupportedModelError."""
    layout = loaded.identity.layout
    ropes = _ropes(loaded)
    limit = min(CALIBRATION_TOKENS, loaded.max_positions or CALIBRATION_TOKENS)
    moments: list[list[_Moments]] = [
        [_Moments(spec, ropes if spec.name == "k" else ()) for spec in layer.tensors] for layer in layout.layers
    ]
    for number, text in enumerate(texts, 1):
        progress(f"calibrating on text {number} of {len(texts)}")
        # Characters are bounded before the tokenizer sees them: a token has some four.
        ids = loaded.tokenizer(text[: 16 * limit])["input_ids"][:limit]
        prefill = ScheduledPrefill(loaded.model, layout, len(ids))
        for _ in prefill.run(ids):
            pass
        exact = prefill.rows(len(ids))
        gradients = next(row_gradients(loaded, ids, exact, samples=1))
        for layer, rows, slopes in zip(moments, exact, gradients, strict=True):
            for one, tensor, slope in zip(layer, rows, slopes, strict=True):
                one.add(tensor, slope[: len(ids) - probe_tokens(len(ids))])
    progress("finding the basis")
    return Basis.build(layout, [[one.basis() for one in layer] for layer in moments])


class _Moments:
    """Means, covariances and Fisher matrices of one tensor, with its rope undone in each of the ways that are tried."""

    def __init__(self, spec: TensorSpec, ropes: Sequence[Rope]) -> None:
        self._spec = spec
        self._ropes = [None, *(rope for rope in ropes if 2 * rope.pairs <= spec.dim)]
        fitting = [count for count in range(1, spec.heads + 1) if spec.heads % count == 0 and count * spec.dim <= _GROUP_DIMS]
        self._groups = spec.heads // max(fitting, default=1)
        width = spec.heads * spec.dim // self._groups
        shape = (len(self._ropes), self._groups, width)
        self._texts = 0
        self._rows = 0
        self._sum = np.zeros(shape)
        self._squares = np.zeros((*shape, width))
        self._fisher = np.zeros((*shape, width))

    def add(self, tensor: torch.Tensor, slope: torch.Tensor) -> None:
        """Takes the rows of a text, [tokens, heads, dim], and gradients of those that lie before the probe."""
        self._texts += 1
        self._rows += len(tensor) - EXACT_TOKENS
        for index, rope in enumerate(self._ropes):
            values, slopes = (self._undone(rows, rope) for rows in (tensor, slope))
            for group in range(self._groups):
                self._sum[index, group] += values[:, group].sum(0, dtype=np.float64)
                self._squares[index, group] += values[:, group].T @ values[:, group]
                self._fisher[index, group] += slopes[:, group].T @ slopes[:, group] / probe_tokens(len(tensor))

    def _undone(self, rows: torch.Tensor, rope: Rope | None) -> Floats:
        values: Floats = np.array(rows.float().numpy())
        if rope is not None:
            rope.turn(values, 0, back=True)
        return values[EXACT_TOKENS:].reshape(len(values) - EXACT_TOKENS, self._groups, -1)

    def basis(self) -> TensorBasis:
        """The basis in the way of undoing rope that leaves the least volume: the fewest bits at any step."""
        means = self._sum / self._rows
        covariances = self._squares / self._rows - means[..., :, None] * means[..., None, :]
        volumes = [sum(_log_volume(group) for group in tried) for tried in covariances]
        best = int(np.argmin(volumes))
        # The layers' shares of harm are those of the sums over heads: one unit for all groups.
        parts = [_matrix(c, f) for c, f in zip(covariances[best], self._fisher[best] / self._texts, strict=True)]
        scales, matrices = (np.stack(items) for items in zip(*parts, strict=True))
        mean = means[best].reshape(self._spec.heads, self._spec.dim).astype(np.float32)
        return TensorBasis(mean, scales.astype(np.float32), matrices, self._ropes[best])


def _log_volume(covariance: Matrix) -> float:
    least = 1e-9 * float(np.trace(covariance)) / len(covariance) + 1e-30
    return float(np.log(np.linalg.eigvalsh(covariance).clip(least)).sum())


def _matrix(covariance: Matrix, fisher: Matrix) -> tuple[np.float32, NDArray[np.int8]]:
    """Unit and integers of synthesis, components by falling variance."""
    harm = float(np.trace(fisher)) / len(fisher) or 1.0
    for share in (_UNIFORM_SHARE, 0.5, 1.0):
        metric = (1 - share) * fisher + share * harm * np.eye(len(fisher))
        values, vectors = np.linalg.eigh((metric + metric.T) / 2)
        root = (vectors * np.sqrt(values.clip(1e-12 * harm))) @ vectors.T
        _, rotation = np.linalg.eigh(root @ covariance @ root)
        synthesis = rotation[:, ::-1].T @ np.linalg.inv(root)
        unit = np.float32(np.abs(synthesis).max() / 127)
        integers = np.rint(synthesis / unit).clip(-127, 127)
        if np.linalg.cond(integers) < _MOST_CONDITION:
            return unit, integers.astype(np.int8)
    raise UnsupportedModelError("no basis of 8-bit integers was found for this model")


def _ropes(loaded: LoadedModel) -> tuple[Rope, ...]:
    """Every rotary embedding that the model holds, in both orders of pairs."""
    found = dict.fromkeys(bytes(frequencies.astype("<f8").tobytes()) for frequencies in _frequencies(loaded))
    return tuple(Rope(frequencies, interleaved) for frequencies in found for interleaved in (False, True))


def _frequencies(loaded: LoadedModel) -> Iterator[NDArray[np.float32]]:
    for name, buffer in loaded.model.named_buffers():
        if name.rsplit(".", 1)[-1].endswith("inv_freq") and "original" not in name:
            yield buffer.detach().float().cpu().numpy()
