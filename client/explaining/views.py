"""Views: one reading of a prompt, from its text to its names; another reading is another prefix with other names."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from kvcdn.client.explaining.samples import Content, Conversation
from kvcdn.keys import Chain, ModelIdentity, Namespace
from kvcdn.model.tokens import Prompt, Spelling, spell_chat, spell_text

_QUESTION = "\n\nQuestion: "
"""What `Client.question` writes behind a document."""


class Form(enum.StrEnum):
    """How a text becomes a prompt. A conversation is always rendered by the chat template."""

    TEXT = "plain text"
    SYSTEM = "a system message in the chat template"
    USER = "a user message in the chat template"


class Special(enum.StrEnum):
    """The special tokens in front."""

    OWN = "the tokenizer's special tokens in front"
    NONE = "no special token in front"
    BOS = "one more BOS token in front"


@dataclass(frozen=True)
class View:
    """A prompt as somebody reads it. `answer_follows` opens the assistant's turn, which published documents do not."""

    content: Content = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    identity: ModelIdentity = field(repr=False)
    namespace: Namespace
    form: Form = Form.TEXT
    special: Special = Special.OWN
    answer_follows: bool = False
    tried: int = 0
    """Characters of a text in front that are known to be right, and not to be changed."""

    def spell(self) -> Spelling:
        """Its tokens and the text they stand for; boundaries where a document's end may be looked for. Raises UsageError."""
        spelling = self._spell()
        if self.special is not Special.BOS:
            return spelling
        prompt = Prompt(
            (self.tokenizer.bos_token_id, *spelling.token_ids), tuple(end + 1 for end in spelling.prompt.boundaries)
        )
        return Spelling(prompt, spelling.text, (0, *spelling.starts))

    def _spell(self) -> Spelling:
        if isinstance(self.content, Conversation):
            messages, tools = self.content.messages, self.content.tools
            return spell_chat(self.tokenizer, messages, answer_follows=self.answer_follows, tools=tools)
        if self.form is Form.TEXT:
            ends = [len(self.content), *([end] if (end := self.content.rfind(_QUESTION)) > 0 else [])]
            return spell_text(self.tokenizer, self.content, ends, special=self.special is not Special.NONE)
        role = "system" if self.form is Form.SYSTEM else "user"
        return spell_chat(self.tokenizer, [{"role": role, "content": self.content}], answer_follows=False)

    def chain(self, spelling: Spelling) -> Chain:
        """The names of every prefix of `spelling`, which is this view's own."""
        return Chain(self.identity, self.namespace, spelling.token_ids)


def front(view: View, characters: int) -> Content:
    """The first `characters` characters of a view's content: what a hypothesis about its front has to look at."""
    if isinstance(view.content, str):
        return view.content[:characters]
    messages, left = [], characters
    for message in view.content.messages:
        messages.append(message)
        content = message.get("content")
        left -= len(content) if isinstance(content, str) else len(str(content))
        if left < 0:
            break
    return Conversation(tuple(messages), view.content.tools)
