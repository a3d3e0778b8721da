"""An edge's life: who may ask, where it may listen, how it starts and ends, what it loads and how much memory it takes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvcdn.access.guard import LOCAL
from kvcdn.edge.http.sendfile import STALL_SECONDS
from kvcdn.edge.launch import RunningEdge, launch_edge
from kvcdn.edge.settings import load_settings
from kvcdn.edge.tenants.guard import Guard
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.blocks import make_document
from support.edge_process import WatchedStore, ask, connect, edge_in_thread, exchange, object_files, running_edge
from support.waiting import WAIT_SECONDS, until

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def origin(tmp_path: Path) -> str:
    (tmp_path / "origin").mkdir()
    return str(tmp_path / "origin")


def test_an_edge_loads_no_tensor_library() -> None:
    """Importing everything an edge runs brings neither torch nor numpy nor blosc2, and no S3 client before it is needed."""
    code = """
import importlib, json, pkgutil, sys
import kvcdn.edge
for module in pkgutil.walk_packages(kvcdn.edge.__path__, "kvcdn.edge."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import kvcdn.edge.__main__
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    loaded = set(json.loads(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True).stdout))
    assert "aiohttp" in loaded
    assert set() == loaded & {"torch", "numpy", "numba", "blosc2", "transformers", "boto3", "botocore", "uvloop"}


def test_without_a_token_loopback_is_open() -> None:
    """The default needs no credentials."""
    assert LOCAL == Guard.of(load_settings(None, {"origin": "x"})).admit(None)


@pytest.mark.parametrize("listen", ["0.0.0.0:8400", "[::]:8400", "192.0.2.1:8400", "edge.example.org:8400"])
@pytest.mark.parametrize("given", [{}, {"insecure_http": True}, {"token": TOKEN}])
def test_beyond_loopback_an_edge_refuses_to_start(listen: str, given: dict[str, object]) -> None:
    """Plain HTTP for others needs both the setting and a token, for either address; the hint says what to do instead."""
    for name in ("listen", "admin_listen"):
        with pytest.raises(UsageError, match=f"{name} is more than loopback") as caught:
            Guard.of(load_settings(None, {"origin": "x", name: listen, **given}))
        assert "127.0.0.1" in caught.value.hint
        assert ("tls_cert" if "token" in given else "token_file") in caught.value.hint
        Guard.of(load_settings(None, {"origin": "x", name: listen, "insecure_http": True, "token": TOKEN}))


def test_an_edge_process_refuses_the_open_network(origin: str, tmp_path: Path) -> None:
    """It ends with the usage exit code before it touches the folder or the port."""
    with (
        pytest.raises(UnavailableError, match=r"ended with 2: error: listen is more than loopback.*hint: "),
        running_edge(origin, tmp_path / "cache", listen="0.0.0.0:0"),
    ):
        pass
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("token", ["short", "has a blank in it", "with\nline-and-more", "ünïcödé-is-not-ascii", ""])
def test_weak_and_malformed_tokens_are_refused(token: str, tmp_path: Path) -> None:
    """A token file must hold something that is a bearer token and cannot be guessed."""
    path = tmp_path / "token"
    path.write_text(token + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="usable token") as caught:
        Guard.of(load_settings(None, {"origin": "x", "token_file": path}))
    assert not token or token not in str(caught.value)


