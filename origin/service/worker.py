"""The worker: claims jobs one after another and publishes them, in a process of its own.

A model that does not fit, a kernel that aborts or a device that is lost takes a worker with it and nothing else: the queue
knows what it was doing, and the service starts another. The word from the service is standard input: settings on its first
line, and its end says that the service is gone, or that it is time to go.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import transformers

from kvcdn.errors import KvcdnError
from kvcdn.keyring import load_namespace
from kvcdn.origin.jobs.jobs import Job
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.jobs.queue_errors import ClaimLostError
from kvcdn.origin.publishing.publish import PublishProgress
from kvcdn.origin.service.attempt import JobPublisher, StoppingError, attempt
from kvcdn.origin.service.pace import IDLE_SECONDS, SIGNS_PER_CLAIM
from kvcdn.origin.service.service_settings import ServiceSettings
from kvcdn.origin.service.usage import OriginUsage
from kvcdn.signing import SigningKey, TrustList
from kvcdn.store import BlobStore

PROGRESS_SECONDS = 0.5

log = logging.getLogger("kvcdn.origin.service.worker")


class Worker:
    """Works on jobs until `stop` is set."""

    def __init__(
        self,
        settings: ServiceSettings,
        queue: JobQueue,
        store: BlobStore,
        key: SigningKey,
        trust: TrustList,
        usage: OriginUsage | None = None,
    ) -> None:
        self._settings, self._queue, self._usage = settings, queue, usage
        self._publisher = JobPublisher(settings, store, key, trust)
        self.stop = threading.Event()

    def run(self) -> None:
        """Claims and publishes; a job in hand is given back after its block when `stop` is set."""
        while not self.stop.is_set():
            job = self._queue.claim()
            if job is None:
                self.stop.wait(IDLE_SECONDS)
            else:
                self.work(job)

    def work(self, job: Job) -> None:
        """Publishes one job, and says what has become of it."""
        with self._alive(job):
            outcome = attempt(job.id, lambda: self._publish(job))
        outcome.tell(self._queue, job)
        if self._usage is not None:
            self._usage.tried(outcome, job.tenant)

    def _publish(self, job: Job) -> dict[str, object]:
        told = 0.0

        def progress(done: PublishProgress) -> None:
            nonlocal told
            if self.stop.is_set():
                raise StoppingError("the worker stops")
            now = time.monotonic()
            if now - told > PROGRESS_SECONDS:
                told = now
                self._queue.renew(job, {"tokens_done": done.tokens_done, "tokens_total": done.tokens_total})

        return self._publisher.publish(job.request, load_namespace(job.request.namespace), job.tenant, progress)

    @contextlib.contextmanager
    def _alive(self, job: Job) -> Iterator[None]:
        """Gives signs of life while the context lasts."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(self._settings.claim_seconds / SIGNS_PER_CLAIM):
                try:
                    self._queue.renew(job)
                except ClaimLostError:
                    return  # the next progress is told the same, and raises where it can be dealt with
                except KvcdnError as error:
                    log.warning("no sign of life for job %s, which is tried again: %s", job.id, error)

        thread = threading.Thread(target=renew, name="kvcdn-claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def main() -> None:
    """Runs a worker by the settings on standard input, until that ends or SIGTERM comes."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    settings = ServiceSettings.model_validate_json(sys.stdin.readline())
    queue = settings.open_queue()
    usage = OriginUsage.of(settings.usage_file)
    worker = Worker(settings, queue, settings.open_store(), *settings.open_keys(), usage)

    def stop(_number: int, _frame: FrameType | None) -> None:
        worker.stop.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to pass on
    threading.Thread(target=_await_end, args=(worker,), name="kvcdn-service", daemon=True).start()
    worker.run()
    if usage is not None:
        usage.close()
    queue.close()


def _await_end(worker: Worker) -> None:
    sys.stdin.read()
    worker.stop.set()


if __name__ == "__main__":
    main()
