"""Threads for blocking calls: daemons, so that a call which hangs delays neither the loop nor the end of the process.

A thread that is done waits a while for the next call: on the way of a cold miss, which takes three, starting threads is felt.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

IDLE_SECONDS = 10.0
"""How long a thread without a call stays."""

_idle: deque[SimpleQueue[Callable[[], None]]] = deque()
"""Where threads wait, the one that came last first: each is given at most one call at a time."""


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Result or exception of `function`, run for whom the caller runs (`trail`), in a thread where nothing else runs.

    The caller bounds how many run at once.
    """
    return await begin_in_thread(function, *args, **kwargs)


def begin_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """As `in_thread`, begun at once; who waits for it may give up, and the call goes on."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - every end of the call is the caller's to see
            post(_fail, error)
        else:
            post(_succeed, result)

    def post(deliver: Callable[..., None], outcome: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(deliver, future, outcome)

    try:
        _run(work)
    except RuntimeError as error:  # the system gives no more threads
        future.set_exception(error)
    return future


def _run(work: Callable[[], None]) -> None:
    try:
        _idle.pop().put(work)
    except IndexError:
        # By its queue: what a thread is begun with lives as long as it does.
        calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        calls.put(work)
        threading.Thread(target=_serve, args=(calls,), name="kvcdn-call", daemon=True).start()


def _serve(calls: SimpleQueue[Callable[[], None]]) -> None:
    """The life of a thread."""
    work = calls.get()
    while True:
        work()
        # Nothing of a call, such as the file that it used, is to live on in a thread that waits.
        del work
        _idle.append(calls)
        try:
            work = calls.get(timeout=IDLE_SECONDS)
        except Empty:
            try:
                _idle.remove(calls)
            except ValueError:
                # Somebody has taken this place at the last moment, and gives it a call.
                work = calls.get()
            else:
                return


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
