"""A publisher's settings: one frozen model, from a TOML file, the environment and the command line.

For machines that publish unattended: what a person would give `kvcdn publish` as options. Credentials for S3 are no
settings; they come from where boto3 looks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from kvcdn.producer import MAX_TEXT
from kvcdn.settings import SettingsSources

SOURCES = SettingsSources(service="publisher", env_prefix="KVCDN_PUBLISHER_", sample="infra/origin.toml")

Precision = Literal["native", "int8", "int4", "tc-high", "tc-medium", "tc-low", "tc-least"]
"""What may be asked for by name."""

MAX_DAYS = 36_500
"""A century; more is a date or a count of seconds by mistake."""


def checked_origin(url: str) -> str:
    """`url`, if it is a place to which objects can go. Raises ValueError."""
    # Not shown in the message: what somebody puts into a URL may be a password.
    if url.lower().startswith(("http://", "https://")):
        raise ValueError("http(s) origins can only be read; name a folder or s3://bucket/prefix")
    return url


class PublisherSettings(BaseSettings):
    """Everything a publisher is told. Read once, at the start; nothing changes while it runs."""

    model_config = SettingsConfigDict(
        env_prefix=SOURCES.env_prefix, extra="forbid", frozen=True, env_ignore_empty=True, hide_input_in_errors=True
    )

    origin: Annotated[str, AfterValidator(checked_origin)] | None = Field(
        default=None,
        min_length=1,
        description="Where objects go: a folder or s3://bucket/prefix. Without it, a folder of the user's.",
    )
    endpoint: str | None = Field(default=None, description="The S3 endpoint, for a server that is not AWS.")
    model: str = Field(min_length=1, description="What prefills: a checkpoint folder, a hub id or an alias.")
    adapters: tuple[Path, ...] = Field(
        default=(), description="Folders of LoRA adapters that the model applies, in this order. Without them, none."
    )
    device: str = Field(default="cpu", min_length=1, description="Where the model runs: cpu, cuda, cuda:1.")
    namespace: str | None = Field(
        default=None,
        min_length=1,
        description="Private namespace, whose secret is on this machine. Without it, the public one.",
    )
    precision: Precision = Field(
        default="native",
        description="How KV is kept: native is bit-exact, the others are smaller, and measured on each document.",
    )
    progressive: bool = Field(default=False, description="Whether what makes a lossy document exact is published beside it.")
    min_quality: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Largest mean next-token KL in nats; where it is larger, a finer precision is published.",
    )
    key_file: Path | None = Field(default=None, description="Signing key (PEM). Without it, the user's own key.")
    key_passphrase_file: Path | None = Field(
        default=None, description="File with the passphrase of an encrypted signing key, in its first line."
    )
    trust_file: Path | None = Field(
        default=None,
        description="Publishers whose blocks may be built upon, a key a line. Without it, the user's own list.",
    )
    label: str = Field(default="", max_length=MAX_TEXT, description="Public words that each manifest carries.")
    days: int | None = Field(
        default=None, ge=1, le=MAX_DAYS, description="Days after which a document may be forgotten. Without it, never."
    )


def load_settings(path: Path | None, overrides: Mapping[str, Any]) -> PublisherSettings:
    """As `SettingsSources.load` has it; the environment is KVCDN_PUBLISHER_*."""
    return SOURCES.load(
        PublisherSettings, PublisherSettings.model_fields, EnvSettingsSource(PublisherSettings), path, overrides
    )
