"""Fixtures that every test may ask for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from support.seaweed import S3Server, running_seaweed

if TYPE_CHECKING:
    from support.blocks import Document
    from support.command import Ran
    from support.edge_process import WatchedStore
    from support.library import Library

# Before torch is loaded, here and in what tests start: the models are tiny, and the cores are taken by other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how loaded the machine is, and nothing about what is tested.
settings.register_profile("kvcdn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvcdn")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with an empty bucket, an identity that may write and one that may only read."""
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama checkpoint with random weights."""
    from support.tiny import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(name="short_blocks")
def _short_blocks() -> Iterator[None]:
    """Short texts have several blocks."""
    from support.published import short_blocks

    with short_blocks():
        yield


@pytest.fixture(scope="session")
def document() -> Document:
    """A document of three blocks, sealed as real ones are, of no model."""
    from support.blocks import make_document

    return make_document(tokens=2500)


@pytest.fixture
def store(document: Document) -> WatchedStore:
    """A store that holds `document`, and tells what it was asked."""
    from kvcdn.stores.memory import MemoryStore
    from support.edge_process import WatchedStore

    store = WatchedStore(MemoryStore())
    document.publish(store)
    return store


@pytest.fixture
def memory_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By which edges of this process forget what they remember for seconds: it stands still unless the test moves it."""
    from kvcdn.edge.memory import FadingMemory

    now = [0.0]
    monkeypatch.setattr(FadingMemory.__init__, "__defaults__", (lambda: now[0],))
    return now


@pytest.fixture
def library(tmp_path: Path) -> Library:
    """An empty library in the folder that `run` works on."""
    from kvcdn.stores.folder import FolderStore
    from support.library import Library

    return Library(FolderStore(tmp_path / "origin"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """Runs a command on that folder."""
    from support.command import kvcdn

    return lambda *words, **options: kvcdn(*words, "--origin", tmp_path / "origin", **options)


@pytest.fixture(autouse=True)
def _asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second request overtakes a late one, unless a test is about that: on a busy machine any answer may be late."""
    edges = sys.modules.get("kvcdn.client.network.edges")
    for name in ("HEDGE_UNKNOWN_SECONDS", "HEDGE_FLOOR_SECONDS") if edges else ():
        monkeypatch.setattr(edges, name, 1000.0)


@pytest.fixture(scope="session", autouse=True)
def _home_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What fixtures make for many tests they make in one home of the run's, which no test sees: never in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        _live_in(tmp_path_factory.mktemp("home-of-all"), patch)
        yield


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a home of its own: no key, trust list or memory of the user's is read or written."""
    _live_in(tmp_path_factory.mktemp("home"), monkeypatch)


def _live_in(home: Path, patch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        patch.setenv(variable, str(home / variable.lower()))
    for variable in ("KVCDN_ORIGIN", "KVCDN_EDGE", "KVCDN_TOKEN", "KVCDN_LOCAL_CAPACITY", "KVCDN_USAGE"):
        patch.delenv(variable, raising=False)
    # Tests of fetching fetch, again and again; those of the local store say so.
    patch.setenv("KVCDN_LOCAL", "0")
