"""Divergence: the first token at which one prompt leaves another, the text around it in both, and the likely cause."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from kvcdn.client.explaining.causes import Cause
from kvcdn.client.explaining.difference import common_length, first_difference, visible
from kvcdn.model.tokens import Spelling

EXCERPT_CHARACTERS = 60
"""Text shown on each side of a place: a line of a terminal."""


@dataclass(frozen=True)
class Excerpt:
    """The text before a token and from it on, as it is."""

    before: str
    after: str

    @classmethod
    def at(cls, spelling: Spelling, token: int) -> Excerpt:
        """Around the token `token`, or around the text's end."""
        place = spelling.character(token)
        return cls(spelling.text[max(place - EXCERPT_CHARACTERS, 0) : place], spelling.text[place : place + EXCERPT_CHARACTERS])

    def to_json(self) -> dict[str, Any]:
        """Plain values, with what does not show escaped."""
        return {"before": visible(self.before), "after": visible(self.after)}


@dataclass(frozen=True)
class Divergence:
    """Where our prompt leaves the other: the first different token, its block, and its character in our text."""

    token: int
    block: int
    character: int
    ours: Excerpt
    theirs: Excerpt | None
    cause: Cause
    detail: str


def shared_tokens(ours: Spelling, theirs: Spelling) -> int:
    """How many leading tokens two prompts share."""
    return common_length(ours.token_ids, theirs.token_ids)


def find_divergence(
    ours: Spelling, theirs: Spelling, block_tokens: int, special_ids: AbstractSet[int] = frozenset()
) -> Divergence | None:
    """Where `ours` leaves `theirs`; None where one begins with the other. `special_ids` are the tokenizer's own tokens."""
    token = shared_tokens(ours, theirs)
    if token == min(len(ours.token_ids), len(theirs.token_ids)):
        return None
    cause, detail = _cause(ours, theirs, token, special_ids)
    return Divergence(
        token,
        token // block_tokens,
        ours.character(token),
        Excerpt.at(ours, token),
        Excerpt.at(theirs, token),
        cause,
        detail,
    )


def _cause(ours: Spelling, theirs: Spelling, token: int, special_ids: AbstractSet[int]) -> tuple[Cause, str]:
    special = _special_token(ours.token_ids, theirs.token_ids, token, special_ids)
    if special is not None:
        return Cause.BOS, f"token {special} {(token and 'once more ') or ''}in front here, not there"
    special = _special_token(theirs.token_ids, ours.token_ids, token, special_ids)
    if special is not None:
        return Cause.BOS, f"token {special} {(token and 'once more ') or ''}in front there, not here"
    if ours.text == theirs.text:
        return Cause.TOKENIZER, "the same text is other tokens"
    difference = first_difference(ours.text, theirs.text)
    if difference is None:
        longer, shorter = (ours, theirs) if len(ours.text) > len(theirs.text) else (theirs, ours)
        seam = visible(longer.text[max(len(shorter.text) - 8, 0) : len(shorter.text) + 8])
        return Cause.MERGED_TOKEN, f"one text ends within a token of the other, in {seam!r}"
    return difference.cause, difference.detail


def _special_token(longer: tuple[int, ...], shorter: tuple[int, ...], token: int, special_ids: AbstractSet[int]) -> int | None:
    """The special token that `longer` has at `token` and that is all that `shorter` lacks there."""
    found = longer[token]
    rest = longer[token + 1 : token + 9]
    alike = common_length(rest, shorter[token : token + 8])
    return found if token <= 1 and found in special_ids and alike >= min(len(rest), 4) and alike else None
