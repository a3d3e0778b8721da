"""The main job, end to end and for real: a real model, a real S3 server, an edge process, every step a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcdn.model.checkpoint import PACKAGED_ALIAS, resolve_checkpoint
from support.command import kvcdn
from support.edge_process import metric, origin_gets, running_edge
from support.tiny import ROOT


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The small real model; converted once a run, into the run's own cache."""
    return resolve_checkpoint(PACKAGED_ALIAS).folder


@pytest.mark.timeout(600)
def test_publish_serve_and_ask_through_s3_and_an_edge(real_model, s3_server, tmp_path, monkeypatch):
    """Published by one process, cached by a second, answered by a third under another hash seed, and verified."""
    document = tmp_path / "licence.txt"
    document.write_text((ROOT / "LICENSE").read_text("utf-8")[:2800])
    origin, home = s3_server.url("e2e"), tmp_path / "home"
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    arguments = (document, "--model", real_model)

    published = kvcdn("publish", *arguments, "--origin", origin, "--json", home=home, process=True)
    assert 0 == published.code, published.err
    tokens = published.json["tokens"]
    assert published.json["stored_bytes"] <= 0.70 * published.json["raw_bytes"]

    with running_edge(origin, tmp_path / "cache") as edge:
        for seed in ("1", "2"):
            asked = kvcdn(
                "ask", *arguments[:1], "What is the grant of rights?", *arguments[1:], "--edge", edge.url, "--max-tokens", "4",
                "--mode", "fetch", "--json", home=home, process=True, PYTHONHASHSEED=seed,
            )  # fmt: skip
            assert 0 == asked.code, asked.err
            assert (tokens, None) == (asked.json["report"]["tokens_reused"], asked.json["report"]["reason"])
        found = kvcdn("verify", *arguments, "--edge", edge.url, "--greedy", "8", "--json", home=home).json
        # Three readers, one origin fetch a block.
        assert published.json["blocks"] == origin_gets(edge.url)
        assert 0 == metric(edge.url, 'kvcdn_edge_fills_total{outcome="corrupt"}')
    assert (True, True, True) == tuple(found[name] for name in ("loaded_equals_published", "bit_identical", "sound"))
    assert found["one_pass"]["top1"] > 0.5
    assert found["one_pass"]["kl_mean"] < 0.05
