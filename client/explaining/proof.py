"""Proofs: which reading of a prompt is published further than the prompt itself.

Names say nothing about how texts differ, but a name that exists proves that somebody published what it was made from. So
the mistakes of `kvcdn.client.explaining.fixes` are tried, singly, then in pairs, and what reaches further is what was
published. Only the front of the prompt is tokenised for a trial: enough to reach the next blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from kvcdn.client.explaining.divergence import shared_tokens
from kvcdn.client.explaining.fixes import Fix, fixes
from kvcdn.client.explaining.shelf import Reach, Shelf
from kvcdn.client.explaining.surroundings import Surroundings
from kvcdn.client.explaining.views import View, front
from kvcdn.errors import UsageError
from kvcdn.model.tokens import Spelling

_ROUNDS = 3
"""Mistakes made one behind the other that are followed up."""

_SECONDS = 20.0
"""Time after which no new trial begins: a distant source answers some thirty a second."""

_BLOCKS_AHEAD = 2
"""Blocks behind what is published that a trial tokenises: the next one must show, whatever a fix adds or removes."""


@dataclass(frozen=True)
class Step:
    """A fix that reaches further, and the first token that it changes."""

    fix: Fix
    token: int


@dataclass(frozen=True)
class Proof:
    """The reading that is published furthest, and the steps that lead there; without steps, the prompt as it is."""

    view: View
    spelling: Spelling
    reach: Reach
    steps: tuple[Step, ...] = ()


class Search:
    """One search on one shelf. It ends by itself, and may end early where the shelf is slow."""

    def __init__(self, shelf: Shelf, surroundings: Surroundings) -> None:
        self._shelf = shelf
        self._surroundings = surroundings
        self._deadline = time.monotonic() + _SECONDS
        self.complete = True
        """False where time was up before every reading was tried."""

    def prove(self, view: View, spelling: Spelling, reach: Reach) -> Proof:
        """Follows the fixes that reach beyond `reach`, the best of each round first. Raises what the source raises."""
        proof = Proof(view, spelling, reach)
        for _ in range(_ROUNDS):
            if proof.reach.tokens >= len(proof.spelling.token_ids):
                break
            found = self._further(proof)
            if found is None:
                break
            proof = found
        return proof

    def _further(self, proof: Proof) -> Proof | None:
        ahead = proof.reach.tokens + _BLOCKS_AHEAD * proof.view.identity.layout.block_tokens
        known = proof.spelling.character(proof.reach.tokens)
        near = replace(proof.view, content=front(proof.view, proof.spelling.character(ahead) + 1), tried=known)
        for trials in (self._singles(near), self._pairs(near)):
            best: tuple[int, tuple[Fix, ...]] = (proof.reach.tokens, ())
            for trial in trials:
                reach = self._reach(trial[-1].view)
                if reach > best[0]:
                    best = reach, trial
            if best[1]:
                return self._followed(proof, best[1])
        return None

    def _singles(self, view: View) -> Iterator[tuple[Fix, ...]]:
        for group in fixes(view, self._surroundings):
            for fix in group:
                yield (fix,)

    def _pairs(self, view: View) -> Iterator[tuple[Fix, ...]]:
        groups = fixes(view, self._surroundings)
        for first, second in combinations(range(len(groups)), 2):
            for fix in groups[first]:
                for other in fixes(fix.view, self._surroundings)[second]:
                    yield fix, other

    def _reach(self, view: View) -> int:
        if time.monotonic() > self._deadline:
            self.complete = False
            return 0
        try:
            spelling = view.spell()
        except UsageError:  # a template that refuses these roles
            return 0
        return self._shelf.reach(view, spelling).tokens if spelling.token_ids else 0

    def _followed(self, proof: Proof, trial: tuple[Fix, ...]) -> Proof:
        """The fixes of a trial, done to the whole prompt."""
        view, spelling, steps = proof.view, proof.spelling, proof.steps
        for fix in trial:
            view = replace(view, tried=proof.spelling.character(proof.reach.tokens))
            whole = (other for group in fixes(view, self._surroundings) for other in group if other.detail == fix.detail)
            view = next(whole, fix).view
            fixed = view.spell()
            # Of two names of the same tokens, none is shared.
            token = shared_tokens(spelling, fixed) if spelling.token_ids != fixed.token_ids else 0
            spelling, steps = fixed, (*steps, Step(fix, token))
        return Proof(view, spelling, self._shelf.reach(view, spelling), steps)
