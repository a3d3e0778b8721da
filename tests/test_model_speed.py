"""Speeds of passes: from the first token on, over blocks, and behind a prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.model.load import load_model
from kvcdn.model.speed import Pass, PrefillSpeed, PrefillSpeeds, prefill_speeds, remember_passes, remember_prefill

WHOLE = PrefillSpeed(3e-4, 7e-8)
"""1.6 s for 3,774 tokens, as was measured of SmolLM2-135M on two cores."""

REST = PrefillSpeed(3e-4, 1.2e-7)


def test_a_rest_behind_a_short_prefix_may_take_longer_than_everything():
    """Each of its tokens is compared with all: that is more than half of a square."""
    speeds = PrefillSpeeds(None, WHOLE, REST, rests_measured=True)
    assert (True, False) == (speeds.anew(512, 3774), speeds.anew(3072, 3774))
    assert speeds.remaining(0, 512, 3774) == 0.0
    assert speeds.remaining(0, 3700, 3774) == pytest.approx(speeds.rest(0, 3774) - speeds.rest(3700, 3774))


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.integers(0, 10_000))
def test_what_remains_is_no_more_than_the_whole(end, start, length):
    """Whatever is here, the model can read everything anew."""
    start, length = sorted((min(start, end), min(length, end)))
    speeds = PrefillSpeeds(None, WHOLE, REST)
    assert 0.0 <= speeds.remaining(start, length, end) <= speeds.rest(0, end)


def test_sorts_of_passes_are_remembered_apart(tiny_llama):
    """A rest is known from blocks until one was measured; what is too short to tell says nothing of it."""
    loaded = load_model(str(tiny_llama))
    assert prefill_speeds(loaded) == PrefillSpeeds(None, None, None)
    remember_passes(loaded, [Pass(0, 100, 1.0), Pass(100, 200, 2.0), Pass(200, 300, 3.0)])
    found = prefill_speeds(loaded)
    assert (found.blocks, False) == (found.prompts, found.rests_measured)
    assert found.rest(200, 300) == pytest.approx(3.0)
    remember_prefill(loaded, 400, 2.0)
    remember_prefill(loaded, 400, 9.0, behind=390)
    assert not prefill_speeds(loaded).rests_measured
    remember_prefill(loaded, 400, 9.0, behind=100)
    found = prefill_speeds(loaded)
    assert (2.0, 9.0, True) == (found.rest(0, 400), pytest.approx(found.rest(100, 400)), found.anew(100, 400))


def test_a_few_tokens_take_as_long_as_the_weights_do(tiny_llama):
    """What a pass over a few tokens took is the least that any takes behind a prefix."""
    loaded = load_model(str(tiny_llama))
    remember_passes(loaded, [Pass(0, 100, 1.0), Pass(100, 200, 2.0)])
    assert prefill_speeds(loaded).rest(200, 210) == pytest.approx(0.2)
    for seconds in (0.9, 0.7, 0.5):
        remember_prefill(loaded, 210, seconds, behind=200 - int(10 * seconds))
    found = prefill_speeds(loaded)
    assert (0.7, 0.7) == (found.rest(200, 201), found.rest(200, 210))
    assert found.rest(100, 200) == pytest.approx(2.0)


def test_a_disturbed_pass_hardly_counts_and_a_fast_one_does(tiny_llama):
    """A busy machine makes a pass slower, a hundred times if need be; nothing makes it faster than it is."""
    loaded = load_model(str(tiny_llama))
    remember_passes(loaded, [Pass(0, 100, 1.0)])
    remember_passes(loaded, [Pass(0, 100, 100.0)])
    assert 1.125 == pytest.approx(prefill_speeds(loaded).blocks.seconds(0, 100))
    remember_passes(loaded, [Pass(0, 100, 0.5)])
    assert 0.5 == pytest.approx(prefill_speeds(loaded).blocks.seconds(0, 100))
