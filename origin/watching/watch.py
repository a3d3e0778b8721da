"""Watching: looks at folders, lists and sitemaps now and then, submits what has changed, and takes old versions away."""

from __future__ import annotations

import logging
import threading

from kvcdn import canonical
from kvcdn.digest import Digest, hash_bytes
from kvcdn.errors import KvcdnError, NotFoundError
from kvcdn.keys import manifest_key, model_tag
from kvcdn.origin.jobs.fetching import NO_VALIDATORS
from kvcdn.origin.jobs.jobs import Job, JobRequest, JobState
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.jobs.queue_errors import QueueFullError
from kvcdn.origin.publishing.sources import decode_document
from kvcdn.origin.upkeep.catalog import read_manifest
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.origin.upkeep.remove import remove_documents
from kvcdn.origin.watching.watch_settings import WatchSettings
from kvcdn.origin.watching.watch_sources import Seen, WatchSource
from kvcdn.origin.watching.watched import Known, OvertakenError, Version, WatchBook
from kvcdn.producer import MAX_TEXT
from kvcdn.store import BlobInfo, BlobStore

TICK_SECONDS = 1.0
"""Between two questions whether a look is due, and what has become of jobs."""

STOP_SECONDS = 5.0
"""How long stopping waits for a look: it ends at the next document, but one that is being fetched may take longer."""

RENEWED_AFTER = 0.5
"""Of a watch's ttl: then a document that is still there is published again, to last longer."""

log = logging.getLogger("kvcdn.origin.watching.watch")


