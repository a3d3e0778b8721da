"""Threads for blocking calls: daemons, so that a call which hangs delays neither the loop nor the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Result or exception of `function`, run in a thread of its own, for whom the caller runs (`trail`).

    The caller bounds how many run at once.
    """
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

    threading.Thread(target=work, name=f"kvcdn-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
