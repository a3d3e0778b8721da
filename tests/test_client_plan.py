"""The plan: right on known numbers, careful with unknown ones, and never an option that another one beats by much."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.cli import options
from kvcdn.client.planning.plan import PROBE_SECONDS, SAFE_SHARE, WORTHLESS, Aim, Mode, Prices, Progress, Work, decide, expect
from kvcdn.errors import UsageError

BLOCKS = 8


def work(fetch_s, compute_s, *, one_pass=1.0, blocks=BLOCKS, lost=(), shared=0.0, decode=1e15, question_s=0.0):  # noqa: PLR0913 - by name
    """Equal blocks that take `fetch_s` and `compute_s` in all; 1 MB each. None is unknown."""
    return Work(
        block_s=None if compute_s is None else [compute_s / blocks] * blocks,
        prompt_s=None if compute_s is None else one_pass * compute_s,
        wire_bytes=[math.inf if index in lost else 1e6 for index in range(blocks)],
        link=None if fetch_s is None else (blocks * 1e6 / fetch_s if fetch_s else 1e15),
        decode=decode,
        shared=shared,
        question_s=question_s,
    )


@pytest.mark.parametrize(
    ("fetch_s", "compute_s", "mode"),
    [
        (1, 100, Mode.FETCH),
        (14, 100, Mode.FETCH),
        (40, 100, Mode.BOTH),
        (100, 100, Mode.BOTH),
        (250, 100, Mode.BOTH),
        (600, 100, Mode.COMPUTE),
        (3000, 100, Mode.COMPUTE),
        (math.inf, 100, Mode.COMPUTE),
    ],
)
def test_the_fastest_is_chosen(fetch_s, compute_s, mode):
    """Fetching on a fast link, computing on a slow one, both in between."""
    found = work(fetch_s if fetch_s < math.inf else 1e300, compute_s)
    assert mode is decide(found, Aim(), Progress()).mode


@settings(deadline=None)
@given(st.floats(0.01, 1000), st.floats(0.01, 1000), st.floats(0.8, 1.0), st.integers(1, 40))
def test_no_option_beats_the_chosen_one_by_much(fetch_s, compute_s, one_pass, blocks):
    """What is chosen takes little longer than the best, and at most 1.1 times fetching or prefilling alone."""
    found = decide(work(fetch_s, compute_s, one_pass=one_pass, blocks=blocks), Aim(), Progress())
    expected = found.expected
    assert expected.fetch == pytest.approx(fetch_s)
    best = min(expected.fetch, expected.compute, expected.both)
    chosen = expected.of(found.mode)
    assert chosen <= best / WORTHLESS * (1 + 1e-9) or chosen <= SAFE_SHARE * expected.compute
    assert chosen <= 1.1 * min(expected.fetch, expected.compute)


@settings(deadline=None)
@given(st.floats(0.01, 1000), st.floats(0.01, 1000), st.integers(1, 40), st.data())
def test_both_never_takes_longer_than_its_parts_and_meets_where_it_says(fetch_s, compute_s, blocks, data):
    """The meeting point is the best of all, found by trying every one, also at the front; lost blocks are computed."""
    lost = data.draw(st.sets(st.integers(0, blocks - 1), max_size=3))
    expected = expect(work(fetch_s, compute_s, blocks=blocks, lost=lost))
    meetings = range(max(lost) + 1 if lost else 0, blocks + 1)
    tried = {count: max(count * compute_s / blocks, (blocks - count) * fetch_s / blocks) for count in meetings}
    assert expected.both == pytest.approx(min(tried.values()))
    assert tried[expected.computed_blocks] == pytest.approx(expected.both)
    assert expected.both <= compute_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("fetch_s", "compute_s", "spent", "mode"),
    [
        (None, None, 0.0, Mode.FETCH),
        (None, None, PROBE_SECONDS, Mode.BOTH),
        (None, 100, 1.9, Mode.FETCH),
        (None, 100, 2.1, Mode.BOTH),
        (0.05, None, 0.04, Mode.FETCH),
        (5, None, 0.0, Mode.BOTH),
    ],
)
def test_the_unknown_is_tried_for_a_moment(fetch_s, compute_s, spent, mode):
    """An unknown link is tried for a part of the prefill, an unknown model is measured beside fetching."""
    assert mode is decide(work(fetch_s, compute_s), Aim(), Progress(spent_s=spent)).mode


@pytest.mark.parametrize(("decode", "mode"), [(1e15, Mode.FETCH), (1e7, Mode.BOTH)])
def test_the_question_is_read_while_the_link_brings_the_rest(decode, mode):
    """Behind a meeting it begins only then; and beside threads that decode all the time, it gains nothing."""
    found = work(0.4, 1.0, question_s=0.2, decode=decode)
    expected = expect(found)
    assert expected.fetch == pytest.approx(0.2 if mode is Mode.FETCH else 0.8)
    assert mode is decide(found, Aim(), Progress()).mode


@pytest.mark.parametrize("shared", [0.0, 2.0])
def test_everything_may_arrive_before_a_pass_is_done(shared):
    """A pass over all blocks runs: it is ended when all has come, later where both need the processor."""
    running = Work([9.0, 0.0, 0.0, 0.0], 9.0, [1e6] * 4, 1e6, 1e6, shared=shared)
    assert (8.0 if shared else 4.0, 0) == (expect(running).both, expect(running).computed_blocks)


@settings(deadline=None)
@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_small_changes_do_not_turn_it_back_and_forth(fetch_s, compute_s):
    """What was chosen is kept when every estimate moves by a twentieth."""
    mode = decide(work(fetch_s, compute_s), Aim(), Progress()).mode
    for factor in (0.95, 1.05):
        again = decide(work(fetch_s * factor, compute_s), Aim(), Progress(running=mode)).mode
        # From a fetch to both is no turn that loses anything.
        assert again is mode or (mode, again) in ((Mode.COMPUTE, Mode.BOTH), (Mode.FETCH, Mode.BOTH))
        if mode is Mode.FETCH:
            assert again is Mode.FETCH


def test_an_end_of_the_link_is_met_by_computing_up_to_what_is_there():
    """Blocks that have arrived at the right are used, however the link is; without any the model's own pass is faster."""
    some = Work([1.0] * 4, 3.5, [math.inf, math.inf, 0.0, 0.0], 1e6, 1e9)
    assert (Mode.BOTH, 2.0, 2) == (
        decide(some, Aim(), Progress(running=Mode.BOTH)).mode,
        expect(some).both,
        expect(some).computed_blocks,
    )
    none = Work([1.0] * 4, 3.0, [math.inf] * 4, 1e6, 1e9)
    assert Mode.COMPUTE is decide(none, Aim(), Progress(running=Mode.BOTH)).mode
    # But not where most of a pass would be thrown away.
    begun = Work([0.2, 1.0, 1.0, 0.7], 3.0, [math.inf] * 4, 1e6, 1e9)
    assert Mode.BOTH is decide(begun, Aim(), Progress(running=Mode.BOTH)).mode


