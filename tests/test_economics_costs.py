"""The economics' arithmetic: one input changed, every output that must move; thresholds where the answer really turns."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcdn.economics.case import CONNECTIONS, DAYS_PER_MONTH, RANGE_BYTES, REQUEST_BYTES, STREAMED_BLOCKS, Case, Speed
from kvcdn.economics.costs import (
    WITH,
    WITHOUT,
    compare,
    months_that_eat_the_saving,
    per_read_with,
    per_read_without,
    publish_usd,
    retrained,
    shortest_cadence_days,
    storage_usd_per_month,
)
from kvcdn.economics.devices import DEVICES, Link
from kvcdn.economics.models import MODELS, plain
from kvcdn.economics.precisions import Precision
from kvcdn.economics.prices import Delivery, Store, Tariff
from kvcdn.economics.thresholds import break_even_link, cheaper_from, faster_from, pays_from, simple_link
from kvcdn.economics.verdict import to_json
from kvcdn.errors import UsageError
from kvcdn.layout import Layout

PRICE = st.floats(1e-3, 1.0)
"""With the ranges below, no 5 % of a price is lost to rounding in a sum."""


@st.composite
def inputs(draw):
    """Plausible inputs, by name: what a case is made of."""
    return {
        "kv": draw(st.floats(5e3, 2e5)),
        "parameters": draw(st.floats(1e8, 1e11)),
        "tokens": draw(st.integers(2000, 200_000)),
        "question": draw(st.integers(1, 500)),
        "ratio": draw(st.floats(0.1, 1.0)),
        "flops": draw(st.floats(1e11, 1e13)),
        "hour": draw(st.floats(0.1, 20)),
        "storage": draw(PRICE),
        "request": draw(PRICE),
        "write": draw(PRICE),
        "egress": draw(PRICE),
        "edge": draw(PRICE),
        "free_storage": draw(PRICE),
        "free_request": draw(PRICE),
        "hit": draw(st.floats(0.1, 0.6)),
        "input": draw(st.floats(0.1, 10)),
        "cached": draw(st.floats(0.01, 1)),
        "link": draw(st.floats(1e5, 1e9)),
        "rtt": draw(st.floats(1e-5, 1e-4)),
        "open": 1e17,
        "piece": 1e15,
        "reads": draw(st.floats(1, 1e4)),
        "days": draw(st.floats(10, 300)),
    }


def case(values, **more):
    speed = Speed(values["hour"], values["flops"])
    return Case(
        model=plain("m", values["kv"], values["parameters"], "test"),
        precision=Precision("p", values["ratio"]),
        speed=speed,
        store=Store("s", values["storage"], values["request"], values["write"], values["egress"]),
        delivery=Delivery("d", values["edge"]),
        zero_egress=Store("z", values["free_storage"], values["free_request"], values["write"], 0.0),
        tariff=Tariff("t", values["input"], values["cached"]),
        link=Link("l", values["link"], values["rtt"]),
        tokens=values["tokens"],
        question_tokens=values["question"],
        reads=values["reads"],
        days=values["days"],
        hit_ratio=values["hit"],
        open_bytes_per_s=values["open"],
        request_bytes=values["piece"],
        **more,
    )


def outputs(at):
    """Every output of one case, by name."""
    found = {
        "raw": at.raw_bytes,
        "stored": at.stored_bytes,
        "prefill_s": at.prefill_s,
        "miss_s": at.miss_s,
        "question_s": at.question_s,
        "fetch_s": at.fetch_s,
        "hit_s": at.hit_s,
        "link": break_even_link(at),
        "formula": simple_link(at),
        **per_read_without(at),
        **per_read_with(at),
    }
    for way in ("origin", "zero-egress"):
        found[f"publish {way}"] = publish_usd(at, way)
        found[f"storage {way}"] = storage_usd_per_month(at, way)
        found[f"total {way}"] = compare(at, "gpu", way).total_with
    found["total gpu"] = compare(at, "gpu", "origin").total_without
    return found


COMPUTE = {"prefill_s", "miss_s", "question_s", "gpu", "total gpu", "publish origin", "publish zero-egress", "hit_s"}

READS = {"origin", "edges", "zero-egress", "total origin", "total zero-egress"}

ORIGIN = {"origin", "edges", "total origin"}

MOVES = {
    "flops": ({"link", "formula"}, COMPUTE | READS),
    "parameters": (COMPUTE | READS, {"link", "formula"}),
    "hour": ({"gpu", "total gpu", "publish origin", "publish zero-egress"} | READS, set()),
    "ratio": (
        {"stored", "fetch_s", "hit_s", "link", "formula", "storage origin", "storage zero-egress"}
        | ORIGIN
        | {"total zero-egress"},
        set(),
    ),
    "storage": ({"storage origin", "total origin"}, set()),
    "request": (ORIGIN, set()),
    "write": ({"publish origin", "publish zero-egress", "total origin", "total zero-egress"}, set()),
    "egress": (ORIGIN, set()),
    "edge": ({"edges"}, set()),
    "free_storage": ({"storage zero-egress", "total zero-egress"}, set()),
    "free_request": ({"zero-egress", "total zero-egress"}, set()),
    "hit": (set(), {"edges"}),
    "input": ({"api", "api-cached"}, set()),
    "cached": ({"api-cached"}, set()),
    "link": (set(), {"fetch_s", "hit_s"}),
    "rtt": ({"fetch_s", "hit_s", "link"}, set()),
    "reads": ({"total gpu", "total origin", "total zero-egress"}, set()),
    "days": ({"total origin", "total zero-egress"}, set()),
}
"""For each input, when it grows: the outputs that grow, and those that shrink. All others stay, to the last bit."""


@pytest.mark.parametrize("name", MOVES)
@given(values=inputs(), factor=st.floats(1.05, 1.6))
@settings(max_examples=15, deadline=None)
def test_one_input_moves_what_it_must_and_nothing_else(name, values, factor):
    """Each price, size and speed alone: the right outputs rise, the right ones fall, the rest is untouched."""
    before = outputs(case(values))
    after = outputs(case({**values, name: values[name] * factor}))
    assume(before["link"] is not None)
    assume(after["link"] is not None)
    grow, shrink = MOVES[name]
    assert grow == {key for key in before if after[key] > before[key]}
    assert shrink == {key for key in before if after[key] < before[key]}


@given(values=inputs(), factor=st.floats(1.5, 3))
@settings(max_examples=25, deadline=None)
def test_a_longer_document_costs_more_everywhere(values, factor):
    """More tokens: more bytes, more seconds, more dollars, by every way."""
    longer = {**values, "tokens": math.ceil(values["tokens"] * factor)}
    before, after = outputs(case(values)), outputs(case(longer))
    assert all(after[key] >= before[key] for key in ("zero-egress", "question_s"))  # by whole blocks; without attention
    others = set(before) - {"link", "formula", "question_s", "zero-egress"}
    assert set() == {key for key in others if not after[key] > before[key]}


@given(values=inputs(), factor=st.floats(1.1, 2))
@settings(max_examples=25, deadline=None)
def test_larger_kv_never_helps(values, factor):
    """More KV for the same compute: delivery costs more and needs more link, prefilling costs the same."""
    before, after = outputs(case(values)), outputs(case({**values, "kv": values["kv"] * factor}))
    assert all(before[key] == after[key] for key in ("miss_s", "gpu", "api", "api-cached"))
    assert all(after[key] > before[key] for key in ("raw", "stored", "fetch_s", "hit_s", "origin", "edges", "formula"))
    assert all(after[key] >= before[key] for key in ("zero-egress", "publish origin"))


@given(values=inputs())
@settings(max_examples=25, deadline=None)
def test_a_waiting_device_is_paid(values):
    """With --gpu-waits each read is dearer by exactly the fetch's seconds at the device's price."""
    at = case(values)
    waiting = replace(at, gpu_waits=True)
    for way in WITH:
        added = per_read_with(waiting)[way] - per_read_with(at)[way]
        assert added == pytest.approx(at.fetch_s * values["hour"] / 3600, rel=1e-6)
    assert per_read_without(at) == per_read_without(waiting)


@given(values=inputs())
@settings(max_examples=30, deadline=None)
def test_break_even_reads_are_where_the_totals_cross(values):
    """With that many reads nothing is lost, with one fewer something is; never only where every read loses."""
    at = case(values)
    for without in WITHOUT:
        for way in WITH:
            found = compare(at, without, way)
            if found.break_even_reads is None:
                assert found.read_with >= found.read_without
                continue
            enough = compare(replace(at, reads=float(min(found.break_even_reads, 10**15))), without, way)
            assert enough.saved >= -1e-9 * enough.total_with
            if 1 < found.break_even_reads < 10**12:
                fewer = compare(replace(at, reads=found.break_even_reads - 1.0), without, way)
                assert fewer.saved < 1e-9 * fewer.total_with


@given(values=inputs())
@settings(max_examples=30, deadline=None)
def test_break_even_link_is_where_the_times_cross(values):
    """On that link both ways take as long; on one 1 % faster, reuse is ahead."""
    at = case(values)
    needed = break_even_link(at)
    assume(needed is not None)
    on_it = replace(at, link=Link("x", needed, values["rtt"]))
    assert on_it.hit_s == pytest.approx(on_it.miss_s, rel=1e-6)
    faster = replace(at, link=Link("x", needed * 1.01, values["rtt"]))
    assert faster.hit_s < faster.miss_s


def test_break_even_link_without_overhead_is_the_readmes_formula():
    """KV bytes a token x tokens a second x stored over raw, in the README's own example: 1.65 Gbit/s at 2,000 tokens/s."""
    speed = Speed(0.0, tokens_per_s=2000.0)
    at = case(dict(BASE, kv=147_456, ratio=0.7, rtt=0.0))
    at = replace(at, speed=speed, model=plain("m", 147_456, 0.0, "test"))
    assert 147_456 * 2000 * 0.7 == pytest.approx(simple_link(at))
    assert simple_link(at) == pytest.approx(break_even_link(at))
    assert "1.65" == f"{8 * simple_link(at) / 1e9:.2f}"


