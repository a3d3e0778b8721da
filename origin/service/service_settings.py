"""The prefill service's settings: one frozen model, from a TOML file, the environment and the command line."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import EnvSettingsSource, SettingsConfigDict

from kvcdn.access.guard import Guard
from kvcdn.access.listening import ListenAddress
from kvcdn.access.settings import AccessSettings
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.keyring import load_or_create_signing_key, load_signing_key, load_trust, signing_key_path
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.jobs.quotas import Quotas
from kvcdn.origin.publishing.settings import checked_origin
from kvcdn.origin.watching.watch_settings import WatchSettings, require_served
from kvcdn.passphrase import passphrase_from
from kvcdn.paths import data_dir
from kvcdn.settings import SettingsSources
from kvcdn.signing import SigningKey, TrustList
from kvcdn.sizes import parse_size
from kvcdn.store import BlobStore
from kvcdn.stores import open_store

ENV_PREFIX = "KVCDN_SERVICE_"

MAX_WATCHES = 32
"""Each is a thread."""

SOURCES = SettingsSources(service="prefill service", env_prefix=ENV_PREFIX, sample="infra/service.toml")


def _checked_listen(text: str) -> str:
    if ListenAddress.parse(text).socket is not None:
        raise ValueError("this is a HOST:PORT")
    return text


_Bytes = Annotated[int, BeforeValidator(parse_size), Field(gt=0, le=1 << 50)]


class ServiceSettings(AccessSettings):
    """Everything the service is told. Read once, at the start; nothing changes while it runs."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True, hide_input_in_errors=True
    )

    models: tuple[str, ...] = Field(
        min_length=1,
        max_length=256,
        description="What may be asked for: checkpoint folders, hub ids, aliases. The first is the default.",
    )
    origin: Annotated[str, AfterValidator(checked_origin)] | None = Field(
        default=None,
        min_length=1,
        description="Where objects go: a folder or s3://bucket/prefix. Without it, a folder of the user's.",
    )
    endpoint: str | None = Field(default=None, description="The S3 endpoint, for a server that is not AWS.")
    listen: Annotated[str, AfterValidator(_checked_listen)] = Field(
        default="127.0.0.1:8500", description="HOST:PORT to listen on. Port 0 takes a free one."
    )
    queue_file: Path | None = Field(
        default=None, description="The queue, a SQLite file on a local disk. Without it, the user's own."
    )
    workers: int = Field(
        default=1, ge=0, le=64, description="Worker processes, each with models of its own. 0: only the queue."
    )
    executor: Literal["processes", "ray"] = Field(
        default="processes", description="What runs the workers: this machine, or a Ray cluster, of which they are actors."
    )
    ray_address: Annotated[str, AfterValidator(_checked_listen)] | None = Field(
        default=None,
        description="HOST:PORT of the cluster's head. Without it, a Ray of the service's own on this machine.",
    )
    worker_cpus: int = Field(
        default=1, ge=1, le=1024, description="CPUs of an actor, and the threads that a model's pass takes there."
    )
    worker_gpus: float = Field(default=0, ge=0, le=64, description="GPUs of an actor; a half is one shared by two.")
    insecure_ray: bool = Field(
        default=False, description="Use a cluster that asks for no token or has no TLS: its network is nobody else's."
    )
    device: str = Field(default="cpu", min_length=1, description="Where models run: cpu, cuda, cuda:1.")
    model_memory: _Bytes = Field(
        default=16 * 1000**3, description="Weights that a worker keeps in memory; beyond it the least recently used leave."
    )
    namespaces: tuple[str, ...] = Field(
        default=(), max_length=1000, description="Private namespaces that jobs may name; their secrets are on this machine."
    )
    key_file: Path | None = Field(default=None, description="Signing key (PEM). Without it, the user's own key.")
    key_passphrase_file: Path | None = Field(
        default=None, description="File with the passphrase of an encrypted signing key, in its first line."
    )
    trust_file: Path | None = Field(
        default=None, description="Publishers whose blocks may be built upon, a key a line. Without it, the user's own list."
    )
    max_document: _Bytes = Field(default=16 * 1000**2, description="Largest document, and largest request.")
    max_jobs: int = Field(default=100_000, ge=1, description="Jobs that wait or run; more are refused with 429.")
    max_jobs_per_tenant: int = Field(default=10_000, ge=1, description="Of these, most of one tenant.")
    submit_bytes_per_day: _Bytes | None = Field(
        default=None, description="Bytes of documents that a tenant may submit in a day of UTC. Without it, any."
    )
    stored_bytes_per_day: _Bytes | None = Field(
        default=None, description="Bytes of objects beyond which a tenant submits no more in a day of UTC. Without it, any."
    )
    claim_seconds: float = Field(
        default=30.0,
        ge=2,
        le=3600,
        description="A worker that shows no sign of life for so long is dead, and its job another's.",
    )
    keep_days: float = Field(default=7, gt=0, le=3650, description="After how many days jobs that ended are forgotten.")
    watch: tuple[WatchSettings, ...] = Field(
        default=(), max_length=MAX_WATCHES, description="Folders, lists of URLs and sitemaps to publish again as they change."
    )
    allow_internal_urls: bool = Field(
        default=False,
        description="Fetch documents from internal addresses, too. Whoever may submit reaches what this machine can.",
    )
    stop_seconds: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="How long workers may take to end the block in hand once they are told to stop.",
    )
    usage_file: Path | None = Field(
        default=None, description="Ledger, a SQLite file, of what tenants publish (`kvcdn usage`). Without it, none is kept."
    )
    ready_file: Path | None = Field(default=None, description="Written with the URL once the service accepts connections.")

    @model_validator(mode="after")
    def _cluster_is_whole(self) -> Self:
        if self.executor != "ray":
            return self
        if self.ray_address is not None and self.origin is None:
            raise ValueError("a Ray cluster needs an origin that all of its machines reach")
        if self.device.startswith("cuda") and not self.worker_gpus:
            raise ValueError("actors on cuda need worker_gpus: Ray hides the GPUs of others")
        return self

    @model_validator(mode="after")
    def _watches_are_served(self) -> Self:
        try:
            require_served(self.watch, self.models, self.namespaces)
        except UsageError as error:
            raise ValueError(f"{error}; {error.hint}") from None
        return self

    @property
    def queue_path(self) -> Path:
        """Where the queue lies."""
        return (self.queue_file or data_dir() / "queue.sqlite").expanduser()

    @property
    def address(self) -> ListenAddress:
        return ListenAddress.parse(self.listen)

    def guard(self) -> Guard:
        """Who may ask. Raises UsageError where these settings would leave the service open to the network."""
        guard = Guard.told(self, ENV_PREFIX)
        guard.require_safe("listen", self.address, tls=self.tls_cert is not None, insecure_http=self.insecure_http)
        return guard

    def open_queue(self) -> JobQueue:
        """The queue. Raises UnavailableError, CorruptError."""
        return JobQueue(
            self.queue_path,
            most=self.max_jobs,
            most_of_tenant=self.max_jobs_per_tenant,
            lease_seconds=self.claim_seconds,
            quotas=Quotas(self.submit_bytes_per_day, self.stored_bytes_per_day),
        )

    def open_store(self) -> BlobStore:
        """Where objects go. Raises what the store's constructor raises."""
        if self.origin is not None:
            return open_store(self.origin, endpoint=self.endpoint)
        folder = data_dir() / "origin"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UnavailableError(f"cannot make {folder}: {error.strerror}") from None
        return open_store(str(folder))

    def open_keys(self) -> tuple[SigningKey, TrustList]:
        """The key to sign with, made if there is none, and whom to trust. Raises NotFoundError or UsageError."""
        passphrase = passphrase_from(self.key_passphrase_file)
        if self.key_file:
            key = load_signing_key(self.key_file, passphrase)
        else:
            key = load_or_create_signing_key(signing_key_path(), passphrase)[0]
        return key, load_trust(self.trust_file)


def resolve_any(host: str, port: int) -> str:
    """An address of `host`, internal or not: `allow_internal_urls`. Raises UnavailableError."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise UnavailableError(f"the name {host[:253]!r} cannot be resolved") from None


def load_settings(path: Path | None, overrides: Mapping[str, Any]) -> ServiceSettings:
    """As `SettingsSources.load` has it; the environment is KVCDN_SERVICE_*."""
    return SOURCES.load(ServiceSettings, ServiceSettings.model_fields, EnvSettingsSource(ServiceSettings), path, overrides)
