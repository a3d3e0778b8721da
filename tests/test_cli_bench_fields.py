"""Every benchmark tells its progress, the spread of what it measured, and the machine and versions that it ran on."""

from __future__ import annotations

import re

import pytest

from kvcdn.cli.bench.commands import app
from kvcdn.cli.bench.nginx import nginx_path
from support.benched import check_benched
from support.command import kvcdn
from support.tiny import ROOT

HERE = {
    "decode": ("--tokens", "32", "--steps", "4"),
    "edge": (
        *("--seconds", "0.1", "--rounds", "1", "--clients", "2", "--cold-size", "8MiB"),
        *("--readers", "2", "--slow-size", "8MiB"),
    ),
    "eviction": ("--capacity", "5,50", "--trace", "{trace}"),
    "restart": ("--objects", "5", "--runs", "1"),
    "ttft": ("--tokens", "300", "--runs", "1", "--document", str(ROOT / "LICENSE")),
}
"""Small sizes of those that take a moment."""

ELSEWHERE = {"against", "codec", "crossover", "publish", "workers"}
"""Those whose own tests run them, and look at the same: `check_benched`."""


@pytest.mark.parametrize("name", HERE)
def test_a_benchmark_says_all_that_its_figures_hang_on(name, tiny_llama, tmp_path, monkeypatch):
    """On standard error while it runs, and in its JSON."""
    if name == "edge" and nginx_path() is None:
        pytest.skip("bench edge measures an nginx beside the edge, and there is none here (apt-get install nginx-light)")
    monkeypatch.setattr("kvcdn.cli.bench.edge.COLD_OBJECTS", 2)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, 3]}\n', "utf-8")
    words = [word.format(trace=trace) for word in HERE[name]]
    if name in ("decode", "ttft"):
        words += ["--model", str(tiny_llama)]
    check_benched(name, kvcdn("bench", name, *words, "--json", home=tmp_path))


def test_no_benchmark_is_left_out():
    """Each is run here, or by a test of its own that looks at the same."""
    names = {command.name or command.callback.__name__ for command in app.registered_commands} - {"all", "report"}
    assert HERE.keys() | ELSEWHERE == names
    for name in ELSEWHERE:
        text = (ROOT / "tests" / f"test_cli_bench_{name}.py").read_text("utf-8")
        assert re.search(rf'check_benched\("{name}"', text), name
