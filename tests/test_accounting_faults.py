"""The ledgers of client, two tiers of edges, and origin reconcile under faults: kill -9, a failing origin, cut bodies."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvcdn.accounting.books import Books
from kvcdn.accounting.costs import Prices, cost_of
from kvcdn.accounting.entry import HEADER, Loss, Outcome, Part, PromptId, total
from kvcdn.accounting.hits import By, rows, to_readers
from kvcdn.accounting.ledger import Ledger
from kvcdn.accounting.reconcile import Verdict, reconcile
from kvcdn.accounting.snapshot import Snapshot
from kvcdn.client.usage import Usage
from kvcdn.economics.prices import Delivery, Store
from kvcdn.keys import Namespace, PrefixNames, block_key
from kvcdn.model.tokens import encode_text
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.origin.service.usage import OriginUsage
from kvcdn.stores.memory import MemoryStore
from support.edge_process import ask, metric, running_edge, settle
from support.faults import Fault, faulty_link
from support.published import publish_text
from support.tiny import TEXT
from support.waiting import until
from support.web import running_web

SENT = 'kvcdn_edge_response_body_bytes_total{route="object"}'

PASSED = 60_000
"""Bytes of an answer that come through before something happens to it."""

READER = Path(__file__).with_name("support") / "usage_reader.py"


def snapshot(path):
    with Ledger(path, create=False) as ledger:
        return ledger.snapshot()


class Day:
    """A bad day of a publisher, an edge that is killed and started again, and clients of which one is killed."""

    def __init__(self, checkpoint, folder):
        self.checkpoint, self.folder = checkpoint, folder
        self.published, self.store = publish_text(checkpoint, tokens=2200), MemoryStore()
        self.other = TEXT[: len(self.published.text) // 2]
        (folder / "document").write_text(self.published.text)
        arguments = [checkpoint, folder / "killed.sqlite", self.published.key.public.text, folder / "document"]
        # It loads its libraries meanwhile.
        self.child = subprocess.Popen(
            [sys.executable, READER, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.reports, self.sent = {}, {}
        """What clients reported, and how many bytes edges say by their metrics that they sent."""

    def publish(self):
        with OriginUsage(self.folder / "origin.sqlite") as origin:
            publisher = Publisher(self.published.loaded, self.store, self.published.key)
            for text in (self.published.text, self.other):
                origin.published(publisher.publish(self.ids(text)).to_json(), "press")

    def ids(self, text):
        return encode_text(self.published.loaded.tokenizer, text).token_ids

    def ask(self, name, link, text, usage):
        with self.published.client(link.url, usage=usage, local_store=None) as client:
            prompt = encode_text(client.tokenizer, text + " Why?", [len(text)])
            self.reports[name] = client.generate(prompt, max_new_tokens=1).report

    def before(self, edge, link, origin, usage):
        """Calm, a cut body, an origin that is down, one that breaks off, and then the edge is killed in mid-answer."""
        text = self.published.text
        self.ask("calm", link, text, usage)
        link.inject(Fault(when=b"GET /v1", pass_bytes=PASSED, reset=True))
        self.ask("cut", link, text, usage)
        origin.inject(Fault(answer=b"HTTP/1.1 503 Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"), times=1000)
        self.ask("no origin", link, self.other, usage)
        names = PrefixNames.of(self.published.loaded.identity, Namespace.public(), self.ids(self.other))
        refused = ask(edge.url, "/" + block_key(names.model.tag, names.blocks[-1].address))
        assert 504 == refused.status
        origin.inject(Fault(), times=0)
        time.sleep(2.5)  # what failed is remembered for a moment
        origin.inject(Fault(when=b"GET", pass_bytes=PASSED // 2))
        self.ask("origin cut", link, self.other, usage)
        settle(edge.url)
        assert 200 == ask(edge.url, "/v1/usage").status  # which writes down what was counted so far
        # The metric counts what refusals say, too.
        self.sent["killed"] = metric(edge.url, SENT) - len(refused.body)
        link.inject(Fault(when=b"GET /v1", pass_bytes=PASSED, stall=True), times=2)
        passed = link.bytes_passed
        asking = threading.Thread(target=self.ask, args=("killed", link, text, usage))
        # It is killed before it has written down what it counts from now on, however long the rest takes.
        with contextlib.closing(sqlite3.connect(self.folder / "edge.sqlite", isolation_level=None)) as ledger:
            ledger.execute("BEGIN IMMEDIATE")
            asking.start()
            until(lambda: link.pending == 0 and link.bytes_passed >= passed + 2 * PASSED)
            link.refusing = True
            os.kill(edge.pid, signal.SIGKILL)
            edge.process.wait()
        asking.join()

    def after(self, edge, link, usage):
        """A client is killed in mid-answer, another before it has written anything; then all is well."""
        ledger = self.folder / "killed.sqlite"
        link.inject(Fault(when=b"GET /v1", pass_bytes=PASSED, stall=True), times=8)
        child = self.child
        child.stdin.write(f"{link.url}\n".encode())
        child.stdin.close()
        until(lambda: link.bytes_passed >= PASSED)
        until(lambda: ledger.exists() and snapshot(ledger).entries)
        child.send_signal(signal.SIGKILL)
        assert b"" == child.stdout.read()
        child.stdout.close()
        child.wait()
        link.inject(Fault(), times=0)
        key = next(iter(self.store.list("v1/"))).key
        assert 200 == ask(edge.url, f"/{key}", headers={HEADER: str(PromptId.new())}).status
        self.ask("after", link, self.published.text, usage)
        settle(edge.url)
        self.sent["stopped"] = metric(edge.url, SENT)


@pytest.fixture(scope="module")
def books(tiny_llama, tmp_path_factory):
    """What is in the ledgers after such a day, what reports said, what edges counted by other means, and the origin."""
    folder = tmp_path_factory.mktemp("day")
    day = Day(tiny_llama, folder)
    day.publish()
    settings = {"usage_file": folder / "edge.sqlite"}
    with (
        running_web(day.store) as web,
        running_edge(web.url, folder / "upper", usage_file=folder / "upper.sqlite") as upper,
        faulty_link(upper.port) as origin,
        Usage(folder / "client.sqlite", tenant="acme") as usage,
    ):
        with running_edge(origin.url, folder / "cache", **settings) as edge, faulty_link(edge.port) as link:
            day.before(edge, link, origin, usage)
        with running_edge(origin.url, folder / "cache", **settings) as edge, faulty_link(edge.port) as link:
            day.after(edge, link, usage)
    found = [snapshot(folder / f"{name}.sqlite") for name in ("origin", "client", "killed", "edge", "upper")]
    return Books.of(found), day.reports, day.sent, day.published, day.store


def of(books, part, *outcomes):
    return [entry for entry in books if entry.key.part is part and (not outcomes or entry.key.outcome in outcomes)]


def test_every_difference_is_explained(books):
    """Each prompt has the verdict of what happened to it, and sent and received differ by no more than is said."""
    found = reconcile(books[0])
    assert () == found.faults
    verdicts = dict(found.prompts)
    cut = verdicts.pop(Verdict.IN_FLIGHT, 0)
    assert {Verdict.AGREED, Verdict.EDGE_LOST, Verdict.NOT_ENDED, Verdict.CLIENT_UNKNOWN} == set(verdicts)
    assert [1, 1, 1] == [verdicts[one] for one in (Verdict.EDGE_LOST, Verdict.NOT_ENDED, Verdict.CLIENT_UNKNOWN)]
    # A cut body may have been sent no further than it was received.
    assert (4, True) == (verdicts[Verdict.AGREED] + cut - 1, cut <= 2)
    assert 0 < abs(found.sent - found.received) <= found.bound
    assert found.used <= found.received
    assert (1, 1) == (found.edges_unended, found.clients_unended)


def test_what_is_lost_with_an_edge_is_what_it_had_not_written(books):
    """The killed edge's ledger has all up to the last flush; the other, that was stopped, has everything."""
    merged, _, sent, _, _ = books
    counted = to_readers(total(entry.counts for entry in of(merged, Part.EDGE)))
    assert sent["killed"] + sent["stopped"] == counted


