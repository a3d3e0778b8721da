"""Certificates: integers with bounds, read strictly, compared with what a reader asks for."""

from __future__ import annotations

from typing import Any

import pytest

from kvcdn.certificate import Certificate
from kvcdn.errors import CorruptError

SOUND = Certificate(256, 30, 32, 1_900_000, 20_000_000, 1_700_000, 12_345_678, 12_300_000, 984_375)


def test_reads_what_it_writes() -> None:
    """Nothing is lost, and all of it is integers."""
    value = SOUND.to_json()
    assert {int} == {type(number) for number in value.values()}
    assert SOUND == Certificate.from_json(value, "header")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top1": 1_000_001}, "top1"),
        ({"kl_mean": -1}, "kl_mean"),
        ({"kl_p99": 2**53}, "kl_p99"),
        ({"kl_mean": True}, "kl_mean"),
        ({"kl_mean": None}, "kl_mean"),
        ({"kl_mean": 0.5}, "kl_mean"),
        ({"greedy_equal": 33}, "more greedy tokens"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_other_values_are_refused(change: dict[str, Any], says: str) -> None:
    """Each field has its type and range, and there are no others."""
    with pytest.raises(CorruptError, match=says):
        Certificate.from_json({**SOUND.to_json(), **change}, "header")


def test_a_missing_field_is_refused() -> None:
    """A certificate is whole."""
    value = SOUND.to_json()
    del value["kl_recompute"]
    with pytest.raises(CorruptError, match="'kl_recompute' is missing"):
        Certificate.from_json(value, "header")


def test_bounds() -> None:
    """A bound is met by what equals it."""
    assert SOUND.meets(None)
    assert SOUND.meets(0.0019)
    assert not SOUND.meets(0.001_899_999)


def test_line_for_people() -> None:
    """The figures in the units that people know."""
    assert str(SOUND) == (
        "KL 0.00190 (1.1 x recompute noise; p99 0.0200), top-1 98.4%, 30 of 32 greedy tokens equal,"
        " perplexity 12.346 (exact 12.300), over 256 tokens"
    )
