"""Stores for the tests of an origin's upkeep: a fresh one of each kind that can be written."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from kvcdn.store import BlobStore
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from kvcdn.stores.s3 import S3Store

KINDS = ("memory", "folder", "s3")


def new_store(kind: str, folder: Path, request: pytest.FixtureRequest) -> BlobStore:
    """An empty store; in S3 under a prefix of its own, with the identity that may write in the environment."""
    if kind == "memory":
        return MemoryStore()
    if kind == "folder":
        return FolderStore(folder / uuid.uuid4().hex)
    server = request.getfixturevalue("s3_server")
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for name, value in server.environment().items():
        patch.setenv(name, value)
    return S3Store(server.bucket, uuid.uuid4().hex, endpoint=server.endpoint, region=server.region)
