"""`kvcdn bench workers` on a tiny model: real services, one after another."""

from __future__ import annotations

from support.benched import check_benched
from support.command import kvcdn


def test_one_and_several_are_timed(tiny_llama) -> None:
    """Their ratio is the one told; another executor is refused."""
    words = ("bench", "workers", "--model", tiny_llama, "--documents", "3", "--tokens", "64", "--rounds", "1", "--json")
    found = check_benched("workers", kvcdn(*words, "--executor", "processes"))
    assert (3, 64, 2, "processes") == tuple(found[name] for name in ("documents", "tokens", "workers", "executor"))
    assert min(found["one_s"], found["several_s"]) > 0
    assert abs(found["speedup"] - found["one_s"] / found["several_s"]) < 0.05 * found["speedup"]
    assert 2 == kvcdn(*words, "--executor", "threads").code
