"""`kvcdn usage` on the ledgers of a real publication, a real edge and a real client; and every command of docs/usage.md."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import shutil
from decimal import Decimal
from pathlib import Path

import pytest

from kvcdn.accounting.entry import Part
from kvcdn.accounting.ledger import Ledger
from kvcdn.accounting.snapshot import Snapshot
from kvcdn.model.tokens import encode_text
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.origin.service.usage import OriginUsage
from kvcdn.stores.memory import MemoryStore
from support.command import kvcdn
from support.edge_process import ask, edge_in_thread, settle
from support.published import publish_text
from support.tiny import TEXT

ROOT = Path(__file__).parents[1]

LEDGERS = ("client.sqlite", "edge.sqlite", "origin.sqlite")


@pytest.fixture(scope="module")
def made(tiny_llama, tmp_path_factory):
    """A folder with the three ledgers, and what was published."""
    folder = tmp_path_factory.mktemp("ledgers")
    published, store = publish_text(tiny_llama, tokens=2200), MemoryStore()
    with OriginUsage(folder / "origin.sqlite") as usage:
        usage.published(Publisher(published.loaded, store, published.key).publish(published.token_ids).to_json(), "acme")
    with edge_in_thread(store, folder / "cache", usage_file=folder / "edge.sqlite") as edge:
        with published.client(edge.url, usage=folder / "client.sqlite", local_store=None) as client:
            for question in ("What?", "Why?"):
                prompt = encode_text(client.tokenizer, published.text + question, [len(published.text)])
                client.generate(prompt, max_new_tokens=1)
                # What is on its way still is no hit.
                settle(edge.url)
        (folder / "edge.jsonl").write_bytes(ask(edge.url, "/v1/usage").body)
    shutil.copy(ROOT / "infra" / "tariff.toml", folder)
    shutil.copy(ROOT / "infra" / "prices.toml", folder)
    return folder, published


def usage(made, *arguments, ledgers=LEDGERS):
    return kvcdn("usage", *(made[0] / name for name in ledgers), *arguments)


def test_ledgers_are_merged(made):
    """Half of what the edge sent it had already; all that the document offered was reused."""
    (row,) = usage(made, "--json").json["rows"]
    stored = made[1].result.stored_bytes
    assert (1.0, 0.5, {}) == (row["hit_ratio"], row["edge_hit_ratio"], row["lost_tokens"])
    assert {"hit": stored, "miss": stored} == row["edge_bytes"]
    assert 2 * stored == row["client"]["bytes_used"] == row["client"]["bytes_edge"] == row["edge"]["bytes_sent"]
    assert stored == row["edge"]["origin_bytes"] == row["origin"]["bytes_stored"]


def test_a_ledger_given_twice_counts_once(made):
    """As a file, as a copy of it, and as the snapshot that the edge gave away before it ended."""
    shutil.copy(made[0] / "edge.sqlite", made[0] / "copy.sqlite")
    once = usage(made, "--json").json
    again = usage(made, "--json", ledgers=(*LEDGERS, *LEDGERS, "copy.sqlite", "edge.jsonl")).json
    assert once == again


@pytest.mark.parametrize("by", ["tenant", "model", "document", "hour"])
def test_counts_are_told_by(made, by):
    """Rows add up to the whole."""
    found = usage(made, "--by", by, "--json").json["rows"]
    (whole,) = usage(made, "--json").json["rows"]
    for part in ("client", "edge", "origin"):
        for name, count in whole[part].items():
            assert count == sum(row[part].get(name, 0) for row in found)
    assert 0 == usage(made, "--by", by).code


def test_the_document_ties_all_three(made):
    """By its address, and nothing else of it."""
    found = {row["name"]: row for row in usage(made, "--by", "document", "--json").json["rows"]}
    row = found[made[1].result.address]
    assert row["client"]["prompts"] == 2
    assert row["edge"]["bytes_sent"] == 2 * made[1].result.stored_bytes
    assert row["origin"]["tokens_published"] == 2200


def test_the_counts_reconcile(made):
    """To the byte; a ledger that is missing is told, one that lies is a fault with an exit code of its own."""
    found = usage(made, "--reconcile", "--json").json
    assert (True, {"agreed": 2}, 0) == (found["holds"], found["prompts"], found["differ_by_at_most"])
    assert found["tokens_served"] == found["tokens_begun"] == 4400
    assert "the counts reconcile" in usage(made, "--reconcile").out
    alone = usage(made, "--reconcile", "--json", ledgers=("edge.sqlite",)).json
    assert {"no-client-ledger": 2} == alone["prompts"]
    with Ledger(made[0] / "edge.sqlite", create=False) as ledger:
        honest = ledger.snapshot()
    entries = [
        type(one)(one.key, {**one.counts, "bytes_sent": one.counts["bytes_sent"] + 1}) if "bytes_sent" in one.counts else one
        for one in honest.entries
    ]
    (made[0] / "lying.jsonl").write_bytes(b"".join(Snapshot(honest.head, tuple(entries)).lines()))
    ran = usage(made, "--reconcile", ledgers=("client.sqlite", "lying.jsonl"))
    assert 4 == ran.code
    assert "do not reconcile" in ran.out
    assert "is the ledger of an edge or a client missing, or was one changed?" in ran.complaint


def test_bills_are_exported(made):
    """As CSV and as JSON, which say the same; the edge's one reader is on loopback, and has the tariff of everybody."""
    arguments = ("--tariff", made[0] / "tariff.toml")
    ran = usage(made, "--export", "csv", *arguments)
    rows = list(csv.DictReader(io.StringIO(ran.out)))
    shown = usage(made, "--export", "json", *arguments).json
    assert Decimal(shown["total"]) == sum(Decimal(row["amount"]) for row in rows)
    local = [row for row in rows if row["tenant"] == "local"]
    assert [("tokens reused", "4400"), ("bytes delivered", str(2 * made[1].result.stored_bytes))] == [
        (row["item"], row["quantity"]) for row in local
    ]
    assert {"acme", "bolt", "local"} == {row["tenant"] for row in rows}
    assert 2 == usage(made, "--export", "csv").code


