"""The states of a fill and of an origin's breaker: pure machines, driven by hypothesis and by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcdn.edge.fills.breaker import FAILURES, FIRST_REST_SECONDS, LONGEST_REST_SECONDS, PROBE_SECONDS, Breaker
from kvcdn.edge.fills.fill_lock import GRACE_SECONDS, STILL_SECONDS, FillLock, FillState
from kvcdn.edge.fills.origins import Origin, close_pieces
from kvcdn.errors import UnavailableError
from kvcdn.stores.memory import MemoryStore

SIZE = 1000


class LockMachine(RuleBasedStateMachine):
    """Any order of what a writer may do and a clock that only goes forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lock = FillLock(0.0, 30.0)
        self.before = (FillState.WAITING, 0)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.lock.state is FillState.WAITING)
    @rule()
    def open(self) -> None:
        self.lock.open(SIZE, self.now, self.now + 30)

    @precondition(lambda self: self.lock.state is FillState.WRITING)
    @rule(step=st.integers(0, SIZE))
    def advance(self, step: int) -> None:
        self.lock.advance(min(self.lock.verified + step, SIZE), self.now)

    @rule()
    def finish(self) -> None:
        if self.lock.state is FillState.WRITING and self.lock.verified == SIZE:
            self.lock.finish()
        else:
            with pytest.raises(ValueError, match=r"expected to be|no whole object"):
                self.lock.finish()

    @precondition(lambda self: self.lock.state.running)
    @rule(transient=st.booleans())
    def fail(self, transient: bool) -> None:
        self.lock.fail(transient=transient)

    @rule()
    def abandon(self) -> None:
        self.lock.abandon()

    @invariant()
    def verdicts_stand_and_the_frontier_never_goes_back(self) -> None:
        state, verified = self.before
        assert state.running or state is self.lock.state
        assert verified <= self.lock.verified <= max(self.lock.size, 0)
        assert self.lock.state is not FillState.DONE or self.lock.verified == SIZE
        self.before = (self.lock.state, self.lock.verified)

    @invariant()
    def a_reader_waits_for_a_running_fill_only_and_not_for_ever(self) -> None:
        seen = self.lock.seen(self.now, 0.0)
        assert seen is self.lock.state or self.lock.state.running
        assert self.lock.admits(self.now) is self.lock.seen(self.now, self.now).running
        later = self.now + self.lock.patience(self.now, self.now) + 0.001
        assert not self.lock.seen(later, self.now).running


TestLock = LockMachine.TestCase


def test_a_reader_of_a_fill_that_stands_still_has_waited_too_long() -> None:
    """A newcomer still joins; every byte that comes gives those who wait new patience."""
    lock = FillLock(0.0, 1000.0)
    lock.open(SIZE, 1.0, 1000.0)
    assert FillState.WRITING is lock.seen(STILL_SECONDS, 0.0)
    assert FillState.WAITED_TOO_LONG is lock.seen(STILL_SECONDS + 2, 0.0)
    assert lock.admits(STILL_SECONDS + 2)
    lock.advance(0, STILL_SECONDS + 2)
    assert FillState.WRITING is lock.seen(STILL_SECONDS + 3, 0.0)


def test_nobody_joins_a_fill_that_is_too_old() -> None:
    """Beyond its deadline and some grace it hangs, whatever it last said."""
    lock = FillLock(0.0, 10.0)
    lock.open(SIZE, 1.0, 20.0)
    lock.advance(5, 20.0 + GRACE_SECONDS)
    assert lock.admits(20.0 + GRACE_SECONDS)
    assert FillState.TOO_OLD is lock.seen(20.1 + GRACE_SECONDS, 20.0 + GRACE_SECONDS)
    assert not lock.admits(20.1 + GRACE_SECONDS)


@pytest.mark.parametrize("step", [lambda lock: lock.advance(1, 0.0), lambda lock: lock.advance(SIZE + 1, 0.0)])
def test_a_frontier_that_lies_is_refused(step) -> None:
    """It neither goes back nor beyond the object."""
    lock = FillLock(0.0, 10.0)
    lock.open(SIZE, 0.0, 10.0)
    lock.advance(2, 0.0)
    with pytest.raises(ValueError, match="cannot move"):
        step(lock)


def test_a_down_origin_is_asked_by_one_at_a_time_and_ever_more_rarely() -> None:
    """FAILURES in a row, then rests that double up to the longest; one success ends it."""
    breaker, now = Breaker(), 0.0
    for _ in range(FAILURES):
        assert breaker.admit(now)
        breaker.fail(now, 1.0)
    expected = FIRST_REST_SECONDS
    for _ in range(10):
        assert not breaker.admit(now)
        assert expected == breaker.rest(now)
        now += expected
        assert breaker.admit(now)
        assert not breaker.admit(now)
        breaker.fail(now, 1.0)
        expected = min(2 * expected, LONGEST_REST_SECONDS)
    now += expected
    assert breaker.admit(now)
    breaker.succeed()
    assert (False, True, True) == (breaker.open, breaker.admit(now), breaker.admit(now))


def test_a_probe_that_is_lost_does_not_close_an_origin_for_ever() -> None:
    """Without an outcome another probe goes out after a while."""
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.fail(0.0, 0.0)
    assert breaker.admit(1.0)
    assert not breaker.admit(0.9 + PROBE_SECONDS)
    assert breaker.admit(1.0 + PROBE_SECONDS)


def test_failures_that_are_not_in_a_row_do_not_count() -> None:
    """An origin that answers most of the time is up."""
    breaker = Breaker()
    for _ in range(10):
        breaker.fail(0.0, 0.0)
        breaker.fail(0.0, 0.0)
        breaker.succeed()
    assert not breaker.open


class BreakingStore(MemoryStore):
    """Begins every stream well and breaks it after its first piece, as often as told."""

    def __init__(self, breaks: int) -> None:
        super().__init__()
        self.breaks = breaks
        self.create("a", [b"x" * 10])

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        return self._pieces(b"".join(super().stream(key, start, length)))

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        yield data[:5]
        if self.breaks:
            self.breaks -= 1
            raise UnavailableError("the link broke")
        yield data[5:]


def test_an_origin_that_breaks_every_body_is_down() -> None:
    """That it begins to answer does not make it an origin that answers; one whole body does."""
    now = [0.0]
    origin = Origin(BreakingStore(FAILURES), lambda: now[0])
    for number in range(FAILURES):
        assert not origin.down, number
        with pytest.raises(UnavailableError, match="broke"):
            list(origin.stream("a"))
    assert origin.down
    with pytest.raises(UnavailableError, match="tried again in"):
        origin.stream("a")
    now[0] += LONGEST_REST_SECONDS
    assert b"x" * 10 == b"".join(origin.stream("a"))
    assert not origin.down


def test_a_reader_that_stops_early_is_not_the_origins_fault() -> None:
    """What was asked for and not read to its end has come so far."""
    now = [0.0]
    origin = Origin(BreakingStore(0), lambda: now[0])
    for _ in range(2 * FAILURES):
        pieces = origin.stream("a")
        next(pieces)
        close_pieces(pieces)
    assert not origin.down
