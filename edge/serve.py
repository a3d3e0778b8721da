"""Serving: an edge's life in this process, from its settings to the last response."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcdn.access import listening
from kvcdn.access.guard import read_token
from kvcdn.access.tasks import beside
from kvcdn.edge.answers.access import AccessLogger, access_log
from kvcdn.edge.answers.administration import Administration
from kvcdn.edge.answers.app import Edge
from kvcdn.edge.answers.express import Express
from kvcdn.edge.answers.front import Answering, FrontedServer
from kvcdn.edge.answers.requests import Handler, on_its_trail
from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.fills.origins import Origin, Origins
from kvcdn.edge.fills.peers import Peers
from kvcdn.edge.fills.revocations import KeptLists, Revoked, Watch
from kvcdn.edge.http import sockets
from kvcdn.edge.http.hops import Hops
from kvcdn.edge.http.sending import FileBody
from kvcdn.edge.reads.fetch import Fetcher
from kvcdn.edge.reads.presence import Presence
from kvcdn.edge.settings import ENV_PREFIX, RELOADABLE, EdgeSettings
from kvcdn.edge.telemetry.logs import ROOT, logging_to_stderr
from kvcdn.edge.telemetry.metrics import Metrics
from kvcdn.edge.telemetry.tracing import Tracing, open_tracing, require_tracing
from kvcdn.edge.telemetry.traffic import Traffic
from kvcdn.edge.tenants.admission import Admission
from kvcdn.edge.tenants.guard import Guard
from kvcdn.edge.tenants.usage import EdgeUsage
from kvcdn.edge.threads import in_thread
from kvcdn.edge.upkeep.collectors import CacheCollector, OriginCollector, PinCollector, TrafficCollector
from kvcdn.edge.upkeep.pins import Pins
from kvcdn.edge.upkeep.recall import Recall
from kvcdn.edge.upkeep.scrub import Scrub
from kvcdn.edge.upkeep.status import Status
from kvcdn.edge.upkeep.warm import Warming
from kvcdn.errors import KvcdnError, UsageError
from kvcdn.signing import TrustList
from kvcdn.store import BlobStore
from kvcdn.stores import open_store

LINGERING_SECONDS = 1.0
"""How long a refused request's body is still read, so that the client sees the answer before the connection ends."""

SWITCH_SECONDS = 0.001
"""How long a thread that fills may keep the interpreter while the loop has something to send. Python's own 5 ms are felt."""

log = logging.getLogger("kvcdn.edge")


LoggerMaker = Callable[[logging.Logger, str], AccessLogger]
"""What aiohttp makes its access loggers with."""

ACCOUNTS_SECONDS = 10.0
"""How often it is written down what tenants were sent: what a crash forgives them."""


@dataclass
class ServingEdge:
    """An edge that accepts connections."""

    url: str
    admin_url: str
    cache: DiskCache
    origins: Origins
    metrics: Metrics
    settings: EdgeSettings
    _edge: Edge
    _admission: Admission
    _watch: Watch
    _traffic: Traffic
    _tls: ssl.SSLContext | None
    _peers: Peers | None
    front: FrontedServer
    """Where objects are asked for."""

    def apply(self, settings: EdgeSettings) -> list[str]:
        """Goes by what of `settings` can change while the edge runs (`RELOADABLE`); which others differ.

        Raises UsageError, and then changes nothing.
        """
        # Tried on a context of its own: a certificate that does not fit its key would leave ours with neither.
        tls_context(settings)
        trust = trust_list(settings.trust_file)
        self._admission.apply(settings)
        self._watch.trust(trust)
        if self._peers is not None:
            self._peers.use_token(self._admission.guard.peer_token)
        self._traffic.apply(settings.speeds_by_tag)
        if self._tls is not None and settings.tls_cert and settings.tls_key:
            self._tls.load_cert_chain(settings.tls_cert.expanduser(), settings.tls_key.expanduser())
        logging.getLogger(ROOT).setLevel(settings.log_level.upper())
        changed = {name for name in EdgeSettings.model_fields if getattr(settings, name) != getattr(self.settings, name)}
        if (settings.tls_cert is None) is (self.settings.tls_cert is None):
            changed -= {"tls_cert", "tls_key"}
        self.settings = self.settings.model_copy(update={name: getattr(settings, name) for name in RELOADABLE})
        return sorted(changed - RELOADABLE)

    def drain(self) -> None:
        """From now on `/readyz` says that the edge is not ready for new work; all else goes on."""
        self._edge.draining = True


