"""The plan: whether to fetch a prefix, to compute it, or both at once until they meet. Pure decisions over measured numbers.

Both means: the model computes blocks from the left while blocks arrive from the right. It takes less time than either
alone, and nothing is lost when one side fails. Fetching alone is chosen where it takes a small part of a prefill, so
that a failure costs little; computing alone where fetching would not save a twentieth. What is not known yet is tried in
a way that cannot lose much: fetching for a moment, then both.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcdn.errors import UsageError

PROBE_SECONDS = 0.1
"""How long fetching alone is tried while nothing is known of the link or of the model's speed."""

PROBE_SHARE = 0.02
"""The same as a part of the prefill, where its time is known: what a link that never answers may cost."""

SAFE_SHARE = 0.15
"""Fetching alone may take this part of a prefill: an edge that dies at the last moment then costs no more."""

NEAR = 1.05
"""What takes at most so many times the best is as good: other things decide, such as leaving the processor to others."""

TURN = 0.8
"""A running option is left for one that takes less than this part of the time it still needs: turning loses work."""

STAKE = 0.5
"""What fetching alone must save besides, as a part of the computing that it would throw away: links promise much."""

LINK_BOUND = 0.4
"""Of what the threads can decode: a link that brings less leaves the cores to the model, which then starts while it brings."""

WORTHLESS = 0.85
"""Fetching beside computing must bring the time below this part of it: it takes from the pass, and hangs on the link's word."""


class Mode(enum.StrEnum):
    """How a prefix comes to the model."""

    FETCH = "fetch"
    COMPUTE = "compute"
    BOTH = "both"


@dataclass(frozen=True)
class Prices:
    """What a second and a byte cost here, in US dollars."""

    usd_per_gpu_hour: float
    """Of the device that prefills; what it does while it waits for a fetch is counted as someone else's work."""
    usd_per_gb: float
    """Egress of the edge or origin, per 10^9 bytes."""
    usd_per_10k_requests: float = 0.0

    def __post_init__(self) -> None:
        for price in (self.usd_per_gpu_hour, self.usd_per_gb, self.usd_per_10k_requests):
            number = isinstance(price, int | float) and not isinstance(price, bool)
            if not (number and math.isfinite(price) and price >= 0):
                raise UsageError(f"{price!r} is no price", hint="prices are US dollars, 0 or more")

    def of_computing(self, seconds: float) -> float:
        return seconds / 3600 * self.usd_per_gpu_hour

    def of_fetching(self, wire_bytes: float, requests: int) -> float:
        return wire_bytes / 1e9 * self.usd_per_gb + requests / 1e4 * self.usd_per_10k_requests


@dataclass(frozen=True)
class Aim:
    """What the user wants. `mode` None lets the plan decide; `deadline_s` is from the question to the first token."""

    mode: Mode | None = None
    deadline_s: float | None = None
    prefer: Literal["fastest", "cheapest"] = "fastest"
    prices: Prices | None = None

    def changed_by(self, options: dict[str, Any]) -> Aim:
        """This aim with the wishes among `options`, which are taken out of them. Raises UsageError."""
        wishes: dict[str, Any] = {
            name: options.pop(name) for name in ("mode", "deadline", "prefer", "prices") if name in options
        }
        if not wishes:
            return self
        ours: dict[str, Any] = {
            "mode": self.mode or "auto",
            "deadline": self.deadline_s,
            "prefer": self.prefer,
            "prices": self.prices,
        }
        return Aim.of(**{**ours, **wishes})

    @classmethod
    def of(
        cls,
        mode: str = "auto",
        deadline: float | None = None,
        prefer: str = "fastest",
        prices: Prices | None = None,
    ) -> Aim:
        """From what users write. Raises UsageError."""
        if mode not in ("auto", *Mode):
            raise UsageError(f"{mode!r} is no mode", hint="auto, fetch, compute or both")
        if prefer not in ("fastest", "cheapest"):
            raise UsageError(f"{prefer!r} is no preference", hint="fastest or cheapest")
        if prefer == "cheapest" and prices is None:
            raise UsageError("the cheapest way cannot be told without prices", hint="give prices=Prices(...)")
        if deadline is not None and not deadline > 0:
            raise UsageError(f"a deadline of {deadline} s cannot be met", hint="seconds from the question to the first token")
        return cls(None if mode == "auto" else Mode(mode), deadline, "cheapest" if prefer == "cheapest" else "fastest", prices)