def test_a_token_is_asked_for_on_loopback_too(origin: str, tmp_path: Path) -> None:
    """Everything but /healthz is 401 without it, right with it, and it is never logged."""
    document = make_document(tokens=300)
    document.publish(FolderStore(origin))
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n", encoding="utf-8")
    block = "/" + next(iter(document.blocks))
    with running_edge(origin, tmp_path / "cache", token_file=path) as edge:
        assert 200 == ask(edge.url, "/healthz").status
        wrong = [
            {},
            *({"Authorization": text} for text in ("", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer", "Bearer ü")),
        ]
        for headers in wrong:
            for method, target in (("GET", block), ("HEAD", block), ("POST", "/v1/match"), ("GET", "/metrics"), ("GET", "/x")):
                reply = ask(edge.url, target, method, headers)
                assert (401, 'Bearer realm="kvcdn"', "no-store") == (
                    reply.status,
                    reply.headers["WWW-Authenticate"],
                    reply.headers["Cache-Control"],
                )
        assert [] == object_files(tmp_path / "cache")
        for scheme in ("Bearer", "bearer"):
            assert 200 == ask(edge.url, block, headers={"Authorization": f"{scheme} {TOKEN}"}).status
        time.sleep(0.2)
        assert TOKEN not in edge.log()
        assert TOKEN not in Path(f"/proc/{edge.pid}/cmdline").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_edge_cleanly(origin: str, tmp_path: Path, number: signal.Signals) -> None:
    """Exit code 0, with idle connections open for which nobody waits, and no trace of an error."""
    with running_edge(origin, tmp_path / "cache", shutdown_seconds=300, keepalive_seconds=3600) as edge:
        connection = connect(edge.url)
        exchange(connection, "/healthz")
        edge.process.send_signal(number)
        assert 0 == edge.process.wait(WAIT_SECONDS)
        connection.close()
        assert "Traceback" not in edge.log()


def refuses(edge: RunningEdge) -> bool:
    """Whether nobody listens any more."""
    with contextlib.closing(connect(edge.url)) as connection:
        try:
            connection.connect()
        except ConnectionRefusedError:
            return True
        return False


def test_a_running_response_is_finished_before_the_end(origin: str, tmp_path: Path) -> None:
    """A response under way when the signal comes is sent to its last byte; new connections are refused meanwhile."""
    document = make_document(tokens=1024, layers=32, heads=4, dim=64)
    document.publish(FolderStore(origin))
    key, data = next(iter(document.blocks.items()))
    with running_edge(origin, tmp_path / "cache", shutdown_seconds=60) as edge:
        connection = connect(edge.url)
        connection.request("GET", f"/{key}")
        response = connection.getresponse()
        head = response.read(1000)
        edge.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(edge))
        assert data == head + response.read()
        connection.close()
        assert 0 == edge.process.wait(WAIT_SECONDS)


def test_a_reader_that_hangs_does_not_hold_the_end_up(origin: str, tmp_path: Path) -> None:
    """After its seconds of grace an edge ends whoever still reads."""
    document = make_document(tokens=1024, layers=32, heads=4, dim=64)
    document.publish(FolderStore(origin))
    with running_edge(origin, tmp_path / "cache", shutdown_seconds=0.5) as edge:
        connection = connect(edge.url)
        connection.request("GET", "/" + next(iter(document.blocks)))
        connection.getresponse().read(1000)
        edge.process.send_signal(signal.SIGTERM)
        # Sooner than a reader is cut who hangs while the edge goes on.
        assert 0 == edge.process.wait(STALL_SECONDS - 10)
        connection.close()


def test_a_fill_under_way_at_the_end_leaves_nothing(tmp_path: Path) -> None:
    """Stopping in the middle of a fill leaves no file behind."""
    document = make_document(tokens=1024)
    store = WatchedStore(MemoryStore())
    document.publish(store)
    store.go.clear()
    with edge_in_thread(store, tmp_path / "cache", shutdown_seconds=0.1) as edge:
        connection = connect(edge.url)
        connection.request("GET", "/" + next(iter(document.blocks)))
        assert store.streaming.wait(WAIT_SECONDS)
        release = threading.Timer(0.6, store.go.set)
        release.start()
    release.join()
    connection.close()
    assert [] == object_files(tmp_path / "cache")
    assert [] == list((tmp_path / "cache" / "staging").iterdir())


def test_a_port_in_use_is_told_as_such(origin: str, tmp_path: Path) -> None:
    """Exit code 5 and a hint."""
    with (
        running_edge(origin, tmp_path / "a") as edge,
        pytest.raises(UnavailableError, match=r"ended with 5: error: cannot listen on .*hint: "),
        running_edge(origin, tmp_path / "b", listen=f"127.0.0.1:{edge.port}"),
    ):
        pass


def test_a_wrong_setting_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    """launch_edge checks what it is given."""
    with pytest.raises(UsageError, match="colour is no setting"), launch_edge(origin="x", cache_dir=tmp_path, colour="red"):
        pass


def test_a_missing_trust_file_is_named(origin: str, tmp_path: Path) -> None:
    """An edge does not start without the list it was told to use."""
    with (
        pytest.raises(UnavailableError, match="ended with 2: error: cannot read the trust file"),
        running_edge(origin, tmp_path / "cache", trust_file=tmp_path / "none"),
    ):
        pass