def run(settings: EdgeSettings, reload: Callable[[], EdgeSettings] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; then finishes running responses and returns. `reload` reads the settings for SIGHUP.

    Raises UsageError for settings that cannot be, UnavailableError where origin, disk or port are not to be had.
    """
    stores = open_origins(settings)
    _raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    with logging_to_stderr(settings.log_level):
        asyncio.run(_serve_until_signal(settings, stores, reload))


def open_origins(settings: EdgeSettings) -> list[BlobStore]:
    """The origins of `settings` in their order; nothing is asked of them yet. Raises UsageError."""
    tokens = {url: read_token(None, path, ENV_PREFIX) for url, path in settings.origin_token_files.items()}
    if settings.origin_token is not None:
        tokens[settings.origin] = settings.origin_token.get_secret_value()
    first = open_store(settings.origin, endpoint=settings.endpoint, token=tokens.get(settings.origin))
    return [first, *(open_store(url, token=tokens.get(url)) for url in settings.fallback_origins)]


def site(settings: EdgeSettings) -> Peers | None:
    """The edges that share the objects with this one; None where it is alone. Raises UsageError."""
    if settings.self is None:
        return None
    return Peers(settings.peers, settings.self, lambda: FileBody.active)


def check(settings: EdgeSettings) -> None:
    """Raises UsageError for settings with which an edge would not start. Touches neither network nor cache."""
    open_origins(settings)
    site(settings)
    Guard.of(settings)
    trust_list(settings.trust_file)
    tls_context(settings)
    require_tracing(settings)


async def _serve_until_signal(
    settings: EdgeSettings, stores: Sequence[BlobStore], reload: Callable[[], EdgeSettings] | None = None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(settings, *stores) as edge:
        if reload is not None:
            loop.add_signal_handler(signal.SIGHUP, _reload, edge, reload)
        sys.stderr.write(
            f"kvcdn edge at {edge.url}, origin {edge.origins.url}, cache {edge.cache.folder}: "
            f"{len(edge.cache)} objects, {_readable(edge.cache.used)} of {_readable(edge.cache.capacity)}\n"
        )
        sys.stderr.flush()
        if settings.trust_file is None:
            log.info("there is no trust_file: nobody is asked for revocations")
        if settings.ready_file is not None:
            _announce(settings.ready_file, edge)
        await stop.wait()
        edge.drain()
        await asyncio.sleep(settings.drain_seconds)


def _reload(edge: ServingEdge, read: Callable[[], EdgeSettings]) -> None:
    """Applies the settings as they are now; what is wrong with them is logged, and the edge goes on as before."""
    try:
        waiting = edge.apply(read())
    except KvcdnError as error:
        log.warning("settings are not reloaded", extra={"fields": {"error": str(error), "hint": error.hint}})
        return
    log.info("settings are reloaded", extra={"fields": {"need_a_restart": waiting}})


@contextlib.asynccontextmanager
async def serving(settings: EdgeSettings, *stores: BlobStore) -> AsyncIterator[ServingEdge]:
    """An edge of `settings` before `stores`, which are asked in this order, in the running loop. Raises as `run`."""
    Guard.of(settings)
    trust, tls = trust_list(settings.trust_file), tls_context(settings)
    tracing, hops = open_tracing(settings), Hops()
    hops.begin()
    metrics, traffic = Metrics(), Traffic()
    traffic.apply(settings.speeds_by_tag)
    origins = Origins(stores)
    cache = DiskCache(settings.cache_dir, settings.capacity, settings.quarantine)
    try:
        admission = Admission(settings)
        pins = Pins(cache)
        metrics.watch(CacheCollector(cache), PinCollector(pins), TrafficCollector(traffic, admission.name_of))
        kept = KeptLists(cache.folder / "revocations")
        revoked = Revoked(trust, kept.load(trust) if trust else None)
        peers = site(settings)
        others = [] if peers is None else [peer.origin for peer in peers.each]
        _observe(origins.each, others, metrics, tracing)
        if peers is not None:
            peers.use_token(admission.guard.peer_token)
        fetcher = Fetcher(origins, cache, revoked, metrics, peers)
        recall = Recall(revoked, cache, fetcher)
        warming = Warming(fetcher, cache, pins)
        presence = Presence(origins, cache, metrics, peers)
        status = Status(traffic, cache, origins.each, others, metrics, admission, pins)
        administration = Administration(fetcher, presence, cache, warming, admission, metrics, status)
        fetcher.usage = administration.usage = usage = EdgeUsage.of(settings.usage_file)
        log_answers = AccessLogger.maker(metrics, traffic, usage)
        edge = Edge(fetcher, presence, cache, admission, recall, administration, admin=settings.admin_address is None)
        edge.peers = peers
        fetcher.tracing = tracing

        # A span is begun before anything is known of a request: then all of them go the long way.
        express = Express(fetcher, cache, recall, admission, metrics, traffic, usage).answer
        front = _server(settings, on_its_trail(edge.handle, hops, tracing), log_answers, _nothing if tracing else express)
        watch = Watch(revoked, origins, kept, settings.revocation_poll_seconds, recall.recall)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(usage or contextlib.nullcontext())
            if tracing is not None:
                stack.push_async_callback(in_thread, tracing.close)
            stack.push_async_callback(fetcher.stop)
            url = admin_url = await stack.enter_async_context(
                sockets.listening(settings.address, front, tls, settings.shutdown_seconds)
            )
            if settings.admin_address is not None:
                admin = _server(settings, on_its_trail(edge.handle_admin, hops, tracing), log_answers, _nothing)
                admin_url = await stack.enter_async_context(
                    sockets.listening(settings.admin_address, admin, tls, settings.shutdown_seconds)
                )
            scrub = Scrub(cache, revoked, metrics, settings.scrub_bytes_per_second)
            for part in (recall, warming, watch, scrub, status):
                await stack.enter_async_context(part.running())
            await stack.enter_async_context(_keeping_accounts(admission))
            yield ServingEdge(
                url, admin_url, cache, origins, metrics, settings, edge, admission, watch, traffic, tls, peers, front
            )
    finally:
        cache.close()


def _observe(origins: Sequence[Origin], peers: Sequence[Origin], metrics: Metrics, tracing: Tracing | None) -> None:
    """Has metrics show, and spans tell, what is asked of others."""
    metrics.watch(OriginCollector("origin", {str(place): origin for place, origin in enumerate(origins)}))
    if peers:
        metrics.watch(OriginCollector("peer", {peer.url: peer for peer in peers}))
    for asked in (*origins, *peers):
        asked.tracing = tracing


@contextlib.asynccontextmanager
async def _keeping_accounts(admission: Admission) -> AsyncIterator[None]:
    async def keep() -> None:
        while True:
            await asyncio.sleep(ACCOUNTS_SECONDS)
            await asyncio.to_thread(admission.remember)

    try:
        async with beside(keep(), "accounts"):
            yield
    finally:
        admission.remember()


def _server(settings: EdgeSettings, handle: Handler, log_answers: LoggerMaker, answer: Answering) -> FrontedServer:
    return FrontedServer(
        handle,
        answer=answer,
        idle_seconds=settings.keepalive_seconds,
        access_log=access_log,
        access_log_class=log_answers,
        logger=log,
        # The one deadline that aiohttp has for headers as well as for idle connections; it restarts with each request only.
        keepalive_timeout=settings.keepalive_seconds,
        max_line_size=settings.max_request_line_bytes,
        max_field_size=settings.max_header_bytes,
        max_headers=settings.max_headers,
        lingering_time=LINGERING_SECONDS,
        # No body of ours is compressed, and a compressed one could grow behind its limit.
        auto_decompress=False,
    )


def _nothing(data: bytes, *, files: bool) -> None:
    """No express: administration is not asked for often."""


def tls_context(settings: EdgeSettings) -> ssl.SSLContext | None:
    """What HTTPS needs; None where the settings say HTTP. Raises UsageError."""
    return listening.tls_context(settings.tls_cert, settings.tls_key)


def trust_list(path: Path | None) -> TrustList | None:
    """The publishers whose objects may be cached; None for all. Raises UsageError."""
    if path is None:
        return None
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trust file {path}: {error}") from None
    return TrustList.from_text(text, str(path))


def _announce(path: Path, edge: ServingEdge) -> None:
    """Writes the ready file, complete or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps({"url": edge.url, "admin_url": edge.admin_url, "pid": os.getpid()}), encoding="utf-8")
    draft.rename(path)


def _raise_descriptor_limit() -> None:
    """A response in flight holds a connection and a file: as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _readable(size: int) -> str:
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:  # noqa: PLR2004 - the step between units
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
