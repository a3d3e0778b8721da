"""Fixes: the mistakes that are made with prompts, each as the reading of the prompt that does not make it."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import islice
from typing import Any

from kvcdn.client.explaining.causes import Cause
from kvcdn.client.explaining.difference import visible
from kvcdn.client.explaining.samples import Conversation
from kvcdn.client.explaining.surroundings import Surroundings
from kvcdn.client.explaining.views import Form, Special, View
from kvcdn.client.explaining.volatile import VolatileText, find_volatile
from kvcdn.keys import PRECISIONS, ModelIdentity
from kvcdn.layout import DTYPE_BYTES, Layout


@dataclass(frozen=True)
class Fix:
    """A cause, in words, and the reading in which it is mended."""

    cause: Cause
    detail: str
    view: View


def fixes(view: View, surroundings: Surroundings) -> list[list[Fix]]:
    """The readings that differ from `view` in one respect, in groups: those of different groups go together."""
    return [list(_framing(view, surroundings)), [*_wording(view), *_stable(view)], list(_naming(view, surroundings))]


# -- how text becomes tokens ------------------------------------------------------------------------------------------


def _framing(view: View, surroundings: Surroundings) -> Iterator[Fix]:
    content, tokenizer = view.content, view.tokenizer
    adds = bool(tokenizer("", verbose=False)["input_ids"])
    bos = tokenizer.bos_token
    if view.special is Special.OWN:
        if isinstance(content, str) and view.form is Form.TEXT and adds:
            yield Fix(Cause.BOS, f"published with {Special.NONE}", replace(view, special=Special.NONE))
        elif tokenizer.bos_token_id is not None:
            yield Fix(Cause.BOS, f"published with {Special.BOS}", replace(view, special=Special.BOS))
        if isinstance(content, str) and bos and content.startswith(bos):
            rest = content.removeprefix(bos)
            yield Fix(Cause.BOS, f"published without the {bos!r} that the text begins with", replace(view, content=rest))
    if isinstance(content, str):
        for form in Form:
            if form is not view.form and (form is Form.TEXT or tokenizer.chat_template):
                yield Fix(
                    Cause.CHAT_TEMPLATE,
                    f"published as {form}, read as {view.form}",
                    replace(view, form=form, special=Special.OWN),
                )
    else:
        yield from _reframed(view, content)
    for name, other in surroundings.tokenizers:
        yield Fix(Cause.TOKENIZER, f"published with the tokenizer in {name}", replace(view, tokenizer=other))


def _reframed(view: View, content: Conversation) -> Iterator[Fix]:
    first = content.messages[0]
    text, role = first.get("content"), first["role"]
    if isinstance(text, str) and text:
        yield Fix(
            Cause.CHAT_TEMPLATE,
            f"published as {Form.TEXT}, read as a {role} message in the chat template",
            replace(view, content=text, form=Form.TEXT, answer_follows=False),
        )
    for other in {"system": ("user", "developer"), "user": ("system",), "developer": ("system",)}.get(role, ()):
        messages = ({**first, "role": other}, *content.messages[1:])
        yield Fix(
            Cause.CHAT_TEMPLATE, f"published with its first message as {other}, read as {role}", _with(view, messages=messages)
        )
    joined = tuple(_joined(message) for message in content.messages)
    if joined != content.messages:
        yield Fix(Cause.CHAT_TEMPLATE, "published with contents as text, read as lists of parts", _with(view, messages=joined))
    if content.tools:
        yield Fix(Cause.TOOLS, "published without the tools", _with(view, tools=()))
        for cause, detail, tools in _ordered_tools(content.tools):
            if json.dumps(tools) != json.dumps(content.tools):
                yield Fix(cause, detail, _with(view, tools=tools))


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with its parts as one text, where all of them are text: templates write lists of parts otherwise."""
    parts = message.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    if not texts or len(texts) != len(parts or ()) or not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "".join(str(text) for text in texts)}