@dataclass(frozen=True)
class Work:
    """What is missing of a prefix, block by block from the first that is not there to the end, and how fast each way is.

    `block_s` are seconds of computing each on the schedule, less what is done of the first; `prompt_s` those of the model's
    own pass over all of them: None while unknown. `wire_bytes` are what is still to come of each: 0 for what is there,
    infinite for what will not come. `link` is in bytes per second and None while unknown, `decode` likewise what the
    fetching threads can verify and decode. `shared` is how many times that time of all cores the model loses to decoding.
    `question_s` is the model's pass over what follows the prefix, which begins layer by layer while the link brings the rest,
    but behind a meeting only once all is there. `either` is set where nothing can be computed beside a fetch: all is
    fetched, or all is computed.
    """

    block_s: Sequence[float] | None
    prompt_s: float | None
    wire_bytes: Sequence[float]
    link: float | None
    decode: float
    latency_s: float = 0.0
    shared: float = 0.0
    question_s: float = 0.0
    either: bool = False

    @property
    def hidden_s(self) -> float:
        """Of the question's pass, what a fetch hides: nothing where decoding takes the cores that it needs."""
        waiting = self.link is not None and self.link < LINK_BOUND * self.decode
        return self.question_s if waiting else 0.0


@dataclass(frozen=True)
class Expected:
    """Seconds by option until the question can begin: None while unknown, infinite where it will not end.

    `fetch` is less by what the question's pass does meanwhile.
    """

    fetch: float | None
    compute: float | None
    both: float | None
    computed_blocks: int = 0
    """How many blocks `both` computes."""

    def of(self, mode: Mode) -> float | None:
        return {Mode.FETCH: self.fetch, Mode.COMPUTE: self.compute, Mode.BOTH: self.both}[mode]

    def to_json(self) -> dict[str, float | None]:
        return {mode: _rounded(self.of(mode)) for mode in Mode}


@dataclass(frozen=True)
class Decision:
    """What to do from now on, what each option is expected to take, and why, in one sentence."""

    mode: Mode
    expected: Expected
    why: str


@dataclass(frozen=True)
class Progress:
    """Where a prompt is."""

    elapsed_s: float = 0.0
    """Seconds since the question."""
    running: Mode | None = None
    spent_s: float = 0.0
    """Seconds since the first decision."""
    at_stake_s: float = 0.0
    """Seconds of computing that would be lost by fetching alone from now on."""


def expect(work: Work) -> Expected:
    """What each option takes from now on."""
    rate = None if work.link is None else min(work.link, work.decode)
    coming = sum(work.wire_bytes)
    fetch = 0.0 if not coming else math.inf if math.isinf(coming) else None
    if fetch is None and rate is not None:
        fetch = max(work.latency_s + coming / rate - work.hidden_s, 0.0) if rate > 0 else math.inf
    both, computed = _meeting(work, rate)
    return Expected(fetch, work.prompt_s, both, computed)


def _meeting(work: Work, rate: float | None) -> tuple[float | None, int]:
    """Where computing from the left and fetching from the right meet: seconds until then, and blocks computed."""
    if work.block_s is None or rate is None or work.either:
        return None, 0
    # A pass is ended by everything having arrived, be it later for what it takes from decoding.
    best, computed = _all_arriving(work), 0
    left, sizes = 0.0, [size if math.isfinite(size) else 0.0 for size in work.wire_bytes]
    lost = max((index + 1 for index, size in enumerate(work.wire_bytes) if math.isinf(size)), default=0)
    for count, seconds in enumerate(work.block_s, start=1):
        left += seconds
        if count < lost:
            continue
        right = sum(sizes[count:])
        arriving = 0.0 if not right else (work.latency_s + right / rate if rate > 0 else math.inf)
        stolen = work.shared * right / work.decode
        if max(left + stolen, arriving) < best:
            best, computed = max(left + stolen, arriving), count
    return best, computed


