"""Publishing in a lossy precision: the whole document is prefilled, its KV encoded, measured, and written if it is good enough.

What is measured is what readers will have: blocks that are there already are decoded and take part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvcdn.certificate import Certificate
from kvcdn.codec import Encoded, Rows
from kvcdn.codecs.basis import Basis
from kvcdn.codecs.carrier import carry
from kvcdn.codecs.choice import (
    GridEncoder,
    TensorEncoder,
    TransformEncoder,
    choose_fine,
    encode_refinement,
    grid_harm,
    grid_weights,
    row_exponents,
    row_weights,
)
from kvcdn.digest import Buffer
from kvcdn.errors import UnsupportedModelError
from kvcdn.keys import PRECISION_NATIVE, TRANSFORMED, BlockName, Namespace, PrefixNames, refinement_of
from kvcdn.layout import TensorSpec
from kvcdn.manifest import BlockEntry
from kvcdn.model.calibrate import calibrate, calibration_texts
from kvcdn.model.load import LoadedModel
from kvcdn.model.prefill import tensor_bytes
from kvcdn.model.quality import Judge, Kv, tail_tokens
from kvcdn.model.sensitivity import Gradients, row_gradients
from kvcdn.model.shelf import Shelf
from kvcdn.origin.publishing.run import Run

LADDER = {
    "int4": "int8",
    "int8": PRECISION_NATIVE,
    "tc-least": "tc-low",
    "tc-low": "tc-medium",
    "tc-medium": "tc-high",
    "tc-high": PRECISION_NATIVE,
}
"""The next finer precision of each."""

EncodedBlock = list[list[Buffer | Encoded]]


class LossyPublishing:
    """Publishes one document. `run_of` makes a run in a precision; `run_for` one of any prefix."""

    def __init__(
        self,
        run_of: Callable[[str], Run],
        run_for: Callable[[PrefixNames], Run],
        token_ids: Sequence[int],
        max_kl: float | None,
        *,
        progressive: bool = False,
    ) -> None:
        """`progressive`: beside the lossy KV goes what makes it exact."""
        self._run_of = run_of
        self._run_for = run_for
        self._ids = token_ids
        self._max_kl = max_kl
        self._progressive = progressive
        self.refined: Run | None = None

    def publish(self, precision: str, *, label: str, expires: int | None) -> Run | None:
        """Publishes in `precision`, or in the next finer one that is good enough. None where only native precision is.

        `refined` is then the run of the refinement, where there is to be one.
        """
        run = self._run_of(precision)
        existing = run.existing_manifest()
        if existing is not None and run.is_complete() and existing.certificate and existing.certificate.meets(self._max_kl):
            run.keep(existing, label=label, expires=expires)
            if self._leaves_refinement(run, label=label, expires=expires):
                return run
        native = self._run_of(PRECISION_NATIVE)
        exact = native.compute(self._ids)
        judge = Judge(native.loaded, self._ids, exact)
        encoders = Encoders(native.loaded, self._ids, exact)
        while precision != PRECISION_NATIVE:
            run = self._run_of(precision)
            run.after(native)
            lossy = _Lossy(run, exact, encoders.of(precision))
            certificate = judge.certify(lossy.decoded)
            if certificate.meets(self._max_kl):
                existing = run.existing_manifest()
                if existing is not None and run.is_complete():
                    run.keep(existing, label=label, expires=expires)
                else:
                    if precision in TRANSFORMED:
                        self._publish_basis(run, encoders.basis)
                    run.write(partial(lossy.write, certificate), existing, certificate, label=label, expires=expires)
                if self._progressive and not self._leaves_refinement(run, label=label, expires=expires):
                    self._refine(run, exact, lossy.decoded, label=label, expires=expires)
                return run
            precision = LADDER[precision]
        return None

    def _leaves_refinement(self, coarse: Run, *, label: str, expires: int | None) -> bool:
        """Whether nothing is to be done to make what `coarse` has published exact."""
        if not self._progressive:
            return True
        self.refined = refined = self._run_of(refinement_of(coarse.names.model.precision))
        existing = refined.existing_manifest()
        if existing is None or not refined.is_complete():
            return False
        for name, entry in zip(refined.names.blocks, coarse.manifest.blocks, strict=True):
            refined.refining(name, entry.etag)
        refined.keep(existing, label=label, expires=expires)
        return True

    def _refine(self, coarse: Run, exact: Kv, decoded: Kv, *, label: str, expires: int | None) -> None:
        """Publishes what `decoded`, which `coarse` has published, lacks of `exact`."""
        refined = self.refined
        if refined is None:
            return
        entries = coarse.manifest.blocks

        def write() -> list[BlockEntry]:
            return [
                refined.refining(name, entry.etag)
                or refined.write_block(name, _rest(refined, name, exact, decoded), coarse=entry.etag)
                for name, entry in zip(refined.names.blocks, entries, strict=True)
            ]

        refined.write(write, refined.existing_manifest(), label=label, expires=expires)

    def _publish_basis(self, run: Run, basis: Basis) -> None:
        """Brings the basis to the origin, before the blocks that name it."""
        name = basis.name
        names = PrefixNames.of(name.identity(run.loaded.identity), Namespace.public(), name.token_ids)
        carrier = self._run_for(names)
        existing = carrier.existing_manifest()
        if existing is not None and carrier.is_complete():
            return
        carrier.write(
            lambda: [carrier.write_block(block, carry(basis, block)) for block in names.blocks],
            existing,
            label=f"basis {str(name.digest)[:12]}",
            expires=None,
        )


def _rest(run: Run, name: BlockName, exact: Kv, decoded: Kv) -> EncodedBlock:
    """What a block lacks of the exact one, tensor by tensor; the exact one itself where that is not more."""
    tokens = slice(name.start, name.end)

    def encode(spec: TensorSpec, raw: torch.Tensor, near: torch.Tensor) -> Buffer | Encoded:
        rows = Rows(spec.dtype, spec.shape(name.tokens), name.start, coarse=tensor_bytes(near[tokens]))
        return encode_refinement(tensor_bytes(raw[tokens]), rows)

    return [
        list(map(encode, spec.tensors, raws, nears))
        for spec, raws, nears in zip(run.names.model.layout.layers, exact, decoded, strict=True)
    ]


class Encoders:
    """The encoders of one document, made when they are asked for."""

    def __init__(self, loaded: LoadedModel, token_ids: Sequence[int], exact: Kv) -> None:
        self._loaded = loaded
        self._ids = token_ids
        self._exact = exact
        self._basis: Basis | None = None
        self._exponents: list[list[np.ndarray]] = []

    def of(self, precision: str) -> TensorEncoder:
        """The encoder of a lossy precision."""
        layout = self._loaded.identity.layout
        if precision not in TRANSFORMED:
            return self._four_bits() if precision == "int4" else GridEncoder(layout, precision, len(self._ids))
        if not self._exponents:
            weights = [
                [row_weights(slope.numpy(), one) for slope, one in zip(rows, ones, strict=True)]
                for rows, ones in zip(self._slopes(), self.basis.tensors, strict=True)
            ]
            self._exponents = row_exponents(weights, len(self._ids))
        return TransformEncoder(layout, precision, self.basis, self._exponents)

    def _slopes(self) -> Gradients:
        """Gradients of all rows before the tail."""
        # Not along the tail: the certificate that is measured there would flatter (FORMAT.md 5.1).
        seen = len(self._ids) - tail_tokens(len(self._ids))
        return next(row_gradients(self._loaded, self._ids[:seen], self._exact, samples=1))

    def _four_bits(self) -> GridEncoder:
        """More bits for the tensors that want them more than others, and grids for the rows that are read."""
        layout, total = self._loaded.identity.layout, len(self._ids)
        try:
            slopes = self._slopes()
        except UnsupportedModelError:
            # Layers of a kind that cannot be probed: nothing is known, and no tensor is better than another.
            return GridEncoder(layout, "int4", total, choose_fine(layout, {}))
        weights, harms = {}, {}
        for layer, rows in enumerate(slopes):
            for place, (tensor, slope) in enumerate(zip(self._exact[layer], rows, strict=True)):
                found = weights[layer, place] = grid_weights(slope.numpy(), total)
                spec = layout.layers[layer].tensors[place]
                harms[layer, place] = grid_harm(tensor_bytes(tensor[:total]), spec, slope.numpy(), found)
        return GridEncoder(layout, "int4", total, choose_fine(layout, harms), weights)

    @property
    def basis(self) -> Basis:
        """The model's basis: this machine's, or a new one, which takes a few prefills."""
        if self._basis is None:
            shelf = Shelf(self._loaded.identity.tag, self._loaded.identity.layout)
            self._basis = shelf.latest()
            if self._basis is None:
                self._basis = calibrate(self._loaded, calibration_texts())
                shelf.put(self._basis)
        return self._basis


class _Lossy:
    """The KV of one prefix in a lossy precision: encoded, and decoded again as every reader will decode it."""

    def __init__(self, run: Run, exact: Kv, encoder: TensorEncoder) -> None:
        self._run = run
        self._exact = exact
        self._encoder = encoder
        self.decoded: Kv = [tuple(torch.empty_like(tensor) for tensor in layer) for layer in exact]
        self._there: dict[int, BlockEntry] = {}
        self._encoded: dict[int, EncodedBlock] = {}
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kvcdn-encode") as pool:
            list(pool.map(self._fill, run.names.blocks))

    def write(self, certificate: Certificate) -> list[BlockEntry]:
        """Creates the blocks that are not there, and returns the entries of all."""
        basis = self._encoder.basis
        return [
            self._there.get(name.index) or self._run.write_block(name, self._encoded[name.index], certificate, basis)
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
        tokens = slice(name.start, name.end)
        encoded = self._encoder.encode(tensor_bytes(self._exact[layer][tensor][tokens]), layer, tensor, name)
        place = tensor_bytes(self.decoded[layer][tensor][tokens])
        if not isinstance(encoded, Encoded):
            place[:] = encoded
            return encoded
        place[:] = encoded.decoded
        return replace(encoded, decoded=place)  # the same bytes: they are there once

    def _places(self, layer: int, start: int, end: int) -> Sequence[torch.Tensor]:
        return [tensor[start:end] for tensor in self.decoded[layer]]
