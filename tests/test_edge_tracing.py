"""Traces: real edges that send spans to a real receiver, one trace through two tiers, and nothing at all where nobody asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_edge_access import KEY, bearer

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from kvcdn.access.grant import Grant, Scope
from kvcdn.edge.launch import RunningEdge
from kvcdn.edge.serve import check
from kvcdn.edge.settings import load_settings
from kvcdn.errors import UsageError
from kvcdn.stores.folder import FolderStore
from support.blocks import Document
from support.edge_process import ask, ask_match, running_edge, settle
from support.otlp import ReceivedSpan, Receiver, running_receiver
from support.waiting import WAIT_SECONDS

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"

SERVER, CLIENT, INTERNAL = 2, 3, 1
"""Kinds of spans (opentelemetry-proto, Span.SpanKind)."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, document: Document) -> str:
    folder = tmp_path_factory.mktemp("origin")
    document.publish(FolderStore(folder))
    return str(folder)


def traced(origin: str, cache: Path, receiver: Receiver, **settings: object):
    return running_edge(origin, cache, otlp_endpoint=receiver.url, **settings)


def child_of(spans: list[ReceivedSpan], parent: str, name: str) -> ReceivedSpan:
    """The one span called `name` whose parent has this id."""
    (found,) = [span for span in spans if span.parent == parent and span.name == name]
    return found


def test_one_trace_goes_through_two_tiers(origin: str, tmp_path: Path, document: Document) -> None:
    """The reader's span, the near edge's request, fill and question, the far edge's three: each within the one before."""
    key, data = next(iter(document.blocks.items()))
    sent = {"traceparent": SAMPLED, "tracestate": "vendor=1", "X-Request-Id": "reader-1"}
    with running_receiver() as receiver:
        with traced(origin, tmp_path / "far", receiver) as far, traced(far.url, tmp_path / "near", receiver) as near:
            assert data == ask(near.url, "/" + key, headers=sent).body
        spans = [span for span in receiver.wait(6) if span.trace == TRACE]
    parent = CALLER
    for origin_url in (far.url, Path(origin).as_uri()):
        request = child_of(spans, parent, "GET object")
        fill = child_of(spans, request.id, "fill")
        asked = child_of(spans, fill.id, "origin get")
        assert (SERVER, INTERNAL, CLIENT) == (request.kind, fill.kind, asked.kind)
        assert (200, "miss", len(data)) == tuple(
            request.attributes[name] for name in ("http.response.status_code", "kvcdn.cache", "http.response.body.size")
        )
        assert ("stored", len(data)) == (fill.attributes["kvcdn.outcome"], fill.attributes["kvcdn.size"])
        assert (origin_url, len(data)) == (asked.attributes["kvcdn.origin"], asked.attributes["kvcdn.bytes"])
        assert {"reader-1"} == {span.attributes["kvcdn.request_id"] for span in (request, fill, asked)}
        assert {"vendor=1"} == {span.state for span in (request, fill, asked)}
        parent = asked.id
    assert 6 == len(spans)
    assert {"kvcdn-edge"} == {span.resource["service.name"] for span in spans}
    assert [] == [span.name for span in spans if span.failed]


def test_spans_say_no_more_than_logs(origin: str, tmp_path: Path, document: Document) -> None:
    """No address in full, no token, no query of a link: of hits, misses, matches, refusals and what is damaged."""
    issuers = tmp_path / "issuers"
    issuers.write_text(f"{KEY.public.text}\n", encoding="utf-8")
    store = FolderStore(tmp_path / "origin")
    damaged = document.manifest_bytes[:-1] + bytes([document.manifest_bytes[-1] ^ 1])
    store.create(document.manifest_key, [damaged])
    key = next(iter(document.blocks))
    reader = bearer(Grant("acme", frozenset((Scope.READ,))))
    with running_receiver() as receiver:
        settings = {"issuers_file": issuers, "fallback_origins": (origin,)}
        with traced(store.url, tmp_path / "cache", receiver, **settings) as edge:
            for path in (key, key, document.manifest_key, "v1/" + "0" * 32 + "/manifests/" + "0" * 64):
                ask(edge.url, "/" + path, headers=reader)
            ask(edge.url, f"/{key}?expires=1&issuer=a&signature=secret-of-a-link")
            ask_match(edge.url, document.model.tag, document.addresses)
        spans = receiver.wait(10)
    said = b"".join(receiver.bodies)
    assert [] == [
        address for address in (*document.addresses, str(document.names.manifest_address)) if address.encode() in said
    ]
    assert reader["Authorization"].split()[1].encode() not in said
    assert b"secret-of-a-link" not in said
    assert {"acme", ""} == {span.attributes.get("kvcdn.tenant", "") for span in spans}
    assert {"miss", "refused", "none"} <= {span.attributes.get("kvcdn.cache") for span in spans}


