"""The actor: a worker on a machine of a Ray cluster, which holds models and publishes the jobs it is handed, one after another.

Only text, bytes and numbers go in and out. It is given the signing key and the secrets of namespaces in calls, keeps them in
memory, and has of its own machine only the models, the credentials of S3, and how far it has seen the origin's journal.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

import torch
import transformers

from kvcdn import __version__
from kvcdn.keys import Namespace
from kvcdn.origin.jobs.jobs import JobRequest
from kvcdn.origin.jobs.queue_errors import ClaimLostError
from kvcdn.origin.publishing.publish import PublishProgress
from kvcdn.origin.service.attempt import JobPublisher, StoppingError, attempt
from kvcdn.origin.service.service_settings import ServiceSettings
from kvcdn.signing import SigningKey, TrustList

CALLS_AT_ONCE = 2
"""A job, and questions about it."""


class Actor:
    """Publishes jobs, once `open` was called. While `publish` runs, `progress` and `stop` may be called from other threads."""

    def __init__(self, threads: int) -> None:
        """`threads` are those of a model's pass."""
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._publisher: JobPublisher | None = None
        self._done = (0, 0)
        self._stop = threading.Event()
        self._cancelled = False

    def open(self, settings: str, key: bytes, trust: str, folder: str | None) -> str:
        """Takes the settings (JSON), the signing key (PEM) and the trust list; the version of kvcdn here.

        On the service's own machine `folder` is where relative paths begin. Raises what opening the store raises.
        """
        if folder is not None:
            os.chdir(folder)
        given = ServiceSettings.model_validate_json(settings)
        signing_key = SigningKey.from_pem(key, "what the service sent")
        trusted = TrustList.from_text(trust, "what the service sent")
        self._publisher = JobPublisher(given, given.open_store(), signing_key, trusted)
        return __version__

    def publish(self, name: str, tenant: str, request: str, namespace: str, secret: bytes) -> str:
        """Publishes a tenant's job (JSON) into the namespace of this name and key; an `Outcome` as text."""
        publisher = self._publisher
        if publisher is None:
            raise RuntimeError("the actor was not opened")
        self._done, self._cancelled = (0, 0), False
        self._stop.clear()
        wanted = JobRequest.model_validate_json(request)
        return attempt(name, lambda: publisher.publish(wanted, Namespace(secret, namespace), tenant, self._tell)).to_text()

    def progress(self) -> tuple[int, int]:
        """Tokens done of the job in hand, and all of its tokens."""
        return self._done

    def stop(self, cancelled: bool) -> None:  # noqa: FBT001 - Ray passes by position
        """Has the job in hand end at its next block, as it is not wanted any more or is to be begun again elsewhere."""
        self._cancelled = cancelled
        self._stop.set()

    def _tell(self, done: PublishProgress) -> None:
        self._done = (done.tokens_done, done.tokens_total)
        if self._stop.is_set():
            raise ClaimLostError("the job is not wanted any more") if self._cancelled else StoppingError("the actor stops")