def _ordered_tools(tools: tuple[dict[str, Any], ...]) -> Iterator[tuple[Cause, str, tuple[dict[str, Any], ...]]]:
    by_name = tuple(sorted(tools, key=_tool_name))
    yield Cause.TOOL_ORDER, "published with the tools sorted by name", by_name
    yield Cause.TOOL_ORDER, "published with the tools in the reverse order", tuple(reversed(tools))
    sorted_keys = [json.loads(json.dumps(tool, sort_keys=True)) for tool in tools]
    yield Cause.KEY_ORDER, "published with the keys of the tools sorted", tuple(sorted_keys)


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, dict) else str(tool.get("name", ""))


def _with(view: View, **changes: Any) -> View:
    if not isinstance(view.content, Conversation):
        raise TypeError("only a conversation has messages and tools")
    return replace(view, content=replace(view.content, **changes))


# -- what the text says -----------------------------------------------------------------------------------------------


def _wording(view: View) -> Iterator[Fix]:
    seen = {str(view.content)}
    for cause, detail, change in _CHANGES:
        content = change(view.content) if isinstance(view.content, str) else _changed(view.content, change)
        if content and str(content) not in seen:
            seen.add(str(content))
            yield Fix(cause, detail, replace(view, content=content))


def _changed(content: Conversation, change: Callable[[str], str]) -> Conversation:
    messages = [
        {**message, "content": change(message["content"])} if isinstance(message.get("content"), str) else message
        for message in content.messages
    ]
    return replace(content, messages=tuple(messages))


_INVISIBLE = dict.fromkeys(map(ord, "\ufeff\u200b\u200c\u200d\u2060\u00ad\u200e\u200f"))
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u202f\u3000"), " ")
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"})

_CHANGES: tuple[tuple[Cause, str, Callable[[str], str]], ...] = (
    (Cause.LINE_ENDINGS, "published with LF line ends, read with CRLF", lambda t: t.replace("\r\n", "\n").replace("\r", "\n")),
    (Cause.LINE_ENDINGS, "published with CRLF line ends, read with LF", lambda t: re.sub(r"\r?\n", "\r\n", t)),
    (Cause.UNICODE, "published in Unicode's form NFC", lambda t: unicodedata.normalize("NFC", t)),
    (Cause.UNICODE, "published in Unicode's form NFD", lambda t: unicodedata.normalize("NFD", t)),
    (Cause.UNICODE, "published in Unicode's form NFKC", lambda t: unicodedata.normalize("NFKC", t)),
    (Cause.UNICODE, "published without invisible characters", lambda t: t.translate(_INVISIBLE)),
    (Cause.UNICODE, "published with a byte order mark in front", lambda t: "\ufeff" + t.removeprefix("\ufeff")),
    (Cause.UNICODE, "published with plain spaces", lambda t: t.translate(_SPACES)),
    (Cause.UNICODE, "published with plain quotes and dashes", lambda t: t.translate(_QUOTES)),
    (Cause.WHITESPACE, "published without white space around it", str.strip),
    (Cause.WHITESPACE, "published without white space in front", str.lstrip),
    (Cause.WHITESPACE, "published without white space behind it", str.rstrip),
    (Cause.WHITESPACE, "published with one line end behind it", lambda t: t.rstrip() + "\n"),
    (Cause.WHITESPACE, "published with an empty line in front", lambda t: "\n" + t.lstrip("\n")),
    (Cause.WHITESPACE, "published with a space in front", lambda t: " " + t.lstrip(" ")),
    (Cause.WHITESPACE, "published without white space at the ends of lines", lambda t: re.sub(r"(?m)[ \t]+(?=\r?$)", "", t)),
    (Cause.WHITESPACE, "published with single spaces", lambda t: re.sub(r"(?<=\S)[ \t]{2,}", " ", t)),
    (Cause.WHITESPACE, "published with single empty lines", lambda t: re.sub(r"\n{3,}", "\n\n", t)),
    (Cause.WHITESPACE, "published with four spaces for a tab", lambda t: t.replace("\t", "    ")),
    (Cause.WHITESPACE, "published with a space for a tab", lambda t: t.replace("\t", " ")),
)  # fmt: skip
"""The changes that editors, libraries and templates make to text, as what was published may have had it."""


_PIECES = 4
"""Volatile pieces looked at, from the front of the text that is tried."""

_DAYS = 7
"""Days back that a prompt's date may have been published."""


