"""`kvcdn economics --json`: its shape, and what each option moves: every figure that hangs on it, and no other."""

from __future__ import annotations

import inspect
import math
from functools import cache

import pytest

from kvcdn.cli.economics import economics as command
from kvcdn.economics.costs import WITH, WITHOUT
from support.command import kvcdn

COMMON = (
    "--model", "qwen3-8b", "--tokens", "20000", "--link", "region", "--store", "s3", "--delivery", "bunny", "--reads", "1e6",
    "--open-rate", "1e10",
)  # fmt: skip
"""More blocks than an edge streams, on a link that is slower than opening, which is faster than prefilling."""

SIZES = {"raw_bytes", "kv_bytes_per_token"}

STORED = {"stored_bytes", "fetch_s", "reuse_ttft_s", "link_bytes_per_s", "link_bytes_per_s_formula"}

STORAGE = {f"storage {way}" for way in WITH}

PUBLISH = {f"publish {way}" for way in WITH}

READ = {f"read {way}" for way in WITH}

PREFILL = {"prefill_tokens_per_s", "prefill_ttft_s", "link_bytes_per_s", "link_bytes_per_s_formula"}

QUESTION = {"reuse_ttft_s", *READ}
"""The question's own pass. On an H100 it takes as long as reading the weights, whatever the peak."""

STORE = {f"{what} {way}" for what in ("read", "publish", "storage") for way in ("origin", "edges")}

FREE = {f"{what} zero-egress" for what in ("read", "publish", "storage")}

TARIFF = {"read api", "read api-cached"}

MOVES = {
    ("--model", "qwen3-14b"): {
        *SIZES, *STORED, *STORAGE, *PUBLISH, *PREFILL, *QUESTION, "read gpu", "tokens_faster",
    },
    ("--kv-bytes-per-token", "300000"): {*SIZES, *STORED, *STORAGE, *READ, "tokens_faster"},
    ("--parameters", "5e9"): {*PREFILL, *PUBLISH, "read gpu", "tokens_faster"},
    ("--tokens", "40000"): {
        *SIZES, *STORED, *STORAGE, *PUBLISH, *PREFILL, *QUESTION, *TARIFF, "blocks", "read gpu",
    } - {"kv_bytes_per_token"},
    ("--question-tokens", "64"): {"prefill_ttft_s", "read gpu", "link_bytes_per_s", "tokens_faster", *TARIFF},
    ("--reads", "2000"): set(),
    ("--days", "60"): STORAGE,
    ("--retrain-days", "7"): PUBLISH,
    ("--precision", "int8"): {*STORED, *STORAGE, "read origin", "read edges", "tokens_faster"},
    ("--stored-ratio", "0.3"): {*STORED, *STORAGE, "read origin", "read edges", "tokens_faster"},
    ("--device", "a100"): {*PREFILL, *QUESTION, *PUBLISH, "read gpu", "tokens_faster"},
    ("--devices", "2"): {*PREFILL, "reuse_ttft_s", "tokens_faster"},
    ("--utilisation", "0.2"): {*PREFILL, *PUBLISH, "read gpu", "tokens_faster"},
    ("--prefill-rate", "1000"): {*PREFILL, *QUESTION, *PUBLISH, "read gpu", "tokens_faster"},
    ("--gpu-hour", "1"): {*READ, *PUBLISH, "read gpu"},
    ("--store", "b2"): STORE,
    ("--storage-usd", "1"): {"storage origin", "storage edges"},
    ("--request-usd", "1"): {"read origin", "read edges"},
    ("--write-usd", "1"): {"publish origin", "publish edges"},
    ("--egress-usd", "1"): {"read origin", "read edges"},
    ("--zero-egress", "s3-in-region"): FREE,
    ("--delivery", "fastly"): {"read edges"},
    ("--edge-usd", "1"): {"read edges"},
    ("--hit-ratio", "0.5"): {"read edges"},
    ("--tariff", "gpt-5.6"): TARIFF,
    ("--input-usd", "1"): TARIFF,
    ("--cached-usd", "1"): {"read api-cached"},
    ("--link", "home"): {"fetch_s", "reuse_ttft_s", "link_bytes_per_s", "tokens_faster"},
    ("--rtt", "0.002"): {"fetch_s", "reuse_ttft_s", "link_bytes_per_s", "tokens_faster"},
    ("--open-rate", "1e8"): {"fetch_s", "reuse_ttft_s", "link_bytes_per_s", "tokens_faster"},
    ("--request-bytes", "1e6"): {"read origin", "read zero-egress"},
    ("--gpu-waits",): READ,
}  # fmt: skip
"""Options, and the figures that each must move. What follows from these by sums is held below."""

