"""Prefix files: what is read back is what was published, and nothing else passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn import canonical
from kvcdn.errors import CorruptError, IntegrityError, UntrustedError
from kvcdn.keys import Namespace, PrefixNames
from kvcdn.prefixfile import ALIGNMENT_BYTES, PrefixFile, PrefixVerifier, open_prefix_file
from kvcdn.signing import SigningKey, TrustList
from support.prefixes import BLOCK, PUBLISHER, ROOM, TRUST, Prefix, two_layers

MODEL = two_layers()
PREFIX = Prefix(MODEL, (1, 2), tail=100)
IMAGE = bytes(PREFIX.image())


def used(image: bytes) -> list[tuple[int, int]]:
    """The parts of a file that mean something: its head, and the rows of each tensor."""
    places = [place for layer in PREFIX.file.places(MODEL.layout) for place in layer]
    head = len(PREFIX.file.encoded) + sum(map(len, PREFIX.envelopes))
    return [(0, head), *((rows.start, rows.stop) for rows in (place.span(0, 2 * BLOCK + 100) for place in places))]


def test_a_file_says_and_holds_what_was_published():
    """Header, places and rows: every tensor page-aligned, with room behind its last row, and checked to the last byte."""
    file = open_prefix_file(memoryview(IMAGE), "file")
    assert PREFIX.file == file
    assert [PUBLISHER.public] * 3 == PREFIX.check(memoryview(IMAGE))
    places = [place for layer in file.places(MODEL.layout) for place in layer]
    assert [0] * 4 == [place.offset % ALIGNMENT_BYTES for place in places]
    assert {2 * BLOCK + 100 + ROOM} == {place.rows for place in places}
    assert len(IMAGE) == file.size(MODEL.layout)
    for name in PREFIX.names:
        flat = [data for layer in PREFIX.raw(name) for data in layer]
        assert flat == [IMAGE[place.span(name.start, name.end)] for place in places]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_changed_bit_in_anything_that_means_something_is_found(data):
    """Magic, length, header, envelopes, rows: whatever is read is what the publisher signed, or refused."""
    start, end = data.draw(st.sampled_from(used(IMAGE)))
    position = data.draw(st.integers(start, end - 1))
    image = bytearray(IMAGE)
    image[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        PREFIX.check(memoryview(image))
    except IntegrityError:
        return
    # Labels and the room are nobody's promise; all that serves a prompt is as it was.
    assert replace(open_prefix_file(memoryview(image), "file"), model_name=MODEL.name) == PREFIX.file


@given(st.binary(max_size=200) | st.builds(lambda tail: IMAGE[:12] + tail, st.binary(max_size=400)))
def test_any_bytes_are_a_header_or_an_error(data):
    """The reader of headers ends in a value or in CorruptError."""
    try:
        open_prefix_file(memoryview(data), "file")
    except CorruptError:
        return
    raise AssertionError("random bytes are no prefix file")


CHANGES = {
    "another type": {"type": "block"},
    "another version": {"v": 2},
    "no tokens": {"tokens": 0},
    "tokens that do not add up": {"tokens": 2 * BLOCK + 99},
    "capacity below tokens": {"capacity": 2 * BLOCK},
    "capacity beyond all": {"capacity": 1 << 40},
    "first behind the end": {"first": [0, 3 * BLOCK, 0]},
    "first within a block": {"first": [0, 5, 0]},
    "first of what has no rows": {"first": [0, 0, BLOCK]},
    "a layer too few": {"first": [0, 0]},
    "no blocks": {"blocks": []},
    "a bool for a number": {"capacity": True},
    "an unknown field": {"more": 1},
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_header_that_says_something_else_is_refused(case):
    """Each field has its range, and together they have one size of file."""
    length = int.from_bytes(IMAGE[8:12], "little")
    header = {**canonical.decode(IMAGE[12 : 12 + length], "header"), **CHANGES[case]}
    encoded = canonical.encode(header)
    image = IMAGE[:8] + len(encoded).to_bytes(4, "little") + encoded + IMAGE[12 + length :]
    with pytest.raises(CorruptError):
        PREFIX.check(memoryview(image))


@pytest.mark.parametrize("length", [0, 7, 11, 12, 500, len(IMAGE) - ALIGNMENT_BYTES, len(IMAGE) - 1, len(IMAGE) + 1])
def test_a_file_of_another_length_is_refused(length):
    """A torn file is found by its size before anything of it is read."""
    with pytest.raises(CorruptError):
        PREFIX.check(memoryview((IMAGE + b"x")[:length]))


def test_blocks_in_another_order_or_of_another_text_are_refused():
    """A block is taken for the prompt's own only at its place, under its name, with the key that follows from the text."""
    other = Prefix(MODEL, (1, 3), tail=100)
    mixed = other.image()
    with pytest.raises(CorruptError):
        PREFIX.check(memoryview(mixed))
    private = PrefixNames.of(MODEL, Namespace.private("mine", bytes(32)), PREFIX.token_ids).blocks
    verifier = PrefixVerifier(PREFIX.file, memoryview(IMAGE), MODEL, "file")
    with pytest.raises(CorruptError):
        verifier.check_block(private[0], TRUST)
    with pytest.raises(CorruptError):
        PREFIX.file.leading(private[0].address)


