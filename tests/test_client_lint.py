"""Lint: volatile text in front of what prompts share is found, weighed, and told apart from the prompts' own part."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_client_difference import DIFFERENCES, TOOLS

from kvcdn.client.explaining.causes import Cause, Certainty
from kvcdn.client.explaining.difference import common_length
from kvcdn.client.explaining.lint import lint_samples
from kvcdn.client.explaining.samples import Conversation, Sample
from support.explained import BASE, Stage, checkpoint_with_tools
from support.tiny import TEXT

LATER = TEXT[6000:9000]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    return Stage.at(checkpoint_with_tools(tmp_path_factory.mktemp("linted")))


def lint(stage, *contents):
    samples = [Sample(f"sample {index}", content) for index, content in enumerate(contents)]
    return lint_samples(samples, stage.view(""))


def ids(stage, content):
    return stage.view(content).spell().token_ids


@pytest.mark.parametrize("case", DIFFERENCES)
def test_every_kind_of_difference_in_front_is_found_and_weighed(stage, case):
    """Where it stands, what it is, and that all of the equal text behind it is lost; the questions behind are no problem."""
    cause, ours, theirs = DIFFERENCES[case]
    samples = [
        f"{BASE[:1500]}\n{side}\n{LATER}\n\nQuestion: {question}"
        for side, question in ((ours, "Why?"), (theirs, "When, then?"))
    ]
    found = lint(stage, *samples)
    shared = common_length(*(ids(stage, sample) for sample in samples))
    assert shared == found.shared
    assert shared // 1024 * 1024 == found.reusable
    assert cause in {problem.cause for problem in found.problems}, found.problems
    proved = [problem for problem in found.problems if problem.certainty is Certainty.PROVED]
    later = len(ids(stage, LATER))
    first = proved[0]
    assert abs(first.token - shared) <= 2
    assert later - 5 <= first.behind <= later + 60
    assert all(problem.token < shared + 150 for problem in proved)


def test_two_problems_are_two_and_mending_adds_up(stage):
    """A time at the top, an id in the middle: the first alone gains what lies between them."""
    texts = [
        f"It is 2026-11-30 10:0{digit}.\n{BASE}\nsession_id: {name}\n{LATER}\n\nQuestion: {digit}?"
        for digit, name in ((1, "c0ffee12ab34cd56"), (2, "0ddba11efaceb00c"))
    ]
    found = lint(stage, *texts)
    first, second = found.problems
    assert (Cause.TIMESTAMP, Cause.IDENTIFIER) == (first.cause, second.cause)
    assert second.token == first.mended
    assert first.behind > second.behind >= len(ids(stage, LATER)) - 5
    assert second.token + second.behind <= second.mended <= len(ids(stage, texts[0]))


def test_line_ends_of_another_kind_are_one_problem(stage):
    """Not one for each line: they are mended in one place."""
    text = BASE[:1500]
    [found] = lint(stage, text, text.replace("\n", "\r\n")).problems
    assert Cause.LINE_ENDINGS is found.cause
    assert re.search(r"; and \d+ more of this kind$", found.detail)
    assert found.mended > len(ids(stage, text)) - 40
    assert found.token <= 2
    assert found.behind > 100


def test_samples_that_share_all_but_their_questions_have_no_problem(stage):
    """The questions are the prompts' own part, however alike they are."""
    found = lint(
        stage, *(f"{BASE}\n\nQuestion: {q}\nAnswer:" for q in ("What may a licensee do?", "Who is a licensor?", "Why?"))
    )
    assert [] == found.problems
    assert found.shared >= len(ids(stage, BASE))


def test_equal_samples_have_no_problem(stage):
    """Nothing differs at all."""
    found = lint(stage, BASE, BASE)
    assert ([], found.tokens) == (found.problems, found.shared)


