"""Forms in which prompts, models and sources are given, and what is told to somebody who gives another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvcdn.client.tensors import read_prompts
from kvcdn.errors import UsageError
from kvcdn.model.tokens import Messages, Prompt, Tools, encode_chat, encode_text

PromptLike = str | Messages | Prompt | Mapping[str, Any]
"""Plain text, chat messages, tokens with boundaries (`Prompt`), or a tokenizer's tensors."""

_OTHERS: tuple[tuple[type, str], ...] = (
    (Path, "give what it holds: path.read_text('utf-8')"),
    (bytes, "give text: document.decode('utf-8')"),
    (torch.Tensor, "give {'input_ids': tensor}, or Prompt(tuple(ids))"),
    (type(None), "give text, messages, a Prompt, or a tokenizer's tensors"),
)


def require_text_or_messages(value: Any, what: str) -> None:
    """Raises UsageError, with what to give instead, for what is neither text nor a list of messages."""
    if isinstance(value, str):
        return
    hint = next((hint for kind, hint in _OTHERS if isinstance(value, kind)), "give text, or a list of messages")
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise UsageError(f"{what} is a {type(value).__name__}, which is neither text nor messages", hint=hint)
    first = next((one for one in value if isinstance(one, int | str | Sequence)), None)
    if first is not None:
        hint = (
            "ask for several prompts with generate_batch()" if isinstance(first, str) else "give tokens as Prompt(tuple(ids))"
        )
        raise UsageError(f"{what} is a list of {type(first).__name__}, and no messages", hint=hint)
    if not value:
        raise UsageError(f"{what} has no messages", hint="give text, or a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or "role" not in message:
            raise UsageError(f"message {number} of {what} has no role", hint="a message is {'role': 'user', 'content': '...'}")


def read_prompt(tokenizer: PreTrainedTokenizerBase, prompt: PromptLike, tools: Tools | None, known: int | None) -> Prompt:
    """The tokens of `prompt`. Raises UsageError where there are none, or some of which the model has no row."""
    require_tools(tools)
    if isinstance(prompt, Prompt):
        read = _checked(prompt)
    elif isinstance(prompt, Mapping):
        if "messages" in prompt or "role" in prompt:
            raise UsageError("a message, or a request with messages, is no prompt", hint="give the list of messages itself")
        rows = read_prompts(prompt)
        if len(rows) != 1:
            raise UsageError(f"one prompt is asked for, and there are {len(rows)} rows")
        read = rows[0]
    else:
        require_text_or_messages(prompt, "the prompt")
        read = (
            encode_text(tokenizer, prompt)
            if isinstance(prompt, str)
            else encode_chat(tokenizer, prompt, answer_follows=True, tools=tools)
        )
    if not read.token_ids:
        raise UsageError("the prompt has no tokens")
    if known is not None and not 0 <= min(read.token_ids) <= max(read.token_ids) < known:
        raise UsageError(f"the prompt has tokens outside of the model's, which are 0 to {known - 1}")
    return read


def _checked(prompt: Prompt) -> Prompt:
    """A prompt that somebody made of tokens. Raises UsageError where they, or its boundaries, are no tuples of integers."""
    for name in ("token_ids", "boundaries"):
        values = getattr(prompt, name)
        if not isinstance(values, Sequence) or not all(isinstance(one, int) for one in values):
            raise UsageError(
                f"{name} of the prompt is a {type(values).__name__}, and no tuple of integers",
                hint=f"Prompt({name}=tuple(...)); of a tensor tuple(tensor.tolist())",
            )
    return Prompt(tuple(prompt.token_ids), tuple(prompt.boundaries))


def require_tools(tools: Any) -> None:
    """Raises UsageError for what is no list of descriptions of functions."""
    if tools is None:
        return
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise UsageError(f"tools is a {type(tools).__name__}, and no list", hint="give a list of descriptions, [{...}, {...}]")


def known_tokens(model: Any) -> int | None:
    """How many tokens `model` has a row for, or None where it does not say."""
    try:
        rows = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return None
    return rows if isinstance(rows, int) else None


def require_parts(model: Any, tokenizer: Any) -> None:
    """Raises UsageError for what is no model, or no tokenizer."""
    if not hasattr(model, "generate"):
        inner = (
            "give the model itself: wrapper.module"
            if hasattr(model, "module")
            else "Client.load(name, source) loads one by name"
        )
        raise UsageError(f"a {type(model).__name__} is no model of transformers", hint=inner)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(
            f"a {type(tokenizer).__name__} is no tokenizer", hint="AutoTokenizer.from_pretrained(folder) makes one"
        )
