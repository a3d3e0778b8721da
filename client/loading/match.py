"""Matching: the longest published prefix of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcdn.client.sources.source import Source
from kvcdn.keys import BlockName, Chain, ModelIdentity, Namespace
from kvcdn.model.tokens import Prompt

_BOUNDARIES_TRIED = 8
"""Shorter tails tried, longest first, where the longest is not published: each costs a request."""


@dataclass(frozen=True)
class PublishedPrefix:
    """The blocks that lead a prompt and exist; empty where none does."""

    blocks: tuple[BlockName, ...]

    @property
    def tokens(self) -> int:
        return self.blocks[-1].end if self.blocks else 0


def find_in_precisions(
    source: Source, model: ModelIdentity, precisions: Sequence[str], namespace: Namespace, prompt: Prompt
) -> tuple[ModelIdentity, PublishedPrefix]:
    """The longest published prefix in one of `precisions`, and the model in that precision; of equally long ones, the first.

    A precision in which the prompt's document is published ends the search.
    """
    offered = min(prompt.boundaries, default=len(prompt.token_ids))
    best: tuple[ModelIdentity, PublishedPrefix] | None = None
    for precision in precisions:
        identity = replace(model, precision=precision)
        found = find_published(source, Chain(identity, namespace, prompt.token_ids), prompt.boundaries)
        if best is None or found.tokens > best[1].tokens:
            best = identity, found
        if found.tokens >= offered:
            break
    return best or (model, PublishedPrefix(()))


def find_published(source: Source, chain: Chain, boundaries: tuple[int, ...]) -> PublishedPrefix:
    """The longest prefix of `chain` at `source` that ends on a whole block or on one of the `boundaries` (token counts).

    In the common case, a published document before a question, this is one request. With a layout that has states, it ends
    at a checkpoint and before the prompt's last token.
    """
    length, layout = chain.block_tokens, chain.model.layout
    readable = chain.tokens - 1 if layout.state_bytes else chain.tokens
    whole_end = layout.usable_blocks(readable // length) * length
    published_ends = (layout.document_end(boundary) for boundary in boundaries if boundary <= chain.tokens)
    ends = sorted({end for end in published_ends if end > 0}, reverse=True)
    longest = ends[0] if ends else whole_end
    if not longest:
        return PublishedPrefix(())
    blocks = chain.prefix(longest).blocks
    matched = _match(source, chain, blocks)
    whole = min(matched, longest // length)
    if whole == longest // length and whole_end > whole * length:
        # Everything up to the boundary is there: a longer document may have been published that goes on like this prompt.
        all_whole = chain.prefix(whole_end).blocks
        beyond = _match(source, chain, all_whole[whole:])
        usable = layout.usable_blocks(whole + beyond)
        if beyond and usable * length > longest:
            return PublishedPrefix(all_whole[:usable])
    if matched == len(blocks):
        return PublishedPrefix(blocks)
    usable = layout.usable_blocks(whole)
    for end in [end for end in ends if usable * length < end < (whole + 1) * length and end != longest][:_BOUNDARIES_TRIED]:
        shorter = chain.prefix(end).blocks
        if _match(source, chain, shorter[-1:]):
            return PublishedPrefix(shorter)
    return PublishedPrefix(blocks[:usable])


def _match(source: Source, chain: Chain, blocks: tuple[BlockName, ...]) -> int:
    return source.match(chain.model.tag, [block.address for block in blocks])