def test_clients_counted_what_their_reports_say(books):
    """Every prompt that ended, however: the same tokens, once."""
    merged, reports, _, _, _ = books
    ended = {entry.key.prompt: entry for entry in of(merged, Part.CLIENT) if entry.key.outcome is not Outcome.BEGUN}
    assert {report.prompt_id for report in reports.values()} == set(ended)
    for report in reports.values():
        counts = ended[report.prompt_id].counts
        assert report.tokens_total == counts["tokens_asked"]
        assert report.tokens_reused == counts.get("tokens_fetched", 0)
        assert report.tokens_total == sum(counts.get(f"tokens_{way}", 0) for way in ("fetched", "computed", "prefilled"))
        assert counts.get("bytes_used", 0) <= counts.get("bytes_edge", 0)
    begun = total(entry.counts for entry in of(merged, Part.CLIENT, Outcome.BEGUN))["begun"]
    assert len(ended) + 1 == begun


def test_who_lost_the_hits_of_that_day(books):
    """The origin's failure and the killed edge are told as such; nothing else lost a token."""
    merged, reports, _, _, _ = books
    lost = {entry.key.prompt: entry for entry in of(merged, Part.CLIENT) if entry.counts.get("tokens_lost")}
    assert {reports["no origin"].prompt_id, reports["killed"].prompt_id} == set(lost)
    # An edge that cannot ask its origin says so.
    assert Loss.UNAVAILABLE is lost[reports["no origin"].prompt_id].key.loss
    (row,) = rows(merged, By.ALL)
    assert {Loss.UNAVAILABLE: sum(entry.counts["tokens_lost"] for entry in lost.values())} == row.lost


