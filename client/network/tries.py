"""Tries: which edge a request goes to next after one has failed it, and when it is over."""

from __future__ import annotations

from kvcdn.client.network.edges import Edge, EdgeGroup
from kvcdn.client.network.patience import Patience, jittered
from kvcdn.client.network.wire import BrokenError
from kvcdn.errors import UnavailableError

TRIES = 5
"""Of one request, or of one transfer since it last got on, at each of its edges: with the pauses between them 0.75 s."""


class Tries:
    """Of one request. Used by one thread at a time."""

    def __init__(self, group: EdgeGroup, patience: Patience, key: str) -> None:
        """Raises UnavailableError where no edge is worth asking."""
        group.require_one()
        group.asked()
        patience.budget.asked()
        self._group, self._patience, self._key = group, patience, key
        self._candidates = list(group.ranked(key))
        self._tried: set[str] = set()
        self._round = 1
        self.edge = self._untried()[0]
        """The one to ask now."""

    def _untried(self) -> list[Edge]:
        """Edges that have not failed it in this round, without those that fail everybody, as long as there are others."""
        usable = [edge for edge in self._candidates if not edge.health.out_for] or self._candidates
        return [edge for edge in usable if edge.url not in self._tried]

    def got_on(self) -> None:
        """What failed before is forgotten: bytes have come since."""
        self._tried.clear()
        self._round = 1

    def failed(self, edge: Edge, error: UnavailableError, asked: float, since: float) -> None:
        """`edge`, asked at a time, failed, and the time since another was in vain.

        Returns, after a pause, where to try again is right; raises `error` where it is not.
        """
        if not isinstance(error, BrokenError):
            raise error
        alone = len(self._group.edges) == 1
        self._patience.budget.lose(min(since, self._patience.clock() - error.waited_s))
        self._patience.budget.failed()
        if not (error.elsewhere and alone):
            edge.health.failed(asked, error.retry_after)
        if error.elsewhere:
            self._candidates = [other for other in self._candidates if other is not edge]
        self._tried.add(edge.url)
        pause = 0.0
        if not self._untried():
            self._tried.clear()
            pause = max(jittered(self._round), error.retry_after)
            self._round += 1
        over = not self._candidates or self._round > TRIES or pause >= self._patience.left()
        if over or not self._patience.budget.may_retry(pause):
            raise error
        if pause:
            self._patience.pause(pause)
        self.edge = self._untried()[0]
