"""The benchmarks of an edge: small runs have every figure, and what is not a measurement is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcdn.block import SegmentVerifier, open_header
from kvcdn.cli.bench.edge import MIB, Sizes, measure_edge
from kvcdn.cli.bench.nginx import nginx_path
from kvcdn.cli.bench.objects import write_object
from kvcdn.cli.bench.restart import measure_restart
from kvcdn.digest import hash_bytes

FIGURES = {"size", "connections", "gbps", "nginx_gbps", "ratio", "p99_ttfb_ms", "nginx_p99_ttfb_ms"}


@pytest.mark.skipif(nginx_path() is None, reason="there is no nginx (apt-get install nginx-light)")
def test_an_edge_is_measured_beside_nginx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each number of connections; one fetch for a stampede, all of whose bodies are right."""
    monkeypatch.setattr("kvcdn.cli.bench.edge.COLD_OBJECTS", 2)
    sizes = Sizes(0.1, 1, connections=(1, 3), clients=10, cold_bytes=16 * MIB, readers=5, slow_bytes=16 * MIB)
    result = measure_edge(sizes, lambda _: None)
    assert [1, 3] == [row["connections"] for row in result["rows"]]
    assert all(row.keys() >= FIGURES for row in result["rows"])
    stampede = result["stampede"]
    assert (1, 10) == (stampede["origin_fetches"], stampede["right_bodies"])
    assert 5 == result["slow_readers"]["readers"]


def test_a_start_is_measured_by_index_and_by_walk() -> None:
    """Both ways end with a ready edge."""
    result = measure_restart(50, 1, lambda _: None)
    assert 50 == result["objects"]
    assert all(result[name] > 0 for name in ("empty_s", "walk_s", "index_s"))


def test_objects_of_the_benchmarks_pass_every_check_of_an_edge(tmp_path: Path) -> None:
    """They are real blocks as far as can be told without keys."""
    made = write_object(tmp_path, 3, 100_001)
    data = (tmp_path / made.key).read_bytes()
    verifier = SegmentVerifier(open_header(data, "block"))
    verifier.update(data)
    verifier.finish()
    assert (made.size, made.blake3) == (len(data), str(hash_bytes(data)))
