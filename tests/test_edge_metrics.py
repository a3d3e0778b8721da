"""The metrics of an edge: what is documented is there, counts what it says, and has bounded labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from test_edge_access import KEY, bearer

from kvcdn import __version__
from kvcdn.access.grant import Grant, Scope
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document
from support.edge_process import WatchedStore, ask, edge_in_thread, settle

DOCUMENTED = re.compile(r"`(kvcdn_edge_[a-z_]+)(?:\{([a-z,]+)\})?`")


class DamagedStore(WatchedStore):
    """Sends the last byte of blocks wrong."""

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        pieces = super().stream(key, start, length)
        return (piece[:-1] + bytes([piece[-1] ^ 1]) if "/blocks/" in key else piece for piece in pieces)


def samples(url: str, **headers: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels; none is there twice."""
    text = ask(url, "/metrics", headers=headers).body.decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    by_name = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(by_name) == len(found)
    return by_name


def values(url: str, name: str, **headers: str) -> dict[tuple[str, ...], float]:
    """The samples of one name, by the values of their labels in the order of their names."""
    found = samples(url, **headers).items()
    return {tuple(value for _, value in sorted(labels)): number for (sample, labels), number in found if sample == name}


def test_what_is_documented_is_there_and_the_other_way_round(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """Every name with its labels: of the table in docs/operating.md, and of an edge that did a little of everything."""
    text = (Path(__file__).parents[1] / "docs" / "operating.md").read_text("utf-8")
    table = text.split("## Metrics")[1].split("```")[0]
    documented = {name: set(filter(None, labels.split(","))) for name, labels in DOCUMENTED.findall(table)}
    tag = str(document.model.tag)
    site = {"peers": ("http://127.0.0.1:1", "http://127.0.0.1:2"), "self": "http://127.0.0.1:2"}
    settings = {"prefill_speeds": {tag: 100.0}, "scrub_bytes_per_second": "1GB", **site}
    with edge_in_thread(store, tmp_path / "cache", **settings) as edge:
        for key in document.objects:
            ask(edge.url, "/" + key)
        settle(edge.url)
        found: dict[str, set[str]] = {}
        while "kvcdn_edge_scrubbed_objects_total" not in found:
            for name, labels in samples(edge.url):
                shown = re.sub("_(bucket|sum|count)$", "", name)
                if not name.endswith("_created"):
                    found.setdefault(shown, set()).update(label for label, _ in labels if label != "le")
    assert documented == found


def test_ways_and_bytes_are_counted(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """First a miss, then a hit; the sums of both are what was sent."""
    key, data = next(iter(document.blocks.items()))
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for _ in range(3):
            assert data == ask(edge.url, "/" + key).body
            settle(edge.url)
        requests, sizes = (values(edge.url, f"kvcdn_edge_object_{what}_total") for what in ("requests", "bytes"))
        ways = [("hit",), ("collapsed",), ("miss",), ("passed",)]
        assert [2, 0, 1, 0] == [requests[way] for way in ways]
        assert [2 * len(data), 0, len(data), 0] == [sizes[way] for way in ways]
        assert {("local", str(document.model.tag))} == {
            (tenant, model) for model, tenant in values(edge.url, "kvcdn_edge_delivered_bytes_total")
        }
        assert {(__version__,): 1} == values(edge.url, "kvcdn_edge_info")


def test_savings_are_by_model_and_by_a_name_that_is_written_safely(document: Document, store, tmp_path: Path) -> None:
    """Seconds where the settings tell a speed; what a name holds stays in its label, also one like that of a sum."""
    tag = str(document.model.tag)
    for name in ('tiny"}\n', "other", "\\"):
        settings = {"model_names": {name: tag}, "prefill_speeds": {name: 250.0}}
        with edge_in_thread(store, tmp_path / "cache", **settings) as edge:
            for key in document.blocks:
                ask(edge.url, "/" + key)
            assert {(name,): 2500} == values(edge.url, "kvcdn_edge_saved_prefill_tokens_total")
            assert {(name,): 10} == values(edge.url, "kvcdn_edge_saved_prefill_seconds_total")


def test_tenants_are_told_apart(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """Each with its models; who is refused has delivered nothing."""
    issuers = tmp_path / "issuers"
    issuers.write_text(f"{KEY.public.text}\n", encoding="utf-8")
    key, data = next(iter(document.blocks.items()))
    stats = bearer(Grant("op", frozenset((Scope.STATS,))))
    with edge_in_thread(store, tmp_path / "cache", issuers_file=issuers) as edge:
        for tenant, scope in (("acme", Scope.READ), ("acme", Scope.READ), ("blue", Scope.READ), ("poor", Scope.WARM)):
            ask(edge.url, "/" + key, headers=bearer(Grant(tenant, frozenset((scope,)))))
        sent = values(edge.url, "kvcdn_edge_delivered_bytes_total", **stats)
    tag = str(document.model.tag)
    assert {(tag, "acme"): 2 * len(data), (tag, "blue"): len(data)} == sent


def test_an_origin_that_sends_what_is_wrong_is_counted(document: Document, tmp_path: Path) -> None:
    """By its place, each time; and the one behind it, which has it right, is not."""
    bad, good = DamagedStore(MemoryStore()), MemoryStore()
    document.publish(bad)
    document.publish(good)
    key, data = next(iter(document.blocks.items()))
    with edge_in_thread(bad, tmp_path / "cache", good) as edge:
        assert data == ask(edge.url, "/" + key).body
        failures = values(edge.url, "kvcdn_edge_origin_verification_failures_total")
        assert (True, 0) == (failures["0",] >= 1, failures["1",])


def test_the_time_that_origins_take_is_counted(document: Document, store: WatchedStore, tmp_path: Path) -> None:
    """By operation; buckets grow and end with all; that something is missing is an answer, that an origin is down is none."""
    with edge_in_thread(store, tmp_path / "cache") as edge:
        for key in document.objects:
            ask(edge.url, "/" + key)
        assert 404 == ask(edge.url, f"/v1/{'0' * 32}/manifests/{'0' * 64}").status
        store.down = True
        assert 504 == ask(edge.url, f"/v1/{'0' * 32}/manifests/{'1' * 64}").status
        counts = values(edge.url, "kvcdn_edge_origin_seconds_count")
        assert {("get", "0"): len(document.objects) + 1, ("stat", "0"): 0} == counts
        buckets = values(edge.url, "kvcdn_edge_origin_seconds_bucket")
        grown = [number for (bound, operation, _), number in buckets.items() if operation == "get"]
        assert (sorted(grown), grown[-1]) == (grown, len(document.objects) + 1)
