"""Coarse rows: a lossy prefix that is in memory already, to be made exact by what its refinement brings (FORMAT.md 4.7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcdn.digest import Digest
from kvcdn.keys import BlockName
from kvcdn.model.prefill import tensor_bytes


@dataclass(frozen=True)
class CoarseRows:
    """`rows(layer, start, end)` are the tensors of those tokens, `etags` the blocks they came from, by address.

    Nothing is believed of them: numbers that are made exact from others are found out by the digest of the exact ones.
    """

    etags: Mapping[Digest, Digest]
    rows: Callable[[int, int, int], Sequence[torch.Tensor]]

    def fill(self, name: BlockName, layer: int, outs: Sequence[memoryview]) -> None:
        """Copies the tensors of a layer of the block `name` to `outs`, their bytes."""
        for out, tensor in zip(outs, self.rows(layer, name.start, name.end), strict=True):
            out[:] = tensor_bytes(tensor.contiguous())