def test_a_source_that_fails_is_not_waited_for_and_not_given_up():
    """What goes on beside it is the model's own pass, as long as that is as fast."""
    silent = Work([1.0] * 4, 4.0, [1e6] * 4, 0.0, 1e9)
    for running in (Mode.FETCH, Mode.BOTH):
        decision = decide(silent, Aim(), Progress(running=running, spent_s=0.5))
        assert (Mode.BOTH, 4) == (decision.mode, decision.expected.computed_blocks)
    late = Work([0.0, 0.0, 3.0, 3.0], 4.0, [1e6] * 4, 0.0, 1e9)
    assert Mode.COMPUTE is decide(late, Aim(), Progress(running=Mode.BOTH)).mode


def test_a_pass_that_is_far_on_is_not_given_up_for_a_promise():
    """A link that turns out a little faster is no reason to throw computing away; where the pass takes from decoding, it is."""
    for fetch_s, at_stake, decode, mode in (
        (0.7, 0.0, 1e9, Mode.FETCH),
        (0.7, 0.5, 1e9, Mode.BOTH),
        (0.2, 0.5, 2e7, Mode.BOTH),
        (0.2, 0.1, 2e7, Mode.FETCH),
    ):
        found = Work([1.0, 0.0, 1.0, 1.0], 3.0, [1e6] * 4, 4e6 / fetch_s, decode, shared=2.0)
        assert mode is decide(found, Aim(), Progress(running=Mode.BOTH, at_stake_s=at_stake)).mode


def test_decoding_takes_from_the_model_on_the_same_cores():
    """Where both share the cores, what is decoded is not free."""
    alone, sharing = (work(1.0, 8.0, shared=shared, decode=8e6) for shared in (0.0, 1.0))
    assert expect(sharing).both > expect(alone).both


