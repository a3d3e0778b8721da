"""The front: each connection's first protocol. It answers what `express` can, and hands the connection over for good otherwise.

From then on the web framework has the connection, its time-outs and its limits; before, they are here: a connection on which
nothing comes, or whose client takes nothing, is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from kvcdn.edge.respond import STALL_SECONDS

SWEEP_SECONDS = 1.0
"""Between two looks at who is idle."""

log = logging.getLogger("kvcdn.edge")


class FrontedServer(web.Server):
    """A server of aiohttp's whose connections begin with a front."""

    def __init__(self, *given: Any, answer: Callable[[bytes], bytes | None], idle_seconds: float, **more: Any) -> None:
        """`answer` takes what a client sent at once, and gives the whole answer, or None where it is for aiohttp."""
        super().__init__(*given, **more)
        self._answer, self._idle_seconds = answer, idle_seconds
        self.fronts: set[Front] = set()
        """Connections that nobody was handed yet."""
        self._sweeper: asyncio.TimerHandle | None = None

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override] # the protocol that aiohttp's own would be, later
        return Front(self._answer, super().__call__, self.fronts, self._watch)

    def pre_shutdown(self) -> None:
        """Closes what is idle; a front is nothing else, between two calls."""
        for front in list(self.fronts):
            front.close()
        super().pre_shutdown()

    def _watch(self) -> None:
        """Somebody came."""
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now = asyncio.get_running_loop().time()
        for front in list(self.fronts):
            front.leave_if_idle(now, self._idle_seconds)
        if self.fronts:
            self._watch()


class Front(asyncio.Protocol):
    """One connection, until it is handed over."""

    def __init__(
        self,
        answer: Callable[[bytes], bytes | None],
        successor: Callable[[], asyncio.Protocol],
        fronts: set[Front],
        came: Callable[[], None],
    ) -> None:
        self._answer, self._successor, self._fronts, self._came = answer, successor, fronts, came
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._seen = self._loop.time()
        self._stalled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._fronts.add(self)
        self._came()

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._answer(data)
        except Exception:
            log.exception("a request is answered the long way")
            answer = None
        if answer is None:
            self._hand_over(data)
        else:
            self._seen = self._loop.time()
            self._transport.write(answer)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self._fronts.discard(self)

    def pause_writing(self) -> None:
        """The client does not take its answers: it is not asked for more requests."""
        self._stalled = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled = False
        self._seen = self._loop.time()
        self._transport.resume_reading()

    def close(self) -> None:
        self._transport.close()

    def leave_if_idle(self, now: float, seconds: float) -> None:
        """Ends the connection where nothing came, or went, for too long."""
        if self._stalled and now - self._seen > STALL_SECONDS:
            self._transport.abort()
        elif not self._stalled and now - self._seen > seconds:
            self._transport.close()

    def _hand_over(self, data: bytes) -> None:
        self._fronts.discard(self)
        successor = self._successor()
        self._transport.set_protocol(successor)
        successor.connection_made(self._transport)
        successor.data_received(data)
