"""Sendfile: a file's bytes to a client's socket without passing through this process, nor through asyncio's own sendfile.

`loop.sendfile` takes the socket out of the selector and back for every piece, and asks for the file's size and position: three
quarters of what a hit costs here. So clients that are sent bodies wait in an epoll of our own, which the loop watches as one
file: the kernel names those who can take more in turns, and each round of the loop gives out a bounded number of bytes, however
many wait. What else the loop has to do, such as first bytes of others, waits no longer than that.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import weakref

TURN_BYTES = 2 << 20
"""Handed to the kernel for one client between two looks at what else there is to do: some 0.2 ms. A client that keeps up makes
room for a third of the 4 MiB that Linux queues at most, before it is named again: less a turn would be two turns each time."""

FIRST_BYTES = 1 << 18
"""Of these a client's first: among those who have just asked, each waits for the others' firsts."""

STALL_SECONDS = 60.0
STALL_BYTES = 4 << 20
"""A client that does not take so much in that time is cut off: 70 kB/s, below any link that a cache pays on."""

SWEEP_SECONDS = 1.0
"""Between two looks at who has stalled."""


class Sender:
    """One file's bytes on their way over one connection. For the event loop's thread; close it."""

    def __init__(self, transport: asyncio.Transport, file: int, start: int) -> None:
        """Raises ConnectionError where the connection is closed. Nothing else may write to `transport` before `close`."""
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is None or transport.is_closing() or connection.fileno() < 0:
            raise ConnectionResetError("the client left")
        self.sent = 0
        """Bytes with the kernel."""
        self.descriptor = os.dup(connection.fileno())
        self._file, self._start, self._end = file, start, 0
        self._waiting: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._turns = _Turns.of(self._loop)
        self._watched = False
        self._mark, self._since = 0, self._loop.time()
        """Of the stretch of STALL_BYTES that is on its way: where and when it began."""

    def close(self) -> None:
        self._unwatch()
        os.close(self.descriptor)

    def begin(self, length: int) -> bool:
        """Sends what the socket takes at once of the next `length` bytes; whether that is all. Raises as `send`."""
        self._end = self.sent + length
        return self._turn(FIRST_BYTES)

    async def send(self, length: int) -> int:
        """Sends the next `length` bytes; how many, fewer only where the file ends early. Raises OSError.

        TimeoutError and ConnectionError are the client's, any other the file's. Between turns others have theirs.
        """
        before, self._end = self.sent, self.sent + length
        self._mark, self._since = self.sent, self._loop.time()
        try:
            if not self._turn(TURN_BYTES):
                # The turns that follow are the loop's own calls: waking this task for each would cost half as much as sending.
                self._waiting = self._loop.create_future()
                self._watch()
                await self._waiting
        finally:
            self._waiting = None
        return self.sent - before

    def writable(self) -> None:
        """The client takes more, and it is its turn."""
        waiting = self._waiting
        if waiting is None or waiting.done():
            # Nobody waits, because the file does not go on yet: to be told again and again would cost.
            self._unwatch()
            return
        try:
            if self._turn(TURN_BYTES):
                waiting.set_result(None)
        except OSError as error:
            waiting.set_exception(error)

    def leave_if_stalled(self, now: float) -> None:
        """Ends the waiting for a client that takes too little."""
        if self.sent - self._mark >= STALL_BYTES:
            self._mark, self._since = self.sent, now
        elif now - self._since > STALL_SECONDS and self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(TimeoutError("the client stopped reading"))

    def _turn(self, count: int) -> bool:
        """Sends up to `count` bytes; whether there is nothing more to send."""
        try:
            sent = os.sendfile(self.descriptor, self._file, self._start + self.sent, min(count, self._end - self.sent))
        except BlockingIOError:
            return False
        self.sent += sent
        return not sent or self.sent == self._end

    def _watch(self) -> None:
        if not self._watched:
            self._turns.add(self)
            self._watched = True

    def _unwatch(self) -> None:
        if self._watched:
            self._turns.remove(self)
            self._watched = False


class _Turns:
    """Who of one loop's senders waits for a turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._senders: dict[int, Sender] = {}
        self._sweeping = False
        loop.add_reader(self._epoll.fileno(), self._give)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Turns:
        found = _turns.get(loop)
        if found is None:
            found = _turns[loop] = cls(loop)
        return found

    def add(self, sender: Sender) -> None:
        self._epoll.register(sender.descriptor, select.EPOLLOUT)
        self._senders[sender.descriptor] = sender
        if not self._sweeping:
            self._sweeping = True
            self._sweep_later()

    def remove(self, sender: Sender) -> None:
        self._epoll.unregister(sender.descriptor)
        del self._senders[sender.descriptor]

    def _give(self) -> None:
        # Of those who can take more, the kernel names each once before it names one again.
        for descriptor, _ in self._epoll.poll(0, 1):
            self._senders[descriptor].writable()

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        for sender in list(self._senders.values()):
            sender.leave_if_stalled(now)
        self._sweeping = bool(self._senders)
        if self._sweeping:
            self._sweep_later()

    def _sweep_later(self) -> None:
        asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)


_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = weakref.WeakKeyDictionary()