def test_what_fails_is_marked(tmp_path: Path) -> None:
    """With one word, and not with a message; that something does not exist is no failure."""
    path = f"/v1/{'0' * 32}/manifests/{'0' * 64}"
    with running_receiver() as receiver:
        with traced("http://127.0.0.1:1", tmp_path / "cache", receiver) as edge:
            assert 504 == ask(edge.url, path).status
        failed = {span.name: span.attributes["error.type"] for span in receiver.wait(3) if span.failed}
        assert {"GET object": "504", "fill": "origin-unavailable", "origin get": "UnavailableError"} == failed
        with traced(str(tmp_path), tmp_path / "cache", receiver) as edge:
            assert 404 == ask(edge.url, path).status
        assert 3 == len([span for span in receiver.wait(6) if not span.failed])


def test_callers_decide_of_their_traces(origin: str, tmp_path: Path, document: Document) -> None:
    """A trace that its caller does not keep is not kept; `trace_ratio` is about those that begin here."""
    key = next(iter(document.blocks))
    with running_receiver() as receiver:
        with traced(origin, tmp_path / "cache", receiver, trace_ratio=0.0) as edge:
            ask(edge.url, "/" + key)
            ask(edge.url, "/" + key, headers={"traceparent": UNSAMPLED})
            ask(edge.url, "/" + key, headers={"traceparent": SAMPLED})
        assert [(TRACE, CALLER)] == [(span.trace, span.parent) for span in receiver.wait(1)]
        with traced(origin, tmp_path / "cache", receiver) as edge:
            ask(edge.url, "/" + key, headers={"traceparent": UNSAMPLED})
            ask(edge.url, "/" + key, headers={"traceparent": "not a trace"})
        _, begun_here = receiver.wait(2)
    assert (True, "") == (begun_here.trace != TRACE, begun_here.parent)


def test_a_receiver_that_is_gone_costs_spans_and_nothing_else(origin: str, tmp_path: Path, document: Document) -> None:
    """Answers come, the edge ends in time with exit code 0, and the log says in JSON that spans are lost."""
    key, data = next(iter(document.blocks.items()))
    with running_edge(origin, tmp_path / "cache", otlp_endpoint="http://127.0.0.1:1/v1/traces") as edge:
        assert data == ask(edge.url, "/" + key).body
        settle(edge.url)
        edge.process.terminate()
        assert 0 == edge.process.wait(WAIT_SECONDS)
        lines = edge.log().splitlines()[1:]
    assert [] == [line for line in lines if not line.startswith("{")]
    assert any('"logger":"opentelemetry' in line for line in lines)


def test_nobody_else_pays(origin: str, tmp_path: Path) -> None:
    """An edge without `otlp_endpoint` has not loaded the library."""
    with running_edge(origin, tmp_path / "cache") as edge:
        assert not maps_protobuf(edge)
    with running_receiver() as receiver, traced(origin, tmp_path / "cache", receiver) as edge:
        assert maps_protobuf(edge)


def maps_protobuf(edge: RunningEdge) -> bool:
    """Whether a process has mapped the compiled part of what the library writes spans with."""
    return "/google/_upb/" in Path(f"/proc/{edge.pid}/maps").read_text("utf-8")


def test_a_missing_library_is_told_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By --check-config as well; a URL that is none is refused as a setting."""
    monkeypatch.setitem(sys.modules, "kvcdn.edge.telemetry.otel", None)
    given = {"origin": str(tmp_path), "otlp_endpoint": "http://127.0.0.1:4318/v1/traces"}
    with pytest.raises(UsageError, match="not installed") as caught:
        check(load_settings(None, given))
    assert "kvcdn[otel]" in caught.value.hint
    for wrong in ("127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://user:secret@127.0.0.1/"):
        with pytest.raises(UsageError, match="otlp_endpoint") as caught:
            load_settings(None, {**given, "otlp_endpoint": wrong})
        assert "secret" not in str(caught.value)


def test_a_client_hands_its_application_s_trace_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The active span's, as the library itself would write it; none where there is no span, or no library."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    from kvcdn.client.loading.spans import traceparent

    assert traceparent() is None
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert traceparent() is None
    monkeypatch.undo()
    with TracerProvider().get_tracer("application").start_as_current_span("prompt"):
        carried: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carried)
        assert carried["traceparent"] == traceparent()
