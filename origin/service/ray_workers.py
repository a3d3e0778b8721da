"""Workers on a Ray cluster: a process beside the service that claims jobs, hands them to actors, and notes how they end.

The queue is a file on this machine, which actors elsewhere cannot open. So each actor has a seat here, a thread, which does
with the queue what a local worker does: it claims a job when its actor is there to take it, gives signs of life while the actor
answers, and tells the end. An actor that is gone, alone or with its machine, says nothing more: its job's claim runs out, and
another takes it up where its blocks end. If this process dies, Ray ends its actors; the service starts another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError

from kvcdn import __version__
from kvcdn.errors import KvcdnError, UsageError
from kvcdn.keyring import load_namespace
from kvcdn.origin.jobs.jobs import Job
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.jobs.queue_errors import ClaimLostError
from kvcdn.origin.service.actor import CALLS_AT_ONCE, Actor
from kvcdn.origin.service.attempt import Outcome
from kvcdn.origin.service.pace import IDLE_SECONDS, SIGNS_PER_CLAIM, Restarts
from kvcdn.origin.service.ray_environment import LOOPBACK
from kvcdn.origin.service.service_settings import ServiceSettings
from kvcdn.origin.service.usage import OriginUsage
from kvcdn.signing import SigningKey, TrustList

ASK_SECONDS = 0.5
"""Between two questions to an actor at work: how soon it hears of an end, and how old a progress may be."""

START_SECONDS = 60.0
"""An actor that is not there by then lacks something, which is told."""

OBJECT_STORE_BYTES = 80 * 1000**2
"""Ray's least. Only documents pass through it."""

_OF_THE_SERVICE = {
    *("token", "token_file", "tls_cert", "tls_key", "ready_file"),
    *("key_file", "key_passphrase_file", "trust_file", "queue_file", "usage_file"),
}
"""Settings that no other machine needs to know."""

log = logging.getLogger("kvcdn.origin.ray")


