"""kvcdn bench crossover: real edges, real links, a tiny model: the figures hang together, and what was not measured says so."""

from __future__ import annotations

import pytest

from support.benched import check_benched
from support.command import kvcdn
from support.tiny import ROOT, tiny_checkpoint

TOKENS = 600


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One run over two links and one killed edge."""
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    ran = kvcdn(
        "bench", "crossover", "--model", str(model), "--document", str(ROOT / "LICENSE"), "--tokens", str(TOKENS),
        "--runs", "1", "--mbit", "0.5,400", "--fetch-limit", "1", "--kill", "1", "--json", home=tmp_path_factory.mktemp("home"),
    )  # fmt: skip
    return check_benched("crossover", ran)


def test_a_row_for_each_link(found):
    """With the times of each way, and what was decided."""
    assert [0.5, 400] == [row["mbit"] for row in found["rows"]]
    assert TOKENS == found["tokens"]
    for row in found["rows"]:
        for name in ("prefill_s", "fetch_s", "auto_s", "auto_first_s"):
            assert row[name] > 0
        assert row["auto_over_best"] == pytest.approx(row["auto_s"] / min(row["prefill_s"], row["fetch_s"]), rel=0.05)
        assert set(row["decision"].split(">")) <= {"fetch", "compute", "both"}
        assert row["measured_mbit"] < 1.2 * row["mbit"]


def test_what_was_not_fetched_is_marked(found):
    """A fetch of seconds on the slow link is reckoned from its bytes."""
    slow, fast = found["rows"]
    assert (True, False) == (slow["fetch_estimated"], fast["fetch_estimated"])
    assert slow["fetch_s"] == pytest.approx(found["wire_bytes"] * 8 / 1e6 / slow["measured_mbit"], rel=0.01)


def test_an_edge_is_killed(found):
    """And the prompt is answered nevertheless."""
    (row,) = found["kill"]["rows"]
    assert found["kill"]["worst_over_prefill"] == row["over_prefill"] > 0


@pytest.mark.parametrize("links", ["", "0", "-1", "a", "1,1", "2e6"])
def test_links_that_cannot_be_are_refused(links, tmp_path):
    ran = kvcdn("bench", "crossover", f"--mbit={links or ' '}", "--json", home=tmp_path)
    assert 2 == ran.code
