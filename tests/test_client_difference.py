"""Differences of texts: where they are, what kind they are, and how they are shown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.client.explaining.causes import ADVICE, Cause
from kvcdn.client.explaining.difference import common_length, first_difference, visible
from kvcdn.client.explaining.volatile import find_volatile
from kvcdn.client.loading.report import MissReason

FRONT = "You are a careful assistant.\n"
BACK = "\nAnswer in the language of the question, and name your sources.\n"

TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {"type": "object"}}}
    for name in ("alpha", "beta", "gamma")
]

DIFFERENCES = {
    "a day": (Cause.TIMESTAMP, "Today is 2026-11-30.", "Today is 2026-10-01."),
    "a time": (Cause.TIMESTAMP, "It is 12:04:59 now.", "It is 12:05:00 now."),
    "a day and a time": (Cause.TIMESTAMP, "(2026-11-30T10:20:30Z)", "(2026-11-30T10:20:31Z)"),
    "a day in words": (Cause.TIMESTAMP, "on Monday, November 30, 2026", "on Tuesday, December 1, 2026"),
    "a day of the week": (Cause.TIMESTAMP, "Today is Monday.", "Today is Friday."),
    "an epoch": (Cause.TIMESTAMP, "<t>1764500000</t>", "<t>1764500917</t>"),
    "a UUID": (
        Cause.IDENTIFIER,
        "run 0b8e4e1c-1f5d-4f0e-9a53-2f3c8a1c9d10",
        "run 7c9e6679-7425-40de-944b-e07fc1f90ae7",
    ),
    "a commit": (Cause.IDENTIFIER, "at 53b73229aa01c4d5", "at dd350941c2e7f0ab"),
    "a prefixed id": (Cause.IDENTIFIER, "req_8fA31kLm02Qz", "req_9Bd72xYw51Pn"),
    "a labelled id": (Cause.IDENTIFIER, "session: kitten", "session: walrus"),
    "a number": (Cause.COUNTER, "You have 14 messages.", "You have 15 messages."),
    "a host": (Cause.HOST, "on node-7.eu.internal", "on node-12.eu.internal"),
    "an address": (Cause.HOST, "from 10.0.3.17", "from 10.0.44.9"),
    "a path": (Cause.PATH, "in /tmp/run-ab12/work", "in /tmp/run-zz98/work"),
    "a home": (Cause.PATH, "in /home/alice/src", "in /home/bob/src"),
    "a user's name": (Cause.USER, "User: Alice Adams", "User: Bob Brown"),
    "a user's address": (Cause.USER, "for alice@example.org", "for bob.b@example.org"),
    "CRLF": (Cause.LINE_ENDINGS, "one\ntwo", "one\r\ntwo"),
    "trailing spaces": (Cause.WHITESPACE, "one\ntwo", "one  \ntwo"),
    "a tab": (Cause.WHITESPACE, "a\tb", "a    b"),
    "an empty line": (Cause.WHITESPACE, "a\n\nb", "a\nb"),
    "NFD": (Cause.UNICODE, "caf\u00e9 au lait", "cafe\u0301 au lait"),
    "a ligature": (Cause.UNICODE, "the of\ufb01ce", "the office"),
    "an invisible character": (Cause.UNICODE, "zero\u200bwidth", "zerowidth"),
    "curly quotes": (Cause.UNICODE, "say \u201chello\u201d", 'say "hello"'),
    "capitals": (Cause.CASE, "use the API", "use the api"),
    "a list": (Cause.LIST_ORDER, "Cities: Rome, Oslo, Bern", "Cities: Bern, Rome, Oslo"),
    "a list of lines": (Cause.LIST_ORDER, "- red\n- green\n- blue", "- blue\n- red\n- green"),
    "keys": (Cause.KEY_ORDER, '{"b": 1, "a": [2, 3]}', '{"a": [2, 3], "b": 1}'),
    "keys on lines": (Cause.KEY_ORDER, '"b": 1,\n"a": 2', '"a": 2,\n"b": 1'),
    "tools": (Cause.TOOL_ORDER, json.dumps(TOOLS), json.dumps(TOOLS[::-1])),
    "tools on lines": (
        Cause.TOOL_ORDER,
        "\n".join(map(json.dumps, TOOLS)),
        "\n".join(map(json.dumps, [TOOLS[2], *TOOLS[:2]])),
    ),
    "tools written out": (Cause.TOOL_ORDER, json.dumps(TOOLS, indent=2), json.dumps(TOOLS[::-1], indent=2)),
    "a line with a day": (Cause.TIMESTAMP, "Today is 2026-11-30.\nBe brief.", "Be brief."),
    "a line with an id": (Cause.IDENTIFIER, "Be brief.", "Run req_8fA31kLm02Qz:\nBe brief."),
    "other words": (Cause.TEXT, "Be brief.", "Take your time."),
    "a word more": (Cause.TEXT, "Be brief.", "Be very brief."),
}


@pytest.mark.parametrize("case", DIFFERENCES)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_kind_of_a_difference_is_told(case, swapped):
    """In the middle of equal text, whichever side is ours."""
    cause, *sides = DIFFERENCES[case]
    ours, theirs = (FRONT + side + BACK for side in (reversed(sides) if swapped else sides))
    found = first_difference(ours, theirs)
    assert found is not None
    assert cause == found.cause, found.detail
    assert ours[: found.ours[0]] == theirs[: found.theirs[0]]
    assert found.ours[0] <= common_length(ours, theirs) <= max(found.ours[1], found.theirs[1])


@pytest.mark.parametrize("more", ["", "more"])
def test_equal_beginnings_do_not_differ(more):
    """A text that goes on is no difference."""
    assert first_difference(FRONT, FRONT + more) is None


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80), st.text(max_size=80), st.text(max_size=40))
def test_any_two_texts_have_a_first_difference_or_none(front, a, b):
    """The place is the first different character's, at the latest; behind the difference both sides may go on."""
    ours, theirs = front + a, front + b
    common = next(
        (index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs))
    )
    assert common == common_length(ours, theirs)
    found = first_difference(ours, theirs)
    assert (found is None) == (common == min(len(ours), len(theirs)))
    if found is not None:
        assert 0 <= found.ours[0] <= common
        assert 0 <= found.ours[0] <= found.ours[1] <= len(ours)
        assert 0 <= found.theirs[0] <= found.theirs[1] <= len(theirs)
        assert max(found.ours[1], found.theirs[1]) > common
        assert found.detail


@given(st.text(max_size=200))
def test_what_is_shown_is_one_printable_line(text):
    """No control character, line end or lone accent reaches a terminal, and nothing is lost."""
    shown = visible(text)
    assert shown.isprintable()
    back = shown.encode("ascii", "backslashreplace").decode("unicode_escape")
    assert text == back


@pytest.mark.parametrize(
    "text", ["a" * 100_000, "1" * 100_000, "-" * 100_000, "0a" * 50_000, "a.b-" * 25_000, "/tmp/" * 20_000]
)
def test_patterns_take_linear_time_on_hostile_text(text):
    """Counted, not timed: twice the text has about twice the finds, and the search ends."""
    assert len(list(find_volatile(text))) <= 2 * len(list(find_volatile(text[: len(text) // 2]))) + 1


def test_every_reason_of_a_report_is_a_cause_with_advice():
    """A reason can be looked up; a new one must get a cause."""
    assert set(MissReason) <= set(Cause)
    assert set(Cause) == set(ADVICE)