class Watcher:
    """One watch, in a thread of its own from `start` to `stop`."""

    def __init__(
        self,
        watch: WatchSettings,
        source: WatchSource,
        queue: JobQueue,
        book: WatchBook,
        store: BlobStore,
        journal: Journal,
        *,
        added: bool = False,
    ) -> None:
        """`journal` is the store's, with the key that its jobs sign with; `added` is a watch that is in no settings."""
        self._watch, self._source, self._added = watch, source, added
        self._queue, self._book, self._store, self._journal = queue, book, store, journal
        self._key = journal.signer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvcdn-watch-{watch.name}", daemon=True)
        kept = watch.model_dump(include={"kind", "model", "namespace", "precision", "label", "ttl"}, mode="json")
        self._terms = str(hash_bytes(canonical.encode(kept)))

    def start(self) -> None:
        self._thread.start()

    def signal(self) -> None:
        """Has it end, without waiting for that."""
        self._stop.set()

    def stop(self) -> None:
        """Ends after the document in hand; what was not looked at is looked at the next time."""
        self.signal()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except KvcdnError as error:
                log.warning("the watch %s goes on later: %s", self._watch.name, error)
            except Exception:
                # One odd document or answer does not end the watch.
                log.exception("the watch %s goes on later", self._watch.name)
            self._stop.wait(TICK_SECONDS)

    def step(self) -> None:
        """A look, where one is due; and whatever there is to do about versions. Raises a KvcdnError."""
        if self._book.claim(self._watch.name, self._watch.every, added=self._added):
            self.look()
        self.settle()

    # -- looking --------------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Looks at every document once. Raises a KvcdnError where nothing can be written down."""
        name = self._watch.name
        try:
            documents = self._source.documents()
        except KvcdnError as error:
            # Nothing is gone because a disk is not mounted or a server is down.
            self._book.end_look(name, None, str(error))
            log.warning("the watch %s sees nothing: %s", name, error)
            return
        known = self._book.documents(name)
        aging = set() if self._watch.ttl is None else self._book.aging(name, self._watch.ttl * RENEWED_AFTER)
        try:
            for document in documents:
                if self._stop.is_set():
                    return
                self._look_at(document, known.get(document), renew=document in aging)
        except QueueFullError as error:
            self._book.end_look(name, len(documents), str(error))
            return
        for document in known.keys() - set(documents):
            self._book.gone(name, document)
        self._book.end_look(name, len(documents), "")

    def _look_at(self, document: str, before: Known | None, *, renew: bool) -> None:
        name = self._watch.name
        trusted = before is not None and before.terms == self._terms and not renew
        try:
            seen = self._source.look(document, before.validators if before and trusted else NO_VALIDATORS)
            if seen is not None:
                self._take(document, before, seen, renew=renew)
        except NotFoundError:
            self._book.gone(name, document)
        except OvertakenError:
            pass  # the next look sees whether anything is left to do
        except QueueFullError:
            raise
        except KvcdnError as error:
            if self._book.failed(name, document, str(error)):
                log.warning("the watch %s passes over %s: %s", name, document, error)
        except Exception as error:
            # Nobody thought of it: those behind it are looked at all the same.
            log.exception("the watch %s passes over %s", name, document)
            self._book.failed(name, document, type(error).__name__)

    def _take(self, document: str, before: Known | None, seen: Seen, *, renew: bool) -> None:
        """Submits the document if it is another than before, or to `renew` it. Raises QueueFullError and other KvcdnErrors."""
        name = self._watch.name
        digest = "" if seen.data is None else str(hash_bytes(self._terms.encode("ascii") + seen.data))
        if before is not None and digest in ("", before.digest) and not (renew and digest):
            self._book.same(name, document, self._terms, seen.validators)
            return
        request = self._request(document, decode_document(document, seen.data or b"").text)
        accepted = self._book.submit(name, document, request, before, digest, self._terms, seen.validators)
        if isinstance(accepted, KvcdnError):
            raise accepted
        for job in self._book.overtaken(name, document):
            self._queue.cancel(job)

    def _request(self, document: str, text: str) -> JobRequest:
        """The job: the very text that was looked at, wherever it is from."""
        watch = self._watch
        return JobRequest(
            text=text,
            name=document[-MAX_TEXT:],
            model=watch.model,
            namespace=watch.namespace,
            precision=watch.precision,
            label=watch.label,
            labels={"watch": watch.name},
            priority=watch.priority,
            window=watch.window,
            ttl=watch.ttl,
        )

    # -- versions -------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Sees which jobs have ended, and removes the versions whose time is over. Raises a KvcdnError."""
        for version in self._book.submitted(self._watch.name):
            try:
                job = self._queue.get(version.job)
            except NotFoundError:
                self._book.lost(version)  # it was dead for long, or nobody looked for long
                continue
            if job.state is JobState.PUBLISHED and job.result:
                self._book.published(
                    version.job,
                    fingerprint=str(job.result["fingerprint"]),
                    address=str(job.result["address"]),
                    own=self._has_made(job),
                )
            elif job.state is JobState.CANCELLED:
                self._book.drop([version.job])
        if self._watch.remove and (old := self._book.outlived(self._watch.name, self._watch.grace)):
            self._remove(old)

    def _has_made(self, job: Job) -> bool:
        """Whether a job's manifest is its own: what was there before is somebody else's doing, and not ours to remove.

        A job that was taken up again after it had made the manifest found it there.
        """
        result = job.result or {}
        if result.get("status") != "exists":
            return True
        info = self._manifest_info(str(result["fingerprint"]), str(result["address"]))
        listed = read_manifest(self._store, info) if info else None
        manifest = listed.manifest if listed else None
        return manifest is not None and manifest.publisher == self._key and manifest.created >= int(job.created)

    def _manifest_info(self, fingerprint: str, address: str) -> BlobInfo | None:
        model, name = Digest.read(fingerprint), Digest.read(address)
        return self._store.stat(manifest_key(model_tag(model), name)) if model and name else None

    def _remove(self, versions: list[Version]) -> None:
        infos: dict[str, BlobInfo] = {}
        for version in versions:
            if version.own and (info := self._manifest_info(version.fingerprint, version.address)):
                infos[info.key] = info
        if infos:
            remove_documents(self._store, list(infos.values()), journal=self._journal)
            log.info("the watch %s has removed %d old versions", self._watch.name, len(infos))
        self._book.drop([version.job for version in versions])
