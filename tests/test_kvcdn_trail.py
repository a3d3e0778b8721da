"""The trail: what a stranger calls a request is bounded, kept with what runs for it, and passed on."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvcdn import trail
from kvcdn.edge.threads import in_thread
from kvcdn.trail import Trail, following

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("name", ["a", "A-b_c.d~9", "x" * 64])
def test_a_plain_id_is_kept(name: str) -> None:
    assert name == Trail.of(name).request_id
    assert {"X-Request-Id": name} == Trail.of(name).headers


@pytest.mark.parametrize("name", [None, "", "x" * 65, "a b", "a\nb", "a\n", "é", "<b>", "a,b", '"', "a;b", "\x00"])
def test_another_is_replaced(name: str | None) -> None:
    """By one that no other request has."""
    first, second = Trail.of(name).request_id, Trail.of(name).request_id
    assert (16, 16, False) == (len(first), len(second), first == second)
    assert first.isalnum()


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT + "-",
        PARENT[:-1],
        "01" + PARENT[2:],
        "00-" + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + "-01",
        PARENT + "\n",
        " " + PARENT,
    ],
)
def test_what_is_no_traceparent_is_left_out(parent: str) -> None:
    """And a tracestate with it (W3C Trace Context, section 3.3.1.5)."""
    assert {"X-Request-Id"} == set(Trail.of("a", parent, "vendor=1").headers)


def test_a_trace_is_passed_on() -> None:
    """As it came; a state that is too long, or not printable, is left out (section 3.3.1.5)."""
    assert {"X-Request-Id": "a", "traceparent": PARENT} == Trail.of("a", PARENT).headers
    assert "vendor=1" == Trail.of("a", PARENT, "vendor=1").headers["tracestate"]
    for state in ("", "x" * 513, "a\r\nb", "é"):
        assert {"X-Request-Id": "a", "traceparent": PARENT} == Trail.of("a", PARENT, state).headers


def test_it_goes_with_tasks_and_threads() -> None:
    """Into what they begin, and out of nothing else."""

    async def work(name: str) -> list[str]:
        trail.follow(Trail.of(name))
        inner = asyncio.create_task(asyncio.sleep(0, trail.current()))
        found = [await inner, await in_thread(trail.current), trail.current()]
        return [one.request_id for one in found if one is not None]

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(work("a"), work("b")))

    assert [["a"] * 3, ["b"] * 3] == asyncio.run(both())
    assert trail.current() is None
    assert {} == trail.headers()


def test_it_lasts_as_long_as_its_context() -> None:
    seen: list[object] = []
    with following(Trail.of("outer")), following(Trail.of("inner")):
        seen.append(trail.headers()["X-Request-Id"])
        thread = threading.Thread(target=lambda: seen.append(trail.current()))
        thread.start()
        thread.join()
    assert ["inner", None, None] == [*seen, trail.current()]
