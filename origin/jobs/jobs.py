"""Jobs: what the prefill service is asked to publish, when it may, and what becomes of it."""

from __future__ import annotations

import enum
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticSerializationError

from kvcdn.errors import UsageError
from kvcdn.origin.publishing.settings import Precision
from kvcdn.origin.publishing.sources import Document
from kvcdn.producer import MAX_TEXT

DAY_SECONDS = 86400
_MINUTE_SECONDS = 60

MAX_TTL_SECONDS = 36_500 * DAY_SECONDS
"""A century."""

MAX_LABELS = 16

_WINDOW = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")


class JobState(enum.StrEnum):
    """What has become of a job. The last three are ends."""

    QUEUED = "queued"
    RUNNING = "running"
    PUBLISHED = "published"
    DEAD = "dead"
    """It failed for good, or too often; the reason is told, and it can be tried again by hand."""
    CANCELLED = "cancelled"


ENDS = frozenset((JobState.PUBLISHED, JobState.DEAD, JobState.CANCELLED))


class JobRequest(BaseModel):
    """One document to publish: exactly one of `text`, `url` and `messages`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    text: str | None = Field(default=None, min_length=1, description="The document.")
    url: str | None = Field(default=None, max_length=2048, description="Where the document is, http or https.")
    messages: list[dict[str, Any]] | None = Field(
        default=None, min_length=1, max_length=10_000, description="The opening messages of a chat, for the model's template."
    )
    tools: list[dict[str, Any]] = Field(default=[], max_length=1000, description="A chat's tools.")
    name: str = Field(default="", max_length=MAX_TEXT, description="What the job is called in lists; never published.")
    model: str | None = Field(default=None, max_length=512, description="One of the service's models; without it, the first.")
    precision: Precision = Field(default="native", description="How KV is kept.")
    min_quality: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="Largest mean KL of a lossy one.")
    namespace: str | None = Field(default=None, min_length=1, max_length=64, description="Private namespace; else public.")
    label: str = Field(default="", max_length=MAX_TEXT, description="Public words that the manifest carries.")
    labels: dict[str, str] = Field(default={}, max_length=MAX_LABELS, description="Words of your own; never published.")
    priority: int = Field(default=5, ge=0, le=9, description="Higher ones come first.")
    ttl: int | None = Field(default=None, ge=1, le=MAX_TTL_SECONDS, description="Seconds from its publication to its expiry.")
    not_before: float = Field(default=0, ge=0, le=1 << 40, description="Unix time before which it does not begin.")
    window: str | None = Field(default=None, description="Hours of UTC in which it may begin, such as 22:00-06:00.")
    idempotency_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="The same job again, with the same key and of the same tenant, is one job.",
    )

    @field_validator("window")
    @classmethod
    def _checked_window(cls, value: str | None) -> str | None:
        if value is not None:
            Window.parse(value)
        return value

    @field_validator("text")
    @classmethod
    def _checked_text(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("it is empty: there is nothing to publish")
        return value

    @field_validator("url")
    @classmethod
    def _checked_url(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)

    @model_validator(mode="after")
    def _one_document(self) -> Self:
        if sum(source is not None for source in (self.text, self.url, self.messages)) != 1:
            raise ValueError("give exactly one of text, url and messages")
        if any(not isinstance(message.get("role"), str) or "content" not in message for message in self.messages or ()):
            raise ValueError("a message has a role and a content")
        if self.tools and self.messages is None:
            raise ValueError("tools belong to messages")
        return self

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    @property
    def size(self) -> int:
        """Bytes of the document as it was submitted, in UTF-8; of a URL, those of its name."""
        document = self.document()
        return len((self.url or "" if document is None else document.text).encode("utf-8", "surrogatepass"))

    def document(self) -> Document | None:
        """The document; None where it is to be fetched first."""
        if self.messages is not None:
            return Document("chat.json", json.dumps({"messages": self.messages, "tools": self.tools}))
        return None if self.text is None else Document(self.name or "text", self.text)


def checked_url(url: str) -> str:
    """`url`, where it is one that may be fetched. Raises ValueError that shows nothing of it."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise ValueError("only http and https URLs are fetched")
    if "@" in parts.netloc:
        raise ValueError("a URL with a password in it is not fetched, and would be shown")
    return url


def read_request(value: Any) -> JobRequest:
    """A job from hostile JSON. Raises UsageError that names the field and shows nothing of its content."""
    try:
        request = JobRequest.model_validate(value)
        # What cannot be written down is told to whoever sent it, and not to all that are accepted with it.
        request.model_dump_json()
        json.dumps(request.model_dump(), ensure_ascii=False).encode("utf-8")
    except (UnicodeError, PydanticSerializationError, RecursionError):
        raise UsageError("not a job: it is nested too deeply, or has half a surrogate pair in it") from None
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'the job'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_input=False, include_url=False)
        )
        raise UsageError(f"not a job: {problems[:1000]}", hint="GET /v1/openapi.json describes one") from None
    return request


@dataclass(frozen=True)
class Window:
    """Hours of each day of UTC, in minutes from midnight; over midnight where the end is before the start."""

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """Reads `22:00-06:00`. Raises ValueError."""
        match = _WINDOW.fullmatch(text)
        if match is None:
            raise ValueError("a window is HH:MM-HH:MM, in UTC")
        hours = [int(part) for part in match.groups()]
        window = cls(hours[0] * 60 + hours[1], hours[2] * 60 + hours[3])
        if window.start == window.end:
            raise ValueError("a window of no length never opens")
        return window

    def opens(self, now: float) -> float:
        """The first moment from `now` on (Unix time) that is within it."""
        midnight = now // DAY_SECONDS * DAY_SECONDS
        start, end = self.start * _MINUTE_SECONDS, self.end * _MINUTE_SECONDS
        second = now - midnight
        inside = start <= second < end if start < end else second >= start or second < end
        if inside:
            return now
        return midnight + start + (DAY_SECONDS if second >= start else 0)


@dataclass(frozen=True)
class Job:
    """A job as the queue has it. Times are Unix seconds."""

    id: str
    tenant: str
    state: JobState
    request: JobRequest
    attempts: int
    created: float
    updated: float
    not_before: float
    reason: str
    progress: Mapping[str, Any]
    result: Mapping[str, Any] | None
    claim: str = ""
    """Who holds a claimed job may say what has become of it."""
    failures: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    def to_json(self) -> dict[str, Any]:
        """What its tenant is shown: nothing of the document itself."""
        request = self.request
        return {
            "id": self.id,
            "tenant": self.tenant,
            "state": self.state.value,
            "name": request.name or request.url or "",
            "model": request.model,
            "precision": request.precision,
            "namespace": request.namespace,
            "labels": request.labels,
            "priority": request.priority,
            "window": request.window,
            "attempts": self.attempts,
            "created": self.created,
            "updated": self.updated,
            "not_before": self.not_before,
            "reason": self.reason,
            "progress": dict(self.progress),
            "result": None if self.result is None else dict(self.result),
        }


def first_start(request: JobRequest, now: float | None = None) -> float:
    """When a job may begin at the earliest, after its own time and its window."""
    earliest = max(request.not_before, time.time() if now is None else now)
    return Window.parse(request.window).opens(earliest) if request.window else earliest
