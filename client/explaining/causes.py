"""Causes: why a prompt is not, or not further, what is published; each with what to do about it.

The words are stable: they are what `kvcdn explain --json` and `kvcdn lint --json` print. Every `MissReason` is a cause of
the same word, so that a reason in a report can be looked up here. `revoked` is for a publisher or document that was taken back.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Certainty(enum.StrEnum):
    """How sure a finding is: shown by published names or by comparing, or only suspected."""

    PROVED = "proved"
    LIKELY = "likely"


class Cause(enum.StrEnum):
    """Why published tokens end where they do."""

    # How text becomes tokens
    BOS = "bos"
    CHAT_TEMPLATE = "chat-template"
    TOOLS = "tools"
    TOKENIZER = "tokenizer"
    MERGED_TOKEN = "merged-token"  # noqa: S105 - a word of tokenizers
    # What the text says
    LINE_ENDINGS = "line-endings"
    WHITESPACE = "whitespace"
    UNICODE = "unicode"
    CASE = "case"
    TIMESTAMP = "timestamp"
    IDENTIFIER = "identifier"
    COUNTER = "counter"
    HOST = "host"
    PATH = "path"
    USER = "user"
    TOOL_ORDER = "tool-order"
    KEY_ORDER = "key-order"
    LIST_ORDER = "list-order"
    TEXT = "text"
    # What names are made of besides
    REVISION = "revision"
    LAYOUT = "layout"
    PRECISION = "precision"
    NAMESPACE = "namespace"
    # What lies at the source
    NOT_PUBLISHED = "not-published"
    DOCUMENT_END = "document-end"
    BOUNDARY = "boundary"
    SHORT = "shorter-than-a-block"
    EXPIRED = "expired"
    INCOMPLETE = "incomplete"
    REVOKED = "revoked"
    UNTRUSTED = "untrusted"
    CORRUPT = "corrupt"
    MISMATCH = "mismatch"
    QUALITY = "quality"
    UNAVAILABLE = "unavailable"
    ORIGIN_UNAVAILABLE = "origin-unavailable"
    PLANNED = "planned"
    UNSUPPORTED_MODEL = "unsupported-model"
    REFUSED = "refused"


ADVICE: Mapping[Cause, str] = {
    Cause.BOS: "tokenise as the publisher does: kvcdn adds the tokenizer's special tokens to plain text and none to chats",
    Cause.CHAT_TEMPLATE: "publish and ask in one form: both with --chat, or both as plain text, with the same roles",
    Cause.TOOLS: "publish with the tools that requests carry: templates write them in front of the messages",
    Cause.TOKENIZER: "use the tokenizer files of the publisher's checkpoint",
    Cause.MERGED_TOKEN: "put an empty line behind the document, so that its last characters do not merge with what follows",
    Cause.LINE_ENDINGS: "write line feeds only, when publishing and when asking",
    Cause.WHITESPACE: "strip and join text in one place that publisher and readers share",
    Cause.UNICODE: "normalise text to NFC, and remove invisible characters, when publishing and when asking",
    Cause.CASE: "write it the same way everywhere",
    Cause.TIMESTAMP: "move the date or time behind the stable part, or pin it to a day and publish once a day",
    Cause.IDENTIFIER: "move the identifier behind the stable part, or leave it out: models have no use for it",
    Cause.COUNTER: "move the changing number behind the stable part",
    Cause.HOST: "name no machine in front of the stable part",
    Cause.PATH: "use one fixed path, or move it behind the stable part",
    Cause.USER: "move what is about one user behind the stable part",
    Cause.TOOL_ORDER: "sort the tools, for example by name, before every request",
    Cause.KEY_ORDER: "serialise with sorted keys: json.dumps(..., sort_keys=True)",
    Cause.LIST_ORDER: "sort the list before it is written; a set has another order in every process",
    Cause.TEXT: "move what differs behind the stable part, or publish this text, too",
    Cause.REVISION: "load the very checkpoint that was published, or publish with this one",
    Cause.LAYOUT: "load the model in the dtype it was published in, with a library version that keeps the same cache",
    Cause.PRECISION: "read in the precision that was published, or publish in this one",
    Cause.NAMESPACE: "ask in the namespace it was published in: --namespace, or none for public documents",
    Cause.NOT_PUBLISHED: "publish it: kvcdn publish",
    Cause.DOCUMENT_END: "nothing is wrong: what follows belongs to the prompt alone",
    Cause.BOUNDARY: "tell where the document ends: client.ask(document, question), messages, or Prompt(..., boundaries=...)",
    Cause.SHORT: "put more stable text in front, or tell where the document ends, as client.ask does",
    Cause.EXPIRED: "publish it again, with a later expiry date or none",
    Cause.INCOMPLETE: "publish it again: the publisher makes what is missing",
    Cause.REVOKED: "do not use it; ask its publisher for a new one",
    Cause.UNTRUSTED: "if you know this publisher: kvcdn keygen --trust KEY",
    Cause.CORRUPT: "do not use it; kvcdn fsck finds and removes what is damaged at an origin",
    Cause.MISMATCH: "do not use it: kvcdn verify --audit says which block is wrong, kvcdn trust ls who is refused",
    Cause.UNAVAILABLE: "is it running, is its address right, is the token valid?",
    Cause.ORIGIN_UNAVAILABLE: "is the edge's origin up, and its address in the edge's settings right?",
    Cause.QUALITY: "accept a larger --max-kl, or another precision",
    Cause.PLANNED: "nothing is wrong: on this link, prefilling here was expected to be sooner than fetching",
    Cause.UNSUPPORTED_MODEL: "this kind of model cannot be published by this version",
    Cause.REFUSED: "the request could not be made as asked",
}
"""What to do, a sentence a cause."""
