"""The pace: how fast a model computes blocks here and now, and how far the pass is that it is running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvcdn.client.planning.plan import TURN
from kvcdn.keys import BlockName
from kvcdn.model.load import LoadedModel
from kvcdn.model.place import layer_devices, on_cpu
from kvcdn.model.speed import Pass, PrefillSpeed, PrefillSpeeds, prefill_speeds, remember_passes

_LEAST_PART = 0.25
"""A pass that has done less of its layers says nothing of how long it will take."""


@dataclass
class RunningPass:
    """A pass over `count` blocks from `first` on, the tokens `start` to `end`: since when, and which layer it has reached.

    `stolen_s` is what a fetch beside it has decoded meanwhile.
    """

    first: int
    count: int
    start: int
    end: int
    since: float
    layer: int = 0
    stolen_s: float = 0.0


class Pace:
    """Of one prompt's computing. Used by the model's thread."""

    def __init__(self, loaded: LoadedModel, blocks: Sequence[BlockName]) -> None:
        self.running: RunningPass | None = None
        self.on_cpu = on_cpu(layer_devices(loaded.model, loaded.identity.layout))
        self._loaded = loaded
        self._blocks = blocks
        self._before = prefill_speeds(loaded)
        self._passes: list[Pass] = []

    def begin(self, first: int, count: int) -> RunningPass:
        """A pass over `count` blocks from `first` on begins."""
        start, end = self._blocks[first].start, self._blocks[first + count - 1].end
        self.running = RunningPass(first, count, start, end, time.perf_counter())
        return self.running

    def ran(self, seconds: float) -> None:
        """The running pass has run to its end, in so many seconds."""
        if self.running is not None:
            self._passes.append(Pass(self.running.start, self.running.end, seconds))

    def at_stake(self, now: float) -> float:
        """Seconds of computing that would be lost by stopping the running pass."""
        return 0.0 if self.running is None else now - self.running.since

    def speeds(self, now: float) -> PrefillSpeeds:
        """As remembered, times what this machine has needed more or less just now."""
        passes, running, before = list(self._passes), self.running, self._before
        if running is not None and self.on_cpu and not passes:
            part = running.layer / len(self._loaded.identity.layout.layers)
            if part >= _LEAST_PART:
                passes.append(Pass(running.start, running.end, self._alone(now, running, part)))
        if not passes:
            return before
        if before.blocks is None:
            measured = PrefillSpeed.fit(passes)
            return PrefillSpeeds(measured, before.prompts or measured, before.rests)
        expected = sum(self._seconds_of(before, one.start, one.end) for one in passes)
        return before.times(sum(one.seconds for one in passes) / expected) if expected else before

    def _alone(self, now: float, running: RunningPass, part: float) -> float:
        """What the running pass, of which `part` is done, takes without a fetch, which is counted by itself and ends sooner."""
        spent = now - running.since
        remembered = self._seconds_of(self._before, running.start, running.end)
        return max((spent - running.stolen_s) / part, min(spent / part, remembered))

    def sooner_over(self, now: float, count: int) -> bool:
        """Whether a pass over only the first `count` blocks of the running one, begun now, would be over sooner by far."""
        running, speeds = self.running, self.speeds(now)
        if running is None:
            return False
        anew = self._seconds_of(speeds, running.start, self._blocks[running.first + count - 1].end)
        return anew <= TURN * self._left(now, self._seconds_of(speeds, running.start, running.end), running)

    def sooner_at_once(self, now: float, count: int) -> bool:
        """Whether one pass over `count` blocks, begun now, would be over sooner than the running one and those behind it."""
        running, speeds = self.running, self.speeds(now)
        if running is None or speeds.blocks is None or running.first or count <= running.count:
            return False
        names = self._blocks[running.count : count]
        behind = sum(speeds.blocks.seconds(one.start, one.end) for one in names)
        left = self._left(now, self._seconds_of(speeds, running.start, running.end), running)
        return self._seconds_of(speeds, running.start, names[-1].end) < left + behind

    def block_seconds(self, now: float, names: Sequence[BlockName]) -> list[float] | None:
        """What each of the blocks `names` adds to computing them all, less what is done of them; None while unknown."""
        speeds, running = self.speeds(now), self.running
        blocks = speeds.blocks
        if blocks is None or not names:
            return None if blocks is None else []
        if running is None:
            line = blocks if names[0].start else speeds.prompts or blocks
            return [line.seconds(one.start, one.end) for one in names]
        count = running.first + running.count - names[0].index
        left = self._left(now, self._seconds_of(speeds, running.start, running.end), running)
        return [left, *([0.0] * (count - 1)), *(blocks.seconds(one.start, one.end) for one in names[count:])]

    def _seconds_of(self, speeds: PrefillSpeeds, start: int, end: int) -> float:
        """What a pass over the tokens `start` to `end` takes: over several blocks from the front it is as over a prompt."""
        several = not start and end > self._loaded.identity.layout.block_tokens
        line = speeds.prompts if several else speeds.blocks
        return 0.0 if line is None else line.seconds(start, end)

    def _left(self, now: float, whole: float, running: RunningPass) -> float:
        """Of the `whole` pass. A GPU's queue is ahead of it, so that only the time tells."""
        if self.on_cpu:
            return whole * (1 - running.layer / len(self._loaded.identity.layout.layers))
        return max(whole - (now - running.since), 0.0)

    def remember(self) -> None:
        """Keeps what was measured for later prompts."""
        block_tokens = self._loaded.identity.layout.block_tokens
        prompts = [one for one in self._passes if not one.start and one.end > block_tokens]
        remember_passes(self._loaded, [one for one in self._passes if one not in prompts])
        if self._before.prompts is None:
            # A fetch beside it slows a pass down: what the model needs alone is worth more, where it is known.
            remember_passes(self._loaded, prompts, sort="prompts")
        self._passes.clear()
