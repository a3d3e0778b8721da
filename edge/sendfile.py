"""Sendfile: a file's bytes to a client's socket without passing through this process, nor through asyncio's own sendfile.

`loop.sendfile` takes the socket out of the selector and back for every piece, and asks for the file's size and position: three
quarters of what a hit costs here. A duplicate of the socket's descriptor is ours to watch for as long as the body lasts.
"""

from __future__ import annotations

import asyncio
import os
import socket

PIECE_BYTES = 1 << 19
"""Handed to the kernel in one go: enough to keep a fast reader busy, little enough that others have their turn soon."""

TURN_PIECES = 4
"""Pieces that a client is given in one turn where it is alone; beside others it is one. With more, requests that come meanwhile
wait for several such turns before they count: measured, eight made first bytes of four clients six times later."""


class Sender:
    """The sending side of one connection while a body lasts. For the event loop's thread; close it."""

    active = 0
    """Clients that are sent a body now."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Raises ConnectionError where the connection is closed. Nothing else may write to `transport` before `close`."""
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is None or transport.is_closing() or connection.fileno() < 0:
            raise ConnectionResetError("the client left")
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.dup(connection.fileno())
        self._file = self._start = self._length = self._done = 0
        self._waiting: asyncio.Future[None] | None = None
        self._watching = False
        Sender.active += 1

    def close(self) -> None:
        Sender.active -= 1
        self._unwatch()
        os.close(self._descriptor)

    async def send(self, file: int, start: int, length: int) -> int:
        """Sends `length` bytes from `start`; how many, fewer only where the file ends early. Raises OSError.

        ConnectionError is the client's, any other the file's. Between turns others have theirs.
        """
        self._file, self._start, self._length, self._done = file, start, length, 0
        if not self._turn():
            # The turns that follow are the loop's own calls: waking this task for each would cost half as much as sending.
            self._waiting = self._loop.create_future()
            self._watch()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self._done

    def _turn(self) -> bool:
        """Sends until the socket is full or others are to have their turn; whether there is nothing more to send."""
        for _ in range(TURN_PIECES if Sender.active == 1 else 1):
            left = min(PIECE_BYTES, self._length - self._done)
            try:
                sent = os.sendfile(self._descriptor, self._file, self._start + self._done, left)
            except BlockingIOError:
                return False
            self._done += sent
            if not sent or self._done == self._length:
                return True
        return False

    def _writable(self) -> None:
        waiting = self._waiting
        if waiting is None or waiting.done():
            # Nobody waits, because the file does not go on yet: to be told again and again would cost.
            self._unwatch()
            return
        try:
            if self._turn():
                waiting.set_result(None)
        except OSError as error:
            waiting.set_exception(error)

    def _watch(self) -> None:
        if not self._watching:
            self._loop.add_writer(self._descriptor, self._writable)
            self._watching = True

    def _unwatch(self) -> None:
        if self._watching:
            self._loop.remove_writer(self._descriptor)
            self._watching = False
