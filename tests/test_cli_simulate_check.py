"""`kvcdn simulate --check`: a tiny model, two real edges, two shaped links, real readers; and the same simulated."""

from __future__ import annotations

import pytest

from kvcdn.cli.simulate_check import CheckCase, check

CASE = CheckCase(
    documents=12,
    tokens=1024,
    requests=16,
    rounds=2,
    edge_mbit=10.0,
    uplink_mbit=8.0,
    rtt_s=0.002,
    uplink_rtt_s=0.004,
    capacity_share=0.5,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One run of a case of a few seconds."""
    from support.tiny import tiny_checkpoint

    return check(str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"))), CASE, lambda text: None)


def test_both_sides_are_of_the_same_requests(found):
    """The edge filled whole documents: those asked for at least once each, and no more than there were requests."""
    size = found["document_bytes"]
    for filled in found["filled_bytes"].values():
        documents = filled / size
        assert documents == pytest.approx(round(documents), abs=0.2)
        assert 2 <= round(documents) <= CASE.requests
    for name, share in found["hit_ratio"].items():
        assert 1 - found["filled_bytes"][name] / (CASE.requests * size) == pytest.approx(share, abs=1e-3)
        assert 0 < share < 1


def test_no_fetch_is_faster_than_its_link(found):
    """Real or simulated, each takes its bytes at the link's speed at least; and the error is what it says."""
    least = found["document_bytes"] / (CASE.edge_mbit * 1e6 / 8)
    for row in found["fetch"].values():
        assert min(row["real_s"], row["simulated_s"]) > 0.9 * least
        assert row["error"] == pytest.approx(row["simulated_s"] / row["real_s"] - 1, abs=1e-3)
    assert found["fetch"]["p50"]["simulated_s"] < found["fetch"]["max"]["simulated_s"]


def test_what_a_fetch_takes_alone_is_told(found):
    """It is what the simulation is given; and how far a round is from the fastest of each request, which no round beats."""
    alone = found["alone"]
    assert alone["open_bytes_per_s"] > 0
    assert alone["hit_s"] >= 0.9 * alone["round_trips_of_a_hit_s"] > 0
    assert alone["miss_s"] >= 0
    assert all(row["rounds_apart"] >= 0 for row in found["fetch"].values())
    assert {"cpu", "cores", "load_average", "kvcdn", "model"} <= found["machine"].keys()
