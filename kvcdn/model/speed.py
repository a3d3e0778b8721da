"""Prefill speed of a model on this machine, by position, measured whenever it prefills and remembered.

A token costs more the more tokens are before it, since it attends to all of them: seconds per token are fitted as a line
over its position. Three sorts of passes are kept apart: over blocks (the publisher's schedule), over a whole prompt (the
model's own prefill), which is faster on many machines, and over the rest of a prompt behind a prefix. Of the last, each
token is compared with all up to the last and most of it masked, as libraries skip what is masked only in a pass from the
first token on: reading the last 3,262 of 3,774 tokens can take 1.4 times as long as reading all. A pass over a few tokens
takes as long as reading the weights does, however few they are: those are kept apart, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from kvcdn.digest import ModelTag
from kvcdn.model.load import LoadedModel
from kvcdn.model.place import layer_devices
from kvcdn.model.remembered import Remembered

Sort = Literal["blocks", "prompts", "rests", "short"]

_LEAST_TOKENS = 64
"""Shorter passes, the sort `short`, measure overhead, not speed; also the shortest whole block (FORMAT.md 2.4)."""

_KEPT_PASSES = 48
"""Measurements kept of each sort, the oldest go: enough positions for a line."""

_SLOWER = 1.25
"""A pass counts as at most so many times slower than those before it. What disturbs a machine makes passes slower, many times
where it has other work, and never faster: so a faster one counts at once, and a slower machine is learnt in a few runs."""

_BEHIND = 1.5
_REST = 1.75
"""How many times as long as in a pass over a whole prompt a token takes behind a prefix, in passes over a block or two, and in
one over all that is left: what counts until it was measured. SmolLM2-135M took 1.3 to 1.8 and 1.6 to 1.9 times, from token
512, 1,024 or 2,048 to 3,774, on one core and on two."""

_LARGEST = 1e9
"""Above any position and any duration in seconds; what is said to be more is damaged."""


@dataclass(frozen=True)
class Pass:
    """One forward pass over the tokens `start` to `end` behind all those before, and how long it took."""

    start: int
    end: int
    seconds: float

    @property
    def token_seconds(self) -> float:
        return self.seconds / (self.end - self.start)


@dataclass(frozen=True)
class PrefillSpeed:
    """The token at position p takes `base + slope * p` seconds."""

    base: float
    slope: float = 0.0

    def seconds(self, start: int, end: int) -> float:
        """What a pass over the tokens `start` to `end` takes."""
        return self.base * (end - start) + self.slope * (end * end - start * start) / 2

    def times(self, factor: float) -> Self:
        """The same line, `factor` times slower."""
        return type(self)(self.base * factor, self.slope * factor)

    @classmethod
    def fit(cls, passes: Sequence[Pass], *, at_end: bool = False) -> Self | None:
        """The line through `passes`, weighted by tokens; level where they say nothing else, None where there are none.

        A pass counts at its middle, or `at_end`.
        """
        weight = sum(one.end - one.start for one in passes)
        if not weight:
            return None
        places = [one.end if at_end else (one.start + one.end) / 2 for one in passes]
        mean = sum(one.seconds for one in passes) / weight
        centre = sum((one.end - one.start) * place for one, place in zip(passes, places, strict=True)) / weight
        spread = sum((one.end - one.start) * (place - centre) ** 2 for one, place in zip(passes, places, strict=True))
        rise = sum(
            (one.end - one.start) * (place - centre) * (one.token_seconds - mean)
            for one, place in zip(passes, places, strict=True)
        )
        slope = max(rise / spread, 0.0) if spread else 0.0
        # A line that is below zero at the front comes of noise: then the mean tells more.
        return cls(mean - slope * centre, slope) if mean > slope * centre else cls(mean)


@dataclass(frozen=True)
class PrefillSpeeds:
    """What is known of a model on this machine: of its passes over blocks, whole prompts, and rests behind a prefix.

    What was not measured is taken from the others.
    """

    blocks: PrefillSpeed | None
    prompts: PrefillSpeed | None
    rests: PrefillSpeed | None
    """Of the position of a pass's last token."""

    rests_measured: bool = False
    short_s: float = 0.0
    """Seconds of a pass over a few tokens behind a prefix, which is the least that one takes; 0 until it was measured."""

    def times(self, factor: float) -> Self:
        """The same lines, `factor` times slower."""
        blocks, prompts, rests = (line and line.times(factor) for line in (self.blocks, self.prompts, self.rests))
        return type(self)(blocks, prompts, rests, self.rests_measured, self.short_s * factor)

    def rest(self, start: int, end: int) -> float | None:
        """Seconds of a pass over the tokens `start` to `end` behind those before."""
        if self.rests is None or not start:
            return None if self.prompts is None else self.prompts.seconds(start, end)
        return max((self.rests.base + self.rests.slope * end) * (end - start), self.short_s)

    def anew(self, start: int, end: int) -> bool:
        """Whether a pass over all `end` tokens is faster than one behind the first `start` of them."""
        whole, rest = self.rest(0, end), self.rest(start, end)
        return bool(start and whole is not None and rest is not None and whole < rest)

    def remaining(self, start: int, length: int, end: int) -> float | None:
        """Seconds that a prompt of `end` tokens takes behind its first `start` tokens beyond what it takes behind `length`."""
        own, behind = self.rest(start, end), self.rest(length, end)
        whole = self.rest(0, end)
        if own is None or behind is None or whole is None:
            return None
        return max(min(own, whole) - behind, 0.0)


