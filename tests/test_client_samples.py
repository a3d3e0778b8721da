"""Samples: prompts in every form they are kept in, and one clear error for everything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.client.explaining.samples import Conversation, read_sample, read_samples
from kvcdn.errors import UsageError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CHAT = Conversation(tuple(MESSAGES))
CALL = {"role": "assistant", "tool_calls": []}
WITH_TOOLS = Conversation(tuple(MESSAGES), tuple(TOOLS))
REQUEST = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "temperature": 0.2}

FORMS = {
    "text": ("a.txt", "[{ is text", ["[{ is text"]),
    "messages": ("a.json", json.dumps(MESSAGES), [CHAT]),
    "a request": ("a.json", json.dumps(REQUEST, indent=2), [WITH_TOOLS]),
    "a completion": ("a.json", '{"prompt": "Hello"}', ["Hello"]),
    "requests": ("a.json", json.dumps([REQUEST, {"messages": MESSAGES}]), [WITH_TOOLS, CHAT]),
    "a log of requests": ("a.jsonl", f"{json.dumps(REQUEST)}\n\n{json.dumps({'messages': MESSAGES})}\r\n", [WITH_TOOLS, CHAT]),
    "a log of messages": ("a.jsonl", "\n".join(map(json.dumps, MESSAGES)), [CHAT]),
    "piped messages": ("standard input", json.dumps(MESSAGES), [CHAT]),
    "a piped log": ("standard input", "\n".join(map(json.dumps, MESSAGES)), ["\n".join(map(json.dumps, MESSAGES))]),
    "a piped log of requests": ("standard input", f'{{"messages": {json.dumps(MESSAGES)}}}\n{{"prompt": "x"}}', [CHAT, "x"]),
    "a tool's call": ("a.json", json.dumps([CALL]), [Conversation((CALL,))]),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_read(form):
    """In order, tools with their messages."""
    name, text, expected = FORMS[form]
    assert expected == [sample.content for sample in read_samples(name, text)]


BROKEN = {
    "no JSON": ("a.json", "[{"),
    "a bare word": ("a.json", "null"),
    "an empty list": ("a.json", "[]"),
    "no messages": ("a.json", '{"messages": []}'),
    "a message without a role": ("a.json", '[{"content": "x"}]'),
    "a role that is no word": ("a.json", '[{"role": 1, "content": "x"}]'),
    "tools that are no list": ("a.json", json.dumps({"messages": MESSAGES, "tools": {"a": 1}})),
    "lists in lists": ("a.json", "[[[]]]"),
    "a pit": ("a.json", "[" * 100_000),
    "a pit of objects": ("a.json", '{"messages":' * 50_000),
    "half a surrogate pair": ("a.json", '[{"role": "user", "content": "\\ud800"}]'),
    "a broken line": ("a.jsonl", '{"prompt": "x"}\n{"prompt": '),
    "an empty log": ("a.jsonl", "[]"),
    "a number too long": ("a.json", "[" + "9" * 100_000 + "]"),
}


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", "x" * (8 << 20) + "x"), ("a.json", json.dumps([{"role": "user", "content": "x" * (8 << 20)}]))]
)
def test_a_prompt_that_is_too_long_is_refused(name, text):
    """Tokens with their places take memory."""
    with pytest.raises(UsageError, match=r"a\..* characters"):
        read_samples(name, text)


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_prompt_is_refused(case):
    """With its name in the message, and never another error."""
    name, text = BROKEN[case]
    with pytest.raises(UsageError, match=r"a\.json"):
        read_samples(name, text)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c))
)
def test_any_json_is_a_prompt_or_a_usage_error(value):
    """Nothing else comes out of hostile JSON."""
    for name in ("a.json", "a.jsonl"):
        try:
            samples = read_samples(name, json.dumps(value))
        except UsageError:
            continue
        assert samples


def test_one_prompt_is_asked_for():
    """A log has several."""
    assert "Hello" == read_sample("a.txt", "Hello").content
    with pytest.raises(UsageError, match="2 prompts"):
        read_sample("a.jsonl", '{"prompt": "x"}\n{"prompt": "y"}')
