"""The status of an edge: what it counts, that all of it is bounded, and who may see it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from test_edge_access import KEY, bearer

from kvcdn.access.grant import Grant, Scope
from kvcdn.edge.http.outcome import CacheOutcome
from kvcdn.edge.http.respond import Note
from kvcdn.edge.page import PAGE
from kvcdn.edge.settings import load_settings
from kvcdn.edge.telemetry.history import SPANS, History, Span
from kvcdn.edge.telemetry.hot import COUNTED, HALF_SECONDS, KEPT, Hot
from kvcdn.edge.telemetry.latency import RECENT_ANSWERS, Latency
from kvcdn.edge.telemetry.traffic import MAX_MODELS, MAX_PAIRS, MAX_TENANTS, OTHER, Traffic
from kvcdn.errors import UsageError
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document
from support.edge_process import Reply, WatchedStore, ask, ask_match, edge_in_thread, settle

SHOWN = ("/", "/page.css", "/page.js", "/chart.js", "/icon.svg")

ADDRESS_DIGITS = 12


def status(url: str, **headers: str) -> dict:
    reply = ask(url, "/v1/status", headers=headers)
    assert 200 == reply.status
    assert ("application/json", "no-store") == (reply.headers["Content-Type"], reply.headers["Cache-Control"])
    return reply.json()


def test_history_is_what_was_added_in_each_step() -> None:
    """A step has what came in it; one that nobody looked at has nothing, its growth is the first step's."""
    history = History(100.0, ("n",), (Span(10.0, 4),))
    history.record(105.0, {"n": 3})
    assert [3] == history.to_json(105.0)[0]["n"]
    history.record(112.0, {"n": 5})
    assert [5, 0] == history.to_json(112.0)[0]["n"]
    history.record(114.0, {"n": 9})
    assert [5, 4] == history.to_json(114.0)[0]["n"]
    history.record(135.0, {"n": 10})
    assert ([5, 5, 0, 0], 5.0) == (history.to_json(135.0)[0]["n"], history.to_json(135.0)[0]["unfinished_seconds"])


def test_history_is_bounded() -> None:
    """However long nobody looked, or the edge runs; and what is lost is the oldest."""
    history = History(0.0, ("n",), SPANS)
    for second in range(0, 8000, 10):
        history.record(float(second), {"n": second})
    history.record(1e7, {"n": 8000})
    rings = history.to_json(1e7)
    assert [span.steps for span in SPANS] == [len(ring["n"]) for ring in rings]
    assert [0, 0] == [sum(ring["n"][1:]) for ring in rings]


def test_hot_forgets_the_coldest() -> None:
    """Of more keys than are counted those stay that were asked for most; counts fade by half."""
    hot = Hot(0.0)
    for number in range(COUNTED):
        hot.add(f"cold {number}")
    for _ in range(5):
        hot.add("hot", size=10, blocks=3)
    assert KEPT + 1 == len(hot)
    key, heat = hot.first(1)[0]
    assert ("hot", 5.0, 50.0, 3) == (key, heat.asked, heat.bytes, heat.blocks)
    hot.fade(HALF_SECONDS)
    assert (2.5, 25.0) == (hot.first(1)[0][1].asked, hot.first(1)[0][1].bytes)
    hot.fade(40 * HALF_SECONDS)
    assert 0 == len(hot)


def test_latency_counts_and_remembers() -> None:
    """Buckets are cumulative and of all answers, quantiles of the last ones."""
    latency = Latency()
    assert 0 == latency.recent().answers
    for _ in range(1000):
        latency.add(7.0)
    for milliseconds in range(RECENT_ANSWERS):
        latency.add(milliseconds / 1000)
    buckets, total = latency.buckets()
    counts = dict(buckets)
    assert (2.0, 1512.0, 1512.0) == (counts["0.001"], counts["10"], counts["+Inf"])
    assert total == pytest.approx(7000 + sum(range(RECENT_ANSWERS)) / 1000)
    recent = latency.recent()
    assert (512, 0.255, 0.485) == (recent.answers, recent.median, recent.p95)


