"""Estimates before publishing: size, time and the break-even link speed, from one block really prefilled and sealed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvcdn.block import seal_block
from kvcdn.codec import Buffer, Encoded
from kvcdn.codecs.choice import GridEncoder, choose_fine
from kvcdn.errors import UsageError
from kvcdn.keys import PRECISION_NATIVE, TRANSFORMED, Namespace, PrefixNames
from kvcdn.model.load import LoadedModel
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.origin.publish import check_length, published_part, require_lossy
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

    The quality of a lossy precision is not measured here.
    """
    loaded = loaded.current()
    if precision in TRANSFORMED:
        raise UsageError(f"the size in {precision} hangs on the whole document: nothing less than publishing tells it")
    token_ids = published_part(loaded, token_ids)
    check_length(loaded, len(token_ids))
    identity = replace(loaded.identity, precision=precision)
    names = PrefixNames.of(identity, namespace, token_ids)
    first = names.blocks[0]
    block = next(ScheduledPrefill(loaded.model, identity.layout, first.tokens).run(token_ids[: first.tokens]))
    layers: list[list[Buffer | Encoded]] = [list(layer) for layer in block.raw_layers()]
    if precision != PRECISION_NATIVE:
        require_lossy(loaded, precision)
        # Which tensors are finer is known when the whole document is; how many are is enough here.
        fine = choose_fine(identity.layout, {})
        encoder = GridEncoder(identity.layout, precision, len(token_ids), fine)
        layers = [
            [encoder.encode(raw, layer, tensor, first) for tensor, raw in enumerate(tensors)]
            for layer, tensors in enumerate(block.raw_layers())
        ]
    stored = sum(map(len, seal_block(identity, first, loaded.producer, layers, SigningKey.generate())))
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
