"""The quality to begin with: the exact KV, or a coarse one that is there sooner and is made exact behind the answer.

Pure arithmetic over sizes, the measured link and the model's measured speed, but for looking up what is published.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from kvcdn.client.loading.match import PublishedPrefix, find_published
from kvcdn.client.loading.reading import Reading, Terms
from kvcdn.client.planning.pace import Pace
from kvcdn.client.planning.plan import Mode, Work, expect, seconds
from kvcdn.client.planning.supply import Supply
from kvcdn.client.planning.wire_costs import WireCosts
from kvcdn.errors import KvcdnError
from kvcdn.keys import LOSSY, Chain, ModelIdentity
from kvcdn.model.bases import Bases
from kvcdn.model.load import LoadedModel
from kvcdn.model.tokens import Prompt

SOONER = 0.67
"""Coarse KV is begun with where it is there within this part of the time: a little sooner is not worth it."""

LEAST_SAVED_SECONDS = 0.1
"""Nor is what nobody notices."""


@dataclass(frozen=True)
class Offer:
    """What is published of a prompt in one precision, and in how many seconds it is expected here; None while unknown."""

    identity: ModelIdentity
    published: PublishedPrefix
    seconds: float | None = None

    @property
    def is_coarse(self) -> bool:
        return self.identity.precision in LOSSY


@dataclass(frozen=True)
class Choice:
    """What to begin with, and why, in one sentence."""

    offer: Offer
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"precision": self.offer.identity.precision, "why": self.why}


def choose(offers: Sequence[Offer]) -> Choice:
    """Which of `offers`, most wanted first and at least one, to begin with: exact KV unless coarse KV comes much sooner."""
    longest = max(one.published.tokens for one in offers)
    equal = [one for one in offers if one.published.tokens == longest]
    exact = next((one for one in equal if not one.is_coarse), None)
    coarse = [one for one in equal if one.is_coarse]
    if exact is None:
        return Choice(coarse[0], "no exact KV is published that goes so far")
    if not coarse:
        return Choice(exact, "no coarse KV that is accepted goes so far")
    if exact.seconds is None:
        return Choice(exact, "how soon it comes is not known")
    for one in coarse:
        if one.seconds is not None and one.seconds <= min(SOONER * exact.seconds, exact.seconds - LEAST_SAVED_SECONDS):
            return Choice(one, f"it takes {seconds(one.seconds)}, exact KV {seconds(exact.seconds)}")
    return Choice(exact, f"it takes {seconds(exact.seconds)}, and coarse KV is not much sooner")


def look_up(loaded: LoadedModel, supply: Supply, prompt: Prompt, mode: Mode | None) -> Choice:
    """Chooses among what is published of `prompt` in the precisions of `supply`. Raises KvcdnError."""
    offers, refused = [], None
    for precision in supply.precisions:
        identity = replace(loaded.identity, precision=precision)
        chain = Chain(identity, supply.namespace, prompt.token_ids)
        published = find_published(supply.source, chain, prompt.boundaries)
        refusal = _refusal(identity, supply, published) if published.blocks and precision in LOSSY else None
        if refusal is None:
            offers.append(Offer(identity, _with_coarse(identity, supply, published)))
        refused = refused or refusal
    if refused is not None and not any(one.published.blocks for one in offers):
        raise refused
    timed = [replace(one, seconds=_expected_seconds(loaded, supply, one, len(prompt.token_ids), mode)) for one in offers]
    return choose(timed or [Offer(loaded.identity, PublishedPrefix(()))])


def _with_coarse(model: ModelIdentity, supply: Supply, published: PublishedPrefix) -> PublishedPrefix:
    """As much of a refinement as there are coarse blocks for; anything else as it is."""
    coarse = [name.coarse.address for name in published.blocks if name.coarse is not None]
    if not coarse:
        return published
    there = supply.source.match(model.tag, coarse)
    return published if there == len(coarse) else PublishedPrefix(published.blocks[:there])


def _refusal(identity: ModelIdentity, supply: Supply, published: PublishedPrefix) -> KvcdnError | None:
    """Why coarse KV is not to be begun with, where the reader has a bound: by the first block's certificate."""
    if supply.max_kl is None:
        return None
    terms = Terms(supply.source, identity, supply.gate.trust, Bases(supply.source.read, identity), supply.max_kl)
    wanted = [True] * len(identity.layout.layers)
    try:
        with closing(Reading(terms, published.blocks[0], wanted, ranged=True, passing=True)) as reading:
            reading.read_header()
    except KvcdnError as error:
        return error
    return None


def _expected_seconds(loaded: LoadedModel, supply: Supply, offer: Offer, tokens: int, mode: Mode | None) -> float | None:
    """How soon the prefix of an offer is there, in the best way or as asked for; 0 for nothing, None while that is unknown."""
    blocks, link = offer.published.blocks, supply.source.link()
    if not blocks:
        return 0.0
    costs, pace, now = WireCosts(offer.identity), Pace(loaded, blocks), time.perf_counter()
    length = min(offer.published.tokens, tokens - 1)
    expected = expect(
        Work(
            block_s=pace.block_seconds(now, blocks),
            prompt_s=pace.speeds(now).remaining(0, length, tokens),
            wire_bytes=costs.expected_bytes(blocks, length),
            link=link.bytes_per_s,
            decode=costs.decoding_rate(None),
            latency_s=link.latency_s or 0.0,
            shared=1.0 if pace.on_cpu else 0.0,
        )
    )
    if expected.fetch is None or mode is not None:
        return expected.of(mode) if mode else None
    return min(one for one in (expected.fetch, expected.compute, expected.both) if one is not None)