BASE = {
    "kv": 1e5, "parameters": 4e9, "tokens": 4000, "question": 32, "ratio": 0.7, "flops": 1e13, "hour": 2.0, "storage": 0.02,
    "request": 4e-4, "write": 5e-3, "egress": 0.09, "edge": 0.005, "free_storage": 0.015, "free_request": 3.6e-4, "hit": 0.9,
    "input": 3.0, "cached": 0.3, "link": 1e8, "rtt": 0.01, "open": 2.4e9, "piece": 1e15, "reads": 1000.0, "days": 30.0,
}  # fmt: skip


def test_no_link_is_enough_where_opening_is_slower():
    """Opening slower than prefilling, or round trips longer: never, at any speed."""
    assert break_even_link(case({**BASE, "open": 1e5})) is None
    assert break_even_link(case({**BASE, "rtt": 10.0})) is None
    slow_opening = case({**BASE, "open": 1e5, "link": 1e17})
    assert slow_opening.fetch_s == pytest.approx(4 * 0.01 + 4000 * 1e5 / 1e5)


def test_storage_months_eat_the_saving():
    """After that many months, storage has cost what the reads saved; stored free, never; where nothing is saved, at once."""
    at = case({**BASE, "reads": 5000.0, "egress": 0.0})
    months = months_that_eat_the_saving(at, "gpu", "origin")
    held = compare(replace(at, days=months * DAYS_PER_MONTH), "gpu", "origin")
    assert held.saved == pytest.approx(0, abs=1e-9 * held.total_with)
    assert math.inf == months_that_eat_the_saving(case({**BASE, "egress": 0.0, "storage": 0.0}), "gpu", "origin")
    assert months_that_eat_the_saving(case(BASE), "gpu", "origin") is None


