"""A wire: one connection as a stream of bytes, on which every wait is bounded and can be ended from another thread.

The socket does not block; a read that finds nothing polls for as long as the prompt's patience allows. http.client parses
answers from it, as from any file.
"""

from __future__ import annotations

import io
import os
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from kvcdn.client.network.patience import SLOWEST_BYTES_PER_SECOND, STOPPED, Patience, StoppedError
from kvcdn.errors import UnavailableError

HEAD_BUFFER_BYTES = 8192
"""Read at once while an answer's head is parsed; bodies are received into place."""

GATHER_BYTES = 128 * 1024
GATHER_SECONDS = 0.05
"""Who waits for a body is woken when so much has come, or after so long. On a link of 200 Mbit/s half of the processor time of
a fetch was waking up, for 60 KB each, and a model that computes beside it loses twice as much."""


class BrokenError(UnavailableError):
    """A connection failed, or an edge said that it cannot just now. Another try may do better."""

    def __init__(
        self, message: str, *, hint: str = "", elsewhere: bool = False, retry_after: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """`elsewhere` where only another edge may do better; `retry_after` seconds were asked for by this one.

        `waited_s` seconds were spent on what led to it, if more than on the last wait.
        """
        super().__init__(message, hint=hint)
        self.elsewhere = elsewhere
        self.retry_after = retry_after
        self.waited_s = waited_s


class OriginDownError(BrokenError):
    """An edge says that its origin, which it has to ask, cannot be reached."""


_NOBODY = Patience.of_prompt()
"""The patience of a wire that serves no prompt, and waits for nothing."""


class Wire(io.RawIOBase):
    """A socket, TLS or not. One thread at a time connects, reads and writes; any may end that through its patience."""

    def __init__(self, family: int, name: str, progress: Callable[[], int]) -> None:
        """`name` is whom it leads to, for errors; `progress` counts the bytes that have come from there, on all wires."""
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._name = name
        self._progress = progress
        self._poll = select.poll()
        self._patience = _NOBODY
        self._loan = _Loan(self)
        self._lock = threading.Lock()
        self._aborted = self._closed = self._only_looking = False
        self._waited, self._mark = 0.0, 0
        self.used = False
        """Whether an answer came over it before, so that the peer may have closed it meanwhile."""
        self.at_end = False
        """Whether the peer has said its last."""
        self.has_spoken = False
        """Whether anything has come since it was lent."""
        self.due: float | None = None
        """When, by the patience's clock, the next step must be done: a connection made, an answer's head received."""
        self.choice = False
        """Whether another edge could take over, so that silence is borne for a shorter time."""
        self.file = _File(self, HEAD_BUFFER_BYTES)

    def lend(self, patience: Patience) -> None:
        """From now on it serves a prompt with this `patience`, until `release`. Raises StoppedError."""
        self._patience = patience
        self._waited, self._mark = 0.0, self._progress()
        self.choice = self.has_spoken = False
        self._loan = _Loan(self)
        patience.watch(self._loan)

    def release(self) -> None:
        """It serves nobody for the time being."""
        with self._lock:
            self._patience.forget(self._loan)
            self._patience, self._loan, self.due = _NOBODY, _Loan(self), None

    # -- beginning and end ------------------------------------------------------------------------------------------------

    def connect(self, address: Any) -> None:
        """TCP. Raises OSError, BrokenError or StoppedError."""
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(BlockingIOError):
            self._sock.connect(address)
        self._wait(select.POLLOUT)
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))

    def secure(self, context: ssl.SSLContext, host: str) -> None:
        """TLS with `host`, on a connected wire. Raises ssl.SSLError, BrokenError or StoppedError."""
        with self._lock:
            self._sock = context.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
        while True:
            try:
                self._sock.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)

    def abort(self, loan: _Loan) -> None:
        """Ends a wait in another thread, and all later ones; nothing where it serves another prompt by now."""
        with self._lock:
            if loan is not self._loan or self._closed:
                return
            self._aborted = True
            with suppress(OSError):
                # An SSLSocket's own shutdown forgets the encryption, under the feet of the thread that reads.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """For good; may be called twice."""
        with self._lock:
            self._patience.forget(self._loan)
            self._closed = True
            self._sock.close()
        super().close()

    # -- bytes ------------------------------------------------------------------------------------------------------------

    def readable(self) -> bool:
        return True

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 - as a socket's
        """What http.client asks a socket for."""
        return self.file

    def fileno(self) -> int:
        return self._sock.fileno()

    def readinto(self, buffer: Any) -> int | None:
        """One receive, waited for. Raises BrokenError or StoppedError."""
        while True:
            try:
                count = self._sock.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError):
                if self._only_looking:
                    return None
                self._wait(select.POLLIN, len(buffer) if self.due is None else 0)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            except OSError as error:
                self._raise(error)
            else:
                self._check_abort()
                # Also where nothing is waited for: a head may be without end.
                if self.due is not None and self._patience.clock() > self.due:
                    raise BrokenError(f"{self._name} gives no answer in time")
                self.at_end, self.has_spoken = count == 0, self.has_spoken or count > 0
                return count

    def write_all(self, data: bytes) -> None:
        """Sends all of `data`. Raises BrokenError or StoppedError."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._sock.send(left) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except OSError as error:
                self._raise(error)

    def has_come(self) -> bool:
        """Whether a byte or the end is there to be read. Waits for nothing; TLS's own messages do not count."""
        self._only_looking = True
        try:
            return bool(self.file.peek(1)) or self.at_end
        except UnavailableError:
            return True
        finally:
            self._only_looking = False

    @property
    def was_stale(self) -> bool:
        """Whether the peer had closed it while it was idle (RFC 9112 section 9.3.1): that is no failure of a request."""
        return self.used and self.at_end and not self.has_spoken

    def _raise(self, error: OSError) -> NoReturn:
        self._check_abort()
        self.at_end = True
        raise BrokenError(f"{self._name} broke off: {error.strerror or type(error).__name__}") from None

    # -- waiting ----------------------------------------------------------------------------------------------------------

    def _wait(self, event: int, wanted: int = 0) -> None:
        """Until the socket is ready for `event`. Raises BrokenError where that takes too long, StoppedError where told to.

        A little longer where more is `wanted` than has come.
        """
        self._check_abort()
        began = self._patience.clock()
        limit = self._patience.silence(choice=self.choice)
        if self.due is not None:
            limit = max(min(limit, self.due - began), 0.0)
        self._poll.register(self._sock, event)
        ready = self._gather(min(wanted, GATHER_BYTES), min(limit, GATHER_SECONDS)) if wanted else []
        ready = ready or self._poll.poll(limit * 1000)
        self._check_abort()
        if not ready:
            self._patience.check()
            raise BrokenError(f"{self._name} gives no answer in time")
        self._count_wait(self._patience.clock() - began)

    def _gather(self, count: int, seconds: float) -> list[tuple[int, int]]:
        """What poll gives once `count` bytes have come, the end, or nothing in so long."""
        if sys.platform != "linux" or isinstance(self._sock, ssl.SSLSocket):
            return []  # what TLS has to give is not what has come
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            return self._poll.poll(seconds * 1000)
        finally:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _count_wait(self, seconds: float) -> None:
        """Raises BrokenError where what has come during all waits together is as good as nothing."""
        self._waited += seconds
        if self._waited >= self._patience.stall_seconds(choice=self.choice):
            now = self._progress()
            if now - self._mark < SLOWEST_BYTES_PER_SECOND * self._waited:
                said = f"{self._name} is too slow: {now - self._mark:,} bytes in {self._waited:.1f} s"
                raise BrokenError(said, waited_s=self._waited)
            self._waited, self._mark = 0.0, now

    def _check_abort(self) -> None:
        if self._aborted:
            raise StoppedError(STOPPED)


class _Loan:
    """A wire as far as one prompt has it: what is aborted is this prompt's use, not the next one's."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def abort(self) -> None:
        self._wire.abort(self)


class _File(io.BufferedReader):
    """What http.client reads from. It closes an answer's file at the answer's end; the wire goes on."""

    def close(self) -> None:
        """Nothing: `Wire.close` ends it."""


def first_to_answer(wires: list[Wire], patience: Patience, seconds: float) -> Wire | None:
    """The first of `wires` on which something is to be read, or None after `seconds`. Raises StoppedError."""
    poll = select.poll()
    end = patience.clock() + seconds
    for wire in wires:
        poll.register(wire.fileno(), select.POLLIN)
    while True:
        for wire in wires:
            if wire.has_come():
                return wire
        left = end - patience.clock()
        patience.check()
        if left <= 0:
            return None
        poll.poll(left * 1000)
