"""Estimates before publishing: size, time and the break-even link speed, from one block really prefilled and sealed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcdn.block import seal_block
from kvcdn.codec import Encoded
from kvcdn.codecs.choice import (
    TYPICAL_EXPONENTS,
    GridEncoder,
    TensorEncoder,
    TransformEncoder,
    choose_fine,
    unknown_rows,
)
from kvcdn.digest import Buffer
from kvcdn.keys import PRECISION_NATIVE, TRANSFORMED, BlockName, Namespace, PrefixNames
from kvcdn.layout import Layout
from kvcdn.model.load import LoadedModel
from kvcdn.model.prefill import PrefilledBlock, ScheduledPrefill
from kvcdn.model.quality import tail_tokens
from kvcdn.origin.publishing.lossy import Encoders
from kvcdn.origin.publishing.publish import check_length, published_part, require_lossy
from kvcdn.signing import SigningKey


@dataclass(frozen=True)
class Estimate:
    """What publishing a prefix would take. Speed and ratio are measured on `measured_tokens` tokens of it, on this machine.

    `break_even_bytes_per_second` is the link speed above which fetching beats prefilling on this machine: stored bytes per
    token times prefill tokens per second.
    """

    tokens: int
    blocks: int
    bytes_per_token: int
    raw_bytes: int
    stored_bytes: int
    ratio: float
    measured_tokens: int
    tokens_per_second: float
    prefill_seconds: float
    break_even_bytes_per_second: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate_publish(
    loaded: LoadedModel, token_ids: Sequence[int], namespace: Namespace, precision: str = PRECISION_NATIVE
) -> Estimate:
    """Prefills and encodes the first block of `token_ids`, writes nothing, and extrapolates. Raises UsageError.

    The quality of a lossy precision is not measured here. Where the model's basis is needed and not here yet, it is made.
    """
    loaded = loaded.current()
    token_ids = published_part(loaded, token_ids)
    check_length(loaded, len(token_ids))
    identity = replace(loaded.identity, precision=precision)
    names = PrefixNames.of(identity, namespace, token_ids)
    if precision != PRECISION_NATIVE:
        require_lossy(loaded, precision)
    # The first block has exact rows, which are many beside few bytes: a whole second one is more like those behind it.
    second = precision in TRANSFORMED and len(names.blocks) > 1 and names.blocks[1].tokens == names.blocks[0].tokens
    first = names.blocks[1 if second else 0]
    *_, block = ScheduledPrefill(loaded.model, identity.layout, first.end).run(token_ids[: first.end])
    stored = sum(
        share * sum(map(len, seal_block(identity, first, loaded.producer, layers, SigningKey.generate())))
        for share, layers in _encoded(loaded, token_ids, precision, first, block)
    )
    raw = identity.layout.raw_bytes(len(token_ids))
    measured = sum(len(tensor) for layer in block.raw_layers() for tensor in layer)
    # A block that keeps neither rows nor states tells nothing of how they compress.
    ratio = stored / measured if measured else 1.0
    speed = first.tokens / block.seconds
    return Estimate(
        tokens=len(token_ids),
        blocks=len(names.blocks),
        bytes_per_token=identity.layout.bytes_per_token,
        raw_bytes=raw,
        stored_bytes=round(raw * ratio),
        ratio=round(ratio, 4),
        measured_tokens=first.tokens,
        tokens_per_second=round(speed, 1),
        prefill_seconds=round(len(token_ids) / speed, 2),
        break_even_bytes_per_second=round(raw / len(token_ids) * ratio * speed),
    )


def _encoded(
    loaded: LoadedModel, token_ids: Sequence[int], precision: str, name: BlockName, block: PrefilledBlock
) -> Iterator[tuple[float, list[list[Buffer | Encoded]]]]:
    """A block as it would be encoded: in each of the ways that rows of the document are, with their shares."""
    layout, total = loaded.identity.layout, len(token_ids)
    encoders: list[tuple[float, TensorEncoder]]
    if precision == PRECISION_NATIVE:
        yield 1.0, [list(layer) for layer in block.raw_layers()]
        return
    if precision in TRANSFORMED:
        basis = Encoders(loaded, token_ids, block.layers).basis
        unknown = unknown_rows(total, total - tail_tokens(total)) / total
        encoders = [
            (share / len(exponents), TransformEncoder(layout, precision, basis, _constant(layout, total, exponent)))
            for share, exponents in zip((1 - unknown, unknown), TYPICAL_EXPONENTS, strict=True)
            for exponent in exponents
        ]
    else:
        # Which tensors are finer is known when the whole document is; how many are is enough here.
        encoders = [(1.0, GridEncoder(layout, precision, total, choose_fine(layout, {})))]
    for share, encoder in encoders:
        yield (
            share,
            [
                [encoder.encode(raw, layer, tensor, name) for tensor, raw in enumerate(tensors)]
                for layer, tensors in enumerate(block.raw_layers())
            ],
        )


def _constant(layout: Layout, tokens: int, exponent: int) -> list[list[NDArray[np.int16]]]:
    return [[np.full(tokens, exponent, np.int16) for _ in layer.tensors] for layer in layout.layers]
