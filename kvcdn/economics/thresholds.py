"""Thresholds: the link speed and the document lengths at which the answer turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvcdn.economics.case import Case
from kvcdn.economics.costs import compare

SEARCHED_TOKENS = 1 << 20
"""Lengths are searched up to here: 1,048,576 tokens, more than most models take."""

_STEPS_PER_OCTAVE = 6
"""Lengths tried between doublings. A margin that turns twice between two neighbours is not seen."""


def break_even_link(case: Case) -> float | None:
    """Bytes a second from which on fetching is no slower than prefilling; None where no link is fast enough.

    Then round trips or opening alone take longer than the prefill.
    """
    budget = case.miss_s - case.question_s - case.overhead_s
    if budget <= 0 or max(case.open_s, case.turns_s) > budget:
        return None
    return case.stored_bytes / budget


def simple_link(case: Case) -> float:
    """The README's formula: KV bytes a token x prefill tokens a second x stored size / raw size. No overhead, no opening."""
    return case.stored_bytes / case.prefill_s


def pays_from(margin: Callable[[int], float]) -> int | None:
    """The shortest length from which on `margin` stays positive up to SEARCHED_TOKENS; None where it is not even there."""
    lengths = sorted({round(2 ** (step / _STEPS_PER_OCTAVE)) for step in range(20 * _STEPS_PER_OCTAVE + 1)})
    last_bad = 0
    for length in reversed(lengths):
        if margin(length) <= 0:
            last_bad = length
            break
    if last_bad == lengths[-1]:
        return None
    low, high = last_bad, min(length for length in lengths if length > last_bad)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if margin(middle) > 0 else (middle, high)
    return high


def faster_from(case: Case) -> int | None:
    """Document length from which on the first token comes sooner from a cache, on the case's link."""

    def margin(tokens: int) -> float:
        at = replace(case, tokens=tokens)
        return at.miss_s - at.hit_s

    return pays_from(margin)


def cheaper_from(case: Case, without: str, way: str) -> int | None:
    """Document length from which on kvcdn costs less over the case's days, at the case's reads."""
    return pays_from(lambda tokens: compare(replace(case, tokens=tokens), without, way).saved)