def remember_passes(loaded: LoadedModel, passes: Iterable[Pass], *, sort: Sort = "blocks") -> None:
    """Records what `loaded` needed here for passes of a sort. Never raises: it is a convenience."""
    counted = [one for one in passes if (one.end - one.start < _LEAST_TOKENS) == (sort == "short") and one.seconds > 0]
    if not counted:
        return
    memory = Remembered("prefill-passes")
    entry = memory.get(_key(loaded))
    entry = entry if isinstance(entry, dict) else {}
    known = {(one.start, one.end): one for one in _read(entry.get(sort))}
    for one in counted:
        before = known.pop((one.start, one.end), one)
        known[one.start, one.end] = replace(one, seconds=min(one.seconds, (1 + _SLOWER) / 2 * before.seconds))
    kept = [[one.start, one.end, round(one.seconds, 6)] for one in list(known.values())[-_KEPT_PASSES:]]
    memory.put(_key(loaded), {**entry, sort: kept})


def remember_prefill(loaded: LoadedModel, tokens: int, seconds: float, *, behind: int = 0) -> None:
    """Records that `loaded` read a prompt of `tokens` tokens here in one pass in `seconds`, but for the first `behind`."""
    sort: Sort = "prompts" if not behind else "short" if tokens - behind < _LEAST_TOKENS else "rests"
    remember_passes(loaded, [Pass(behind, tokens, seconds)], sort=sort)


def prefill_speeds(loaded: LoadedModel) -> PrefillSpeeds:
    """The speeds last measured here, or what the measured ones make likely."""
    found = _remembered(_key(loaded))
    blocks, prompts, rests = found["blocks"], found["prompts"], found["rests"]
    whole = PrefillSpeed.fit(prompts or blocks)
    return PrefillSpeeds(
        PrefillSpeed.fit(blocks) or (whole and whole.times(_BEHIND)),
        whole,
        PrefillSpeed.fit(rests or [one for one in blocks if one.start], at_end=True) or (whole and whole.times(_REST)),
        bool(rests),
        statistics.median(one.seconds for one in found["short"]) if found["short"] else 0.0,
    )


def prefill_speed_of(tag: ModelTag, dtype: torch.dtype, device: str = "cpu") -> PrefillSpeed | None:
    """The speed of whole prompts last measured here, for a model that is not loaded."""
    found = _remembered(_key_of(tag, device, dtype))
    return PrefillSpeed.fit(found["prompts"] or found["blocks"])


def _remembered(key: str) -> dict[Sort, list[Pass]]:
    entry = Remembered("prefill-passes").get(key)
    entry = entry if isinstance(entry, dict) else {}
    sorts: tuple[Sort, ...] = ("blocks", "prompts", "rests", "short")
    return {sort: _read(entry.get(sort)) for sort in sorts}


def _read(value: Any) -> list[Pass]:
    """What a file says, as far as it makes sense."""
    found = []
    for item in value if isinstance(value, list) else []:
        if isinstance(item, list) and len(item) == 3 and all(_sensible(number) for number in item):  # noqa: PLR2004 - as Pass
            start, end, seconds = int(item[0]), int(item[1]), float(item[2])
            if end > start and seconds > 0:
                found.append(Pass(start, end, seconds))
    return found


def _sensible(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < _LARGEST


def _key(loaded: LoadedModel) -> str:
    places = dict.fromkeys(map(str, layer_devices(loaded.model, loaded.identity.layout)))
    return _key_of(loaded.identity.tag, "+".join(places), loaded.model.dtype)


def _key_of(tag: ModelTag, device: str, dtype: torch.dtype) -> str:
    return f"{tag} {device} threads={torch.get_num_threads()} {dtype}"
