"""A tally: what came for one prompt over the wire, as connections see it, whatever became of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvcdn.accounting.entry import HEADER, PromptId, tie
from kvcdn.digest import Digest


@dataclass
class Tally:
    """Counts for the prompt `id`, whose document is known once it was looked up. Thread-safe."""

    id: PromptId = field(default_factory=PromptId.new)
    document: Digest | None = None
    bytes_edge: int = 0
    """Object bytes received from edges; from any server over HTTP, that is."""
    bytes_origin: int = 0
    """Object bytes read from a folder or bucket."""
    requests_edge: int = 0
    """Requests for objects sent to edges, with those that failed."""
    requests_origin: int = 0
    requests_cut: int = 0
    """Those of them whose answer was not read to its end: what an edge has sent and nobody received is theirs."""
    objects_read: int = 0
    """Objects read whole: what a codec's blocks need besides."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def fields(self) -> dict[str, str]:
        """Header fields of its requests."""
        return {HEADER: tie(self.id, self.document)}

    def asked_edge(self) -> None:
        with self._lock:
            self.requests_edge += 1

    def asked_origin(self) -> None:
        with self._lock:
            self.requests_origin += 1

    def from_edge(self, count: int) -> None:
        with self._lock:
            self.bytes_edge += count

    def from_origin(self, count: int) -> None:
        with self._lock:
            self.bytes_origin += count

    def read_whole(self) -> None:
        with self._lock:
            self.objects_read += 1

    def cut(self) -> None:
        with self._lock:
            self.requests_cut += 1
