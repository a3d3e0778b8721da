"""Framing: how two prompts differ in what is around their texts: the chat template, BOS, roles and tools."""

from __future__ import annotations

from dataclasses import replace

from kvcdn.client.explaining.causes import Cause
from kvcdn.client.explaining.difference import common_length
from kvcdn.client.explaining.divergence import Divergence
from kvcdn.client.explaining.samples import Conversation
from kvcdn.client.explaining.views import View
from kvcdn.errors import UsageError
from kvcdn.model.tokens import Spelling


def framing_cause(view: View, theirs: View, spelling: Spelling, parted: Divergence) -> tuple[Cause, str]:
    """The cause of a divergence, where it lies in how the two readings make tokens, and not in their texts."""
    chats = [isinstance(each.content, Conversation) for each in (view, theirs)]
    if chats[0] != chats[1] or (not chats[0] and view.form is not theirs.form):
        names = ["a conversation" if chat else str(each.form) for chat, each in zip(chats, (view, theirs), strict=True)]
        return Cause.CHAT_TEMPLATE, f"{names[0]} here, {names[1]} there"
    if view.special is not theirs.special and parted.token <= 1:
        return Cause.BOS, f"{view.special} here, {theirs.special} there"
    if isinstance(view.content, Conversation) and isinstance(theirs.content, Conversation):
        framing = _tools_cause(view, theirs.content, spelling, parted.token) or _roles_cause(
            view, theirs.content, spelling, parted.token
        )
        if framing is not None:
            return framing
    return parted.cause, parted.detail


def _first_change(view: View, content: Conversation, spelling: Spelling) -> int | None:
    """The first token that other content changes; None where the template refuses it."""
    try:
        return common_length(spelling.token_ids, replace(view, content=content).spell().token_ids)
    except UsageError:
        return None


def _roles_cause(view: View, theirs: Conversation, spelling: Spelling, token: int) -> tuple[Cause, str] | None:
    """How roles differ, where our prompt with their roles does not part from ours before they do."""
    ours = view.content
    if not isinstance(ours, Conversation):
        return None
    roles = [message["role"] for message in theirs.messages]
    messages = [{**message, "role": role} for message, role in zip(ours.messages, roles, strict=False)]
    content = replace(ours, messages=(*messages, *ours.messages[len(messages) :]))
    if _first_change(view, content, spelling) != token:
        return None
    index = next(index for index, role in enumerate(roles) if role != ours.messages[index]["role"])
    return (
        Cause.CHAT_TEMPLATE,
        f"message {index + 1} is a {ours.messages[index]['role']} message here, a {roles[index]} message there",
    )


def _tools_cause(view: View, theirs: Conversation, spelling: Spelling, token: int) -> tuple[Cause, str] | None:
    """How tools differ, where our prompt with their tools does not part from ours before they do."""
    ours = view.content
    if not isinstance(ours, Conversation) or list(map(repr, ours.tools)) == list(map(repr, theirs.tools)):
        return None
    if _first_change(view, replace(ours, tools=theirs.tools), spelling) != token:
        return None
    if ours.tools == theirs.tools:
        return Cause.KEY_ORDER, "the keys of the tools are in another order"
    if sorted(map(repr, ours.tools)) == sorted(map(repr, theirs.tools)):
        return Cause.TOOL_ORDER, "the same tools are in another order"
    return Cause.TOOLS, f"{len(ours.tools)} tools here, {len(theirs.tools)} there, and not the same"