def test_cadence_is_where_republishing_breaks_even():
    """With a new version every so many days, that version's reads pay its publication and its storage exactly."""
    at = case({**BASE, "egress": 0.0})
    days = shortest_cadence_days(at, "gpu", "origin")
    found = compare(replace(at, days=days, reads=at.reads / at.days * days), "gpu", "origin")
    assert found.saved == pytest.approx(0, abs=1e-9 * found.total_with)
    assert shortest_cadence_days(case(BASE), "gpu", "origin") is None


def test_retraining_more_often_costs_more():
    """Publications are counted whole, and only they change with the cadence."""
    at = case({**BASE, "egress": 0.0})
    found = retrained(at, "gpu", "origin")
    assert [365, 53, 13, 5, 1] == [round(item.publish / publish_usd(at, "origin")) for _, item in found]
    assert sorted(item.saved for _, item in found) == [item.saved for _, item in found]
    assert 3 == replace(at, retrain_days=10.0, days=30.0).publications == replace(at, retrain_days=14.0).publications


@pytest.mark.parametrize("turn", [1, 2, 3, 100, 4097, 999_999, 1 << 20])
def test_the_length_where_it_turns_is_found_exactly(turn):
    """The shortest length with a positive margin from there on, to the token."""
    assert turn == pays_from(lambda tokens: tokens - turn + 0.5)


