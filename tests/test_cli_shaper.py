"""The shaper: bytes leave at the given rate, whole and in order, and all connections share it."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.cli.bench.shaper import BURST_SECONDS, Bucket, shaped_link
from support.waiting import WAIT_SECONDS


class Clock:
    """Time that passes when somebody sleeps, and somewhat longer than asked."""

    def __init__(self, late=0.0):
        self.now, self.late = 1000.0, late

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + self.late


@settings(deadline=None, max_examples=30)
@given(
    st.floats(1e3, 1.25e9),
    st.lists(st.integers(1, 1 << 18), min_size=50, max_size=200),
    st.floats(0, BURST_SECONDS),
)
def test_bytes_leave_at_the_rate(rate, pieces, late):
    """Whatever the pieces: no faster, and a sleep that was too long is made up for."""
    clock = Clock()
    bucket = Bucket(rate, clock=clock, sleep=clock.sleep)
    started = clock.now
    for count in pieces:
        bucket.take(count)
    needed = sum(pieces) / rate
    assert clock.now - started == pytest.approx(needed, abs=BURST_SECONDS + 1e-6)
    clock.late, started = late, clock.now
    for count in pieces:
        bucket.take(count)
    # Each sleep is late by less than is made up for at the next, so that only the last one counts.
    assert clock.now - started <= needed + 2 * BURST_SECONDS + 1e-6


def test_a_silence_is_not_saved_up():
    """After a pause bytes leave at the rate again, and not in a burst."""
    clock = Clock()
    bucket = Bucket(1e6, clock=clock, sleep=clock.sleep)
    clock.now += 60
    started = clock.now
    for _ in range(10):
        bucket.take(100_000)
    assert clock.now - started == pytest.approx(1.0, abs=2 * BURST_SECONDS)


@pytest.mark.parametrize(("mbit", "least"), [(1, 1448), (100, 1448), (10_000, 200_000)])
def test_pieces_are_small_on_slow_links_and_large_on_fast_ones(mbit, least):
    """A packet at least, and what a few milliseconds carry."""
    assert least <= Bucket(mbit * 1e6 / 8).piece <= max(least, mbit * 1e6 / 8 * 0.005)


def test_a_link_passes_bytes_unchanged_both_ways_and_ends_with_its_server():
    """A real process between real sockets; several connections at once."""
    sent = [bytes([number]) * 300_000 for number in range(3)]

    def answer(connection):
        with connection:
            number = connection.recv(1)
            connection.sendall(number + sent[number[0]])

    def serve(listener):
        for _ in sent:
            threading.Thread(target=answer, args=(listener.accept()[0],)).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,)).start()
        with shaped_link(listener.getsockname()[1], 1000, 0.001) as link:
            where = ("127.0.0.1", int(link.url.rsplit(":", 1)[1]))
            clients = [socket.create_connection(where, WAIT_SECONDS) for _ in sent]
            for number, client in enumerate(clients):
                client.sendall(bytes([number]))
            for number, client in enumerate(clients):
                with client, client.makefile("rb") as stream:
                    assert bytes([number]) + sent[number] == stream.read()
        assert link.process.wait(WAIT_SECONDS) != 0
