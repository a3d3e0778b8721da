"""Matching: the longest published prefix, in few requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.client.loading.match import find_published
from kvcdn.client.sources.source import probe_lead
from kvcdn.keys import Chain, Namespace
from support.blocks import make_model

MODEL = make_model()
N = MODEL.layout.block_tokens
TOKENS = tuple(random.Random(1).randrange(500) for _ in range(5 * N))


class Shelf:
    """A source that knows which addresses exist, and counts the questions."""

    url = "shelf"

    def __init__(self, *lengths: int) -> None:
        self.asked = 0
        self.addresses = {
            block.address for length in lengths for block in Chain(MODEL, Namespace.public(), TOKENS).prefix(length).blocks
        }

    def match(self, tag, addresses):
        self.asked += 1
        assert MODEL.tag == tag
        return next((index for index, address in enumerate(addresses) if address not in self.addresses), len(addresses))


def longest_reusable(prompt: int, boundaries: list[int], published: list[int]) -> int:
    """What the search must find, by the definition: whole blocks of any document, and tails at known boundaries."""
    found = [0]
    for length in published:
        found.append(min(prompt, length) // N * N)
        if length in boundaries and length <= prompt:
            found.append(length)
    return max(found)


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.integers(1, 5 * N),
    boundaries=st.lists(st.integers(1, 5 * N), max_size=4),
    published=st.lists(st.integers(1, 5 * N), max_size=3),
    shared=st.integers(0, 2),
)
def test_the_longest_prefix_is_found(prompt, boundaries, published, shared):
    """For any documents and any boundaries, known and published ones among them."""
    boundaries = sorted({*boundaries, *published[:shared]})
    shelf = Shelf(*published)
    found = find_published(shelf, Chain(MODEL, Namespace.public(), TOKENS[:prompt]), tuple(boundaries))
    assert longest_reusable(prompt, boundaries, published) == found.tokens
    assert list(range(0, found.tokens, N)) == [block.start for block in found.blocks]


@pytest.mark.parametrize("length", [N // 2, N, 2 * N + 100])
def test_a_published_document_before_a_short_question_is_one_request(length):
    """The common case costs one round trip."""
    shelf = Shelf(length)
    found = find_published(shelf, Chain(MODEL, Namespace.public(), TOKENS[: length + 20]), (length,))
    assert (length, 1) == (found.tokens, shelf.asked)


@given(total=st.integers(0, 5000), there=st.integers(0, 5000))
def test_probing_finds_the_lead_in_few_questions(total, there):
    """Against a plain web server: bisection, and one question for what is there entirely."""
    there = min(there, total)
    asked = []

    def exists(key):
        asked.append(key)
        return int(key) < there

    assert there == probe_lead([str(index) for index in range(total)], exists)
    assert len(asked) <= 14
    assert there < total or total == 0 or 1 == len(asked)