def _all_arriving(work: Work) -> float:
    """Seconds until all is fetched beside a computation that takes its share of the cores."""
    rate = min(work.link or 0.0, work.decode / 2 if work.shared else work.decode)
    return work.latency_s + sum(work.wire_bytes) / rate if rate > 0 else math.inf


def decide(work: Work, aim: Aim, progress: Progress) -> Decision:
    """What to do from now on. Call it again whenever the numbers have changed."""
    expected = expect(work)
    if aim.mode is not None:
        return Decision(aim.mode, expected, f"{aim.mode} was asked for")
    if not any(work.wire_bytes):
        return Decision(Mode.FETCH, expected, "everything is there")
    if aim.prefer == "cheapest" and aim.prices is not None:
        found = _cheapest(work, expected, aim, aim.prices, progress)
        if found is not None:
            return found
    decision = _faster(expected, progress) if work.either else _fastest(expected, progress)
    return _in_time(decision, expected, aim, progress)


def _fastest(expected: Expected, progress: Progress) -> Decision:
    fetch, compute, both = expected.fetch, expected.compute, expected.both
    if fetch is None or compute is None or both is None:
        return _trying(expected, progress)
    # Fetching is as good as both, or so short that its failure would cost little; turning back to it loses a pass.
    between = TURN if progress.at_stake_s else 1.0
    turn = {Mode.FETCH: NEAR / TURN, Mode.BOTH: between}.get(progress.running or Mode.COMPUTE, NEAR)
    limit = SAFE_SHARE * compute * {Mode.FETCH: 1 / TURN, Mode.BOTH: 0.0}.get(progress.running or Mode.COMPUTE, 1.0)
    # What was computed is kept against a fetch that only promises.
    worth_turning = fetch + STAKE * progress.at_stake_s <= turn * min(both, compute)
    if worth_turning or fetch + progress.spent_s <= limit:
        return Decision(Mode.FETCH, expected, f"fetching takes {seconds(fetch)}, prefilling {seconds(compute)}")
    fetching = "fetching will not end" if math.isinf(fetch) else f"fetching takes {seconds(fetch)}"
    if math.isinf(fetch):
        # Nothing comes, and perhaps something will: computing goes on beside it as long as that is no slower.
        mode = Mode.BOTH if both <= NEAR * compute else Mode.COMPUTE
        how = "computing begins where it is needed" if mode is Mode.BOTH else f"prefilling {seconds(compute)}"
        return Decision(mode, expected, f"{fetching}, {how}")
    hardly_tried = progress.running is Mode.FETCH and progress.spent_s < PROBE_SHARE * compute and math.isfinite(fetch)
    if hardly_tried:
        # A fetch that is given up does not come back: not for what its first moments say.
        return Decision(Mode.BOTH, expected, f"{fetching} by its first moments, so computing begins beside it")
    if both > compute * (1 / TURN if progress.running is Mode.BOTH else WORTHLESS):
        return Decision(Mode.COMPUTE, expected, f"{fetching}, prefilling {seconds(compute)}, and both at once no less")
    return Decision(Mode.BOTH, expected, f"{fetching}, prefilling {seconds(compute)}, both at once {seconds(both)}")


