"""Threads for blocking calls: used again, one call each at a time, and nothing lives on in those that wait."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import deque

import pytest

from kvcdn.edge import threads
from kvcdn.edge.threads import in_thread
from support.waiting import WAIT_SECONDS, until


class Thing:
    """Something that a call holds."""


def test_a_thread_serves_call_after_call() -> None:
    """Three hundred calls, one after the other, need a few threads: a result may be here before its thread is free again."""

    async def live() -> set[int]:
        return {await in_thread(threading.get_ident) for _ in range(300)}

    assert len(asyncio.run(live())) < 30


def test_calls_at_once_have_a_thread_each() -> None:
    """None waits for another, however many; results and errors are their own."""

    async def live() -> list[object]:
        barrier = threading.Barrier(50)

        def meet(number: int) -> int:
            barrier.wait(WAIT_SECONDS)
            if number % 7 == 0:
                raise ValueError(str(number))
            return number

        return list(await asyncio.gather(*(in_thread(meet, number) for number in range(50)), return_exceptions=True))

    found = asyncio.run(live())
    assert [number % 7 == 0 for number in range(50)] == [isinstance(one, ValueError) for one in found]
    assert [str(number) for number in range(50)] == [str(one) for one in found]


def test_a_call_that_hangs_is_nobody_elses_matter() -> None:
    """Others go on meanwhile, and a caller who gives up is not told later."""

    async def live() -> int:
        go = threading.Event()
        hanging = asyncio.create_task(in_thread(go.wait, 20))
        await asyncio.sleep(0)
        hanging.cancel()
        numbers = [await in_thread(lambda number=number: number) for number in range(20)]
        go.set()
        return sum(numbers)

    assert 190 == asyncio.run(live())


def test_nothing_of_a_call_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits, a new one above all, holds neither what it was called with nor what it gave back."""
    monkeypatch.setattr(threads, "_idle", deque())

    async def live() -> weakref.ref[Thing]:
        thing = Thing()
        assert thing is await in_thread(lambda: thing)
        return weakref.ref(thing)

    found = asyncio.run(live())

    def gone() -> bool:
        gc.collect()
        return found() is None

    until(gone)


def test_threads_leave_when_nothing_is_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a call at that very moment is done all the same."""
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.002)
    monkeypatch.setattr(threads, "_idle", deque())
    before = set(threading.enumerate())

    async def live() -> list[int]:
        found = []
        for number in range(200):
            found.append(await in_thread(lambda number=number: number))
            await asyncio.sleep(0.001 * (number % 5))
        return found

    assert list(range(200)) == asyncio.run(live())
    until(lambda: not set(threading.enumerate()) - before)
