"""Request ids end to end: from a reader through two edges, in the answers and in the logs of both."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from kvcdn.client.sources.transport import EdgeSource
from kvcdn.edge.launch import RunningEdge
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from kvcdn.trail import Trail, following
from support.blocks import Document
from support.edge_process import ask, ask_match, connect, exchange, running_edge
from support.waiting import until
from support.web import running_web

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def origin(tmp_path: Path, document: Document) -> str:
    folder = tmp_path / "origin"
    document.publish(FolderStore(folder))
    return str(folder)


def lines(edge: RunningEdge, request_id: str, wanted: int = 1) -> list[dict]:
    """The log's lines of one request, once there are so many: they are written behind the answer."""

    def found() -> list[dict]:
        written = [json.loads(line) for line in edge.log().splitlines(keepends=True) if line[0] == "{" and line[-1] == "\n"]
        return [line for line in written if line.get("request_id") == request_id]

    until(lambda: len(found()) >= wanted, edge.log)
    return found()


def test_one_id_is_in_the_logs_of_all_tiers(origin: str, tmp_path: Path, document: Document) -> None:
    """Of an object that the first edge fetches from the second, and of a match that it has to ask for."""
    key = next(iter(document.blocks))
    with running_edge(origin, tmp_path / "far") as far, running_edge(far.url, tmp_path / "near") as near:
        reply = ask(near.url, "/" + key, headers={"X-Request-Id": "reader-1"})
        assert (200, "reader-1") == (reply.status, reply.headers["X-Request-Id"])
        assert 1 == ask_match(near.url, document.model.tag, document.addresses[:1]).json()["matched"]
        for edge, outcome in ((near, "miss"), (far, "miss")):
            line = lines(edge, "reader-1")[-1]
            assert ("request", "object", outcome) == (line["event"], line["route"], line["cache"])


def test_what_an_order_has_fetched_has_its_id(origin: str, tmp_path: Path, document: Document) -> None:
    """Objects that are fetched in the background, also those that wait, are asked for under the id of who ordered them."""
    asked = {"model": str(document.model.tag), "addresses": document.addresses}
    given = {"Content-Type": "application/json", "X-Request-Id": "order-1"}
    with (
        running_edge(origin, tmp_path / "far") as far,
        running_edge(far.url, tmp_path / "near", admin_listen="127.0.0.1:0") as near,
    ):
        assert 202 == ask(near.admin_url, "/v1/warm", "POST", given, json.dumps(asked).encode()).status
        found = lines(far, "order-1", len(document.blocks))
        assert [("object", "miss")] * len(document.blocks) == [(line["route"], line["cache"]) for line in found]


def test_every_answer_has_an_id(origin: str, tmp_path: Path, document: Document) -> None:
    """Its own, if the request brought none, or none that is a plain word; also on a connection that is kept."""
    key = next(iter(document.blocks))
    with running_edge(origin, tmp_path / "cache") as edge, contextlib.closing(connect(edge.url)) as connection:
        paths = ["/" + key, "/" + key, "/healthz", "/metrics", "/nothing", "/", "/v1/status"]
        given = [exchange(connection, path).headers["X-Request-Id"] for path in paths]
        given += [exchange(connection, paths[0], "HEAD").headers["X-Request-Id"]]
        assert len(given) == len(set(given))
        assert {16} == {len(one) for one in given}
        kept = exchange(connection, paths[0], headers={"X-Request-Id": "mine", "If-None-Match": "*"})
        assert (304, "mine") == (kept.status, kept.headers["X-Request-Id"])
        for hostile in ("x" * 65, "a b", '{"level":"error"}', "<script>"):
            reply = exchange(connection, paths[0], headers={"X-Request-Id": hostile})
            assert 16 == len(reply.headers["X-Request-Id"])
            assert hostile not in edge.log()
        assert exchange(connection, "/healthz").headers["X-Request-Id"] not in ("mine", *given)


def test_what_goes_wrong_names_its_request(tmp_path: Path) -> None:
    """The warning of a fill that found its origin down has the id of the request that began it."""
    with running_edge("http://127.0.0.1:1", tmp_path / "cache") as edge:
        path = f"/v1/{'0' * 32}/manifests/{'0' * 64}"
        assert 504 == ask(edge.url, path, headers={"X-Request-Id": "reader-2"}).status
        levels = {line["level"]: line["logger"] for line in lines(edge, "reader-2", 2)}
        assert {"warning": "kvcdn.edge.reads.fetch", "info": "kvcdn.edge.answers.access"} == levels


def test_an_origin_sees_the_trail_and_no_more(document: Document, tmp_path: Path) -> None:
    """Id and trace, and that an edge asks; no token, no other header of the reader's."""
    key, data = next(iter(document.blocks.items()))
    store = MemoryStore()
    document.publish(store)
    sent = {"X-Request-Id": "reader-3", "traceparent": PARENT, "tracestate": "vendor=1"}
    private = {"Authorization": "Bearer secret-of-a-reader", "Cookie": "a=b", "X-Forwarded-For": "192.0.2.1"}
    with running_web(store) as web, running_edge(web.url, tmp_path / "cache") as edge:
        assert data == ask(edge.url, "/" + key, headers={**sent, **private}).body
        _, _, headers = web.requests[0]
    assert sent == {name: headers.get(name) for name in sent}
    assert {"Host", "Via", "User-Agent", "Accept-Encoding"} == set(headers) - set(sent)


def test_a_reader_sends_one_id_for_a_prompt(document: Document, tmp_path: Path) -> None:
    """All requests of a session have the same; each session has its own, or that of what it runs for."""
    store = MemoryStore()
    document.publish(store)
    with running_web(store) as web:
        source = EdgeSource(web.url)
        session = source.session()
        for key in document.objects:
            session.read(key, 1 << 24)
        source.session().read(document.manifest_key, 1 << 20)
        with following(Trail.of("mine", PARENT)):
            source.session().match(document.model.tag, [])
            source.session().read(document.manifest_key, 1 << 20)
        source.close()
        found = [headers["X-Request-Id"] for _, _, headers in web.requests]
        parent = web.requests[-1][2]["traceparent"]
    first = len(document.objects)
    assert 1 == len(set(found[:first]))
    assert found[first] not in (*found[:first], "mine")
    assert ("mine", PARENT) == (found[-1], parent)


def test_the_report_tells_the_id(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """A prompt's report, its match and its blocks at the edge, all under one id."""
    from support.published import publish_text
    from support.tiny import tiny_checkpoint

    store = FolderStore(tmp_path / "origin")
    published = publish_text(tiny_checkpoint(tmp_path_factory.mktemp("tiny")), store=store, tokens=1500)
    with running_edge(store.url, tmp_path / "cache") as edge:
        with published.client(EdgeSource(edge.url)) as client:
            reports = [client.ask(published.text, "What may a licensee do?", max_new_tokens=2).report for _ in range(2)]
        assert [1500, 1500] == [report.tokens_reused for report in reports]
        assert 2 == len({report.request_id for report in reports})
        assert reports[0].to_json()["request_id"] == reports[0].request_id
        for report in reports:
            routes = [line["route"] for line in lines(edge, report.request_id, 3)]
            assert ["match", "object", "object"] == sorted(routes)
