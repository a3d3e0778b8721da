"""`kvcdn bench publish` on a tiny model: what it counts is what it did."""

from __future__ import annotations

from support.benched import check_benched
from support.command import kvcdn
from support.tiny import TEXT


def test_both_ways_are_measured(tiny_llama, tmp_path) -> None:
    """Speeds and their ratio agree; a document that is too short is told."""
    document = tmp_path / "document.txt"
    document.write_text(TEXT, encoding="utf-8")
    words = ("bench", "publish", "--model", tiny_llama, "--document", document, "--runs", "2", "--json")
    found = check_benched("publish", kvcdn(*words, "--tokens", "1500"))
    assert (1500, 2) == (found["tokens"], found["runs"])
    assert min(found["prefill_tok_s"], found["publish_tok_s"], found["raw_bytes"]) > 0
    assert found["memory_budget_bytes"] == 64_000_000 + found["raw_bytes"] * 3 // 2
    assert found["shared_ratio"] > 0
    assert abs(found["ratio"] - found["publish_tok_s"] / found["prefill_tok_s"]) < 0.01
    assert 2 == kvcdn(*words, "--tokens", "100000").code
