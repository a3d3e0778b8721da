"""The audit: one whole block recomputed, given those before it, at a fraction of a prefill's cost.

It sees what the canary leaves out: a publisher, or a thief of the signing key, who puts the KV of another text into a block
that nobody recomputes. On the publisher's own stack the result is the same to the bit; elsewhere the same but for rounding.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvcdn.block import BlockHeader
from kvcdn.client.loading.report import Audited
from kvcdn.client.trust.canary import Headers
from kvcdn.errors import KvcdnError
from kvcdn.keyring import distrust_publisher
from kvcdn.model.load import LoadedModel
from kvcdn.model.recompute import Span, compare_span, earliest_start
from kvcdn.signing import PublicKey


def auditable(loaded: LoadedModel, layers: Sequence[Any], headers: Headers) -> list[BlockHeader]:
    """The blocks, in order, that can be recomputed from what `layers` hold: all of them where no layer has a window.

    Lossy blocks are as well, but for them a wider tolerance counts (`compare_span`).
    """
    specs = loaded.identity.layout.layers
    return [header for _, header in sorted(headers.items()) if earliest_start(layers, header.start, specs) == header.start]


def choose_blocks(blocks: Sequence[BlockHeader], count: int) -> list[BlockHeader]:
    """`count` of `blocks`, or all, in order: chosen so that no publisher can tell which."""
    chosen = random.SystemRandom().sample(range(len(blocks)), min(count, len(blocks)))
    return [blocks[index] for index in sorted(chosen)]


def audit_block(loaded: LoadedModel, layers: Sequence[Any], header: BlockHeader, token_ids: Sequence[int]) -> Audited:
    """Recomputes the block of `header` in one pass, as its publisher did, and compares every row that `layers` hold of it."""
    span = Span(header.start, header.start + header.tokens)
    found = compare_span(loaded, layers, token_ids, span, header.precision)
    return Audited(
        block=str(header.address),
        start=header.start,
        tokens=header.tokens,
        publisher=header.publisher.text,
        identical=found.identical,
        passed=not found.excess,
        worst=round(found.worst, 6),
        detail=f"{span}: {found.excess}" if found.excess else "",
    )


def find_culprit(
    loaded: LoadedModel, layers: Sequence[Any], headers: Headers, token_ids: Sequence[int], failed: Audited
) -> Audited | None:
    """The first wrong block up to the `failed` one, which an earlier one may have led astray; None where none can be named.

    Blocks that windows leave without what they need cannot be cleared: they may only have the publisher who is found.
    """
    recomputable = {header.start for header in auditable(loaded, layers, headers)}
    uncleared: set[str] = set()
    for _, header in sorted(headers.items()):
        if header.start >= failed.start:
            break
        if header.start not in recomputable:
            uncleared.add(header.publisher.text)
            continue
        earlier = audit_block(loaded, layers, header, token_ids)
        if not earlier.passed:
            failed = earlier
            break
    return failed if uncleared <= {failed.publisher} else None


def reason_of(audited: Audited) -> str:
    """Why a publisher is no longer trusted, in one line."""
    return f"audit of block {audited.block} failed, {audited.detail}"


def poison(publisher: PublicKey, reason: str) -> str:
    """Refuses `publisher` from now on, in all of the user's processes; returns `reason`, and if that could not be kept."""
    try:
        distrust_publisher(publisher, reason)
    except KvcdnError as error:
        return f"{reason}; other processes go on trusting ({error})"
    return reason