def test_costs_follow_the_prices(made):
    """One price changed, and what hangs on it moves; nothing else does."""
    (cheap,) = usage(made, "--cost", "--device", "h100", "--delivery", "bunny", "--json").json["rows"]
    (dear,) = usage(made, "--cost", "--device", "h100", "--delivery", "cloudfront", "--json").json["rows"]
    sent = Decimal(2 * made[1].result.stored_bytes) / 10**9
    assert Decimal(cheap["cost"]["edge_traffic"]) == sent * Decimal("0.01")
    assert Decimal(dear["cost"]["edge_traffic"]) == sent * Decimal("0.085")
    same = ("origin_traffic", "origin_requests", "publishing", "saved")
    assert [cheap["cost"][name] for name in same] == [dear["cost"][name] for name in same]
    assert [2, 2, 0] == [
        usage(made, "--cost", *more).code for more in ((), ("--gpu-hour", "1", "--store", "attic"), ("--gpu-hour", "0"))
    ]


def test_a_period_is_hours(made):
    """Of UTC, the last one not in it."""
    assert [] == usage(made, "--from", "2001-01-01", "--to", "2001-01-02T05", "--json").json["rows"]
    assert usage(made, "--from", "2001-01-01", "--json").json["rows"]
    ran = usage(made, "--from", "yesterday")
    assert 2 == ran.code
    assert "--from takes an hour of UTC" in ran.complaint


