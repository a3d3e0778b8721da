"""`kvcdn simulate`: its one object, its tables, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcdn.cli.main import app
from kvcdn.errors import UsageError


def invoke(*words):
    return CliRunner().invoke(app, ["simulate", *map(str, words)])


def trace(folder: Path) -> Path:
    """Ten conversations of six turns, two requests a second."""
    lines = []
    for number in range(60):
        talk, turn = number % 10, number // 10
        chain = [0, *(1000 * talk + place for place in range(1, 2 * turn + 3))]
        values = {"timestamp": 500 * number, "input_length": 512 * len(chain) - 100, "output_length": 9, "hash_ids": chain}
        lines.append(json.dumps(values))
    path = folder / "talks.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_the_command_prints_one_object(tmp_path):
    """Both worlds of every value, the same at each run, and the names that documents promise."""
    words = ("cluster", "--trace", trace(tmp_path), "--vary", "publish.after_requests=0,2", "--json")
    done = [invoke(*words) for _ in range(2)]
    assert [0, 0] == [one.exit_code for one in done]
    assert done[0].stdout == done[1].stdout
    found = json.loads(done[0].stdout)
    assert ["publish.after_requests=0", "publish.after_requests=2"] == [run["set"] for run in found["runs"]]
    assert {"topology", "traffic", "seed", "vary", "runs"} == set(found)
    for run in found["runs"]:
        for name in ("with", "without"):
            assert 60 == run[name]["requests"] == run[name]["simulated"]
            assert 0 == run[name]["unfinished"]
            assert {"mean", "p50", "p90", "p95", "p99", "max"} == set(run[name]["first_token_s"])
            assert 1.0 == pytest.approx(sum(run[name]["tokens_share"].values()), rel=1e-4)
        assert {"compute", "publishing", "storage", "store_requests", "origin_egress", "delivery"} == set(
            run["with"]["costs_usd"]
        )
    ahead, later = (run["with"]["tokens_share"]["fetched"] for run in found["runs"])
    assert ahead > later > 0


def test_tables_are_for_people(tmp_path):
    """What is shown says what was simulated, and names caches and devices."""
    done = invoke("cluster", "--trace", trace(tmp_path), "--rate", "2")
    assert 0 == done.exit_code
    assert done.stdout.startswith("talks, 2 times as fast, over cluster")
    assert "TTFT P50" in done.stdout
    assert "devices with kvcdn:" in done.stdout
    done = invoke("laptops", "--readers", "50", "--documents", "5", "--document-tokens", "600", "--days", "0.1")
    assert 0 == done.exit_code
    assert "shield" in done.stdout


def test_a_topology_of_ones_own(tmp_path):
    """A file is read in place of a preset; seconds and readers are what it says."""
    (tmp_path / "own.toml").write_text("[[edge]]\nname = 'here'\n[readers]\ndevice = 'm1-pro'\n")
    done = invoke(tmp_path / "own.toml", "--readers", "20", "--documents", "2", "--document-tokens", "600", "--json")
    assert 0 == done.exit_code, done.exception
    assert ["here"] == list(json.loads(done.stdout)["runs"][0]["with"]["nodes"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("cellar",), "no topology 'cellar'"),
        (("--readers", "0"), "--readers"),
        (("--days", "nan"), "--days"),
        (("--zipf", "-1"), "--zipf"),
        (("--documents", "0"), "--documents"),
        (("--vary", "edge.mbit"), "names no values"),
        (("--vary", "edge.mbit=1,1"), "names no values"),
        (("--vary", "edge.speed=1"), "speed is no setting"),
        (("--trace", "/nowhere"), "cannot read the trace"),
        (("--check", "--readers", "5"), "takes no --readers"),
        (("--method", "guess"), "no method 'guess'"),
        (("--window", "0"), "--window"),
    ],
)
def test_what_cannot_be_is_refused(words, told):
    """As one line that names the option."""
    done = invoke(*words)
    assert isinstance(done.exception, UsageError)
    assert told in str(done.exception)
