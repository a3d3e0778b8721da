"""A bucket as boto3 shows it: objects put, got and downloaded, over the server's port or another's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boto3.session import Session
from botocore.config import Config

from kvcdn.cli.bench.against.way import Server, Stored
from kvcdn.cli.seaweed import HOST

if TYPE_CHECKING:
    from kvcdn.cli.seaweed import S3Server


class Bucket:
    """A bucket of a running server: its own, or another that is made."""

    def __init__(self, s3: S3Server, name: str = "") -> None:
        self.s3, self.name = s3, name or s3.bucket
        self._kept: Any = None
        self.server = Server(s3.port, lambda: [s3.pid])

    def url(self, prefix: str, port: int | None = None) -> str:
        """What `open_store` takes; credentials come from the environment."""
        return self.s3.url(prefix, endpoint=f"http://{HOST}:{port or self.s3.port}")

    def make(self) -> None:
        with self._client() as client:
            client.create_bucket(Bucket=self.name)

    def put(self, key: str, data: bytes) -> None:
        with self._client() as client:
            client.put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        with self._client() as client:
            data: bytes = client.get_object(Bucket=self.name, Key=key)["Body"].read()
            return data

    def download(self, key: str, target: Path, port: int | None = None) -> None:
        """As boto3's guide says: in parallel ranges, into a file."""
        with self._client(port) as client:
            client.download_file(self.name, key, str(target))

    def stored(self, key: str) -> Stored:
        """The object `key`. What is written is what the server then believes is right: its own checksums are of that."""
        return Stored(key, lambda: self.get(key), lambda data: self.put(key, data), lambda: len(self.get(key)))

    def close(self) -> None:
        """Ends the client that is kept: to make one takes longer than many downloads."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    @contextlib.contextmanager
    def _client(self, port: int | None = None) -> Iterator[Any]:
        if port is not None:
            with contextlib.closing(self._make(port)) as client:
                yield client
            return
        if self._kept is None:
            self._kept = self._make(self.s3.port)
        yield self._kept

    def _make(self, port: int) -> Any:
        return Session().client(
            "s3",
            endpoint_url=f"http://{HOST}:{port}",
            region_name=self.s3.region,
            aws_access_key_id=self.s3.writer.access_key,
            aws_secret_access_key=self.s3.writer.secret_key,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}, proxies={}),
        )
