"""Fixtures that every test may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.seaweed import S3Server, running_seaweed


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with an empty bucket, an identity that may write and one that may only read."""
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server
