"""An edge's settings: one frozen model, from a TOML file, the environment and the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import EnvSettingsSource, SettingsConfigDict

from kvcdn.access.allowance import Limits
from kvcdn.access.listening import ListenAddress
from kvcdn.access.settings import AccessSettings
from kvcdn.settings import SettingsSources
from kvcdn.sizes import parse_size

ENV_PREFIX = "KVCDN_EDGE_"

SOURCES = SettingsSources(service="edge", env_prefix=ENV_PREFIX, sample="infra/edge.toml")

MIN_CAPACITY_BYTES = 1 << 20
"""Less than this holds no block of any model; it is a unit forgotten."""

MAX_CAPACITY_BYTES = 1 << 60

MAX_PEERS = 64
"""An order of them is made for each object that is not here."""

MAX_URL_CHARACTERS = 256

MAX_SCRUB_BYTES_PER_SECOND = 10 * 1000**3
"""More than any disk reads."""


def _checked_capacity(value: int) -> int:
    if not MIN_CAPACITY_BYTES <= value <= MAX_CAPACITY_BYTES:
        raise ValueError(f"{value} bytes; an edge needs 1MiB or more")
    return value


def _checked_listen(text: str) -> str:
    ListenAddress.parse(text)
    return text


def _checked_peer(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"{url[:200]!r} is not the URL of an edge, such as https://edge-1.example.org:8400")
    return url.rstrip("/").lower()


_PeerUrl = Annotated[str, Field(max_length=MAX_URL_CHARACTERS), AfterValidator(_checked_peer)]


def _checked_endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("it looks like http://127.0.0.1:4318/v1/traces, without a user name")
    return url


_Rate = Annotated[float, Field(gt=0, le=1e9)]

_Bytes = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


class TenantLimits(BaseModel):
    """How much one tenant may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_second: _Rate | None = Field(default=None, description="Requests a second, on average; twice that at once.")
    bytes_per_second: _Bytes | None = Field(default=None, description="Body bytes a second, on average.")
    bytes_per_day: _Bytes | None = Field(default=None, description="Body bytes in a day of UTC.")

    def limits(self) -> Limits:
        return Limits(self.requests_per_second, self.bytes_per_second, self.bytes_per_day)


