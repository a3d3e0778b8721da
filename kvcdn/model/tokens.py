"""Prompts as token ids, tokenised once and as the model will read them, with the boundaries at which a published text may end.

A document's last block can only be named by who knows where the document ends; in a prompt those places are the end of the
document or of each message. They are counted in tokens here, from the tokenizer's own offsets: text is never tokenised in
pieces and joined, since tokens merge across such seams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvcdn.errors import UsageError

Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the numbers of leading tokens after which something publishable ends, in ascending order."""

    token_ids: tuple[int, ...]
    boundaries: tuple[int, ...] = ()


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int] = ()) -> Prompt:
    """Tokenises plain `text` with the tokenizer's special tokens; `ends` are character positions where documents end."""
    return _encode(tokenizer, text, ends, special=True)


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, answer_follows: bool) -> Prompt:
    """Tokenises chat `messages` in the model's template; `answer_follows` opens the assistant's turn.

    Boundaries are the ends of those leading messages whose rendering the whole prompt starts with. Raises UsageError.
    """
    text = _render(tokenizer, messages, answer_follows)
    ends = []
    for count in range(1, len(messages) + 1):
        head = _render(tokenizer, messages[:count], answer_follows=False)
        if text.startswith(head):
            ends.append(len(head))
    return _encode(tokenizer, text, ends, special=False)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, answer_follows: bool) -> str:  # noqa: FBT001 - private
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("this model has no chat template", hint="publish and ask without --chat")
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer_follows))
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise UsageError(f"the model's chat template refuses these messages: {error}") from None


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int], *, special: bool) -> Prompt:
    wanted = bool(ends) and tokenizer.is_fast
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=wanted, verbose=False)
    token_ids = tuple(encoded["input_ids"])
    if wanted:
        boundaries = _boundaries_from_offsets(encoded["offset_mapping"], ends)
    else:
        boundaries = _boundaries_from_prefixes(tokenizer, text, ends, token_ids, special=special)
    return Prompt(token_ids, boundaries)


def _boundaries_from_offsets(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> tuple[int, ...]:
    """Tokens that end at or before each character position; a token that spans the position is not part of what ends there."""
    boundaries = set()
    count = 0
    for end in sorted(ends):
        while count < len(offsets) and offsets[count][1] <= end and not (offsets[count][1] == 0 and count > 0):
            count += 1
        boundaries.add(count)
    return tuple(sorted(boundaries - {0}))


def _boundaries_from_prefixes(
    tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int], token_ids: tuple[int, ...], *, special: bool
) -> tuple[int, ...]:
    boundaries = set()
    for end in ends:
        head = tokenizer(text[:end], add_special_tokens=special, verbose=False)["input_ids"]
        if tuple(head) == token_ids[: len(head)]:
            boundaries.add(len(head))
    return tuple(sorted(boundaries - {0}))