def note(tag: str, outcome: CacheOutcome = CacheOutcome.HIT, tokens_per_byte: float = 0.5) -> Note:
    return Note("object", "", outcome, f"v1/{tag}/manifests/{'0' * 64}", tokens_per_byte)


def test_traffic_counts_what_was_sent() -> None:
    """Tokens by the share of the bytes that went out; what did not change is a hit without bytes; what is not there is none."""
    traffic = Traffic()
    traffic.apply({"a" * 32: 4.0})
    traffic.count(note("a" * 32), 206, 100, "acme")
    traffic.count(note("b" * 32, CacheOutcome.MISS), 200, 50, "acme")
    traffic.count(note("a" * 32, CacheOutcome.COLLAPSED), 200, 10, "acme")
    traffic.count(note("a" * 32), 304, 0, "acme")
    traffic.count(note("a" * 32), 416, 30, "acme")
    traffic.count(Note("object", "", CacheOutcome.REFUSED), 404, 30, "acme")
    traffic.count(Note("limited"), 429, 30, "acme")
    found = traffic.by_tenant["acme"]
    assert (4, 3, 1, 160, 110, 1) == (
        found.requests,
        found.hits,
        found.collapsed,
        found.bytes,
        found.hit_bytes,
        found.limited,
    )
    assert (80.0, 13.75) == (found.tokens, found.seconds)
    assert {"a" * 32: 110, "b" * 32: 50} == {tag: sums.bytes for tag, sums in traffic.by_model.items()}


def test_traffic_is_bounded() -> None:
    """Further tenants and models are counted together, and nothing is lost of the sum."""
    traffic = Traffic()
    for number in range(2 * MAX_TENANTS):
        traffic.count(note(f"{number:032x}"), 200, 1, f"tenant-{number}")
    assert (MAX_TENANTS + 1, MAX_MODELS + 1) == (len(traffic.by_tenant), len(traffic.by_model))
    assert (MAX_TENANTS, 2 * MAX_TENANTS - MAX_MODELS) == (traffic.by_tenant[OTHER].bytes, traffic.by_model[OTHER].bytes)
    for number in range(2 * MAX_PAIRS):
        traffic.count(note(f"{number % 90:032x}"), 200, 1, f"tenant-{number}")
    assert MAX_PAIRS + 1 == len(traffic.by_pair)
    assert traffic.all.bytes == sum(sums.bytes for sums in traffic.by_pair.values())