def test_an_edge_is_asked_for_its_ledger(made, tmp_path):
    """With a token that allows it; who has none is refused, and so is who asks an edge that keeps none."""
    store = MemoryStore()
    with edge_in_thread(store, tmp_path / "one", usage_file=tmp_path / "edge.sqlite", token="secret" * 6) as edge:
        assert [] == kvcdn("usage", "--edge", edge.url, "--token", "secret" * 6, "--json").json["rows"]
        ran = kvcdn("usage", "--edge", edge.url)
        assert 4 == ran.code
        assert "scope stats" in ran.complaint
    with edge_in_thread(store, tmp_path / "two") as edge:
        ran = kvcdn("usage", "--edge", edge.url)
        assert (3, True) == (ran.code, "set usage_file" in ran.complaint)
    assert 5 == kvcdn("usage", "--edge", edge.url).code


def test_what_is_no_ledger_is_told(made, tmp_path):
    """In one line, with the exit code of its kind."""
    (tmp_path / "text").write_text("Dear ledger,\n")
    (tmp_path / "cut.jsonl").write_bytes((made[0] / "edge.jsonl").read_bytes()[:-20])
    assert [2, 3, 4, 4, 2] == [
        kvcdn("usage", *names).code
        for names in ((), (tmp_path / "missing",), (tmp_path / "text",), (tmp_path / "cut.jsonl",), (tmp_path,))
    ]


def test_every_command_of_the_document_runs(made, monkeypatch):
    """On these ledgers, as written there; those for edges and publishers elsewhere are looked at by test_docs."""
    monkeypatch.chdir(made[0])
    monkeypatch.setenv("KVCDN_USAGE", "client.sqlite")
    text = (ROOT / "docs" / "usage.md").read_text("utf-8")
    lines = [line for line in re.findall(r"^\$ (kvcdn usage.*)$", text, re.MULTILINE) if "--edge" not in line]
    assert len(lines) >= 6
    for line in lines:
        ran = kvcdn(*shlex.split(line)[1:])
        assert (0, True) == (ran.code, bool(ran.out)), (line, ran.err)


def test_the_documented_client_counts(tiny_llama, monkeypatch, tmp_path):
    """The Python example, with this model and this text."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "usage.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    published = publish_text(tiny_llama, tokens=300)
    from kvcdn.keyring import trust_publisher
    from support.web import running_web

    trust_publisher(published.key.public, "the publisher")
    with running_web(published.store) as web:
        code = code.replace("http://127.0.0.1:8400", web.url).replace("smollm2-135m", str(tiny_llama))
        exec(compile(code, "usage.md", "exec"), {"handbook": published.text})
    with Ledger(tmp_path / "client.sqlite", create=False) as ledger:
        found = ledger.snapshot().entries
    assert {"acme"} == {entry.key.tenant for entry in found}
    assert {Part.CLIENT} == {entry.key.part for entry in found}
    assert json.loads(found[0].encode())["part"] == "client"


def test_publishing_and_asking_count_where_they_are_told_to(tiny_llama, tmp_path):
    """Both in one ledger, by option or by variable; a dry run counts nothing."""
    document, origin, ledger = tmp_path / "document.txt", tmp_path / "origin", tmp_path / "usage.sqlite"
    document.write_text(TEXT[:4000] + "\n\n")
    publish = ("publish", document, "--model", tiny_llama, "--origin", origin, "--usage", ledger)
    assert 0 == kvcdn(*publish, "--dry-run").code
    assert not ledger.exists()
    assert 0 == kvcdn(*publish).code
    asking = ("ask", document, "Why?", "--model", tiny_llama, "--origin", origin, "--max-tokens", "1", "--mode", "fetch")
    report = kvcdn(*asking, "--json", KVCDN_USAGE=str(ledger), KVCDN_USAGE_TENANT="acme").json["report"]
    (row,) = kvcdn("usage", ledger, "--json").json["rows"]
    assert (1, 1) == (row["client"]["prompts"], row["origin"]["documents"])
    assert report["tokens_reused"] == row["client"].get("tokens_fetched", 0)
    assert report["tokens_total"] == row["client"]["tokens_asked"]
    assert "acme" in {one["name"] for one in kvcdn("usage", ledger, "--by", "tenant", "--json").json["rows"]}
