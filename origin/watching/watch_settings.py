"""What a watch of the prefill service is told: where documents are, how often to look, what becomes of old versions."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvcdn.errors import UsageError
from kvcdn.origin.jobs.jobs import MAX_TTL_SECONDS, Window, checked_url
from kvcdn.origin.publishing.settings import Precision
from kvcdn.producer import MAX_TEXT

MIN_EVERY_SECONDS = 1.0
"""Between two looks: more often is a loop."""

LOOKS_PER_TTL = 3
"""A document is renewed at the first look after half of its time: the rest is for the job."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_seconds(value: object) -> object:
    """Seconds of `30s`, `15m`, `1h`, `7d`; numbers are left as they are. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,9})([smhd])", value.strip())
    if match is None:
        raise ValueError("a time is a number and s, m, h or d, such as 15m")
    return int(match[1]) * _UNITS[match[2]]


def _checked_window(value: str) -> str:
    Window.parse(value)
    return value


_Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(le=MAX_TTL_SECONDS, allow_inf_nan=False)]


class WatchKind(enum.StrEnum):
    """What a watch's source is."""

    FOLDER = "folder"
    """A folder: the text files in it, at any depth."""
    LIST = "list"
    """A file, or a URL, with a URL a line."""
    SITEMAP = "sitemap"
    """The URL of a sitemap, or of an index of sitemaps (sitemaps.org), of which the pages of its own host count."""


class WatchSettings(BaseModel):
    """One watch: whose documents are published again when they change."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="What it is remembered by: another name begins anew."
    )
    kind: WatchKind = Field(description="folder, list or sitemap.")
    source: str = Field(min_length=1, max_length=2048, description="The folder, the list's file or URL, or the sitemap's URL.")
    every: Annotated[_Seconds, Field(ge=MIN_EVERY_SECONDS)] = Field(default=900.0, description="Between two looks: 15m.")
    grace: Annotated[_Seconds, Field(ge=0)] = Field(
        default=86400.0, description="How long an old version stays once the new one is published, or its document is gone."
    )
    remove: bool = Field(default=True, description="Remove old versions after the grace period; or leave them to their ttl.")
    model: str | None = Field(default=None, max_length=512, description="One of the service's models; without it, the first.")
    namespace: str | None = Field(default=None, min_length=1, max_length=64, description="Private namespace; else public.")
    precision: Precision = Field(default="native", description="How KV is kept.")
    label: str = Field(default="", max_length=MAX_TEXT, description="Public words that the manifests carry.")
    priority: int = Field(default=3, ge=0, le=9, description="Of its jobs.")
    window: Annotated[str, AfterValidator(_checked_window)] | None = Field(
        default=None, description="Hours of UTC in which its jobs may begin, such as 22:00-06:00."
    )
    ttl: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TTL_SECONDS,
        description="Seconds until a document expires that is not seen any more; while it is, it is renewed.",
    )

    @model_validator(mode="after")
    def _outlives_looks(self) -> Self:
        if self.ttl is not None and self.ttl < LOOKS_PER_TTL * self.every:
            raise ValueError(f"ttl is at least {LOOKS_PER_TTL} times every: a document is renewed at a look")
        return self


def read_watch(value: Any) -> WatchSettings:
    """A watch from the network, which may name public URLs only: no folder or file of this machine. Raises UsageError."""
    try:
        watch = WatchSettings.model_validate(value)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'the watch'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_input=False, include_url=False)
        )
        raise UsageError(f"not a watch: {problems[:1000]}", hint="GET /v1/openapi.json describes one") from None
    if watch.kind is WatchKind.FOLDER or not watch.source.startswith(("http://", "https://")):
        hint = "name folders and files of the service's machine in its settings"
        raise UsageError("a watch that is added is a list or sitemap at a URL", hint=hint)
    try:
        checked_url(watch.source)
    except ValueError as error:
        raise UsageError(f"not a watch: source: {error}") from None
    return watch


def require_served(watches: tuple[WatchSettings, ...], models: tuple[str, ...], namespaces: tuple[str, ...]) -> None:
    """Raises UsageError for watches that the service could not do."""
    names = [watch.name for watch in watches]
    for watch in watches:
        if names.count(watch.name) > 1:
            raise UsageError(f"two watches are called {watch.name}", hint="each is remembered by its name")
        if watch.model is not None and watch.model not in models:
            hint = "list it in models"
            raise UsageError(f"the watch {watch.name} wants the model {watch.model!r}, which is not served", hint=hint)
        if watch.namespace is not None and watch.namespace not in namespaces:
            hint = "list it in namespaces"
            raise UsageError(f"the watch {watch.name} wants the namespace {watch.namespace!r}, which is not served", hint=hint)