@pytest.mark.parametrize(
    ("fetch_s", "compute_s", "spent", "mode"),
    [
        (10, 100, 0.0, Mode.FETCH),
        (90, 100, 0.0, Mode.FETCH),
        (200, 100, 0.0, Mode.COMPUTE),
        (1e300, None, 0.0, Mode.FETCH),
        (None, None, 9.0, Mode.FETCH),
        (None, 100, 14.0, Mode.FETCH),
        (None, 100, 16.0, Mode.COMPUTE),
    ],
)
def test_where_it_cannot_be_both_it_is_the_faster(fetch_s, compute_s, spent, mode):
    """Of states only the last count, so that nothing that was computed goes on from a fetch."""
    found = dataclasses.replace(work(fetch_s, compute_s), either=True)
    assert mode is decide(found, Aim(), Progress(spent_s=spent)).mode
    assert Mode.COMPUTE is decide(dataclasses.replace(work(1, None, lost={0}), either=True), Aim(), Progress()).mode
    assert Mode.BOTH is not decide(found, Aim.of(prefer="cheapest", prices=PRICES), Progress(spent_s=spent)).mode


@pytest.mark.parametrize("mode", list(Mode))
def test_what_is_forced_is_done(mode):
    """Whatever the numbers."""
    for fetch_s, compute_s in ((1, 100), (100, 1), (None, None)):
        assert mode is decide(work(fetch_s, compute_s), Aim.of(str(mode)), Progress()).mode


def test_the_commands_know_the_same_modes():
    assert {"auto", *Mode} == set(options.Mode)


PRICES = Prices(usd_per_gpu_hour=3.6, usd_per_gb=0.09, usd_per_10k_requests=0.004)


@pytest.mark.parametrize(
    ("fetch_s", "compute_s", "deadline", "mode"),
    [
        (20, 10, None, Mode.FETCH),  # 8 MB are 0.0007 USD, 10 s of a GPU 0.01 USD
        (20, 10, 15, Mode.BOTH),  # the cheapest in time
        (20, 0.1, None, Mode.COMPUTE),
        (20, 10, 0.5, Mode.BOTH),  # none is in time: then the fastest
    ],
)
def test_the_cheapest_in_time_is_chosen_by_price(fetch_s, compute_s, deadline, mode):
    """Egress against seconds of a device."""
    aim = Aim.of(prefer="cheapest", deadline=deadline, prices=PRICES)
    assert mode is decide(work(fetch_s, compute_s), aim, Progress()).mode


def test_a_deadline_chooses_what_meets_it_and_says_where_none_does():
    """Near the deadline the last second counts, which otherwise is given up for an idle processor."""
    found = work(14.0, 100.0)
    assert Mode.FETCH is decide(found, Aim(), Progress()).mode
    met = decide(found, Aim.of(deadline=13), Progress())
    assert (Mode.BOTH, True) == (met.mode, "deadline" in met.why)
    missed = decide(found, Aim.of(deadline=1.0), Progress())
    assert "none meets the deadline of 1 s" in missed.why
    # Time that has passed counts.
    assert "none meets" in decide(found, Aim.of(deadline=13), Progress(elapsed_s=5.0)).why


@pytest.mark.parametrize(
    "wishes",
    [
        {"mode": "fast"},
        {"prefer": "best"},
        {"prefer": "cheapest"},
        {"deadline": 0.0},
        {"deadline": -1.0},
        {"deadline": math.nan},
    ],
)
def test_wishes_that_cannot_be_are_refused(wishes):
    """Each with what may be asked instead."""
    with pytest.raises(UsageError) as caught:
        Aim.of(**wishes)
    assert caught.value.hint


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf, "2", True, None])
def test_prices_are_numbers(price):
    with pytest.raises(UsageError):
        Prices(1.0, price)


@pytest.mark.parametrize("sizes", [(0.1, 0.2, 0.3), (0.7 * 11_796_480, 0.7 * 4_377_600, 0.7 * 23_040)])
def test_a_dead_link_does_not_make_computing_endless(sizes):
    """What is left of estimated sizes, once all of them are taken off, is nothing: not a rounding error that never comes."""
    found = expect(Work([1.0] * 3, 2.0, sizes, 0.0, 1e9))
    assert (3.0, 3) == (found.both, found.computed_blocks)
