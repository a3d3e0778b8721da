"""Serving: the prefill service's life in this process, and those of its workers beside it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from kvcdn.access.listening import tls_context
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.origin.service.pace import Restarts
from kvcdn.origin.service.ray_environment import ray_environment, require_ray
from kvcdn.origin.service.service import Service, forgetting
from kvcdn.origin.service.service_settings import ServiceSettings
from kvcdn.origin.service.watchers import Watchers
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.origin.watching.watched import WatchBook

log = logging.getLogger("kvcdn.origin.service.serve")


def run(settings: ServiceSettings) -> None:
    """Serves until SIGTERM or SIGINT; workers then end the block in hand and give the rest of their jobs back.

    Raises UsageError for settings that cannot be, UnavailableError where queue, origin or port are not to be had.
    """
    require_workers(settings)
    asyncio.run(_serve_until_signal(settings))


def require_workers(settings: ServiceSettings) -> None:
    """Raises UsageError where the workers of these settings lack what they need."""
    if settings.workers and importlib.util.find_spec("torch") is None:
        raise UsageError("workers need torch, which is not installed", hint='pip install "kvcdn[origin]", or set workers = 0')
    if settings.workers and settings.executor == "ray":
        require_ray(settings)


async def _serve_until_signal(settings: ServiceSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(settings) as url:
        sys.stderr.write(f"kvcdn origin at {url}, {settings.workers} workers, models {', '.join(settings.models)}\n")
        sys.stderr.flush()
        if settings.ready_file is not None:
            _announce(settings.ready_file, url)
        await stop.wait()


@contextlib.asynccontextmanager
async def serving(settings: ServiceSettings) -> AsyncIterator[str]:
    """The service of `settings` in the running loop, its workers beside it; its URL. Raises as `run`."""
    guard, tls = settings.guard(), tls_context(settings.tls_cert, settings.tls_key)
    store, (key, _) = settings.open_store(), settings.open_keys()
    queue = settings.open_queue()
    book = WatchBook(settings.queue_path, queue)
    watchers = Watchers(settings, queue, book, Journal(store, key), store)
    service = Service(settings, queue, guard, book)
    runner = web.AppRunner(service.application(), access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    on_ray = settings.executor == "ray"
    programs = (
        ["kvcdn.origin.service.ray_workers"] * bool(settings.workers)
        if on_ray
        else ["kvcdn.origin.service.worker"] * settings.workers
    )
    workers = [asyncio.create_task(_keep_worker(settings, program)) for program in programs]
    try:
        async with forgetting(service, queue, settings.keep_days * 86400, time.time):
            try:
                await web.TCPSite(runner, settings.address.host, settings.address.port, ssl_context=tls).start()
            except OSError as error:
                raise UnavailableError(f"cannot listen on {settings.address}: {error.strerror}") from None
            watchers.start()
            yield settings.address.url(runner.addresses[0][1], "http" if tls is None else "https")
    finally:
        service.draining = True
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await asyncio.to_thread(watchers.stop)
        await runner.cleanup()
        service.close()
        book.close()
        queue.close()


async def _keep_worker(settings: ServiceSettings, program: str) -> None:
    """Runs a process of workers, and another when it dies, until cancelled; then it ends in order."""
    restarts = Restarts()
    while True:
        restarts.begin()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env=ray_environment(settings) if settings.executor == "ray" else None,
        )
        try:
            if process.stdin is not None:
                with contextlib.suppress(ConnectionError):
                    # Nothing that is secret: a worker asks nobody for tokens.
                    process.stdin.write(settings.model_dump_json(exclude={"token"}).encode() + b"\n")
                    await process.stdin.drain()
            code = await process.wait()
        except asyncio.CancelledError:
            await _stop(process, settings.stop_seconds)
            raise
        log.warning("a worker ended with %s", code)
        await asyncio.sleep(restarts.pause())


async def _stop(process: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        # Its job is taken up again when its claim has run out.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _announce(path: Path, url: str) -> None:
    """Writes the ready file, complete or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    draft.rename(path)
