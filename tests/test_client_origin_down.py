"""An edge whose origin is down serves what it holds: the reader learns that what follows may be published all the same."""

from __future__ import annotations

import contextlib

import pytest
import torch

from kvcdn.client import MissReason
from kvcdn.client.network.exchange import lacks_origin
from kvcdn.client.sources.sources import open_source
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.errors import UnavailableError
from kvcdn.keys import PrefixNames, block_key
from kvcdn.model.tokens import Prompt
from kvcdn.stores.folder import FolderStore
from support.edge_process import running_edge
from support.published import publish_text
from support.tiny import tiny_checkpoint

ONE = {"max_new_tokens": 1, "do_sample": False}
BLOCK = 1024


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """Three blocks in a folder."""
    folder = tmp_path_factory.mktemp("origin-down")
    checkpoint = tiny_checkpoint(folder / "model", dtype=torch.float32)
    return publish_text(checkpoint, store=FolderStore(folder / "origin"), tokens=2500)


@pytest.fixture
def orphan(document, tmp_path):
    """The URL of an edge that holds the document's first block, and whose origin has died since."""
    with (
        running_edge(document.store.url, tmp_path / "origin's") as origin,
        running_edge(origin.url, tmp_path / "edge's") as edge,
    ):
        with contextlib.closing(EdgeSource(edge.url)) as source, document.client(source) as client:
            warm = client.generate(Prompt(document.token_ids[: BLOCK + 1]), **ONE)
            assert (BLOCK, None) == (warm.report.tokens_reused, warm.report.reason)
        origin.process.kill()
        origin.process.wait()
        yield edge.url


def test_what_an_edge_without_its_origin_does_not_know_is_told_from_what_is_not_published(document, orphan):
    """The report says that the origin is unavailable; what the edge holds is used."""
    with document.client(EdgeSource(orphan)) as client:
        report = client.generate(Prompt(document.token_ids, (len(document.token_ids),)), **ONE).report
        assert (BLOCK, MissReason.ORIGIN_UNAVAILABLE) == (report.tokens_reused, report.reason)
        assert orphan in report.detail
        # Nothing is missing where the edge has all that could be used.
        report = client.generate(Prompt(document.token_ids[: BLOCK + 1]), **ONE).report
        assert (BLOCK, None) == (report.tokens_reused, report.reason)


def test_who_reaches_the_origin_himself_asks_it(document, orphan):
    """The edge's word is not the last where the origin is among the sources."""
    with document.client(open_source([orphan, document.store.url])) as client:
        report = client.generate(Prompt(document.token_ids, (len(document.token_ids),)), **ONE).report
        assert (len(document.token_ids) - 1, None) == (report.tokens_reused, report.reason)


def test_an_object_that_an_edge_cannot_get_is_told_from_an_edge_that_is_down(document, orphan):
    """The error of a block leads to the same reason."""
    with document.client(EdgeSource(orphan)) as client:
        names = PrefixNames.of(document.loaded.identity, client.namespace, document.token_ids)
    session = EdgeSource(orphan).session()
    session.hurry(0.0)
    with pytest.raises(UnavailableError) as caught:
        session.read(block_key(document.loaded.identity.tag, names.blocks[1].address), 1 << 30)
    assert MissReason.ORIGIN_UNAVAILABLE is MissReason.of(caught.value)


def test_a_match_that_was_complete_is_not_cut(document, tmp_path):
    """Of a document that is not published further, by an edge that is well."""
    with running_edge(document.store.url, tmp_path) as edge, contextlib.closing(EdgeSource(edge.url)) as source:
        identity = document.loaded.identity
        with document.client(source) as client:
            names = PrefixNames.of(identity, client.namespace, (*document.token_ids[:BLOCK], *document.token_ids))
        session = source.session()
        assert 1 == session.match(identity.tag, [block.address for block in names.blocks])
        assert "" == session.cut_short


@pytest.mark.parametrize(
    ("header", "cut"),
    [
        ("", False),
        ("kvcdn; hit", False),
        ("kvcdn; hit; detail=origin-unavailable", True),
        ("kvcdn;hit;detail=origin-unavailable, cdn; fwd=miss", True),
        ("cdn; hit, kvcdn; hit; detail=origin-unavailable", True),
        ("detail=origin-unavailable", False),
        ("kvcdn; hit; detail=origin-unavailable-not", False),
        (",;, ;" * 100, False),
    ],
)
def test_the_word_is_found_among_those_of_other_caches(header, cut):
    """RFC 9211: a list of caches, each with parameters."""
    assert cut is lacks_origin(header)
