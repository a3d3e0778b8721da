"""Samples: prompts as people keep them: text, chat messages, request bodies with tools, and logs of these, one a line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from kvcdn.errors import UsageError

MAX_SAMPLES = 1000
"""Prompts of one file that are looked at: volatile text shows in a few."""


@dataclass(frozen=True)
class Conversation:
    """Chat messages and the tools that go with them."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


Content = str | Conversation

MAX_PROMPT_CHARACTERS = 8 << 20
"""Some two million tokens, more than nearly any model reads; tokens with their places in the text take memory."""


@dataclass(frozen=True)
class Sample:
    """One prompt and where it came from."""

    name: str
    content: Content = field(repr=False)


def read_samples(name: str, text: str) -> list[Sample]:
    """The prompts in a file: by its name `.json`, `.jsonl`, or text; standard input is JSON where it looks like chats.

    JSON may be `[message, ...]`, `{"messages": [...], "tools": [...]}`, `{"prompt": "..."}`, or a list of the last two; JSONL a
    message or one of these a line. Raises UsageError.
    """
    if name.endswith(".jsonl"):
        return _read_lines(name, text)
    if name.endswith(".json"):
        return _from_value(name, _parse(text, name))
    if name == "standard input" and text.lstrip().startswith(("[{", '{"messages"', '{"prompt"')):
        try:
            return _from_value(name, _parse(text, name))
        except UsageError:
            return _read_lines(name, text)
    return [_sample(name, text, len(text))]


def read_sample(name: str, text: str) -> Sample:
    """The one prompt in a file. Raises UsageError where there are several."""
    samples = read_samples(name, text)
    if len(samples) > 1:
        raise UsageError(f"{name} holds {len(samples)} prompts", hint="name one prompt; kvcdn lint compares several")
    return samples[0]


def _read_lines(name: str, text: str) -> list[Sample]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    values = [(number, _parse(line, f"{name}, line {number}")) for number, line in lines[:MAX_SAMPLES]]
    if values and all(_is_message(value) for _, value in values):
        return _from_value(name, [value for _, value in values])
    return [sample for number, value in values for sample in _from_value(f"{name}:{number}", value)]


def _parse(text: str, what: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair is no text, and no tokenizer takes it
        return value
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} is not JSON: {str(error)[:200]}") from None


def _from_value(name: str, value: Any) -> list[Sample]:
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        return [_chat(name, value, [])]
    if isinstance(value, list) and value and not any(isinstance(item, list) for item in value):
        return [sample for index, item in enumerate(value[:MAX_SAMPLES], 1) for sample in _from_value(f"{name}[{index}]", item)]
    if isinstance(value, dict):
        messages, tools = value.get("messages"), value.get("tools") or []
        if isinstance(messages, list) and messages and all(_is_message(item) for item in messages):
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise UsageError(f"{name}: its tools are not a list of objects")
            return [_chat(name, messages, tools)]
        if isinstance(value.get("prompt"), str) and value["prompt"]:
            return [_sample(name, value["prompt"], len(value["prompt"]))]
    raise UsageError(
        f"{name} is not a prompt", hint='a prompt is {"messages": [{"role": "system", "content": "..."}, ...], "tools": [...]}'
    )


def _chat(name: str, messages: list[Any], tools: list[Any]) -> Sample:
    return _sample(name, Conversation(tuple(messages), tuple(tools)), len(json.dumps([messages, tools], ensure_ascii=False)))


def _sample(name: str, content: Content, characters: int) -> Sample:
    if characters > MAX_PROMPT_CHARACTERS:
        raise UsageError(
            f"{name} has {characters:,} characters, and prompts of at most {MAX_PROMPT_CHARACTERS:,} are looked at",
            hint="the front is what matters: cut it off behind what should be shared",
        )
    return Sample(name, content)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and ("content" in value or "tool_calls" in value)