class Seat:
    """The place of one actor. `run` in a thread of its own, until `stop` is set."""

    def __init__(
        self,
        settings: ServiceSettings,
        queue: JobQueue,
        keys: tuple[SigningKey, TrustList],
        stop: threading.Event,
        usage: OriginUsage | None = None,
    ) -> None:
        self._usage = usage
        self._settings, self._queue, (self._key, self._trust), self._stop = settings, queue, keys, stop

    def run(self) -> None:
        """Has an actor work, and another when it is gone."""
        restarts = Restarts()
        while not self._stop.is_set():
            restarts.begin()
            try:
                self._serve()
            except (RayError, KvcdnError) as error:
                log.warning("an actor is lost: %s", str(error).splitlines()[0])
            except Exception:
                log.exception("an actor is given up")
            self._stop.wait(restarts.pause())

    def _serve(self) -> None:
        actor = self._create()
        try:
            if self._open(actor):
                self._work(actor)
        finally:
            ray.kill(actor)

    def _create(self) -> Any:
        settings = self._settings
        # Each on the machine that has the most room; never started again by Ray, which could not give it the key.
        options = {"num_cpus": settings.worker_cpus, "num_gpus": settings.worker_gpus, "scheduling_strategy": "SPREAD"}
        return ray.remote(Actor).options(**options, max_concurrency=CALLS_AT_ONCE, max_restarts=0).remote(settings.worker_cpus)

    def _open(self, actor: Any) -> bool:
        """Waits for the actor to be there; False where there is no time. Raises RayError, UsageError for another version."""
        # Not to the constructor: its arguments are kept at the cluster's head. Nothing here is a token.
        settings = self._settings.model_dump_json(exclude=_OF_THE_SERVICE)
        trust = "\n".join(f"{key.text} {name}" for key, name in self._trust.names.items())
        folder = str(Path.cwd()) if self._settings.ray_address is None else None
        opened = actor.open.remote(settings, self._key.to_pem(), trust, folder)
        began, told = time.monotonic(), False
        while not ray.wait([opened], timeout=ASK_SECONDS)[0]:
            if self._stop.is_set():
                return False
            if not told and time.monotonic() - began > START_SECONDS:
                told = True
                need = f"{self._settings.worker_cpus} CPUs and {self._settings.worker_gpus:g} GPUs"
                log.warning("no actor after %.0f s: is there a machine in the cluster that has %s left?", START_SECONDS, need)
        version = ray.get(opened)
        if version != __version__:
            raise UsageError(f"a machine of the cluster has kvcdn {version}, this one {__version__}")
        return True

    def _work(self, actor: Any) -> None:
        """Claims jobs and has them done, one after another. Raises RayError once the actor is gone."""
        while not self._stop.is_set():
            self._progress(actor)  # who is gone is handed nothing
            job = self._queue.claim()
            if job is None:
                self._stop.wait(IDLE_SECONDS)
            else:
                outcome = self._do(actor, job)
                outcome.tell(self._queue, job)
                if self._usage is not None:
                    self._usage.tried(outcome, job.tenant)

    def _do(self, actor: Any, job: Job) -> Outcome:
        """Has a job done. Raises RayError where the actor is gone, with the job."""
        try:
            namespace = load_namespace(job.request.namespace)
        except KvcdnError as error:
            return Outcome.of(error)
        # The secret beside the request, not in it: what is large passes through files.
        call = actor.publish.remote(job.id, job.tenant, job.request.model_dump_json(), namespace.name, namespace.key)
        told, signed, lost = (0, 0), time.monotonic(), False
        while not ray.wait([call], timeout=ASK_SECONDS)[0]:
            if lost or self._stop.is_set():
                actor.stop.remote(lost)
            done, now = self._progress(actor), time.monotonic()
            if lost or (done == told and now - signed < self._settings.claim_seconds / SIGNS_PER_CLAIM):
                continue
            told, signed = done, now
            try:
                self._queue.renew(job, {"tokens_done": done[0], "tokens_total": done[1]} if done[1] else None)
            except ClaimLostError:
                lost = True
        return Outcome.from_text(ray.get(call))

    def _progress(self, actor: Any) -> tuple[int, int]:
        done: tuple[int, int] = ray.get(actor.progress.remote(), timeout=self._settings.claim_seconds)
        return done


def main() -> None:
    """Runs the workers by the settings on standard input, until that ends or SIGTERM comes."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    settings = ServiceSettings.model_validate_json(sys.stdin.readline())
    stop = threading.Event()
    queue, keys, usage = settings.open_queue(), settings.open_keys(), OriginUsage.of(settings.usage_file)
    for name in [name for name in os.environ if "PASSPHRASE" in name]:
        del os.environ[name]  # what Ray starts has the rest of it
    _connect(settings)

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)  # in place of Ray's, which leaves at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to pass on
    threading.Thread(target=_await_end, args=(stop,), name="kvcdn-service", daemon=True).start()
    seats = [
        threading.Thread(target=Seat(settings, queue, keys, stop, usage).run, name=f"kvcdn-seat-{number}")
        for number in range(settings.workers)
    ]
    for seat in seats:
        seat.start()
    for seat in seats:
        seat.join()
    if usage is not None:
        usage.close()
    ray.shutdown()
    queue.close()


def _connect(settings: ServiceSettings) -> None:
    """Joins the cluster of the settings, or starts a Ray on this machine that ends with this process."""
    # Ray has actors import from where its driver stands, before anything else: it stands where nobody puts modules.
    with contextlib.chdir("/"):
        if settings.ray_address is not None:
            ray.init(settings.ray_address, logging_level=logging.WARNING)
            return
        ray.init(
            "local",
            num_cpus=settings.workers * settings.worker_cpus,
            object_store_memory=max(OBJECT_STORE_BYTES, 2 * settings.workers * settings.max_document),
            include_dashboard=False,
            logging_level=logging.WARNING,
            _node_ip_address=LOOPBACK,
        )


def _await_end(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


if __name__ == "__main__":
    main()