def test_never_and_twice():
    """Never, where the longest length loses; the later turn, where short documents gain, longer lose and long gain again."""
    assert pays_from(lambda tokens: 1000.0 - tokens) is None
    assert 50_000 == pays_from(lambda tokens: 1.0 if tokens < 100 or tokens >= 50_000 else -1.0)


@pytest.mark.parametrize("name", ["qwen3-8b", "gpt-oss-120b", "gemma-3-27b"])
def test_thresholds_are_where_the_answer_turns(name):
    """One token less loses, that length gains: in time, and in money."""
    device = DEVICES["h100"]
    speed = Speed.of_device(device, device.count_for(MODELS[name]), 0.4, 3.99)
    at = replace(case({**BASE, "link": 3e9, "egress": 0.0, "rtt": 0.001}), model=MODELS[name], speed=speed)
    tokens = faster_from(at)
    for length, gains in ((tokens, True), (tokens - 1, False)):
        there = replace(at, tokens=length)
        assert gains == (there.hit_s < there.miss_s)
    tokens = cheaper_from(at, "gpu", "origin")
    assert [False, True] == [compare(replace(at, tokens=n), "gpu", "origin").pays for n in (tokens - 1, tokens)]


def test_blocks_are_the_formats():
    """For full attention, the count of blocks is what FORMAT.md 2.4 makes."""
    for layers, heads in ((30, 3), (36, 8), (80, 8), (1, 1), (500, 64)):
        layout = Layout.uniform_kv(layers, heads, 64, "bfloat16")
        at = case({**BASE, "kv": float(layout.bytes_per_token), "tokens": 10_007})
        assert math.ceil(10_007 / layout.block_tokens) == at.blocks


def test_requests_are_the_clients():
    """Pieces, connections and streaming are as the client has them; short documents come by whole blocks from an edge."""
    root = Path(__file__).parents[1] / "client"
    text = "".join((root / name).read_text("utf-8") for name in ("sources/source.py", "sources/stored.py", "loading/fetch.py"))
    for line in (
        f"STREAMED_BLOCKS = {STREAMED_BLOCKS}",
        f"MAX_THREADS = {CONNECTIONS}",
        "RANGE_BYTES = 1 << 20",
        "LARGEST_RANGE_BYTES = 8 << 20",
    ):
        assert f"\n{line}\n" in text
    assert (8 << 20, 1 << 20) == (REQUEST_BYTES, RANGE_BYTES)
    long = case({**BASE, "tokens": 10_000, "piece": float(1 << 20), "ratio": 1.0})
    assert (10_000 * 1e5 / 2**20 / 79 < 13, 79, 79 * 13) == (True, long.blocks, long.ranges)
    assert long.turns_s == math.ceil(79 * 13 / 8) * 0.01
    short = case({**BASE, "tokens": 1280, "piece": float(1 << 20)})
    assert (10, 2 * 0.01) == (short.blocks, short.turns_s)
    slow = replace(long, link=Link("x", 1e12, 1.0), open_bytes_per_s=1e12)
    assert 4 * 1.0 + 129.0 == slow.fetch_s
    assert break_even_link(slow) is None


