"""The suite of benchmarks: real runs in small sizes, kept as files; the page says what they say, and calls a miss one."""

from __future__ import annotations

import json
import os
import re

import pytest

from kvcdn.cli.bench.machine import machine
from kvcdn.cli.bench.page import codecs, in_order, machine_words, measured, render
from kvcdn.cli.bench.plot import PLOTS
from kvcdn.cli.bench.suite import BENCHES, benches, load_results
from kvcdn.cli.bench.synthetic_trace import write_trace
from kvcdn.cli.bench.targets import judge
from kvcdn.economics.report import fill
from kvcdn.errors import UsageError
from support.command import kvcdn
from support.tiny import ROOT

PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks"


def test_the_page_is_made_of_the_kept_results():
    """`kvcdn bench report` would change nothing; plots are there."""
    found = in_order(load_results(RESULTS))
    assert render(found) == PAGE.read_text("utf-8")
    assert all((RESULTS / f"{name}.svg").stat().st_size > 1000 for name in PLOTS if name in found)


def test_every_kept_result_says_where_it_is_from():
    """Machine, versions and time; and every file has a section."""
    results = load_results(RESULTS)
    assert results.keys() == in_order(results).keys()
    for name, result in results.items():
        assert {"cpu", "cores", "time", "load_average", "python", "kvcdn"} <= result["machine"].keys(), name


def test_benchmarks_are_run_and_kept(tmp_path):
    """Each in a process of its own; one that fails leaves the others, its old result, and a failure to be seen."""
    (tmp_path / "eviction-nothing.json").write_text('{"old": 1}', "utf-8")
    nothing = tmp_path / "nothing.jsonl"
    words = ("restart", "eviction", "--quick", "--results", str(tmp_path), "--trace", str(nothing), "--json")
    ran = kvcdn("bench", "all", *words, home=tmp_path)
    assert 1 == ran.code
    told = json.loads(ran.out.splitlines()[0])
    assert (["restart"], ["eviction-nothing"]) == (list(told["seconds"]), list(told["failed"]))
    assert "cannot read the trace" in told["failed"]["eviction-nothing"]
    assert {"old": 1} == json.loads((tmp_path / "eviction-nothing.json").read_text("utf-8"))
    kept = json.loads((tmp_path / "restart.json").read_text("utf-8"))
    assert 1000 == kept["objects"]
    assert {"least", "median", "most", "runs"} == kept["spread_s"]["index_s"].keys()


def test_a_synthetic_trace_stands_in(tmp_path):
    """And the report is made of what there is."""
    assert 0 == kvcdn("bench", "all", "eviction", "--quick", "--results", str(tmp_path), home=tmp_path).code
    ran = kvcdn("bench", "report", str(tmp_path / "page.md"), "--results", str(tmp_path), "--json", home=tmp_path)
    assert (0, ["eviction-synthetic-zipf"]) == (ran.code, ran.json["benchmarks"])
    page = (tmp_path / "page.md").read_text("utf-8")
    assert "## Eviction: synthetic-zipf" in page
    assert "| 5 % | 0." in page