def _faster(expected: Expected, progress: Progress) -> Decision:
    """Fetching or computing, where it cannot be both. An unknown link is given as long as a fetch may take in vain."""
    fetch, compute = expected.fetch, expected.compute
    if fetch is not None and math.isinf(fetch):
        return Decision(Mode.COMPUTE, expected, "fetching will not end")
    if compute is None:
        return Decision(Mode.FETCH, expected, "how fast this model prefills is not known")
    if fetch is None:
        if progress.spent_s < SAFE_SHARE * compute:
            return Decision(Mode.FETCH, expected, "nothing is known of the link yet, so it is tried for a moment")
        return Decision(Mode.COMPUTE, expected, f"the link has brought nothing yet, prefilling takes {seconds(compute)}")
    mode = Mode.FETCH if fetch <= NEAR * compute else Mode.COMPUTE
    return Decision(mode, expected, f"fetching takes {seconds(fetch)}, prefilling {seconds(compute)}")


def _trying(expected: Expected, progress: Progress) -> Decision:
    """What to do while the link, the model's speed or both are unknown."""
    fetch, compute = expected.fetch, expected.compute
    if fetch is None:
        if progress.spent_s < (PROBE_SECONDS if compute is None else PROBE_SHARE * compute):
            return Decision(Mode.FETCH, expected, "nothing is known of the link yet, so it is tried for a moment")
        return Decision(Mode.BOTH, expected, "the link has brought nothing yet, so computing begins beside it")
    if fetch + progress.spent_s <= PROBE_SECONDS:
        return Decision(Mode.FETCH, expected, f"fetching takes {seconds(fetch)}; how fast this model prefills is not known")
    return Decision(Mode.BOTH, expected, "how fast this model prefills is not known, so it is measured beside fetching")


def _in_time(decision: Decision, expected: Expected, aim: Aim, progress: Progress) -> Decision:
    """`decision`, or an option that meets the deadline where it does not and another does."""
    if aim.deadline_s is None:
        return decision
    left = aim.deadline_s - progress.elapsed_s
    known = {mode: takes for mode in Mode if (takes := expected.of(mode)) is not None}
    chosen = known.get(decision.mode)
    if chosen is None or chosen <= left or not known:
        return decision
    best = min(known, key=lambda mode: known[mode])
    if known[best] <= left:
        return Decision(best, expected, f"of the ways that meet the deadline, {best} takes {seconds(known[best])}")
    return Decision(decision.mode, expected, f"{decision.why}; none meets the deadline of {seconds(aim.deadline_s)}")


def _cheapest(work: Work, expected: Expected, aim: Aim, prices: Prices, progress: Progress) -> Decision | None:
    """The cheapest option that ends, and in time where one does; None while the model's speed is not known."""
    known = [expected.of(mode) for mode in Mode if not (work.either and mode is Mode.BOTH)]
    if work.block_s is None or None in known:
        return None
    count = expected.computed_blocks
    parts = {
        Mode.FETCH: (0.0, work.wire_bytes),
        Mode.COMPUTE: (expected.compute or 0.0, ()),
        Mode.BOTH: (sum(work.block_s[:count]), work.wire_bytes[count:]),
    }
    costs = {
        mode: prices.of_computing(computing) + prices.of_fetching(sum(sizes), len(sizes))
        for mode, (computing, sizes) in parts.items()
        if math.isfinite(expected.of(mode) or 0.0)
        and (mode is not Mode.BOTH or (count < len(work.block_s) and not work.either))
    }
    left = math.inf if aim.deadline_s is None else aim.deadline_s - progress.elapsed_s
    timely = {mode: cost for mode, cost in costs.items() if (expected.of(mode) or 0.0) <= left}
    if not timely:
        return None
    best = min(timely, key=lambda mode: (timely[mode], expected.of(mode)))
    running = progress.running
    if running in timely and timely[running] * TURN <= timely[best]:
        best = running
    prices_of = ", ".join(f"{mode} {costs[mode]:.2g} USD" for mode in costs)
    return Decision(best, expected, f"{best} is the cheapest way{' in time' if aim.deadline_s else ''}: {prices_of}")


def seconds(value: float) -> str:
    """For people: `0.34 s`, `65 s`."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"  # noqa: PLR2004 - two digits


def _rounded(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else round(value, 4)
