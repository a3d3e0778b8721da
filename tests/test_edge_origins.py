"""Edges before real origins: an S3 server, and another edge."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from kvcdn.edge.launch import RunningEdge
from kvcdn.edge.serve import check
from kvcdn.edge.settings import load_settings
from kvcdn.errors import UsageError
from kvcdn.stores import open_store
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import Document, make_document
from support.edge_process import ask, ask_match, connect, exchange, origin_gets, origin_stats, running_edge
from support.seaweed import S3Server
from support.waiting import WAIT_SECONDS
from support.web import running_web

MOST_RESIDENT_BYTES = 150_000_000

ROUNDS = 8
"""So many that half a block kept in each would show: a round's own peak differs by what happens to be filled at once."""


def read_by_many(edge: RunningEdge, document: Document, readers: int = 8) -> None:
    """Every block, by `readers` at once, each beginning elsewhere; all must come right."""
    keys = list(document.blocks)
    right: list[bool] = []

    def read(first: int) -> None:
        with contextlib.closing(connect(edge.url)) as connection:
            order = keys[first:] + keys[:first]
            right.extend(document.blocks[key] == exchange(connection, f"/{key}").body for key in order)

    threads = [threading.Thread(target=read, args=(number % len(keys),)) for number in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [True] * (readers * len(keys)) == right


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_memory_stays_flat_while_filling_and_serving(
    kind: str, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 17 MB, one of which fits, filled and read by many again and again: resident memory does not grow with them."""
    document = make_document(tokens=1024 * 6, layers=16, heads=4, dim=64)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    origin = s3_server.url("edge-memory") if kind == "s3" else str(tmp_path / "origin")
    document.publish(open_store(origin))
    with running_edge(origin, tmp_path / "cache", capacity="30MB") as edge:
        peaks = []
        for _ in range(ROUNDS):
            read_by_many(edge, document)
            peaks.append(edge.resident_bytes("VmHWM"))
        assert peaks[-1] <= MOST_RESIDENT_BYTES, peaks


def test_an_edge_before_s3_asks_once(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Match by lookups, then one request an object, then none, with what was published."""
    document = make_document(tokens=3000, seed=41)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    url = s3_server.url("edge-once")
    document.publish(open_store(url))
    with running_edge(url, tmp_path / "cache") as edge:
        for _ in range(2):
            assert len(document.blocks) == ask_match(edge.url, document.model.tag, document.addresses).json()["matched"]
            for key, data in document.objects.items():
                assert data == ask(edge.url, f"/{key}").body
        assert (len(document.objects), len(document.blocks)) == (origin_gets(edge.url), origin_stats(edge.url))
        assert 404 == ask(edge.url, f"/v1/{'0' * 32}/manifests/{'0' * 64}").status


def test_an_edge_before_an_edge(tmp_path: Path) -> None:
    """Tiers: the near edge fills from the far one, with its token, and goes on serving and matching when that is gone."""
    document = make_document(tokens=2500, seed=42)
    document.publish(FolderStore(tmp_path / "origin"))
    token = "the-far-edge-asks-for-this"
    cached, *rest = list(document.blocks)
    with (
        running_edge(str(tmp_path / "origin"), tmp_path / "far", token=token) as far,
        running_edge(far.url, tmp_path / "near", origin_token=token) as near,
    ):
        assert len(document.blocks) == ask_match(near.url, document.model.tag, document.addresses).json()["matched"]
        assert document.blocks[cached] == ask(near.url, f"/{cached}").body
        assert 404 == ask(near.url, f"/v1/{'0' * 32}/manifests/{'0' * 64}").status
        far.process.terminate()
        far.process.wait(WAIT_SECONDS)
        reply = ask(near.url, f"/{cached}", headers={"Range": "bytes=1-100"})
        assert (206, document.blocks[cached][1:101]) == (reply.status, reply.body)
        assert 504 == ask(near.url, f"/{rest[0]}").status
        assert 1 <= ask_match(near.url, document.model.tag, document.addresses).json()["matched"]


def test_each_origin_sees_its_own_token(tmp_path: Path) -> None:
    """Three origins: the first asks for one token, the second for another, the third for none and sees none."""
    document = make_document(tokens=2500, seed=43)
    key, *_ = document.blocks
    third = MemoryStore()
    document.publish(third)
    tokens = ["what-the-first-origin-asks-for", "what-the-second-origin-asks-for"]
    files = [tmp_path / "first", tmp_path / "second"]
    for file, token in zip(files, tokens, strict=True):
        file.write_text(token + "\n")
    with running_web(MemoryStore()) as one, running_web(MemoryStore()) as two, running_web(third) as three:
        one.token, two.token = tokens
        given = {"fallback_origins": [two.url, three.url], "origin_token_files": {one.url: files[0], two.url: files[1]}}
        with running_edge(one.url, tmp_path / "cache", **given) as edge:
            assert document.blocks[key] == ask(edge.url, f"/{key}").body
        seen = [[headers.get("Authorization") for _, _, headers in web.requests] for web in (one, two, three)]
        assert [[f"Bearer {tokens[0]}"], [f"Bearer {tokens[1]}"], [None]] == seen


def test_a_token_belongs_to_an_origin_that_there_is(tmp_path: Path) -> None:
    """A URL that is none of the origins is a slip; so are two tokens for one."""
    (tmp_path / "token").write_text("0123456789abcdef")
    given = {"origin": "http://127.0.0.1:1", "origin_token_files": {"http://127.0.0.1:2": tmp_path / "token"}}
    with pytest.raises(UsageError, match="none of the origins"):
        load_settings(None, given)
    given["origin_token_files"] = {"http://127.0.0.1:1": tmp_path / "token"}
    with pytest.raises(UsageError, match="both hold a token"):
        load_settings(None, {**given, "origin_token": "x" * 16})
    check(load_settings(None, given))
    (tmp_path / "token").write_text("short")
    with pytest.raises(UsageError, match="does not hold a usable token"):
        check(load_settings(None, given))
