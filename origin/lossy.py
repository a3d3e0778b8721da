"""Publishing in a lossy precision: the whole document is prefilled, its KV encoded, measured, and written if it is good enough.

What is measured is what readers will have: blocks that are there already are decoded and take part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from kvcdn.certificate import Certificate
from kvcdn.codec import Buffer, Encoded
from kvcdn.codecs.choice import encode_tensor
from kvcdn.keys import PRECISION_NATIVE, BlockName
from kvcdn.manifest import BlockEntry
from kvcdn.model.prefill import tensor_bytes
from kvcdn.model.quality import Judge, Kv
from kvcdn.origin.run import Run

LADDER = {"int4": "int8", "int8": PRECISION_NATIVE}
"""The next finer precision of each."""

EncodedBlock = list[list[Buffer | Encoded]]


def publish_lossy(
    run_of: Callable[[str], Run],
    token_ids: Sequence[int],
    precision: str,
    max_kl: float | None,
    *,
    label: str,
    expires: int | None,
) -> Run | None:
    """Publishes in `precision`, or in the next finer one that is good enough. None where only native precision is."""
    run = run_of(precision)
    existing = run.existing_manifest()
    if existing is not None and run.is_complete() and existing.certificate and existing.certificate.meets(max_kl):
        run.leave(existing)
        return run
    native = run_of(PRECISION_NATIVE)
    exact = native.compute(token_ids)
    judge = Judge(native.loaded, token_ids, exact)
    while precision != PRECISION_NATIVE:
        run = run_of(precision)
        run.after(native)
        lossy = _Lossy(run, exact)
        certificate = judge.certify(lossy.decoded)
        if certificate.meets(max_kl):
            existing = run.existing_manifest()
            if existing is not None and run.is_complete():
                run.leave(existing)
            else:
                blocks = partial(lossy.write, certificate)
                run.write(blocks, existing, certificate, label=label, expires=expires)
            return run
        precision = LADDER[precision]
    return None


class _Lossy:
    """The KV of one prefix in a lossy precision: encoded, and decoded again as every reader will decode it."""

    def __init__(self, run: Run, exact: Kv) -> None:
        self._run = run
        self._exact = exact
        self.decoded: Kv = [tuple(torch.empty_like(tensor) for tensor in layer) for layer in exact]
        self._there: dict[int, BlockEntry] = {}
        self._encoded: dict[int, EncodedBlock] = {}
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kvcdn-encode") as pool:
            list(pool.map(self._fill, run.names.blocks))

    def write(self, certificate: Certificate) -> list[BlockEntry]:
        """Creates the blocks that are not there, and returns the entries of all."""
        return [
            self._there.get(name.index) or self._run.write_block(name, self._encoded[name.index], certificate)
            for name in self._run.names.blocks
        ]

    def _fill(self, name: BlockName) -> None:
        if self._run.exists(name):
            self._there[name.index] = self._run.load_block(name, self._places)
            return
        self._encoded[name.index] = [
            [self._encode(name, layer, tensor) for tensor in range(len(tensors))] for layer, tensors in enumerate(self._exact)
        ]

    def _encode(self, name: BlockName, layer: int, tensor: int) -> Buffer | Encoded:
        """Encodes one tensor of a block, and fills its rows of `decoded`."""
        model, tokens = self._run.names.model, slice(name.start, name.end)
        raw = tensor_bytes(self._exact[layer][tensor][tokens])
        spec, last = model.layout.layers[layer].tensors[tensor], name.end == self._run.names.tokens
        encoded = encode_tensor(raw, spec, name, model.precision, last=last)
        tensor_bytes(self.decoded[layer][tensor][tokens])[:] = encoded.decoded if isinstance(encoded, Encoded) else encoded
        return encoded

    def _places(self, layer: int, start: int, end: int) -> Sequence[torch.Tensor]:
        return [tensor[start:end] for tensor in self.decoded[layer]]