def test_devices_hold_the_weights():
    """As few as hold the weights and a fifth more, a power of two; measured machines are one."""
    h100 = DEVICES["h100"]
    assert [1, 1, 4, 16] == [h100.count_for(MODELS[n]) for n in ("qwen3-4b", "qwen3-32b", "llama-3.1-70b", "deepseek-v3")]
    assert 1 == DEVICES["m1-pro"].count_for(MODELS["llama-3.1-70b"])


def test_memory_limits_short_passes():
    """A pass over one token takes as long as reading the weights; a long one is limited by FLOPs."""
    speed = Speed.of_device(DEVICES["h100"], 1, 0.4, 3.99)
    model = MODELS["qwen3-8b"]
    assert speed.seconds(model, 0, 1) == pytest.approx(2 * 8.19e9 / 3.35e12)
    assert speed.seconds(model, 0, 10_000) == pytest.approx(model.flops(0, 10_000) / (989.4e12 * 0.4))


def test_a_given_rate_holds_at_its_length_and_scales_by_flops():
    """The rate is met at the length it was measured at; twice the length takes more than twice, by attention."""
    model = MODELS["llama-3.1-8b"]
    speed = Speed.of_rate(model, 4000, 1600.0, (1.0, "test"))
    assert speed.seconds(model, 0, 4000) == pytest.approx(2.5)
    assert speed.seconds(model, 0, 8000) == pytest.approx(2.5 * model.flops(0, 8000) / model.flops(0, 4000))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, 1e19])
@pytest.mark.parametrize("name", ["reads", "days", "open", "ratio", "link"])
def test_numbers_that_cannot_be_are_refused(name, value):
    """Wherever a positive number is meant."""
    with pytest.raises(UsageError, match="must be a number"):
        case({**BASE, name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9])
@pytest.mark.parametrize("name", ["hour", "storage", "request", "write", "egress", "edge", "hit", "input", "cached", "rtt"])
def test_prices_below_nothing_are_refused(name, value):
    """A price may be zero, and no less."""
    with pytest.raises(UsageError, match="must be a number"):
        case({**BASE, name: value})


@given(
    values=st.fixed_dictionaries(
        {
            **{name: st.sampled_from([1e-9, 1e-3, 1.0, 1e6, 1e18]) for name in ("flops", "link", "open", "input", "cached")},
            **{
                name: st.sampled_from([0.0, 1e-9, 1.0, 1e18])
                for name in ("hour", "storage", "request", "write", "egress", "edge")
            },
            **{name: st.sampled_from([0.0, 1e-9, 1.0]) for name in ("free_storage", "free_request", "hit", "rtt")},
            "kv": st.sampled_from([1e-9, 1.0, 1e5, 1e12]),
            "parameters": st.sampled_from([1e-9, 1e9, 1e16]),
            "tokens": st.sampled_from([1, 2, 1000, 1 << 24]),
            "question": st.sampled_from([1, 1 << 24]),
            "ratio": st.sampled_from([1e-9, 0.67, 2.0]),
            "piece": st.sampled_from([1.0, 1e6, 1e18]),
            "reads": st.sampled_from([1e-9, 1.0, 1e15]),
            "days": st.sampled_from([1e-9, 30.0, 1e5]),
        }
    ),
    retrain=st.sampled_from([None, 1e-9, 7.0, 1e5]),
)
@settings(max_examples=30, deadline=None)
def test_extremes_have_an_answer(values, retrain):
    """At the ends of every range, alone and together, there is a verdict, and JSON without a number that JSON lacks."""
    found = to_json(case(values, retrain_days=retrain))
    assert set(found["pays"]) == {"time", *WITHOUT}
    json.dumps(found, allow_nan=False)
