"""Writing past the page cache: every byte in its place, whatever the pieces, and on disks that do not take it so."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.stores import direct

SIZES = st.integers(0, 3 * direct._UNIT_BYTES)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Objects of one unit are large, and a buffer holds two: so that all seams are met by small objects."""
    monkeypatch.setattr(direct, "LEAST_BYTES", direct._UNIT_BYTES)
    monkeypatch.setattr(direct, "_BUFFER_BYTES", 2 * direct._UNIT_BYTES)
    direct._own.__dict__.pop("buffer", None)
    yield
    direct._own.__dict__.pop("buffer", None)


def written(pieces) -> bytes:
    """What a file holds after `pieces` were written to it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "object"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            direct.write_pieces(file, pieces)
        finally:
            os.close(file)
        return path.read_bytes()


def some_bytes(sizes):
    """Pieces of these sizes, each another part of one sequence."""
    data, pieces, start = os.urandom(sum(sizes)), [], 0
    for size in sizes:
        pieces.append(memoryview(data)[start : start + size])
        start += size
    return data, pieces


@settings(max_examples=40)
@given(st.lists(SIZES, max_size=6))
def test_a_file_holds_the_pieces_in_order(sizes):
    """Of any number and sizes, whole units or not."""
    data, pieces = some_bytes(sizes)
    assert data == written(pieces)


@pytest.mark.parametrize("refused", range(3))
def test_a_disk_that_asks_for_more_gets_the_rest_as_usual(monkeypatch, refused):
    """EINVAL at any write is no failure: what is left goes through the page cache."""
    data, pieces = some_bytes([5 * direct._UNIT_BYTES + 100])
    calls, write = [], os.write

    def picky(file, part):
        calls.append(len(part))
        if len(calls) > refused:
            raise OSError(errno.EINVAL, "not so")
        return write(file, part)

    monkeypatch.setattr(os, "write", picky)
    assert data == written(pieces)


def test_a_short_write_is_gone_on_with(monkeypatch):
    """Of which the next place is no whole unit."""
    data, pieces = some_bytes([4 * direct._UNIT_BYTES])
    write = os.write
    monkeypatch.setattr(direct, "_set_direct", lambda file, *, on: True)
    monkeypatch.setattr(os, "write", lambda file, part: write(file, part[:1000]))
    assert data == written(pieces)


def test_a_full_disk_is_told(monkeypatch):
    """Any other error is the caller's."""
    monkeypatch.setattr(direct, "_set_direct", lambda file, *, on: True)

    def full(file, part):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="full"):
        written([bytes(2 * direct._UNIT_BYTES)])


def test_a_file_system_without_direct_writes_is_written_to_as_usual(monkeypatch):
    """As tmpfs was for long, and some network disks are."""
    monkeypatch.setattr(direct, "_set_direct", lambda file, *, on: False)
    data, pieces = some_bytes([3 * direct._UNIT_BYTES + 1, 5])
    assert data == written(pieces)


def test_pieces_of_wider_items_count_by_their_bytes():
    """A view of 16-bit numbers is twice as many bytes as items."""
    data = os.urandom(4 * direct._UNIT_BYTES)
    assert data == written([memoryview(data).cast("H")])
