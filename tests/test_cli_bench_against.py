"""`kvcdn bench against`: real servers, real faults, a tiny model; what is not installed is said, and nothing is invented."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from kvcdn.cli.bench.against.link import counted_link
from kvcdn.cli.bench.against.lmcache import interpreter
from kvcdn.cli.bench.machine import machine, spread
from kvcdn.cli.bench.nginx import nginx_path
from kvcdn.cli.bench.processes import cpu_seconds, with_children
from support.benched import check_benched
from support.command import kvcdn
from support.tiny import ROOT, tiny_checkpoint

pytestmark = pytest.mark.timeout(3600)
"""One run has some hundred answers, and servers that are ended and started."""

TOKENS, FAULT_TOKENS = 500, 200

AT_REST = {"bit flip", "sector lost", "truncated", "wrong object"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One run of everything but LMCache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCDN_LMCACHE_PYTHON", "/nowhere/python")
        patch.setattr("kvcdn.cli.bench.against.faults.BIT_FLIPS", 2)
        patch.setattr("kvcdn.cli.bench.against.faults.SECTORS", 1)
        ran = kvcdn(
            "bench", "against", "--model", str(tiny_checkpoint(tmp_path_factory.mktemp("model"))), "--tokens", str(TOKENS),
            "--document", str(ROOT / "LICENSE"), "--runs", "2", "--precision", "native,int8",
            "--fault-tokens", str(FAULT_TOKENS), "--json", home=tmp_path_factory.mktemp("home"),
        )  # fmt: skip
    return check_benched("against", ran)


def test_every_way_is_measured(found):
    """With times, bytes and processor time; what is read over a socket has at least the KV's bytes on the wire."""
    rows = {row["way"]: row for row in found["rows"]}
    ours = ["kvcdn native, edge", "kvcdn int8, edge", "kvcdn native, S3 without an edge", "kvcdn native, local store"]
    files = ["torch.save, nginx", "safetensors, nginx"] if nginx_path() else []
    assert ["no cache", *files, "safetensors, S3 download", *ours] == list(rows)
    for row in rows.values():
        assert 2 == len(row["samples_s"])
        assert row["ttft_least_s"] <= row["ttft_s"] <= row["ttft_most_s"]
        assert row["reader_cpu_s"] > 0
        assert TOKENS == row["tokens_reused"] or "no cache" == row["way"]
        assert {"key", "integrity", "authenticity", "model", "confidentiality"} == row["checks"].keys()
    for way in [*files, "safetensors, S3 download"]:
        assert found["raw_bytes"] < rows[way]["stored_bytes"] < rows[way]["wire_bytes"]
        assert 0 == rows[way]["answer_regret_nats"]
    assert rows["kvcdn native, edge"]["wire_bytes"] < found["raw_bytes"]
    assert rows["kvcdn native, local store"]["wire_bytes"] is None


def test_no_fault_makes_a_wrong_answer_of_ours(found):
    """Whatever is done to bytes, connections or weights: the damage is seen, and the answer is what an undamaged one is."""
    ours = [row for row in found["faults"]["rows"] if row["way"].startswith("kvcdn")]
    assert {row["way"] for row in found["rows"] if row["way"].startswith("kvcdn")} == {row["way"] for row in ours}
    assert "kvcdn int8, edge" in {row["way"] for row in ours}
    assert AT_REST | {"other weights", "connection cut", "server gone"} == {row["fault"] for row in ours}
    for row in ours:
        assert (row["trials"], 0, 0, 0) == (row["recovered"], row["wrong"], row["unnoticed"], row["refused"]), row


def test_a_file_believes_what_it_is_given(found):
    """Another document's file, and other weights under the same name, are used without a word; half a file is refused."""
    rows = {row["fault"]: row for row in found["faults"]["rows"] if row["way"] == "safetensors, S3 download"}
    for fault in ("wrong object", "other weights"):
        assert rows[fault]["trials"] == rows[fault]["wrong"] + rows[fault]["unnoticed"]
    assert 2 == rows["truncated"]["refused"]
    assert all(
        row["trials"] == sum(row[name] for name in ("wrong", "unnoticed", "recovered", "refused")) for row in rows.values()
    )


def test_what_is_not_installed_is_said(found):
    """With the command that installs it."""
    assert ("LMCache", "make peers-lmcache") in {(one["way"], one["install"]) for one in found["not_run"]}
    assert [] == [row for row in found["rows"] if "LMCache" in row["way"]]


@pytest.mark.skipif(interpreter() is None, reason="there is no LMCache here (make peers-lmcache)")
def test_lmcache_is_measured(tmp_path, tiny_llama):
    """Its ways give answers that are right, and reuse whole chunks."""
    ran = kvcdn(
        "bench", "against", "--model", tiny_llama, "--tokens", "600", "--document", ROOT / "LICENSE", "--runs", "1",
        "--precision", "native", "--fault-tokens", "0", "--json", home=tmp_path,
    )  # fmt: skip
    assert 0 == ran.code, ran.err
    rows = {row["way"]: row for row in ran.json["rows"] if "LMCache" in row["way"]}
    assert {"LMCache, local disk", "LMCache, its server", "LMCache, S3"} <= rows.keys()
    assert {512} == {row["tokens_reused"] for row in rows.values()}
    assert 0 == rows["LMCache, local disk"]["answer_regret_nats"] == rows["LMCache, S3"]["answer_regret_nats"]
    assert ran.json["raw_bytes"] * 512 // 600 == rows["LMCache, S3"]["stored_bytes"]  # whole chunks, as they are


def echo_server(listener: socket.socket, reply: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            if connection.recv(100):
                connection.sendall(reply)


def ask(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        try:
            connection.sendall(b"hello")
            parts = []
            while data := connection.recv(1000):
                parts.append(data)
        except OSError:
            pass
        return b"".join(parts)


@pytest.fixture
def server():
    """The port of a server that answers 1,000 bytes to anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=echo_server, args=(listener, bytes(1000)))
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_link_counts(server):
    """Both directions, all connections."""
    with counted_link(server) as link:
        assert [1000, 1000] == [len(ask(link.port)) for _ in range(2)]
        assert 2010 == link.bytes


def test_a_link_cuts_once(server):
    """The connection that carries the byte ends; the next ones are whole."""
    with counted_link(server, cut_after=1300) as link:
        assert [1000, 300, 1000] == [len(ask(link.port)) for _ in range(3)]
        assert 1 == link.cuts


def test_a_link_dies(server):
    """Nothing comes any more."""
    with counted_link(server, cut_after=300, dies=True) as link:
        assert [300, 0, 0] == [len(ask(link.port)) for _ in range(3)]


def test_processes_and_machine(tmp_path: Path):
    """A process's own time is what it has used, and figures say where they come from."""
    import os
    import time

    assert os.getpid() == with_children(os.getpid())[0]
    assert 0 < cpu_seconds(os.getpid()) <= time.process_time() + 0.02
    assert 0 == cpu_seconds(2**30)
    told = machine()
    assert {"cpu", "cores", "memory_bytes", "time", "load_average", "python", "kvcdn", "torch"} <= told.keys()
    assert {"median": 2.0, "least": 1.0, "most": 4.0, "runs": 3} == spread([4.0, 1.0, 2.0])
