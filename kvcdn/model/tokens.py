"""Prompts as token ids, tokenised once and as the model will read them, with the boundaries at which a published text may end.

A document's last block can only be named by who knows where the document ends; in a prompt those places are the end of the
document or of each message. They are counted in tokens here, from the tokenizer's own offsets: text is never tokenised in
pieces and joined, since tokens merge across such seams.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvcdn.errors import UsageError

Messages = Sequence[dict[str, Any]]

Tools = Sequence[dict[str, Any]]
"""Descriptions of functions, as chat requests carry them; templates write them in front of the messages."""


_SEARCHED = 16
"""Characters within which a token's text is looked for behind the token before it: white space, mostly."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the numbers of leading tokens after which something publishable ends, in ascending order."""

    token_ids: tuple[int, ...]
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spelling:
    """A prompt and the text it was made from; `starts[i]` is the character of `text` at which token i begins."""

    prompt: Prompt
    text: str
    starts: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt.token_ids

    def character(self, token: int) -> int:
        """Where token `token` begins; behind the last token, the text's end."""
        return self.starts[token] if token < len(self.starts) else len(self.text)

    def tokens_before(self, character: int) -> int:
        """How many leading tokens begin before `character`."""
        return bisect_left(self.starts, character)

    def token(self, character: int) -> int:
        """The first of the tokens in which `character` of the text lies: one character may take several."""
        last = max(bisect_right(self.starts, character) - 1, 0)
        return bisect_left(self.starts, self.starts[last]) if self.starts else 0


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int] = ()) -> Prompt:
    """Tokenises plain `text` with the tokenizer's special tokens; `ends` are character positions where documents end."""
    return _encode(tokenizer, text, ends, special=True)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, answer_follows: bool, tools: Tools | None = None
) -> Prompt:
    """Tokenises chat `messages` in the model's template; `answer_follows` opens the assistant's turn.

    Boundaries are the ends of those leading messages whose rendering the whole prompt starts with. Raises UsageError.
    """
    text, ends = _rendered(tokenizer, messages, tools, answer_follows=answer_follows)
    return _encode(tokenizer, text, ends, special=False)


def spell_text(tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int] = (), *, special: bool = True) -> Spelling:
    """As `encode_text`, with the tokens' places in the text; without the tokenizer's special tokens unless `special`."""
    return _spell(tokenizer, text, ends, special=special)


def spell_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, answer_follows: bool, tools: Tools | None = None
) -> Spelling:
    """As `encode_chat`, with the rendered text and the tokens' places in it. Raises UsageError."""
    text, ends = _rendered(tokenizer, messages, tools, answer_follows=answer_follows)
    return _spell(tokenizer, text, ends, special=False)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools | None, *, answer_follows: bool
) -> tuple[str, list[int]]:
    """The text of a chat, and the characters at which its leading messages end."""
    text = _render(tokenizer, messages, tools, answer_follows=answer_follows)
    ends = []
    for count in range(1, len(messages) + 1):
        with suppress(UsageError):  # some templates refuse a conversation's beginning: nothing is published that ends there
            head = _render(tokenizer, messages[:count], tools, answer_follows=False)
            if text.startswith(head):
                ends.append(len(head))
    return text, ends


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools | None, *, answer_follows: bool) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("this model has no chat template", hint="publish and ask without --chat")
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=answer_follows
            )
        )
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
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


def _spell(tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int], *, special: bool) -> Spelling:
    if not tokenizer.is_fast:
        prompt = _encode(tokenizer, text, ends, special=special)
        return Spelling(prompt, text, _starts_from_pieces(tokenizer, text, prompt.token_ids))
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    prompt = Prompt(tuple(encoded["input_ids"]), _boundaries_from_offsets(offsets, ends))
    # Special tokens that stand for no text have the place (0, 0), wherever they are.
    last, starts = 0, []
    for start, _ in offsets:
        last = max(last, start)
        starts.append(last)
    return Spelling(prompt, text, tuple(starts))


def _starts_from_pieces(tokenizer: PreTrainedTokenizerBase, text: str, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Places of tokens for tokenizers that do not tell them: where each token's own text is found next, or about there."""
    place, starts = 0, []
    for token in token_ids:
        piece = tokenizer.decode([token]).strip()
        found = text.find(piece, place, place + len(piece) + _SEARCHED) if piece else -1
        start = place if found < 0 else found
        starts.append(start)
        place = start + (len(piece) if found >= 0 else 0)
    return tuple(starts)


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
