"""Client, edge and origin count the same: real edges on real sockets, a tiny model, and what is in their ledgers afterwards."""

from __future__ import annotations

import contextlib
import json

import pytest

from kvcdn.accounting.books import Books
from kvcdn.accounting.entry import HEADER, Loss, Outcome, Part, PromptId, read_tie, total
from kvcdn.accounting.ledger import Ledger
from kvcdn.accounting.snapshot import Snapshot
from kvcdn.client import Client
from kvcdn.client.usage import Usage
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.origin.service.usage import OriginUsage
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.memory import MemoryStore
from support.edge_process import WatchedStore, ask, ask_match, edge_in_thread, settle
from support.published import Published, publish_text
from support.tiny import TEXT

QUESTION = " What is a derivative work?"


@pytest.fixture(scope="module")
def published(tiny_llama) -> Published:
    return publish_text(tiny_llama, tokens=2200)


def entries(path, part):
    with Ledger(path, create=False) as ledger:
        return [entry for entry in ledger.snapshot().entries if entry.key.part is part]


def counts(path, part):
    return total(entry.counts for entry in entries(path, part))


def prompt_of(client: Client, published: Published, question=QUESTION):
    from kvcdn.model.tokens import encode_text

    return encode_text(client.tokenizer, published.text + question, [len(published.text)])


def test_the_three_agree_to_the_byte(published, tmp_path):
    """What the publisher stored is what the edge filled and sent, and what the client received and used."""
    ledger = tmp_path / "usage.sqlite"
    with OriginUsage(tmp_path / "origin.sqlite") as usage:
        store = MemoryStore()
        usage.published(Publisher(published.loaded, store, published.key).publish(published.token_ids).to_json(), "press")
    with edge_in_thread(store, tmp_path / "edge", usage_file=tmp_path / "edge.sqlite") as edge:
        with published.client(edge.url, usage=Usage(ledger, tenant="acme")) as client:
            report = client.generate(prompt_of(client, published), max_new_tokens=1).report
        settle(edge.url)
    client_counts, edge_counts = counts(ledger, Part.CLIENT), counts(tmp_path / "edge.sqlite", Part.EDGE)
    origin_counts = counts(tmp_path / "origin.sqlite", Part.ORIGIN)
    stored = published.result.stored_bytes
    sizes = [origin_counts["bytes_stored"], edge_counts["origin_bytes"], edge_counts["bytes_sent"]]
    assert [stored] * 5 == [*sizes, client_counts["bytes_edge"], client_counts["bytes_used"]]
    assert published.result.tokens == origin_counts["tokens_published"] == origin_counts["tokens_computed"]
    assert published.result.tokens == edge_counts["tokens_served"] == client_counts["tokens_begun"]
    assert published.result.blocks == edge_counts["blocks_served"] == client_counts["blocks_begun"]
    assert published.result.blocks == edge_counts["blocks_matched"]
    assert report.tokens_reused == client_counts["tokens_fetched"] == client_counts["tokens_offered"]
    asked = [client_counts.get(f"tokens_{way}", 0) for way in ("fetched", "local", "kept", "computed", "prefilled")]
    assert report.tokens_total == client_counts["tokens_asked"] == sum(asked)
    assert 1 == client_counts["begun"] == client_counts["prompts"]
    assert edge_counts["requests"] == client_counts["requests_edge"]
    assert 0 == client_counts.get("requests_cut", 0)


