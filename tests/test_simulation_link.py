"""Simulated links and queues, against arithmetic by hand and against queueing theory."""

from __future__ import annotations

import math
import random

import pytest

from kvcdn.simulation.link import Link
from kvcdn.simulation.loop import Loop
from kvcdn.simulation.pool import Pool


def ends_of(link_of, starts):
    """Seconds at which transfers of (start, size) end, in their order."""
    loop = Loop()
    link = link_of(loop)
    ends = [math.inf] * len(starts)

    def start(number, size):
        link.start(size, lambda: ends.__setitem__(number, loop.now))

    for number, (at, size) in enumerate(starts):
        loop.at(at, lambda number=number, size=size: start(number, size))
    loop.run()
    return ends, link


def test_two_transfers_share_by_hand():
    """100 bytes alone for 0.5 s, then both at half the speed: 50 left at 50 a second, then the other alone again."""
    ends, link = ends_of(lambda loop: Link(loop, 100), [(0.0, 100.0), (0.5, 100.0)])
    assert [pytest.approx(1.5), pytest.approx(2.0)] == ends
    assert 200 == link.sent
    assert 2.0 == pytest.approx(link.busy_s)


def test_no_transfer_is_above_its_own_limit():
    """Two readers of 30 bytes a second on a link of 100 do not notice each other; four do."""
    ends, _ = ends_of(lambda loop: Link(loop, 100, 30), [(0.0, 60.0), (0.0, 90.0)])
    assert [pytest.approx(2.0), pytest.approx(3.0)] == ends
    ends, _ = ends_of(lambda loop: Link(loop, 100, 30), [(0.0, 50.0)] * 4)
    assert [pytest.approx(2.0)] * 4 == ends


def test_infinite_and_zero_bandwidth():
    """Without a limit all is there at once; over a dead link nothing ever is, and the loop ends."""
    ends, _ = ends_of(lambda loop: Link(loop, math.inf), [(1.0, 1e12), (1.0, 1.0)])
    assert [1.0, 1.0] == ends
    ends, link = ends_of(lambda loop: Link(loop, 0.0), [(1.0, 1.0)])
    assert [math.inf] == ends
    assert 0.0 == link.sent


def test_a_stopped_transfer_frees_its_share():
    """Of two, one is stopped after a second with 50 bytes sent; the other goes on alone."""
    loop = Loop()
    link = Link(loop, 100)
    ends = []
    first = link.start(1000.0, lambda: ends.append("first"))
    link.start(150.0, lambda: ends.append(loop.now))
    loop.at(1.0, lambda: link.stop(first))
    loop.run()
    assert [pytest.approx(2.0)] == ends
    assert pytest.approx(50.0) == first.sent
    assert pytest.approx(200.0) == link.sent


@pytest.mark.parametrize("sizes", [(100.0, 100.0), (20.0, 420.0)], ids=["equal", "unequal"])
def test_mean_time_is_that_of_m_g_1_processor_sharing(sizes):
    """At half load the mean is mean size / (speed x (1 - load)), whatever the sizes' distribution; and Little's law holds."""
    rng = random.Random(1)
    small = (sizes[1] - 100) / (sizes[1] - sizes[0]) if sizes[0] != sizes[1] else 1.0
    starts, now = [], 0.0
    for _ in range(60_000):
        now += rng.expovariate(0.5)
        starts.append((now, sizes[0] if rng.random() < small else sizes[1]))
    ends, link = ends_of(lambda loop: Link(loop, 100.0), starts)
    sojourns = [end - start for end, (start, _) in zip(ends, starts, strict=True)]
    mean = sum(sojourns) / len(sojourns)
    assert 1.0 / (1 - 0.5) == pytest.approx(mean, rel=0.05)
    # Transfers under way, on average, are their rate of arrival times their mean time.
    assert link.transfer_s == pytest.approx(sum(sojourns), rel=1e-6)
    assert link.sent == pytest.approx(sum(size for _, size in starts), rel=1e-9)


def test_a_pool_is_m_d_c():
    """One device, jobs of a second at half load: the mean wait is load / (2 (1 - load)), by Pollaczek and Khinchine."""
    rng = random.Random(2)
    loop = Loop()
    pool = Pool(loop, 1)

    def job():
        pool.take(1.0, lambda: loop.after(1.0, lambda: pool.give(1.0)))

    now = 0.0
    for _ in range(60_000):
        now += rng.expovariate(0.5)
        loop.at(now, job)
    loop.run()
    assert 0.5 == pytest.approx(pool.waited_s / pool.jobs, rel=0.05)
    assert pytest.approx(60_000.0) == pool.busy_s


def test_a_pool_of_none_has_no_queue():
    """Where every reader has a device, nobody waits; with two devices the third does."""
    for devices, waits in ((0, 0.0), (2, 5.0), (3, 0.0)):
        loop = Loop()
        pool = Pool(loop, devices)
        for _ in range(3):
            pool.take(5.0, lambda loop=loop, pool=pool: loop.after(5.0, lambda: pool.give(5.0)))
        if devices == 2:
            assert 7.5 == pool.expected_wait_s
        loop.run()
        assert waits == pool.waited_s