@pytest.mark.parametrize("kind", ["order", "keys"])
def test_tools_in_another_order_are_one_problem(stage, kind):
    """Whatever the template makes of them, and before what is wrong in the messages."""
    changed = TOOLS[::-1] if kind == "order" else [dict(reversed(tool.items())) for tool in TOOLS]
    chats = [
        Conversation(
            ({"role": "system", "content": f"Today is {day}.\n{BASE}"}, {"role": "user", "content": question}), tuple(tools)
        )
        for tools, day, question in ((TOOLS, "2026-11-30", "Why?"), (changed, "2026-12-01", "How?"))
    ]
    found = lint(stage, *chats)
    assert [Cause.TOOL_ORDER if kind == "order" else Cause.KEY_ORDER, Cause.TIMESTAMP] == [
        each.cause for each in found.problems
    ]
    tools, day = found.problems
    assert common_length(*(ids(stage, chat) for chat in chats)) == tools.token == found.shared
    assert day.token == tools.mended
    assert tools.behind > day.behind >= len(ids(stage, BASE)) - 5


def test_a_pinned_date_is_pointed_out(stage):
    """All samples have it, today."""
    found = lint(stage, *(f"Today is 2026-11-30.\n{BASE}\n\nQuestion: {q}" for q in ("Why?", "How then?")))
    assert [(Cause.TIMESTAMP, Certainty.LIKELY)] == [(each.cause, each.certainty) for each in found.problems]
    assert found.problems[0].behind >= len(ids(stage, BASE)) - 5


def test_one_sample_is_looked_through(stage):
    """For everything that usually changes."""
    found = lint(stage, f"User: alice@example.org on node-1.internal\nrun 0b8e4e1c-1f5d-4f0e-9a53-2f3c8a1c9d10\n{BASE}")
    assert {Cause.USER, Cause.HOST, Cause.IDENTIFIER} <= {each.cause for each in found.problems}
    assert {Certainty.LIKELY} == {each.certainty for each in found.problems}


def test_a_template_that_writes_the_date_is_pointed_out(stage):
    """Nothing in the messages shows it."""
    tokenizer = stage.loaded.tokenizer
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') }}{% endif %}" + before
        chats = [Conversation(({"role": "system", "content": BASE}, {"role": "user", "content": q})) for q in ("Why?", "How?")]
        found = lint(stage, *chats)
    finally:
        tokenizer.chat_template = before
    assert Cause.TIMESTAMP in {each.cause for each in found.problems}
    assert any("template" in each.detail for each in found.problems)


def test_costs_follow_from_speed_and_price(stage):
    """Seconds are lost tokens over speed, money is seconds times the price."""
    problem = lint(stage, f"1\n{BASE}", f"2\n{BASE}").problems[0]
    assert (None, None) == (problem.to_json(None, 1.0)["seconds_per_call"], problem.to_json(None, 1.0)["usd_per_1000_calls"])
    told = problem.to_json(1 / 100, 3.6 / 3600)
    assert round(problem.behind / 100, 3) == told["seconds_per_call"]
    assert round(1000 * told["seconds_per_call"] * 0.001, 4) == told["usd_per_1000_calls"]


@settings(max_examples=40, deadline=None)
@given(
    fronts=st.lists(st.text(max_size=30), min_size=2, max_size=4),
    middles=st.lists(st.text(max_size=30), min_size=4, max_size=4),
)
def test_any_samples_are_linted(stage, fronts, middles):
    """Whatever differs: shared tokens are exact, problems are in order, within the prompt, and never free."""
    texts = [f"{front}\n{TEXT[:800]}\n{middle}\n{TEXT[800:1600]}" for front, middle in zip(fronts, middles, strict=False)]
    found = lint(stage, *texts)
    first = ids(stage, texts[0])
    assert min(common_length(first, ids(stage, text)) for text in texts[1:]) == found.shared
    proved = [each for each in found.problems if each.certainty is Certainty.PROVED]
    assert sorted(each.token for each in proved) == [each.token for each in proved]
    for problem in proved:
        assert problem.behind > 0
        assert 0 <= problem.token < len(first)
        assert problem.mended <= len(first)