def test_prompt_and_document_tie_the_ledgers(published, tmp_path):
    """The edge knows the client's random id and the document's address, and nothing that says more."""
    with edge_in_thread(published.store, tmp_path / "edge", usage_file=tmp_path / "edge.sqlite") as edge:
        with published.client(edge.url, usage=tmp_path / "usage.sqlite") as client:
            report = client.generate(prompt_of(client, published), max_new_tokens=1).report
        settle(edge.url)
    served = [entry.key for entry in entries(tmp_path / "edge.sqlite", Part.EDGE) if entry.key.outcome is Outcome.MISS]
    ended = [entry.key for entry in entries(tmp_path / "usage.sqlite", Part.CLIENT) if entry.key.outcome is Outcome.REUSED]
    assert {report.prompt_id} == {key.prompt for key in served} == {key.prompt for key in ended}
    assert {published.result.address} == {key.document for key in served} == {key.document for key in ended}
    assert {str(published.loaded.identity.tag)} == {key.model for key in served} == {key.model for key in ended}
    # Whoever is on loopback, of an edge that asks nobody who he is.
    assert {"local"} == {key.tenant for key in served}
    assert 32 == len(report.prompt_id) == 2 * PromptId.SIZE
    assert "What is" not in (tmp_path / "edge.sqlite").read_bytes().decode("latin-1")
    assert "What is" not in (tmp_path / "usage.sqlite").read_bytes().decode("latin-1")


def test_clients_count_nothing_unless_asked_to(published, tmp_path):
    """Without a ledger no header goes out, and no thread or file is made."""
    with edge_in_thread(published.store, tmp_path / "edge", usage_file=tmp_path / "edge.sqlite") as edge:
        with published.client(edge.url) as client:
            report = client.generate(prompt_of(client, published), max_new_tokens=1).report
        settle(edge.url)
    assert report.tokens_reused
    assert "" == report.prompt_id
    assert {""} == {entry.key.prompt for entry in entries(tmp_path / "edge.sqlite", Part.EDGE)}


def test_the_environment_can_ask_for_a_ledger(published, tmp_path, monkeypatch):
    """KVCDN_USAGE, and on whose account in KVCDN_USAGE_TENANT."""
    monkeypatch.setenv("KVCDN_USAGE", str(tmp_path / "usage.sqlite"))
    monkeypatch.setenv("KVCDN_USAGE_TENANT", "acme")
    with published.client() as client:
        client.generate(prompt_of(client, published), max_new_tokens=1)
    found = entries(tmp_path / "usage.sqlite", Part.CLIENT)
    assert {"acme"} == {entry.key.tenant for entry in found}
    assert published.result.stored_bytes == counts(tmp_path / "usage.sqlite", Part.CLIENT)["bytes_origin"]
    assert "bytes_edge" not in counts(tmp_path / "usage.sqlite", Part.CLIENT)


