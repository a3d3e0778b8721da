"""The watches of a service: those of its settings, and those that were added since, which every service with its queue has."""

from __future__ import annotations

import logging
import threading

from kvcdn.errors import KvcdnError
from kvcdn.origin.jobs.fetching import resolve_public
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.service.service_settings import ServiceSettings, resolve_any
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.origin.watching.watch import Watcher
from kvcdn.origin.watching.watch_settings import WatchSettings, require_served
from kvcdn.origin.watching.watch_sources import WatchSource
from kvcdn.origin.watching.watched import WatchBook
from kvcdn.store import BlobStore

SECONDS = 1.0
"""Between two questions whether a watch was added or removed."""

log = logging.getLogger("kvcdn.origin.watching.watch")


class Watchers:
    """Runs every watch, from `start` to `stop`."""

    def __init__(self, settings: ServiceSettings, queue: JobQueue, book: WatchBook, journal: Journal, store: BlobStore) -> None:
        self._settings, self._queue, self._book, self._journal, self._store = settings, queue, book, journal, store
        self._running: dict[str, tuple[WatchSettings, Watcher]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvcdn-watches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends all of them, each after the document in hand."""
        self._stop.set()
        self._thread.join()
        self._end(list(self._running))

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                self._adjust()
            except KvcdnError as error:
                log.warning("which watches were added is asked again: %s", error)
            except Exception:
                log.exception("which watches were added is asked again")
            self._stop.wait(SECONDS)

    def _adjust(self) -> None:
        fixed = {watch.name: watch for watch in self._settings.watch}
        wanted = {name: watch for name, watch in self._book.added().items() if self._serves(watch)} | fixed
        self._end([name for name, (watch, _) in self._running.items() if wanted.get(name) != watch])
        resolve = resolve_any if self._settings.allow_internal_urls else resolve_public
        for name in wanted.keys() - self._running.keys():
            source = WatchSource(wanted[name], resolve, self._settings.max_document)
            added = name not in fixed
            watcher = Watcher(wanted[name], source, self._queue, self._book, self._store, self._journal, added=added)
            self._running[name] = wanted[name], watcher
            watcher.start()

    def _serves(self, watch: WatchSettings) -> bool:
        """Whether this service has the watch's model and namespace: others with the same queue may have others."""
        try:
            require_served((watch,), self._settings.models, self._settings.namespaces)
        except KvcdnError:
            return False
        return True

    def _end(self, names: list[str]) -> None:
        ending = [self._running.pop(name)[1] for name in names]
        for watcher in ending:
            watcher.signal()
        for watcher in ending:
            watcher.stop()