LINK = {"link_bytes_per_s", "link_bytes_per_s_formula"}

FALLS = {
    # What makes prefilling dearer or slower needs less of a link, and a shorter document.
    ("--model", "qwen3-14b"): {*LINK, "prefill_tokens_per_s", "tokens_faster"},
    ("--tokens", "40000"): {*LINK, "prefill_tokens_per_s"},
    ("--question-tokens", "64"): {"link_bytes_per_s", "tokens_faster"},
    ("--device", "a100"): {*LINK, "prefill_tokens_per_s", "tokens_faster", *READ},
    ("--utilisation", "0.2"): {*LINK, "prefill_tokens_per_s", "tokens_faster"},
    ("--prefill-rate", "1000"): {*LINK, "prefill_tokens_per_s", "tokens_faster"},
    # What makes it cheaper or faster is a fall of its times and prices.
    ("--parameters", "5e9"): {"prefill_ttft_s", "read gpu", *PUBLISH},
    ("--devices", "2"): {"prefill_ttft_s", "reuse_ttft_s"},
    # Fewer bytes, or lower prices: everything that moves falls.
    **{option: MOVES[option] for option in MOVES if option[1:] in (("int8",), ("0.3",), ("b2",))},
    ("--gpu-hour", "1"): MOVES["--gpu-hour", "1"],
    ("--input-usd", "1"): TARIFF,
}
"""Of the figures that an option moves, those that it lowers; all others rise, or are never reached any more."""

OTHERS = {"measured", "prices", "preset", "plot", "report", "as_json", "ctx"}
"""Files and forms: what they hold are the inputs above."""


@cache
def found(*options):
    ran = kvcdn("economics", *COMMON, *options, "--json")
    assert 0 == ran.code, ran.err
    return ran.json


def figures(told):
    """What is computed first, by name."""
    figures = {**told["sizes"], **told["latency"]}
    figures |= {name: told["break_even"][name] for name in ("link_bytes_per_s", "link_bytes_per_s_formula", "tokens_faster")}
    del figures["speedup"]
    for row in told["costs"]:
        figures |= {f"read {row['without']}": row["read_without_usd"], f"read {row['with']}": row["read_with_usd"]}
        figures |= {f"{what} {row['with']}": row[f"{what}_usd"] for what in ("publish", "storage")}
    return figures


def test_every_option_is_tried():
    """One that is added is added here."""
    tried = {option[0].removeprefix("--").replace("-", "_") for option in MOVES}
    assert tried == set(inspect.signature(command).parameters) - OTHERS


@pytest.mark.parametrize("option", MOVES, ids=" ".join)
def test_an_option_moves_what_it_must_and_nothing_else(option):
    """To the last digit that is told."""
    before, after = figures(found()), figures(found(*option))
    moved = {name for name in before if before[name] != after[name]}
    assert MOVES[option] == moved


@pytest.mark.parametrize("option", MOVES, ids=" ".join)
def test_figures_move_in_the_right_direction(option):
    """A break-even that is never reached lies beyond every number."""
    before, after = figures(found()), figures(found(*option))
    fallen = {name for name, value in after.items() if (math.inf if value is None else value) < before[name]}
    assert FALLS.get(option, set()) == fallen


