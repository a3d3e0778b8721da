"""open_store: one function from what people type to a store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcdn.errors import UsageError
from kvcdn.stores import open_store
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.http import HttpStore
from kvcdn.stores.memory import MemoryStore
from support.seaweed import S3Server


def test_paths_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A path, relative or with a tilde, and a file URL lead to the same folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b").mkdir()
    spellings = (
        str(tmp_path / "a b"),
        "a b",
        "./a b",
        "~/a b",
        f"file://{tmp_path}/a%20b",
        f"FILE://localhost{tmp_path}/a%20b",
    )
    for spelling in spellings:
        store = open_store(spelling)
        assert isinstance(store, FolderStore)
        assert f"file://{tmp_path}/a%20b" == store.url


def test_urls_lead_back(tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    """What a store gives as its URL opens the same place again."""
    for name, value in s3_server.writer.environment().items():
        monkeypatch.setenv(name, value)
    for url in (str(tmp_path / "x"), "http://127.0.0.1:9/some/prefix/", s3_server.url("one/two"), s3_server.url()):
        store = open_store(url)
        assert type(store) is type(open_store(store.url))
        assert store.url == open_store(store.url).url


def test_s3_endpoint_given_apart(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    """The endpoint can come as an option, in the URL, or from AWS's own variable; the option wins."""
    for name, value in s3_server.writer.environment().items():
        monkeypatch.setenv(name, value)
    open_store(s3_server.url("endpoints")).create("a", [b"x"])
    apart = open_store("s3://kvcdn/endpoints", endpoint=s3_server.endpoint)
    wins = open_store("s3://kvcdn/endpoints?endpoint=http://127.0.0.1:9", endpoint=s3_server.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    for store in (apart, wins, open_store("s3://kvcdn/endpoints")):
        assert b"x" == store.read("a")


def test_http_and_memory():
    """http(s) leads to a reader, memory: to a new store of its own."""
    assert isinstance(open_store("https://edge.example/kv"), HttpStore)
    first = open_store("memory:")
    assert isinstance(first, MemoryStore)
    first.create("a", [b"x"])
    assert open_store("memory:").stat("a") is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host/x",
        "gs://bucket",
        "file://host/share",
        "file:///x?y=1",
        "s3://",
        "s3://UPPER/x",
        "s3://bucket/../x",
        "s3://bucket/a b",
        "s3://bucket?endpont=http://typo",
        "s3://bucket?endpoint=ftp://host",
        "s3://bucket?endpoint=http://user:pw@host",
        "s3://bucket?endpoint",
        "s3://bucket#x",
        "http://",
        "http://host:99999/",
        "http://host:0/",
        "http://user:pw@host/",
        "https://host/?query",
        "https://host/#part",
        "https://ho st/",
        "http://[::1/",
    ],
)
def test_refused_forms(url: str):
    """What is not a place is a usage error with a hint, and never shows a password."""
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "pw" not in str(caught.value)


def test_options_that_do_not_belong():
    """An endpoint or a token for a store that has no use for it is a mistake, told as one."""
    with pytest.raises(UsageError, match="endpoint belongs"):
        open_store("/tmp", endpoint="http://host")
    with pytest.raises(UsageError, match="token belongs") as caught:
        open_store("s3://bucket", token="sesame")
    assert "sesame" not in str(caught.value)


def test_only_what_is_needed_is_loaded(tmp_path: Path):
    """A folder store loads neither boto3 nor urllib3, and S3 is not loaded for HTTP: start-up stays fast."""
    script = (
        "import sys; from kvcdn.stores import open_store; open_store(sys.argv[1]).create('a', [b'x']);"
        "assert not {'boto3', 'botocore', 'urllib3', 'aiohttp', 'torch'} & set(sys.modules);"
        "open_store('http://127.0.0.1:9');"
        "assert not {'boto3', 'botocore', 'torch'} & set(sys.modules);"
        "import kvcdn.stores.s3; assert not {'boto3', 'botocore'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], check=True, env=environment)