class EdgeSettings(AccessSettings):
    """Everything an edge is told. Read at the start; on SIGHUP once more, for what can change (`RELOADABLE`)."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True, hide_input_in_errors=True
    )

    origin: str = Field(min_length=1, description="Where objects come from: a folder, s3://bucket/prefix, http(s)://host.")
    endpoint: str | None = Field(default=None, description="The S3 endpoint, for a server that is not AWS.")
    origin_token: SecretStr | None = Field(default=None, description="Bearer token for an http(s) origin that asks for one.")
    origin_token_files: dict[str, Path] = Field(
        default_factory=dict,
        description="Files that hold bearer tokens, each by the URL of the one origin that it is for.",
    )
    fallback_origins: tuple[str, ...] = Field(
        default=(),
        max_length=8,
        description="Asked in turn for what the origins before lack or cannot give. As a variable: a JSON array.",
    )
    peers: tuple[_PeerUrl, ...] = Field(
        default=(),
        max_length=MAX_PEERS,
        description="All edges of this site, the same list at each: they share the objects. As a variable: a JSON array.",
    )
    self: _PeerUrl | None = Field(default=None, description="Which of `peers` this edge is.")
    peer_token_file: Path | None = Field(
        default=None, description="File that holds the token by which peers know each other, the same at all of them."
    )
    cache_dir: Path = Field(
        default=Path("~/.cache/kvcdn/edge"), description="Folder of cached objects, of this edge alone; made with mode 0700."
    )
    capacity: Annotated[int, BeforeValidator(parse_size), AfterValidator(_checked_capacity)] = Field(
        default=20 * 1000**3, description="Hard cap of the cache on disk, in bytes or with a unit: 200GB, 180GiB."
    )
    quarantine: Annotated[int, BeforeValidator(parse_size), Field(ge=0)] = Field(
        default=0, description="How much of `capacity` is for files that rotted on disk, kept aside to look at. 0 deletes them."
    )
    scrub_bytes_per_second: Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=MAX_SCRUB_BYTES_PER_SECOND)] = Field(
        default=10 * 1000**2, description="How fast cached files are read again and checked, over and over. 0 does without."
    )
    listen: Annotated[str, AfterValidator(_checked_listen)] = Field(
        default="127.0.0.1:8400", description="HOST:PORT or unix:/PATH to listen on. Port 0 takes a free one."
    )
    trust_file: Path | None = Field(
        default=None,
        description="Publishers whose objects may be cached, a key a line. Without it, any valid signature will do.",
    )
    revocation_poll_seconds: float = Field(
        default=15.0,
        ge=0,
        le=3600,
        description="How often the origins are asked for what those on the trust list revoke. 0 does without.",
    )
    model_names: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{32}$")]] = Field(
        default_factory=dict, description="Names by which tokens may call models, each with the model's tag."
    )
    prefill_speeds: dict[str, Annotated[float, Field(gt=0, le=1e9)]] = Field(
        default_factory=dict,
        description="Tokens a second at which readers would prefill, by a model's name or tag: what saved time is counted by.",
    )
    tenant_limits: TenantLimits = Field(
        default_factory=TenantLimits, description="What each tenant may use that `tenants` does not name."
    )
    tenants: dict[str, TenantLimits] = Field(default_factory=dict, description="What single tenants may use.")
    admin_listen: Annotated[str | None, AfterValidator(lambda text: text and _checked_listen(text))] = Field(
        default=None, description="HOST:PORT of metrics and administration. Without it they are where objects are."
    )
    otlp_endpoint: Annotated[str | None, AfterValidator(lambda url: url and _checked_endpoint(url))] = Field(
        default=None, description="Where traces go: the URL of an OTLP/HTTP receiver. Needs the extra `otel`."
    )
    trace_ratio: float = Field(
        default=1.0, ge=0, le=1, description="The part of traces that begin here to send; others go as their callers' do."
    )
    keepalive_seconds: float = Field(
        default=15.0,
        gt=0,
        le=3600,
        description="An idle connection, or one that is slow to send its headers, is closed after this.",
    )
    max_request_line_bytes: int = Field(default=4096, ge=512, le=65536, description="Longest request line.")
    max_header_bytes: int = Field(default=8190, ge=512, le=65536, description="Longest single header field.")
    max_headers: int = Field(default=64, ge=16, le=1024, description="Most header fields of a request.")
    shutdown_seconds: float = Field(
        default=5.0, ge=0, le=300, description="How long running responses may go on once the edge is told to stop."
    )
    drain_seconds: float = Field(
        default=0.0,
        ge=0,
        le=300,
        description="How long /readyz says no while everything goes on as before, once the edge is told to stop.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged. Requests are logged at info."
    )
    usage_file: Path | None = Field(
        default=None,
        description="Ledger, a SQLite file, of what tenants are sent (`kvcdn usage`). Without it, none is kept.",
    )
    ready_file: Path | None = Field(
        default=None, description="Written, once the edge accepts connections, with its URL: for whoever started it."
    )

    @model_validator(mode="after")
    def _quarantine_is_a_part(self) -> Self:
        if self.quarantine > self.capacity // 2:
            raise ValueError("quarantine takes more than half of capacity")
        return self

    @model_validator(mode="after")
    def _tokens_have_origins(self) -> Self:
        for url in self.origin_token_files:
            if url not in (self.origin, *self.fallback_origins):
                raise ValueError(f"origin_token_files names {url[:200]}, which is none of the origins")
        if self.origin_token is not None and self.origin in self.origin_token_files:
            raise ValueError("origin_token and origin_token_files both hold a token for origin")
        return self

    @model_validator(mode="after")
    def _site_is_whole(self) -> Self:
        if (self.self is None) != (not self.peers):
            raise ValueError("peers and self go together")
        if self.self is not None and self.self not in self.peers:
            raise ValueError(f"self is {self.self}, which is none of peers")
        if len(set(self.peers)) < len(self.peers):
            raise ValueError("peers names an edge twice")
        return self

    @model_validator(mode="after")
    def _speeds_are_of_models(self) -> Self:
        for name in self.prefill_speeds:
            if name not in self.model_names and not re.fullmatch("[0-9a-f]{32}", name):
                raise ValueError(f"prefill_speeds: {name[:80]!r} is neither a tag nor a name in model_names")
        return self

    @property
    def speeds_by_tag(self) -> dict[str, float]:
        """`prefill_speeds` by the models' tags."""
        return {self.model_names.get(name, name): speed for name, speed in self.prefill_speeds.items()}

    @property
    def address(self) -> ListenAddress:
        return ListenAddress.parse(self.listen)

    @property
    def admin_address(self) -> ListenAddress | None:
        return None if self.admin_listen is None else ListenAddress.parse(self.admin_listen)

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"


RELOADABLE = frozenset(
    (
        "audience",
        "issuers_file",
        "log_level",
        "model_names",
        "peer_token_file",
        "prefill_speeds",
        "tenant_limits",
        "tenants",
        "tls_cert",
        "tls_key",
        "token",
        "token_file",
        "trust_file",
    )
)
"""Settings that SIGHUP applies; their files are read again. The others need a restart."""


def load_settings(path: Path | None, overrides: Mapping[str, Any]) -> EdgeSettings:
    """As `SettingsSources.load` has it; the environment is KVCDN_EDGE_*."""
    return SOURCES.load(EdgeSettings, EdgeSettings.model_fields, EnvSettingsSource(EdgeSettings), path, overrides)
