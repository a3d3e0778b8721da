"""Prefill speed of a model on this machine, by position, measured whenever it prefills and remembered.

A token costs more the more tokens are before it, since it attends to all of them: seconds per token are fitted as a line
over its position. Passes over blocks (the publisher's schedule) and passes over a whole prompt (the model's own prefill)
are kept apart, as the second is faster on many machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from kvcdn.digest import ModelTag
from kvcdn.model.load import LoadedModel
from kvcdn.model.remembered import Remembered

_LEAST_TOKENS = 64
"""Shorter passes measure overhead, not speed; also the shortest whole block (FORMAT.md 2.4)."""

_KEPT_PASSES = 48
"""Measurements kept of each sort, the oldest go: enough positions for a line."""

_LARGEST = 1e9
"""Above any position and any duration in seconds; what is said to be more is damaged."""


@dataclass(frozen=True)
class Pass:
    """One forward pass over the tokens `start` to `end` behind all those before, and how long it took."""

    start: int
    end: int
    seconds: float

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2

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
    def fit(cls, passes: Sequence[Pass]) -> Self | None:
        """The line through `passes`, weighted by tokens; level where they say nothing else, None where there are none."""
        weight = sum(one.end - one.start for one in passes)
        if not weight:
            return None
        mean = sum(one.seconds for one in passes) / weight
        centre = sum((one.end - one.start) * one.middle for one in passes) / weight
        spread = sum((one.end - one.start) * (one.middle - centre) ** 2 for one in passes)
        rise = sum((one.end - one.start) * (one.middle - centre) * (one.token_seconds - mean) for one in passes)
        slope = max(rise / spread, 0.0) if spread else 0.0
        # A line that is below zero at the front comes of noise: then the mean tells more.
        return cls(mean - slope * centre, slope) if mean > slope * centre else cls(mean)


def remember_passes(loaded: LoadedModel, passes: Iterable[Pass], *, whole: bool = False) -> None:
    """Records what `loaded` needed here for blocks, or for `whole` prompts in one pass. Never raises: it is a convenience."""
    counted = [one for one in passes if one.end - one.start >= _LEAST_TOKENS and one.seconds > 0]
    if not counted:
        return
    memory, sort = Remembered("prefill-passes"), _sort(whole=whole)
    entry = memory.get(_key(loaded))
    entry = entry if isinstance(entry, dict) else {}
    known = {(one.start, one.end): one for one in _read(entry.get(sort))}
    for one in counted:
        before = known.pop((one.start, one.end), one)
        # Half of each: one slow run among many does not decide.
        known[one.start, one.end] = Pass(one.start, one.end, (before.seconds + one.seconds) / 2)
    kept = [[one.start, one.end, round(one.seconds, 6)] for one in list(known.values())[-_KEPT_PASSES:]]
    memory.put(_key(loaded), {**entry, sort: kept})


def remember_prefill(loaded: LoadedModel, tokens: int, seconds: float) -> None:
    """Records that `loaded` prefilled a prompt of `tokens` tokens in one pass in `seconds` here."""
    remember_passes(loaded, [Pass(0, tokens, seconds)], whole=True)


def prefill_speed(loaded: LoadedModel, *, whole: bool = True) -> PrefillSpeed | None:
    """The speed last measured here, of a `whole` prompt in one pass or of blocks; where only the other is known, that."""
    return _remembered(_key(loaded), whole=whole)


def prefill_speed_of(tag: ModelTag, dtype: torch.dtype, device: str = "cpu") -> PrefillSpeed | None:
    """As `prefill_speed`, of whole prompts, for a model that is not loaded."""
    return _remembered(_key_of(tag, torch.device(device), dtype), whole=True)


def _remembered(key: str, *, whole: bool) -> PrefillSpeed | None:
    entry = Remembered("prefill-passes").get(key)
    if not isinstance(entry, dict):
        return None
    return PrefillSpeed.fit(_read(entry.get(_sort(whole=whole))) or _read(entry.get(_sort(whole=not whole))))


def _sort(*, whole: bool) -> str:
    return "prompts" if whole else "blocks"


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
    return _key_of(loaded.identity.tag, loaded.model.device, loaded.model.dtype)


def _key_of(tag: ModelTag, device: torch.device, dtype: torch.dtype) -> str:
    return f"{tag} {device} threads={torch.get_num_threads()} {dtype}"