def test_edges_filled_what_the_origin_stored(books):
    """Each object once from the origin, and once from the upper edge, over a restart, though that failed in between."""
    merged, _, _, _, store = books
    filled = total(entry.counts for entry in of(merged, Part.EDGE, Outcome.FILLED))
    stored = sum(info.size for info in store.list("v1/") if "/blocks/" in info.key)
    published = total(entry.counts for entry in of(merged, Part.ORIGIN))
    assert stored == filled["origin_bytes"] == filled["tier_bytes"] == published["bytes_uploaded"]
    assert of(merged, Part.EDGE, Outcome.FAILED)


def test_what_edges_send_to_edges_is_neither_the_stores_nor_the_readers(books):
    """The store's traffic is what was stored, once; what broke off on its way to the lower edge is known by its size."""
    merged, _, _, _, store = books
    stored = sum(info.size for info in store.list("v1/") if "/blocks/" in info.key)
    found = reconcile(merged)
    assert (True, Verdict.EDGE_LOST) == (found.holds, found.tiers.verdict)
    assert stored <= found.tiers.filled < found.tiers.sent
    counts = total(entry.counts for entry in of(merged, Part.EDGE))
    (upper,) = [one for each in merged.ledgers.values() if "bytes_tiers" in (one := total(e.counts for e in each.entries))]
    assert upper["bytes_sent"] == upper["bytes_tiers"]
    assert (counts["bytes_tiers"], counts["tier_bytes"]) == (found.tiers.sent, found.tiers.filled)
    (row,) = rows(merged, By.ALL)
    assert sum(row.answers.values()) == row.bytes_to_readers == counts["bytes_sent"] - counts["bytes_tiers"]
    a_dollar = Prices(Store("s", 0, 0, 0, 1.0, ""), Delivery("d", 1.0, ""), 0)
    cost = cost_of(row, a_dollar)
    assert [stored, found.tiers.sent, row.bytes_to_readers] == [
        amount * 10**9 for amount in (cost.origin_traffic, cost.tier_traffic, cost.edge_traffic)
    ]


@pytest.mark.parametrize("part", [Part.EDGE, Part.CLIENT])
def test_without_the_killed_process_in_the_ledger_it_would_be_a_fault(books, part):
    """The explanation is not for the asking: a ledger all of whose processes ended has none."""
    ledgers = {}
    for name, one in books[0].ledgers.items():
        runs = tuple(run for run in one.head.runs if run.part is not part)
        ledgers[name] = Snapshot(replace(one.head, runs=runs), one.entries)
    found = reconcile(Books(ledgers))
    assert len(found.faults) == 1
    assert not found.holds