@pytest.mark.parametrize(
    ("what", "loss"),
    [
        ("nothing like it", Loss.NOT_PUBLISHED),
        ("goes on otherwise", Loss.DIVERGED),
        ("nobody trusted", Loss.REFUSED),
        ("planned", Loss.SLOWER),
        ("down", Loss.UNAVAILABLE),
    ],
)
def test_who_lost_the_hit(published, tmp_path, what, loss):
    """Each kind of miss is told, with the tokens it cost."""
    from kvcdn.model.tokens import encode_text

    text = {
        "nothing like it": TEXT[5000:8000],
        "goes on otherwise": published.text[: len(published.text) * 2 // 3] + "Otherwise. " * 90,
    }.get(what)
    text = text or published.text
    options = {"usage": tmp_path / "usage.sqlite"}
    if what == "nobody trusted":
        options["trust"] = TrustList.of(SigningKey.generate().public)
    if what == "planned":
        options["mode"] = "compute"
    store = WatchedStore(published.store)
    store.down = what == "down"
    from kvcdn.client.sources.stored import StoreSource

    with published.client(StoreSource(store), **options) as client:
        prompt = encode_text(client.tokenizer, text + QUESTION, [len(text)])
        report = client.generate(prompt, max_new_tokens=1).report
    ended = [entry for entry in entries(tmp_path / "usage.sqlite", Part.CLIENT) if entry.key.outcome is not Outcome.BEGUN]
    assert [loss] == [entry.key.loss for entry in ended]
    offered = client.loaded.identity.layout.document_end(min(prompt.boundaries))
    assert offered - report.tokens_reused == ended[0].counts["tokens_lost"] > 0


def test_an_edge_says_what_it_had_to_send_away(published, tmp_path):
    """An object that left for others is no plain miss when it comes back; nor is it one when it cannot come back."""
    from kvcdn.keys import PrefixNames, block_key

    names = PrefixNames.of(published.loaded.identity, published.client().namespace, published.token_ids)
    first = "/" + block_key(published.loaded.identity.tag, names.blocks[0].address)
    store, path = WatchedStore(published.store), tmp_path / "edge.sqlite"
    with edge_in_thread(store, tmp_path / "edge", usage_file=path) as edge:
        for _ in range(2):
            assert 200 == ask(edge.url, first).status
            settle(edge.url)
        victims = edge.cache._eviction.relieve(1)
        assert [first[1:]] == victims
        edge.cache._forget(victims)
        assert edge.cache.has_evicted(first[1:])
        assert 200 == ask(edge.url, first).status
        settle(edge.url)
        assert not edge.cache.has_evicted(first[1:])
        edge.cache._forget(edge.cache._eviction.relieve(1))
        store.down = True
        assert 504 == ask(edge.url, first).status
    found = entries(path, Part.EDGE)
    sent = {entry.key.outcome: entry.counts.get("bytes_sent", 0) for entry in found if entry.counts.get("requests")}
    size = published.store.stat(first[1:]).size
    assert {Outcome.MISS: size, Outcome.HIT: size, Outcome.EVICTED: size, Outcome.REFUSED: 0} == sent
    assert [1] == [entry.counts["blocks_evicted"] for entry in found if entry.key.outcome is Outcome.REFUSED]
    failed = [entry for entry in found if entry.key.outcome is Outcome.FAILED]
    assert ["origin-unavailable"] == [entry.key.reason for entry in failed]


def test_edges_give_their_ledgers_away_over_http(published, tmp_path):
    """As lines that are the same as what the file holds, counted up to this moment."""
    path = tmp_path / "edge.sqlite"
    with edge_in_thread(published.store, tmp_path / "edge", usage_file=path) as edge:
        with published.client(edge.url, usage=tmp_path / "usage.sqlite") as client:
            client.generate(prompt_of(client, published), max_new_tokens=1)
        settle(edge.url)
        reply = ask(edge.url, "/v1/usage")
        assert 200 == reply.status
        given = Snapshot.decode(reply.body.splitlines(keepends=True), "reply")
        assert published.result.stored_bytes == total(entry.counts for entry in given.entries)["bytes_sent"]
        assert [Part.EDGE] == [run.part for run in given.head.runs]
        assert 405 == ask(edge.url, "/v1/usage", "POST").status
    with Ledger(path, create=False) as ledger:
        kept = ledger.snapshot()
    assert Books.of([given, kept]).ledgers == Books.of([kept]).ledgers
    assert () == kept.head.runs


def test_an_edge_without_a_ledger_says_so(published, tmp_path):
    """And writes none."""
    with edge_in_thread(published.store, tmp_path / "edge") as edge:
        assert 404 == ask(edge.url, "/v1/usage").status


@pytest.mark.parametrize(
    "value", ["", "x" * 32, "0" * 31, "0" * 32 + "/", "0" * 32 + "/" + "g" * 64, "0" * 33, "A" * 32, "0" * 5000]
)
def test_a_header_in_another_form_says_nothing(value):
    """Bounded, and no text."""
    assert ("", "") == read_tie(value)


def test_a_header_that_is_no_tie_does_no_harm(published, tmp_path):
    """The request is answered, and counted without a prompt."""
    path = tmp_path / "edge.sqlite"
    with edge_in_thread(published.store, tmp_path / "edge", usage_file=path) as edge:
        key = next(iter(published.store.list("v1/"))).key
        assert 200 == ask(edge.url, "/" + key, headers={HEADER: "'); DROP TABLE entries; --"}).status
        assert 200 == ask(edge.url, "/" + key, headers={HEADER: "ab" * 16}).status
        settle(edge.url)
    assert {"", "ab" * 16} == {entry.key.prompt for entry in entries(path, Part.EDGE)}


def test_questions_on_a_prefix_in_memory_are_counted(published, tmp_path):
    """The document once, as fetched; the questions as kept."""
    with published.client(usage=tmp_path / "usage.sqlite") as client, client.prefix(published.text) as prefix:
        reports = [prefix.ask(question, max_new_tokens=1).report for question in ("Why?", "What for?")]
    found = counts(tmp_path / "usage.sqlite", Part.CLIENT)
    assert 3 == found["prompts"] == found["begun"]
    assert sum(report.tokens_kept for report in reports) == found["tokens_kept"]
    assert published.result.tokens - 3 <= found["tokens_fetched"] <= published.result.tokens
    assert 0 == found.get("tokens_lost", 0)


def test_reports_name_the_prompt(published, tmp_path):
    """So that a single prompt can be looked up, in every ledger."""
    with published.client(usage=tmp_path / "usage.sqlite") as client:
        report = client.generate(prompt_of(client, published), max_new_tokens=1).report
    assert report.prompt_id == json.loads(json.dumps(report.to_json()))["prompt_id"]
    with contextlib.closing(Usage(tmp_path / "usage.sqlite")) as usage:
        usage.flush()


def test_names_of_what_is_not_there_do_not_fill_the_ledger(published, tmp_path):
    """Whoever asks for a thousand models that there are not is counted under one key."""
    path = tmp_path / "edge.sqlite"
    with edge_in_thread(published.store, tmp_path / "edge", usage_file=path) as edge:
        for number in range(20):
            address = f"{number:064x}"
            headers = {HEADER: f"{'ab' * 16}/{address}"}
            assert 404 == ask(edge.url, f"/v1/{number:032x}/blocks/{address[:2]}/{address}", headers=headers).status
        ask_match(edge.url, "cd" * 16, ["ef" * 32])
    found = entries(path, Part.EDGE)
    assert {("", "")} == {(entry.key.model, entry.key.document) for entry in found}
    assert 20 == total(entry.counts for entry in found)["requests"]


def test_a_batch_counts_what_it_used(published, tmp_path):
    """Rows that are loaded further than the others read the rest again, and did not reuse it."""
    texts = [published.text + QUESTION, published.text[:6000] + QUESTION]
    with published.client(usage=tmp_path / "usage.sqlite") as client:
        reports = [answer.report for answer in client.generate_batch(texts, max_new_tokens=1)]
    found = counts(tmp_path / "usage.sqlite", Part.CLIENT)
    assert 2 == found["prompts"] == found["begun"]
    assert sum(report.tokens_reused for report in reports) == found["tokens_fetched"]
    assert sum(report.tokens_total for report in reports) == found["tokens_asked"]


def test_jobs_of_a_service_are_counted_when_they_have_ended(published, tmp_path):
    """On their tenants' account; an attempt that is made again is no publication, and none that failed."""
    from kvcdn.origin.service.attempt import Ending
    from kvcdn.origin.service.attempt import Outcome as Attempted

    with OriginUsage(tmp_path / "origin.sqlite") as usage:
        usage.tried(Attempted(Ending.PUBLISHED, published.result.to_json()), "acme")
        usage.tried(Attempted(Ending.FAILED, reason="the link"), "acme")
        usage.tried(Attempted(Ending.STOPPED), "acme")
        usage.tried(Attempted(Ending.FAILED, reason="no such model", for_good=True), "bolt")
    found = {(entry.key.tenant, entry.key.outcome): entry.counts for entry in entries(tmp_path / "origin.sqlite", Part.ORIGIN)}
    assert {("acme", Outcome.PUBLISHED), ("bolt", Outcome.FAILED)} == set(found)
    assert published.result.tokens == found["acme", Outcome.PUBLISHED]["tokens_published"]
