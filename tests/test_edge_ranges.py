"""Ranges and conditions: RFC 9110 sections 13 and 14, as pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.edge.http.conditions import Precondition, evaluate, range_applies
from kvcdn.edge.http.ranges import ByteRange, RangeOutcome, select_range

TAG = "ab" * 32
OTHER = "cd" * 32

sizes = st.integers(1, 200)
numbers = st.integers(0, 250)


def _slice(data: bytes, selected: ByteRange | RangeOutcome) -> bytes | RangeOutcome:
    return data[selected.start : selected.start + selected.length] if isinstance(selected, ByteRange) else selected


@given(sizes, numbers, numbers)
def test_first_to_last_is_a_slice(size: int, first: int, last: int) -> None:
    """bytes=a-b is data[a:b+1]; with b before a it is malformed and ignored."""
    data = bytes(range(size))
    expected = RangeOutcome.WHOLE if last < first else data[first : last + 1] or RangeOutcome.UNSATISFIABLE
    assert expected == _slice(data, select_range([f"bytes={first}-{last}"], size))


@given(sizes, numbers)
def test_an_open_end_is_a_slice(size: int, first: int) -> None:
    """bytes=a- is data[a:]."""
    data = bytes(range(size))
    assert (data[first:] or RangeOutcome.UNSATISFIABLE) == _slice(data, select_range([f"bytes={first}-"], size))


@given(sizes, numbers)
def test_a_suffix_is_a_slice(size: int, length: int) -> None:
    """bytes=-n is data[-n:], all of it where n is larger, and nothing where n is 0."""
    data = bytes(range(size))
    expected = data[-length:] if length else RangeOutcome.UNSATISFIABLE
    assert expected == _slice(data, select_range([f"bytes=-{length}"], size))


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["bytes"],
        ["bytes="],
        ["bytes=-"],
        ["bytes=a-b"],
        ["bytes=1"],
        ["bytes=1-2-3"],
        ["bytes= 1 - 2"],
        ["bytes=0-1,3-4"],
        ["bytes=999-,998-"],
        ["lines=0-1"],
        ["0-1"],
        ["bytes=-1-"],
        ["bytes=+1-2"],
        ["bytes=0x1-2"],
        ["bytes=\u0661-\u0662"],
        ["bytes=5-1"],
        ["bytes=0-1", "bytes=0-1"],
        ["bytes=0-1\n"],
    ],
)
def test_what_is_not_one_range_of_bytes_is_ignored(values: list[str]) -> None:
    """Malformed, unknown, repeated and multiple ranges get the whole object (14.2)."""
    assert RangeOutcome.WHOLE is select_range(values, 10)


@pytest.mark.parametrize("value", ["BYTES=2-3", "bytes=,2-3", "bytes= 2-3", "bytes=2-3 ,\t,", "bytes=0002-00000000000003"])
def test_unusual_forms_of_one_range_count(value: str) -> None:
    """Units have no case (14.1), lists may have empty elements (5.6.1.2), numbers leading zeros."""
    assert ByteRange(2, 2) == select_range([value], 10)


def test_numbers_of_any_length_are_read() -> None:
    """A header full of digits is one more large number."""
    nines = "9" * 8000
    assert ByteRange(3, 7) == select_range([f"bytes=3-{nines}"], 10)
    assert ByteRange(0, 10) == select_range([f"bytes=-{nines}"], 10)
    assert RangeOutcome.UNSATISFIABLE is select_range([f"bytes={nines}-"], 10)


@given(st.text(max_size=40), sizes)
def test_any_text_ends_in_a_part_that_exists_or_none(text: str, size: int) -> None:
    """Whatever comes, a part lies within the object."""
    selected = select_range([text], size)
    if isinstance(selected, ByteRange):
        assert 0 <= selected.start < selected.start + selected.length <= size


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "expected"),
    [
        ([], [], Precondition.PROCEED),
        ([f'"{TAG}"'], [], Precondition.PROCEED),
        (["*"], [], Precondition.PROCEED),
        ([f'"{OTHER}", "{TAG}"'], [], Precondition.PROCEED),
        ([f'"{OTHER}"', f'"{TAG}"'], [], Precondition.PROCEED),
        ([f'"{OTHER}"'], [], Precondition.FAILED),
        ([f'W/"{TAG}"'], [], Precondition.FAILED),
        ([TAG], [], Precondition.FAILED),
        ([""], [], Precondition.FAILED),
        ([], ["*"], Precondition.NOT_MODIFIED),
        ([], [f'"{TAG}"'], Precondition.NOT_MODIFIED),
        ([], [f'W/"{TAG}"'], Precondition.NOT_MODIFIED),
        ([], [f'"x,y" ,, W/"{TAG}" ,'], Precondition.NOT_MODIFIED),
        ([], [f'"{OTHER}"', f'"{TAG}"'], Precondition.NOT_MODIFIED),
        ([], [f'"{OTHER}"'], Precondition.PROCEED),
        ([], [TAG], Precondition.PROCEED),
        ([], [f'"{TAG}" "{TAG}"'], Precondition.PROCEED),
        ([], [f'"{TAG}'], Precondition.PROCEED),
        ([f'"{OTHER}"'], [f'"{TAG}"'], Precondition.FAILED),
        ([f'"{TAG}"'], [f'"{TAG}"'], Precondition.NOT_MODIFIED),
    ],
)
def test_preconditions_follow_the_table(if_match: list[str], if_none_match: list[str], expected: Precondition) -> None:
    """If-Match compares strongly and comes first, If-None-Match weakly (13.1, 13.2.2)."""
    assert expected is evaluate(if_match, if_none_match, TAG)


@pytest.mark.parametrize(
    ("if_range", "applies"),
    [
        ([], True),
        ([f'"{TAG}"'], True),
        ([f'W/"{TAG}"'], False),
        ([f'"{OTHER}"'], False),
        ([TAG], False),
        (["Wed, 21 Oct 2015 07:28:00 GMT"], False),
        ([f'"{TAG}"', f'"{TAG}"'], False),
    ],
)
def test_if_range_compares_strongly(if_range: list[str], applies: bool) -> None:
    """A range counts only for the very object the client has (13.1.5)."""
    assert applies == range_applies(if_range, TAG)


@given(st.lists(st.text(max_size=60), max_size=3), st.lists(st.text(max_size=60), max_size=3))
def test_any_condition_ends_in_a_verdict(if_match: list[str], if_none_match: list[str]) -> None:
    """Hostile fields raise nothing."""
    assert evaluate(if_match, if_none_match, TAG) in Precondition
