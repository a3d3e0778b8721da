"""Allowances: no tenant gets more than it may, none less, and none at another's cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.access.allowance import BURST_SECONDS, DAY_SECONDS, Allowances, Limits, Shortage
from kvcdn.access.grant import Grant, Scope

NOON = 20_000 * DAY_SECONDS + DAY_SECONDS / 2.0

ACME = Grant("acme", frozenset((Scope.READ,)))


@given(st.lists(st.floats(0, 2), min_size=1, max_size=200), st.floats(0.5, 50))
def test_requests_keep_to_their_rate(pauses: list[float], rate: float) -> None:
    """Over any time, no more than the rate brings and a burst; whoever waits as told is let in."""
    allowances, now, admitted = Allowances(Limits(requests_per_second=rate)), NOON, 0
    for pause in pauses:
        now += pause
        wait = allowances.admit(ACME, now)
        if wait is None:
            admitted += 1
        else:
            assert Shortage.REQUESTS == wait.shortage
            now += wait.seconds + 1e-6
            assert allowances.admit(ACME, now) is None
            admitted += 1
        assert admitted <= rate * (now - NOON + BURST_SECONDS) + 1 + 1e-6


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 10_000)), min_size=1, max_size=100))
def test_bytes_keep_to_their_rate_but_for_one_object(steps: list[tuple[float, int]]) -> None:
    """Who is in debt waits; the debt is at most the last object."""
    rate, allowances, now, sent, largest = 1000.0, Allowances(Limits(bytes_per_second=1000.0)), NOON, 0, 0
    for pause, size in steps:
        now += pause
        if allowances.admit(ACME, now) is None:
            allowances.charge("acme", size, now)
            sent, largest = sent + size, max(largest, size)
        assert sent <= rate * (now - NOON + BURST_SECONDS) + largest + 1e-3


def test_a_day_has_its_end() -> None:
    """The quota of the day holds until midnight UTC, the token's where it is smaller, and tells how long that is."""
    allowances = Allowances(Limits(bytes_per_day=1000))
    small = Grant("acme", frozenset(), bytes_per_day=500)
    allowances.charge("acme", 600, NOON)
    assert allowances.admit(ACME, NOON) is None
    wait = allowances.admit(small, NOON)
    assert (Shortage.DAY, DAY_SECONDS / 2) == (wait.shortage, wait.seconds)
    allowances.charge("acme", 400, NOON)
    assert Shortage.DAY == allowances.admit(ACME, NOON).shortage
    assert allowances.admit(small, NOON + wait.seconds) is None


def test_tenants_do_not_share() -> None:
    """One that has used up everything leaves the others as they were; named tenants have limits of their own."""
    allowances = Allowances(Limits(requests_per_second=1), {"big": Limits()})
    while allowances.admit(ACME, NOON) is None:
        pass
    assert allowances.admit(Grant("other", frozenset()), NOON) is None
    assert [None] * 1000 == [allowances.admit(Grant("big", frozenset()), NOON) for _ in range(1000)]


def test_a_restart_forgives_nothing() -> None:
    """What was sent today counts on; what was sent yesterday does not."""
    before = Allowances(Limits(bytes_per_day=1000))
    before.charge("acme", 1000, NOON)
    after = Allowances(Limits(bytes_per_day=1000))
    after.restore(before.to_json(NOON), NOON)
    assert Shortage.DAY == after.admit(ACME, NOON).shortage
    tomorrow = Allowances(Limits(bytes_per_day=1000))
    tomorrow.restore(before.to_json(NOON), NOON + DAY_SECONDS)
    assert tomorrow.admit(ACME, NOON + DAY_SECONDS) is None


@pytest.mark.parametrize("value", [None, 1, [], {}, {"day": 20_000}, {"day": 20_000, "bytes": [1]}, {"day": "x", "bytes": {}}])
def test_a_damaged_account_is_forgotten(value: object) -> None:
    """It comes from a disk."""
    allowances = Allowances(Limits(bytes_per_day=1))
    allowances.restore(value, NOON)
    assert 0 == allowances.today("acme", NOON)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    """Nor takes anything: who waited is admitted by the clock of then."""
    allowances = Allowances(Limits(requests_per_second=1, bytes_per_second=100))
    while allowances.admit(ACME, NOON) is None:
        pass
    assert allowances.admit(ACME, NOON - 7200) is not None
    assert allowances.admit(ACME, NOON - 7198) is None
    allowances.charge("acme", 1000, NOON - 7198)
    assert allowances.admit(ACME, NOON - 7197) is not None
    assert allowances.admit(ACME, NOON - 7180) is None
    assert allowances.admit(ACME, NOON + 2) is None