def test_a_document_read_is_its_tokens_saved(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """Whole, or in ranges, from the origin, a fill or the disk; also what an earlier process had stored."""
    tag = str(document.model.tag)
    speeds = {"model_names": {"tiny": tag}, "prefill_speeds": {"tiny": 500.0}}
    with edge_in_thread(store, tmp_path / "cache", **speeds) as edge:
        for key in document.objects:
            assert 200 == ask(edge.url, "/" + key).status
        settle(edge.url)
        found = status(edge.url)
        size = sum(map(len, document.objects.values()))
        assert (2500.0, 5.0) == (found["saved"]["prefill_tokens"], found["saved"]["prefill_seconds"])
        assert (size, size, 0) == (found["traffic"]["bytes"], found["traffic"]["origin_bytes"], found["saved"]["origin_bytes"])
        assert ("tiny", 2500.0) == (found["models"][0]["model"], found["models"][0]["tokens"])
        assert "local" == found["tenants"][0]["tenant"]
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for key, data in document.blocks.items():
            half = len(data) // 2
            for part in (f"bytes=0-{half - 1}", f"bytes={half}-"):
                assert 206 == ask(edge.url, "/" + key, headers={"Range": part}).status
        found = status(edge.url)
        assert (2500.0, None) == (found["saved"]["prefill_tokens"], found["saved"]["prefill_seconds"])
        assert (found["traffic"]["bytes"], found["traffic"]["hit_bytes"]) == (found["saved"]["origin_bytes"],) * 2
        assert sum(found["history"][0]["bytes"]) == found["traffic"]["bytes"] == sum(found["history"][1]["bytes"])


def test_what_is_hot_is_named_and_cannot_be_fetched(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """Prefixes by their last block, with how many blocks they have; no address is told in full."""
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for _ in range(3):
            ask_match(edge.url, document.model.tag, [*document.addresses, "00" * 32])
        for key in document.objects:
            ask(edge.url, "/" + key)
        reply = ask(edge.url, "/v1/status")
    found = reply.json()["hot"]
    first = found["prefixes"][0]
    assert f"block {document.addresses[-1][:ADDRESS_DIGITS]}" == first["name"]
    assert (len(document.blocks), str(document.model.tag)) == (first["blocks"], first["model"])
    assert 2.9 < first["asked"] <= 3
    assert len(document.objects) == len(found["objects"])
    assert [] == [key for key in document.objects if key[-64:].encode() in reply.body]


def test_an_origin_that_is_down_is_shown(
    document: Document, store: WatchedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its failures, and when it is tried again; the one behind it answers, and says how fast."""
    # It still rests when it is looked at.
    for name in ("FIRST_REST_SECONDS", "LONGEST_REST_SECONDS"):
        monkeypatch.setattr(f"kvcdn.edge.fills.breaker.{name}", 1000.0)
    store.down = True
    behind = MemoryStore()
    document.publish(behind)
    with edge_in_thread(store, tmp_path / "cache", behind) as edge:
        for key in list(document.objects)[:3]:
            assert 200 == ask(edge.url, "/" + key).status
        one, two = status(edge.url)["origins"]
    assert (False, 3, True) == (one["up"], one["failures"], 0 < one["retry_seconds"] <= 1000)
    assert (True, 0, None) == (two["up"], two["failures"], two["retry_seconds"])
    assert (0, 3) == (one["latency"]["get"]["answers"], two["latency"]["get"]["answers"])
    assert two["latency"]["get"]["median"] > 0


def test_the_disk_is_shown(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """What the cache takes, may take, and what the file system has left."""
    with edge_in_thread(store, tmp_path / "cache", capacity="2MiB") as edge:
        for key in document.objects:
            ask(edge.url, "/" + key)
        settle(edge.url)
        disk, fills = status(edge.url)["disk"], status(edge.url)["fills"]
        assert (edge.cache.used, 2 << 20, len(edge.cache)) == (disk["used_bytes"], disk["capacity_bytes"], disk["objects"])
    assert disk["free_bytes"] > 0
    assert {"stored": len(document.objects)} == fills


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1:8400", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8400", 200),
        ("edge.example.org", 403),
        ("kvcdn_edge", 403),
        ("localhost.example.org", 403),
        ("127.0.0.1.example.org", 403),
        ("", 403),
    ],
)
def test_without_tokens_it_is_for_this_machine(store: WatchedStore, tmp_path: Path, host: str, answer: int) -> None:
    """A page of another name that resolves to loopback, or a proxy before the edge, gets no figures."""
    with edge_in_thread(store, tmp_path / "cache") as edge:
        reply = ask(edge.url, "/v1/status", headers={"Host": host})
        assert answer == reply.status
        assert (answer == 200) == (b'"tenants"' in reply.body)


def test_with_tokens_it_needs_the_scope(store: WatchedStore, tmp_path: Path) -> None:
    """And then any name will do. The files of the page are everybody's: they have no figures."""
    issuers = tmp_path / "issuers"
    issuers.write_text(f"{KEY.public.text}\n", encoding="utf-8")
    with edge_in_thread(store, tmp_path / "cache", issuers_file=issuers) as edge:
        assert 401 == ask(edge.url, "/v1/status").status
        for scope in Scope:
            headers = {**bearer(Grant("op", frozenset((scope,)))), "Host": "edge.example.org"}
            assert (200 if scope is Scope.STATS else 403) == ask(edge.url, "/v1/status", headers=headers).status
        assert 405 == ask(edge.url, "/v1/status", "POST", bearer(Grant("op", frozenset((Scope.STATS,))))).status
        assert [200] * len(SHOWN) == [ask(edge.url, path).status for path in SHOWN]


def test_it_is_where_administration_is(store: WatchedStore, tmp_path: Path) -> None:
    """Where that has an address of its own, the address of objects knows nothing of it."""
    with edge_in_thread(store, tmp_path / "cache", admin_listen="127.0.0.1:0") as edge:
        for path in (*SHOWN, "/v1/status"):
            assert (404, 200) == (ask(edge.url, path).status, ask(edge.admin_url, path).status)


def test_files_of_the_page_are_kept_and_framed_by_nobody(store: WatchedStore, tmp_path: Path) -> None:
    """Types, entity tags, a policy that lets nothing in or out; other methods are refused."""
    assert set(SHOWN) == set(PAGE)
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for path in SHOWN:
            reply = ask(edge.url, path)
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
            assert "unsafe" not in reply.headers["Content-Security-Policy"]
            assert ("nosniff", None) == (
                reply.headers["X-Content-Type-Options"],
                reply.headers["Access-Control-Allow-Origin"],
            )
            again = ask(edge.url, path, headers={"If-None-Match": reply.headers["ETag"]})
            assert (304, b"") == (again.status, again.body)
            head: Reply = ask(edge.url, path, "HEAD")
            assert (200, b"", str(len(reply.body))) == (head.status, head.body, head.headers["Content-Length"])
            assert 405 == ask(edge.url, path, "POST").status
        for path in ("/index.html", "/page", "/page/index.html", "/../edge.toml", "//"):
            assert 404 == ask(edge.url, path).status


def test_files_of_the_page_are_installed() -> None:
    """Setuptools takes no file along that it is not told of."""
    root = Path(__file__).parents[1]
    setup = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    patterns = setup["package-data"]["kvcdn.edge.page"]
    names = {path.name for path in (root / "edge" / "page").iterdir() if path.suffix not in ("", ".py")}
    assert names == {path.name for pattern in patterns for path in (root / "edge" / "page").glob(pattern)}
    assert len(PAGE) == len(names)


def test_speeds_are_of_models_that_are_known() -> None:
    """By a tag, or by a name that the settings give one."""
    tag = "ab" * 16
    given = {"origin": "x", "model_names": {"tiny": tag}, "prefill_speeds": {"tiny": 5, "cd" * 16: 7}}
    assert {tag: 5.0, "cd" * 16: 7.0} == load_settings(None, given).speeds_by_tag
    for wrong in ({"huge": 5}, {"tiny": 0}, {"tiny": -1}, {"tiny": "fast"}):
        with pytest.raises(UsageError, match="prefill_speeds"):
            load_settings(None, {**given, "prefill_speeds": wrong})


def test_the_status_is_what_the_documentation_says(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """Every field, in docs/operating.md as here, at every depth."""
    text = (Path(__file__).parents[1] / "docs" / "operating.md").read_text("utf-8")
    example = json.loads(text.split("<!-- the status -->")[1].split("```json")[1].split("```")[0])
    with edge_in_thread(store, tmp_path / "cache") as edge:
        ask_match(edge.url, document.model.tag, document.addresses)
        for key in document.objects:
            ask(edge.url, "/" + key)
        settle(edge.url)
        found = status(edge.url)
    assert fields(example) == fields(found)


def fields(value: object) -> object:
    """The names of fields; what is counted by other names than ours has none."""
    if isinstance(value, dict):
        return {name: "by name" if name in ("fills", "dropped") else fields(item) for name, item in value.items()}
    if isinstance(value, list):
        return [fields(item) for item in value if isinstance(item, dict)][:1]
    return None