@pytest.mark.parametrize("option", [(), *MOVES], ids=" ".join)
def test_what_is_told_adds_up(option):
    """Totals, savings, verdicts and ratios follow from the figures, whatever is asked."""
    told = found(*option)
    reads = told["assumptions"]["reads"]["value"]
    latency = told["latency"]
    assert latency["speedup"] == pytest.approx(latency["prefill_ttft_s"] / latency["reuse_ttft_s"], rel=1e-5)
    assert told["pays"]["time"] == (latency["reuse_ttft_s"] < latency["prefill_ttft_s"])
    assert {(row["without"], row["with"]) for row in told["costs"]} == {(one, way) for one in WITHOUT for way in WITH}
    for row in told["costs"]:
        assert row["total_without_usd"] == pytest.approx(reads * row["read_without_usd"], rel=1e-5)
        total = row["publish_usd"] + row["storage_usd"] + reads * row["read_with_usd"]
        assert row["total_with_usd"] == pytest.approx(total, rel=1e-5)
        assert row["saved_usd"] == pytest.approx(
            row["total_without_usd"] - total, abs=2e-5 * max(total, row["total_without_usd"])
        )
        assert row["pays"] == (row["saved_usd"] > 0)
        if row["break_even_reads"] is not None:
            gain = row["read_without_usd"] - row["read_with_usd"]
            needed = (row["publish_usd"] + row["storage_usd"]) / gain
            assert needed * (1 - 1e-3) <= row["break_even_reads"] <= needed * (1 + 1e-3) + 1
    for without in WITHOUT:
        best = min((row for row in told["costs"] if row["without"] == without), key=lambda row: row["total_with_usd"])
        assert told["pays"][without] == best["pays"]
        assert best["with"] in told["verdict"][without] or best["break_even_reads"] is not None


ASSUMED = {
    "model", "parameters", "active_parameters", "weights", "state", "tokens", "question_tokens", "reads", "days",
    "retrain_days", "stored_ratio", "flops", "memory_bandwidth", "prefill_rate", "gpu_hour_usd", "gpu_waits",
    "storage_usd_per_gb_month", "read_usd_per_1000", "write_usd_per_1000", "egress_usd_per_gb", "edge_egress_usd_per_gb",
    "hit_ratio", "zero_egress_store", "zero_egress_storage_usd_per_gb_month", "zero_egress_read_usd_per_1000",
    "zero_egress_write_usd_per_1000", "input_usd_per_million", "cached_usd_per_million", "link", "round_trip", "round_trips",
    "open_rate", "request_bytes", "connections", "requests_per_read", "requests_per_fill",
}  # fmt: skip

SHAPE = {
    "model": None,
    "tokens": None,
    "sizes": {"raw_bytes", "stored_bytes", "kv_bytes_per_token", "blocks"},
    "latency": {"prefill_tokens_per_s", "prefill_ttft_s", "fetch_s", "reuse_ttft_s", "speedup"},
    "costs": {
        "without", "with", "read_without_usd", "read_with_usd", "publish_usd", "storage_usd", "total_without_usd",
        "total_with_usd", "saved_usd", "pays", "break_even_reads",
        "storage_months_that_eat_the_saving", "shortest_retrain_days",
    },
    "break_even": {"link_bytes_per_s", "link_bytes_per_s_formula", "tokens_faster", "tokens_cheaper"},
    "retraining": set(WITHOUT),
    "pays": {"time", *WITHOUT},
    "verdict": {"time", *WITHOUT},
    "assumptions": ASSUMED,
}  # fmt: skip


@pytest.mark.parametrize("option", [(), ("--prefill-rate", "1000"), ("--link", "home"), ("--egress-usd", "1000")], ids=" ".join)
def test_names_are_the_same_whatever_the_answer(option):
    """No field comes or goes; what never happens is null."""
    told = found(*option)
    assert list(SHAPE) == list(told)
    for name, fields in SHAPE.items():
        if fields is not None:
            for one in told[name] if isinstance(told[name], list) else [told[name]]:
                assert fields == set(one), name
    for one in told["assumptions"].values():
        assert {"value", "unit", "source", "date"} == set(one)
        assert one["source"]


@pytest.mark.parametrize("option", [option for option in MOVES if len(option) > 1], ids=lambda option: option[0])
def test_what_was_given_stands_among_the_assumptions(option):
    """Each option changes at least one of them; prices and sizes of other things stay as they were."""
    before, after = found()["assumptions"], found(*option)["assumptions"]
    moved = {name for name in before if before[name]["value"] != after[name]["value"]}
    assert moved
    money = {name for name in before if "usd" in name}
    given = {"--gpu-hour", "--device", "--devices", "--store", "--zero-egress", "--delivery", "--tariff"}
    if option[0] not in given and not option[0].endswith("-usd"):
        assert set() == moved & money - ({"gpu_hour_usd"} if option[0] == "--model" else set())
