"""History: how sums grew, step by step, in rings of fixed length. Pure accounting; the time is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """How far back one ring reaches: `steps` of `seconds` each."""

    seconds: float
    steps: int


SPANS = (Span(10.0, 360), Span(300.0, 288))
"""The last hour finely and the last day coarsely, some 200 kB."""


class History:
    """Rings of what was added to each of some sums in each step. Seconds are the caller's clock, which never goes back."""

    def __init__(self, now: float, names: tuple[str, ...], spans: tuple[Span, ...] = SPANS) -> None:
        """`names` are those of the sums; all of them are 0 at `now`."""
        self._names = names
        self._rings = [_Ring(span, now, len(names)) for span in spans]

    def record(self, now: float, sums: Mapping[str, float]) -> None:
        """What the sums are at `now`. To be called at least once a step: what was added since counts for its first step."""
        values = [sums[name] for name in self._names]
        for ring in self._rings:
            ring.record(now, values)

    def to_json(self, now: float) -> list[dict[str, Any]]:
        """A ring each: the width of a step, lists of the steps' growth, oldest first, and the age of the last, unfinished."""
        return [ring.to_json(now, self._names) for ring in self._rings]


class _Ring:
    def __init__(self, span: Span, now: float, width: int) -> None:
        self._span = span
        self._began = now
        self._base = self._last = [0.0] * width
        self._done: deque[list[float]] = deque(maxlen=span.steps - 1)

    def record(self, now: float, values: list[float]) -> None:
        passed = min(int((now - self._began) / self._span.seconds), self._span.steps)
        for number in range(passed):
            # What came since the last look is the first step's; a step that nobody looked at has nothing.
            self._done.append(self._grown(values) if number == 0 else [0.0] * len(values))
            self._base = values
        if passed:
            self._began += int((now - self._began) / self._span.seconds) * self._span.seconds
        self._last = values

    def _grown(self, values: list[float]) -> list[float]:
        return [value - base for value, base in zip(values, self._base, strict=True)]

    def to_json(self, now: float, names: tuple[str, ...]) -> dict[str, Any]:
        steps = [*self._done, self._grown(self._last)]
        columns = {name: [round(step[place], 3) for step in steps] for place, name in enumerate(names)}
        return {
            "step_seconds": self._span.seconds,
            "steps": self._span.steps,
            "unfinished_seconds": round(max(now - self._began, 0.0), 3),
            **columns,
        }