def _stable(view: View) -> Iterator[Fix]:
    """The text without the line of a volatile piece, or with an earlier date: what was published another day, or for others."""
    if isinstance(view.content, str):
        for piece, text in _restated(view.content, view.tried):
            yield Fix(piece.cause, text[0], replace(view, content=text[1]))
        return
    first = view.content.messages[0]
    if isinstance(first.get("content"), str):
        for piece, text in _restated(first["content"], 0):
            messages = ({**first, "content": text[1]}, *view.content.messages[1:])
            yield Fix(piece.cause, text[0], _with(view, messages=messages))


def _restated(text: str, start: int) -> Iterator[tuple[VolatileText, tuple[str, str]]]:
    """The volatile pieces from `start` on, each with what was done about it, in words, and the text in which it is done."""
    for piece in islice(find_volatile(text, start), _PIECES):
        begin, end = text.rfind("\n", 0, piece.start) + 1, text.find("\n", piece.end) + 1
        if end:
            line = visible(text[begin:end].strip())[:80]
            yield piece, (f"published without the line {line!r}", text[:begin] + text[end:])
        for day in _days_before(piece.text):
            yield (
                piece,
                (f"published with {day}, read with {piece.text[:10]}", text[: piece.start] + day + text[piece.start + 10 :]),
            )


def _days_before(text: str) -> Iterator[str]:
    """The days before a date that is written as 2026-11-30."""
    with suppress(ValueError):
        day = date.fromisoformat(text[:10])
        for back in range(1, _DAYS + 1):
            yield (day - timedelta(days=back)).isoformat()


# -- what names are made of besides -----------------------------------------------------------------------------------


def _naming(view: View, surroundings: Surroundings) -> Iterator[Fix]:
    for space in surroundings.namespaces:
        if space.key != view.namespace.key:
            detail = f"published in the namespace {space.name!r}, read in {view.namespace.name!r}"
            yield Fix(Cause.NAMESPACE, detail, replace(view, namespace=space))
    ours = view.identity
    for precision in PRECISIONS:
        if precision != ours.precision:
            detail = f"published in precision {precision}, read in {ours.precision}"
            yield Fix(Cause.PRECISION, detail, replace(view, identity=replace(ours, precision=precision)))
    for dtype in DTYPE_BYTES:
        layout = in_dtype(ours.layout, dtype)
        if layout != ours.layout:
            detail = f"published in {dtype}, read in {layout_words(ours.layout)}"
            yield Fix(Cause.LAYOUT, detail, replace(view, identity=replace(ours, layout=layout)))
    for identity in surroundings.identities:
        if identity.seed(view.namespace) != ours.seed(view.namespace):
            cause, detail = compare_identities(ours, identity, surroundings)
            yield Fix(cause, detail, replace(view, identity=identity))


def compare_identities(ours: ModelIdentity, theirs: ModelIdentity, surroundings: Surroundings) -> tuple[Cause, str]:
    """In what another identity, which was published, differs from ours."""
    if theirs.fingerprint != ours.fingerprint:
        words = f"fingerprint {str(theirs.fingerprint)[:16]}, here {str(ours.fingerprint)[:16]}"
        other = "another revision, fine-tune or adapter" if theirs.name == ours.name else f"the model {theirs.name!r}"
        return Cause.REVISION, f"published for {other} ({words}){surroundings.local_difference(ours, theirs)}"
    if theirs.layout != ours.layout:
        return Cause.LAYOUT, f"published with {layout_words(theirs.layout)}, read with {layout_words(ours.layout)}"
    return Cause.PRECISION, f"published in precision {theirs.precision}, read in {ours.precision}"


def in_dtype(layout: Layout, dtype: str) -> Layout:
    """`layout` with every tensor in `dtype`."""
    return Layout(
        tuple(
            replace(layer, tensors=tuple(replace(tensor, dtype=dtype) for tensor in layer.tensors)) for layer in layout.layers
        )
    )


def layout_words(layout: Layout) -> str:
    """A layout for people: layers, heads, dimensions and dtypes."""
    tensors = sorted({f"{t.heads} x {t.dim} {t.dtype}" for layer in layout.layers for t in layer.tensors})
    kinds = sorted({layer.kind if layer.window is None else f"window {layer.window}" for layer in layout.layers})
    return f"{len(layout.layers)} layers ({', '.join(kinds)}) of {', '.join(tensors)}"
