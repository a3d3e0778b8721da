"""An attempt at a job, where models are: its document is read, tokenised and published, and what has become of it is told.

It knows nothing of the queue, so that it can be made on another machine than the queue's.
"""

from __future__ import annotations

import enum
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcdn.errors import IntegrityError, KvcdnError, NotFoundError, UsageError
from kvcdn.keys import Namespace
from kvcdn.model.tokens import encode_chat, encode_text
from kvcdn.origin.jobs.fetching import fetch_document, resolve_public
from kvcdn.origin.jobs.jobs import Job, JobRequest
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.jobs.queue_errors import ClaimLostError
from kvcdn.origin.publishing.kept import Kept
from kvcdn.origin.publishing.publish import Publisher, PublishProgress
from kvcdn.origin.service.models import Models
from kvcdn.origin.service.service_settings import ServiceSettings, resolve_any
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.signing import SigningKey, TrustList
from kvcdn.store import BlobStore

Progress = Callable[[PublishProgress], None]

log = logging.getLogger("kvcdn.origin.service.attempt")


class StoppingError(KvcdnError):
    """Whoever works on a job has to go."""


class Ending(enum.StrEnum):
    """How an attempt ended."""

    PUBLISHED = "published"
    FAILED = "failed"
    STOPPED = "stopped"
    """Whoever worked on it had to go: the job is begun again elsewhere."""
    LOST = "lost"
    """The job was cancelled, or is another's by now."""


@dataclass(frozen=True)
class Outcome:
    """What has become of an attempt: the result of a published job, or the reason of one that failed, `for_good` or not."""

    ending: Ending
    result: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    for_good: bool = False

    @classmethod
    def of(cls, error: KvcdnError) -> Outcome:
        """What it means for a job that its attempt raised this."""
        match error:
            case ClaimLostError():
                return cls(Ending.LOST)
            case StoppingError():
                return cls(Ending.STOPPED)
            case _:
                for_good = isinstance(error, UsageError | NotFoundError | IntegrityError)
                return cls(Ending.FAILED, reason=str(error), for_good=for_good)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Outcome:
        """Reads what `to_text` wrote."""
        value = json.loads(text)
        return cls(Ending(value["ending"]), value["result"], value["reason"], value["for_good"])

    def tell(self, queue: JobQueue, job: Job) -> None:
        """Writes it down, where `job` is still of whoever claimed it."""
        match self.ending:
            case Ending.PUBLISHED:
                queue.finish(job, self.result)
            case Ending.FAILED:
                queue.fail(job, self.reason, for_good=self.for_good)
            case Ending.STOPPED:
                queue.release(job)
            case Ending.LOST:
                queue.abandon(job)


def attempt(name: str, publish: Callable[[], Mapping[str, Any]]) -> Outcome:
    """The outcome of `publish`, whatever it raises; the job's `name` is for the log."""
    try:
        return Outcome(Ending.PUBLISHED, publish())
    except KvcdnError as error:
        return Outcome.of(error)
    except Exception as error:
        # Whatever a document does to a model or a tokenizer, the next job has nothing to do with it.
        log.exception("job %s failed", name)
        return Outcome(Ending.FAILED, reason=f"{type(error).__name__} while publishing")


class JobPublisher:
    """Publishes what jobs ask for, with models that it keeps. Used by one thread."""

    def __init__(self, settings: ServiceSettings, store: BlobStore, key: SigningKey, trust: TrustList) -> None:
        self._settings, self._store, self._key, self._trust = settings, store, key, trust
        self._journal = Journal(store, key)
        self._kept, self._last = Kept(), ""
        self._models = Models(settings.model_memory, settings.device)

    def publish(self, request: JobRequest, namespace: Namespace, tenant: str, progress: Progress) -> dict[str, Any]:
        """Publishes one document for `tenant`; what `kvcdn publish --json` prints. Raises what any of its steps raises."""
        document, fetched = request.document(), {}
        if document is None:
            resolve = resolve_any if self._settings.allow_internal_urls else resolve_public
            document = fetch_document(request.url or "", resolve=resolve, limit=self._settings.max_document)
            fetched = {"fetched_bytes": len(document.text.encode())}
        model = request.model or self._settings.models[0]
        if model != self._last:
            self._kept.drop()  # room for the next model comes first
        loaded, self._last = self._models.get(model), model
        if request.is_chat:
            prompt = encode_chat(loaded.tokenizer, document.messages(), answer_follows=False, tools=document.tools())
        else:
            prompt = encode_text(loaded.tokenizer, document.text)
        publisher = Publisher(
            loaded, self._store, self._key, namespace=namespace, trust=self._trust, journal=self._journal, tenant=tenant
        )
        publisher.kept = self._kept
        result = publisher.publish(
            prompt.token_ids,
            precision=request.precision,
            max_kl=request.min_quality,
            label=request.label,
            expires=int(time.time()) + request.ttl if request.ttl else None,
            progress=progress,
        )
        return {**result.to_json(), **fetched}
