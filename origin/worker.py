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

from kvcdn.errors import IntegrityError, KvcdnError, NotFoundError, UsageError
from kvcdn.keyring import load_namespace
from kvcdn.model.tokens import encode_chat, encode_text
from kvcdn.origin.fetching import fetch_document, resolve_public
from kvcdn.origin.jobs import Job
from kvcdn.origin.journal import Journal
from kvcdn.origin.models import Models
from kvcdn.origin.publish import Publisher, PublishProgress
from kvcdn.origin.queue import ClaimLostError, JobQueue
from kvcdn.origin.service_settings import ServiceSettings, resolve_any
from kvcdn.signing import SigningKey, TrustList
from kvcdn.store import BlobStore

IDLE_SECONDS = 0.2
"""Between two looks at an empty queue: how much later a job may begin."""

SIGNS_PER_CLAIM = 6
"""Signs of life that a worker gives before it would count as dead, also while a model is loaded or a document fetched."""

PROGRESS_SECONDS = 0.5

log = logging.getLogger("kvcdn.origin.worker")


class StoppingError(KvcdnError):
    """The worker has to go."""


class Worker:
    """Works on jobs until `stop` is set."""

    def __init__(self, settings: ServiceSettings, queue: JobQueue, store: BlobStore, key: SigningKey, trust: TrustList) -> None:
        self._settings, self._queue, self._store, self._key, self._trust = settings, queue, store, key, trust
        self._journal = Journal(store, key)
        self._models = Models(settings.model_memory, settings.device)
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
        try:
            with self._alive(job):
                result = self._publish(job)
            self._queue.finish(job, result)
        except ClaimLostError:
            self._queue.abandon(job)
        except StoppingError:
            self._queue.release(job)
        except (UsageError, NotFoundError, IntegrityError) as error:
            self._queue.fail(job, str(error), for_good=True)
        except KvcdnError as error:
            self._queue.fail(job, str(error), for_good=False)
        except Exception as error:
            # Whatever a document does to a model or a tokenizer, the next job has nothing to do with it.
            log.exception("job %s failed", job.id)
            self._queue.fail(job, f"{type(error).__name__} while publishing", for_good=False)

    def _publish(self, job: Job) -> dict[str, object]:
        request = job.request
        document = request.document()
        if document is None:
            resolve = resolve_any if self._settings.allow_internal_urls else resolve_public
            document = fetch_document(request.url or "", resolve=resolve, limit=self._settings.max_document)
        loaded = self._models.get(request.model or self._settings.models[0])
        if request.is_chat:
            prompt = encode_chat(loaded.tokenizer, document.messages(), answer_follows=False, tools=document.tools())
        else:
            prompt = encode_text(loaded.tokenizer, document.text)
        publisher = Publisher(
            loaded,
            self._store,
            self._key,
            namespace=load_namespace(request.namespace),
            trust=self._trust,
            journal=self._journal,
            tenant=job.tenant,
        )
        told = 0.0

        def progress(done: PublishProgress) -> None:
            nonlocal told
            if self.stop.is_set():
                raise StoppingError("the worker stops")
            now = time.monotonic()
            if now - told > PROGRESS_SECONDS:
                told = now
                self._queue.renew(job, {"tokens_done": done.tokens_done, "tokens_total": done.tokens_total})

        return publisher.publish(
            prompt.token_ids,
            precision=request.precision,
            max_kl=request.min_quality,
            label=request.label,
            expires=int(time.time()) + request.ttl if request.ttl else None,
            progress=progress,
        ).to_json()

    @contextlib.contextmanager
    def _alive(self, job: Job) -> Iterator[None]:
        """Gives signs of life while the context lasts."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(self._settings.claim_seconds / SIGNS_PER_CLAIM):
                try:
                    self._queue.renew(job)
                except KvcdnError:
                    return  # the next progress is told the same, and raises where it can be dealt with

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
    worker = Worker(settings, queue, settings.open_store(), *settings.open_keys())

    def stop(_number: int, _frame: FrameType | None) -> None:
        worker.stop.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to pass on
    threading.Thread(target=_await_end, args=(worker,), name="kvcdn-service", daemon=True).start()
    worker.run()
    queue.close()


def _await_end(worker: Worker) -> None:
    sys.stdin.read()
    worker.stop.set()


if __name__ == "__main__":
    main()