def test_rows_that_another_trusted_publisher_signed_are_not_taken_for_these():
    """An envelope of another block run, well signed: its digests are those of its own rows."""
    envelopes = [*PREFIX.envelopes[:2], Prefix(MODEL, (1, 2), tail=100).envelopes[2]]
    image = bytearray(IMAGE)
    start = len(PREFIX.file.encoded) + sum(map(len, envelopes[:2]))
    # The same rows, sealed again: another salt, another signature, and as good.
    image[start : start + len(envelopes[2])] = envelopes[2]
    assert [PUBLISHER.public] * 3 == PREFIX.check(memoryview(image))
    other = replace(PREFIX, model=MODEL)
    object.__setattr__(other, "raw", lambda name: [[data[::-1] for data in layer] for layer in PREFIX.raw(name)])
    image[start : start + len(envelopes[2])] = other.envelopes[2]
    with pytest.raises(CorruptError, match="rows are not those"):
        PREFIX.check(memoryview(image))


def test_who_is_not_trusted_now_is_not_served():
    """What was stored under one trust list is nothing to a reader with another."""
    for trust in (TrustList({}), TrustList.of(SigningKey.generate().public)):
        with pytest.raises(UntrustedError):
            PREFIX.check(memoryview(IMAGE), trust)


def test_of_windows_only_what_is_here_is_promised():
    """A file with the last rows of a window serves its own end, and not a shorter prefix."""
    model = two_layers(window=10)
    prefix = Prefix(model, (1, 2), tail=100, first=(0, 2 * BLOCK, 0))
    assert [PUBLISHER.public] * 3 == prefix.check(memoryview(prefix.image()))
    assert prefix.file.reaches(model.layout, 2 * BLOCK + 100)
    assert prefix.file.reaches(model.layout, 2 * BLOCK + 9)
    assert not prefix.file.reaches(model.layout, 2 * BLOCK + 8)
    whole = Prefix(model, (1, 2), tail=100)
    assert whole.file.covers(prefix.file)
    assert not prefix.file.covers(whole.file)
    assert whole.file.covers(Prefix(model, (1,)).file)
    assert not whole.file.covers(Prefix(model, (2,)).file)
    assert not Prefix(model, (1,)).file.covers(whole.file)


def test_disk_bytes_are_the_rows_in_whole_pages():
    """What a file takes of the disk does not grow with its room."""
    file: PrefixFile = PREFIX.file
    roomy = replace(file, capacity=file.tokens + 100_000)
    assert file.disk_bytes(MODEL.layout) == roomy.disk_bytes(MODEL.layout)
    rows = (2 * BLOCK + 100) * MODEL.layout.bytes_per_token
    assert rows < file.disk_bytes(MODEL.layout) < rows + 7 * ALIGNMENT_BYTES + sum(map(len, PREFIX.envelopes))
