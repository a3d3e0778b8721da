"""Estimates before publishing: size, time and the break-even link speed, from one block really prefilled and sealed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcdn.block import seal_block
from kvcdn.keys import Namespace, PrefixNames
from kvcdn.model.load import LoadedModel
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.origin.publish import check_length
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


def estimate_publish(loaded: LoadedModel, token_ids: Sequence[int], namespace: Namespace) -> Estimate:
    """Prefills and seals the first block of `token_ids`, writes nothing, and extrapolates. Raises UsageError."""
    loaded = loaded.current()
    check_length(loaded, len(token_ids))
    identity = loaded.identity
    names = PrefixNames.of(identity, namespace, token_ids)
    first = names.blocks[0]
    block = next(ScheduledPrefill(loaded.model, identity.layout, first.tokens).run(token_ids[: first.tokens]))
    stored = sum(map(len, seal_block(identity, first, loaded.producer, block.raw_layers(), SigningKey.generate())))
    per_token = identity.layout.bytes_per_token
    ratio = stored / (first.tokens * per_token)
    speed = first.tokens / block.seconds
    return Estimate(
        tokens=len(token_ids),
        blocks=len(names.blocks),
        bytes_per_token=per_token,
        raw_bytes=per_token * len(token_ids),
        stored_bytes=round(per_token * len(token_ids) * ratio),
        ratio=round(ratio, 4),
        measured_tokens=first.tokens,
        tokens_per_second=round(speed, 1),
        prefill_seconds=round(len(token_ids) / speed, 2),
        break_even_bytes_per_second=round(per_token * ratio * speed),
    )
