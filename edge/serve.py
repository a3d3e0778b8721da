"""Serving: an edge's life in this process, from its settings to the last response."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from kvcdn.edge.access import AccessLogger, access_log
from kvcdn.edge.app import Edge
from kvcdn.edge.fetch import Fetcher
from kvcdn.edge.guard import Guard
from kvcdn.edge.logs import logging_to_stderr
from kvcdn.edge.metrics import Metrics
from kvcdn.edge.origins import Origins
from kvcdn.edge.presence import Presence
from kvcdn.edge.scrub import Scrub
from kvcdn.edge.settings import EdgeSettings
from kvcdn.edge.storage import DiskCache
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.signing import TrustList
from kvcdn.store import BlobStore
from kvcdn.stores import open_store

LINGERING_SECONDS = 1.0
"""How long a refused request's body is still read, so that the client sees the answer before the connection ends."""

BACKLOG = 1024

log = logging.getLogger("kvcdn.edge")


@dataclass(frozen=True)
class ServingEdge:
    """An edge that accepts connections."""

    url: str
    cache: DiskCache
    origins: Origins
    metrics: Metrics


def run(settings: EdgeSettings) -> None:
    """Serves until SIGTERM or SIGINT; then finishes running responses and returns.

    Raises UsageError for settings that cannot be, UnavailableError where origin, disk or port are not to be had.
    """
    origin_token = settings.origin_token.get_secret_value() if settings.origin_token else None
    stores = [open_store(settings.origin, endpoint=settings.endpoint, token=origin_token)]
    stores += [open_store(url) for url in settings.fallback_origins]
    _raise_descriptor_limit()
    with logging_to_stderr(settings.log_level):
        asyncio.run(_serve_until_signal(settings, stores))


async def _serve_until_signal(settings: EdgeSettings, stores: Sequence[BlobStore]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(settings, *stores) as edge:
        sys.stderr.write(
            f"kvcdn edge at {edge.url}, origin {edge.origins.url}, cache {edge.cache.folder}: "
            f"{len(edge.cache)} objects, {_readable(edge.cache.used)} of {_readable(edge.cache.capacity)}\n"
        )
        sys.stderr.flush()
        if settings.ready_file is not None:
            _announce(settings.ready_file, edge.url)
        await stop.wait()


@contextlib.asynccontextmanager
async def serving(settings: EdgeSettings, *stores: BlobStore) -> AsyncIterator[ServingEdge]:
    """An edge of `settings` before `stores`, which are asked in this order, in the running loop. Raises as `run`."""
    guard = Guard.of(settings)
    trust = _trust_list(settings.trust_file)
    metrics = Metrics()
    origins = Origins(stores)
    cache = DiskCache(settings.cache_dir, settings.capacity)
    try:
        metrics.watch(cache)
        metrics.watch_origins(origins)
        fetcher = Fetcher(origins, cache, trust, metrics)
        edge = Edge(fetcher, Presence(origins, cache, metrics), cache, guard, metrics)
        runner = web.ServerRunner(_server(settings, edge, metrics), shutdown_timeout=settings.shutdown_seconds)
        await runner.setup()
        try:
            url = await _listen(settings, runner)
            async with Scrub(cache, trust, metrics, settings.scrub_bytes_per_second).running():
                yield ServingEdge(url, cache, origins, metrics)
        finally:
            await runner.cleanup()
            await fetcher.stop()
    finally:
        cache.close()


def _server(settings: EdgeSettings, edge: Edge, metrics: Metrics) -> web.Server:
    return web.Server(
        edge.handle,
        access_log=access_log,
        access_log_class=AccessLogger.maker(metrics),
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


async def _listen(settings: EdgeSettings, runner: web.ServerRunner) -> str:
    address = settings.address
    try:
        await web.TCPSite(runner, address.host, address.port, backlog=BACKLOG).start()
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {settings.listen}: {error.strerror}", hint="name a free port with listen, or 0 for any"
        ) from None
    return address.url(runner.addresses[0][1])


def _trust_list(path: Path | None) -> TrustList | None:
    if path is None:
        return None
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trust file {path}: {error}") from None
    return TrustList.from_text(text, str(path))


def _announce(path: Path, url: str) -> None:
    """Writes the ready file, complete or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
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