def test_a_synthetic_trace_is_the_same_each_time(tmp_path):
    """Requests that share beginnings, none with a block twice."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_trace(first, quick=True)
    write_trace(second, quick=True)
    assert first.read_bytes() == second.read_bytes()
    chains = [json.loads(line)["hash_ids"] for line in first.read_text("utf-8").splitlines()]
    assert 1000 == len(chains)
    assert all(len(set(chain)) == len(chain) for chain in chains)
    assert len({chain[0] for chain in chains}) <= 10


def test_unknown_benchmarks_are_refused():
    """With the names that there are."""
    with pytest.raises(UsageError) as raised:
        benches(["speed"], [])
    assert "against, codec" in str(raised.value.hint)
    assert [*(one.name for one in BENCHES), "eviction-synthetic-zipf"] == [one.name for one in benches([], [])]


@pytest.mark.parametrize(("ratio", "met", "word"), [(0.91, True, "met"), (0.89, False, "**missed**")])
def test_a_miss_is_called_one(ratio, met, word):
    """In its section, and at the top of the page."""
    speeds = {name: {"least": 1.0, "most": 3.0} for name in ("prefill", "publish")}
    result = {
        "tokens": 2048, "runs": 3, "raw_bytes": 47_000_000, "memory_bytes": 50_000_000,
        "memory_budget_bytes": 134_500_000, "shared_ratio": 1.05, "prefill_tok_s": 100.0,
        "publish_tok_s": 100 * ratio, "ratio": ratio, "spread_tok_s": speeds,
    }  # fmt: skip
    judged = {one.what: one for one in judge("publish", result)}
    assert met == judged["publishing over the bare prefill loop"].met
    page = render({"publish": result})
    assert f"| at least 0.9 x | {ratio} x | {word} |" in page
    assert (f"{0 if met else 1} of 3 targets are missed") in page


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({"load_average": [2.0, 1, 1]}, "; load 2.0 at its end."),
        ({"load_average": [2.0, 1, 1], "load_before": 0.1}, "; load 0.1 before, 2.0 at its end."),
        ({"load_average": [2.0, 1, 1], "load_before": 1.1}, "; load 1.1 before, 2.0 at its end. **Noisy**: other"),
        ({"load_average": [3.1, 1, 1]}, "; load 3.1 at its end. **Noisy**: other programs were running."),
        ({"load_average": [2.0, 1, 1], "scheduling": "normal"}, "; load 2.0 at its end."),
        (
            {"load_average": [2.0, 1, 1], "scheduling": "fifo"},
            "; load 2.0 at its end. **Scheduled fifo**, in real time: whoever",
        ),
    ],
)
def test_a_machine_is_told_with_its_load(load, words):
    """More than a benchmark's own processes, or anything before it, makes it noisy; so does a real-time policy."""
    told = {"time": "2026-01-01T00:00Z", "cores": 2, "cpu": "A processor", "kvcdn": "0.1.0", "torch": "2.13.0", **load}
    assert f"2 cores of A processor, kvcdn 0.1.0{words}" in machine_words({"machine": told})
    assert ", a-model, torch 2.13.0; load" in machine_words({"machine": told, "model": "a-model"})


@pytest.mark.parametrize(
    ("policy", "name"),
    [(os.SCHED_OTHER, "normal"), (os.SCHED_BATCH, "normal"), (os.SCHED_RR, "round-robin"), (os.SCHED_FIFO, "fifo")],
)
def test_a_benchmark_tells_how_it_is_scheduled(monkeypatch, policy, name):
    """Also where children would not inherit it."""
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: policy | os.SCHED_RESET_ON_FORK)
    assert name == machine()["scheduling"]


def test_the_page_of_codecs_tells_the_kept_result():
    """`kvcdn bench report --readme docs/codecs.md` would change nothing."""
    text = (ROOT / "docs" / "codecs.md").read_text("utf-8")
    assert text == fill(text, {"codecs": lambda: codecs(load_results(RESULTS))})
    assert all(f"| {name} |" in text for name in ("lossless", "int8", "int4", "tc-high", "tc-medium", "tc-low"))


def test_the_readme_tells_the_kept_results():
    """With their machine: `kvcdn bench report --readme README.md` would change nothing."""
    readme = (ROOT / "README.md").read_text("utf-8")
    results = load_results(RESULTS)
    assert readme == fill(readme, {"measured": lambda: measured(results)})
    assert results["ttft"]["machine"]["cpu"] in readme


def test_every_target_reads_a_kept_result():
    """No target looks for a figure that its benchmark does not tell."""
    for name, result in load_results(RESULTS).items():
        for one in judge(name, result):
            assert re.search(r"\d|yes|no", one.measured), (name, one)
