"""The front: each connection's first protocol. It answers what `express` can, and hands the connection over for good otherwise.

From then on the web framework has the connection, its time-outs and its limits; before, they are here: a connection on which
nothing comes, or whose client takes nothing, is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, cast

from aiohttp import web

from kvcdn.edge.http.connections import Connection
from kvcdn.edge.http.sendfile import STALL_SECONDS
from kvcdn.edge.http.sending import FileBody
from kvcdn.edge.http.wellformed import make_request

SWEEP_SECONDS = 1.0
"""Between two looks at who is idle."""

log = logging.getLogger("kvcdn.edge")


@dataclass(frozen=True)
class Delivery:
    """An answer with a large body."""

    head: bytes
    body: FileBody
    ended: Callable[[], None]
    """Called when no more of it is sent, however that came."""


Pending = Callable[[], Coroutine[Any, Any, bytes | Delivery]]
"""What gives an answer that has to be waited for."""

Answer = bytes | Delivery | Pending


class Answering(Protocol):
    """Gives the whole answer to what a client sent at once, or None, having done nothing, where it is for the framework."""

    def __call__(self, data: bytes, *, files: bool) -> Answer | None:
        """`files`: whether a body can be sent as a file just now."""


class FrontedServer(web.Server):
    """A server of aiohttp's whose connections begin with a front."""

    def __init__(self, *given: Any, answer: Answering, idle_seconds: float, **more: Any) -> None:
        super().__init__(*given, request_factory=make_request, **more)
        self.answer, self._idle_seconds = answer, idle_seconds
        self.fronts: set[Front] = set()
        """Connections that nobody was handed yet."""
        self._sweeper: asyncio.TimerHandle | None = None

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override] # the protocol that aiohttp's own would be, later
        return Front(self, lambda: Connection(self, loop=self._loop, **self._kwargs))

    def pre_shutdown(self) -> None:
        """Closes what is idle, and the rest when it is."""
        for front in list(self.fronts):
            front.close()
        super().pre_shutdown()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - aiohttp's
        """Waits so long for what is being sent, and breaks it off then."""
        await asyncio.gather(self._finish(timeout), super().shutdown(timeout))

    async def _finish(self, seconds: float | None) -> None:
        tasks = [front.task for front in self.fronts if front.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def watch(self) -> None:
        """Somebody came."""
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now = asyncio.get_running_loop().time()
        for front in list(self.fronts):
            front.leave_if_idle(now, self._idle_seconds)
        if self.fronts:
            self.watch()


class Front(asyncio.Protocol):
    """One connection, until it is handed over."""

    def __init__(self, server: FrontedServer, successor: Callable[[], asyncio.Protocol]) -> None:
        self._server, self._successor = server, successor
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._seen = self._loop.time()
        self._flowing: asyncio.Future[None] | None = None
        """Of a connection that takes no more just now: until it does."""
        self._sends_files = False
        self.task: asyncio.Task[None] | None = None
        """What sends a large body, while one is sent."""
        self._last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._sends_files = transport.get_extra_info("sslcontext") is None
        self._server.fronts.add(self)
        self._server.watch()

    def data_received(self, data: bytes) -> None:
        files = self._sends_files and self.task is None and not self._transport.get_write_buffer_size()
        try:
            answer = self._server.answer(data, files=files)
        except Exception:
            log.exception("a request is answered the long way")
            answer = None
        if answer is None:
            self._hand_over(data)
            return
        self._seen = self._loop.time()
        if isinstance(answer, bytes):
            self._transport.write(answer)
        elif isinstance(answer, Delivery):
            self._deliver(answer)
        else:
            # No request may come before its end.
            self.task = self._loop.create_task(self._wait(answer))
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self._server.fronts.discard(self)
        self.resume_writing()

    def pause_writing(self) -> None:
        """The client does not take its answers: it is not asked for more requests."""
        self._flowing = self._loop.create_future()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._flowing is not None and not self._flowing.done():
            self._flowing.set_result(None)
        self._flowing = None
        self._seen = self._loop.time()
        if self.task is None:
            self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection, behind what is being sent."""
        self._last = True
        if self.task is None:
            self._transport.close()

    def leave_if_idle(self, now: float, seconds: float) -> None:
        """Ends the connection where nothing came, or went, for too long."""
        if self.task is not None:
            return
        if self._flowing is not None and now - self._seen > STALL_SECONDS:
            self._transport.abort()
        elif self._flowing is None and now - self._seen > seconds:
            self._transport.close()

    def _deliver(self, delivery: Delivery) -> None:
        transport = self._transport
        transport.write(delivery.head)
        if not transport.get_write_buffer_size() and delivery.body.begin(transport):
            self._end(delivery)
            return
        # Nothing may come between head and body, nor a request before their end.
        self.task = self._loop.create_task(self._send(delivery))
        transport.pause_reading()
        transport.set_write_buffer_limits(high=0)

    def _end(self, delivery: Delivery) -> None:
        delivery.body.close()
        delivery.ended()

    async def _wait(self, pending: Pending) -> None:
        transport = self._transport
        try:
            answer = await pending()
        except BaseException:
            # Of this one nothing is known to tell the client.
            self.task = None
            transport.abort()
            raise
        if isinstance(answer, Delivery):
            transport.write(answer.head)
            transport.set_write_buffer_limits(high=0)
            await self._send(answer)
        else:
            transport.write(answer)
            self._sent_all()

    async def _send(self, delivery: Delivery) -> None:
        transport = self._transport
        try:
            if self._flowing is not None:
                async with asyncio.timeout(STALL_SECONDS):
                    await self._flowing
            await delivery.body.send(transport, None)
        except (ConnectionError, TimeoutError):
            transport.abort()
        except BaseException:
            transport.abort()
            raise
        finally:
            self._end(delivery)
            self.task = None
        self._sent_all()

    def _sent_all(self) -> None:
        """The answer of `task` is with the kernel, or will be: the next request may come."""
        transport = self._transport
        self.task, self._seen = None, self._loop.time()
        if self._last:
            transport.close()
        elif not transport.is_closing():
            transport.set_write_buffer_limits()
            transport.resume_reading()

    def _hand_over(self, data: bytes) -> None:
        self._server.fronts.discard(self)
        successor = self._successor()
        self._transport.set_protocol(successor)
        successor.connection_made(self._transport)
        successor.data_received(data)
