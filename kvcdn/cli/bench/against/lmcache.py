"""LMCache's storage path on the same KV: its engine in a process of its own environment, driven by lines.

`make peers-lmcache` installs it in `.venv-lmcache`, pinned. The process has the model too, so that its answers are timed like
the others: lookup, retrieval into tensors, and the library's generate(). What LMCache has no whole chunk of is prefilled, as in
the engines that it serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcdn.cli.bench.against.bucket import Bucket
from kvcdn.cli.bench.against.stand import Stand
from kvcdn.cli.bench.against.way import Checks, Document, Reading, Server, Stored, stored_file
from kvcdn.cli.seaweed import HOST, VIRTUAL_BUCKET, VIRTUAL_DOMAIN
from kvcdn.errors import KvcdnError, UnavailableError

if TYPE_CHECKING:
    from kvcdn.cli.seaweed import S3Server

INSTALL = "make peers-lmcache"

CHUNK_TOKENS = 256
"""LMCache's default."""

BUFFER_GB = 0.5
"""Of its memory for chunks in flight; its default of 5 is for a server."""

START_SECONDS = 600.0
"""Its libraries take ten seconds to import, on a busy machine minutes."""

ORDER_SECONDS = 180.0
"""Longest wait for an answer; a process that needs longer hangs, and is killed."""

ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
"""Usage is not reported; hashes are equal in all processes, as its documentation asks for where a cache is shared."""

UNTOLD = ("local_disk", "remote_url", "extra_config")
"""Settings that hold places and credentials."""

CHECKS = Checks("model's name, world size, worker, tokens, dtype", "none", "none", "its name, in the key", "none")


def interpreter() -> Path | None:
    """The interpreter of LMCache's environment: KVCDN_LMCACHE_PYTHON, or that of `.venv-lmcache` in the working directory."""
    named = os.environ.get("KVCDN_LMCACHE_PYTHON")
    path = Path(named) if named else Path(".venv-lmcache/bin/python").absolute()
    return path if path.is_file() else None


class LmcachePeer:
    """The process. Orders and answers are JSON lines."""

    def __init__(self, python: Path, log: Path, order: Mapping[str, Any]) -> None:
        program = str(Path(__file__).with_name("lmcache_peer.py"))
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, in the environment that the user named
                [str(python), "-P", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**inherited, **ENVIRONMENT},
                text=True,
            )
        self.versions = self.order(**order)

    def order(self, **order: Any) -> dict[str, Any]:
        """What is answered. Raises KvcdnError for an error, or where the process has ended."""
        if self._process.stdin is None or self._process.stdout is None:
            raise KvcdnError("LMCache's process has no pipes")
        watchdog = threading.Timer(ORDER_SECONDS, self._process.kill)
        watchdog.start()
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            words = self._log.read_text("utf-8", errors="replace").strip().splitlines()
            raise UnavailableError("LMCache's process has ended: " + " | ".join(words[-3:])[-500:])
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KvcdnError(f"LMCache: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Lmcache:
    """One of its backends."""

    checks = CHECKS

    def __init__(
        self,
        stand: Stand,
        name: str,
        python: Path,
        log: Path,
        settings: Mapping[str, Any],
        *,
        folder: Path | None = None,
        server: Server | None = None,
        bucket: Bucket | None = None,
        lossy: bool = False,
    ) -> None:
        """What it keeps lies in `folder`, or at `server`, which `settings` name by `remote_url`, or there in `bucket`."""
        self.name, self.lossy = name, lossy
        self._stand, self._python, self._log = stand, python, log
        self._settings = {"local_cpu": False, "max_local_cpu_size": BUFFER_GB, **settings}
        told = ", ".join(f"{key}={value}" for key, value in self._settings.items() if key not in UNTOLD)
        self.setup = f"LMCacheEngine, chunks of {CHUNK_TOKENS} tokens, {told}"
        self._folder, self._bucket = folder, bucket
        self.server = server
        self._keys: dict[str, list[str]] = {}
        self._running = contextlib.ExitStack()
        self._peer: LmcachePeer | None = None

    @property
    def peer(self) -> LmcachePeer:
        """Its process, started when it is first asked for."""
        if self._peer is None:
            self._peer = self._start(self._settings)
            self._running.callback(self._peer.close)
        return self._peer

    def _start(self, settings: Mapping[str, Any]) -> LmcachePeer:
        stand = self._stand
        # Its CacheGen looks for the model's configuration under the model's name.
        name = str(stand.checkpoint) if self.lossy else stand.model_name
        order = {"model": str(stand.checkpoint), "name": name, "chunk_size": CHUNK_TOKENS, "settings": dict(settings)}
        return LmcachePeer(self._python, self._log, {**order, "threads": torch.get_num_threads()})

    def keep(self, document: Document) -> None:
        self._keys[document.name] = self.peer.order(do="store", text=document.text)["keys"]

    def read(self, document: Document, question: str, tokens: int, *, port: int | None = None) -> Reading:
        prompt = self._stand.prompt(document, question)
        peer = self.peer
        if port is not None:
            away = str(self._settings["remote_url"]).rpartition(":")[0]
            peer = self._start({**self._settings, "remote_url": f"{away}:{port}"})
        try:
            found = peer.order(do="answer", prompt=prompt, tokens=tokens)
        except KvcdnError as error:
            return Reading(said=str(error)[:300])
        finally:
            if port is not None:
                peer.close()
        said = "" if found["kept"] == found["found"] else f"{found['kept']} of {found['found']} tokens could be retrieved"
        return Reading(tuple(found["token_ids"]), found["first_token_s"], found["cpu_s"], found["kept"], said)

    def renew(self) -> None:
        """Its memory is a buffer only: everything is read again."""

    def stored(self, document: Document) -> Sequence[Stored]:
        """Its chunks' files or objects; nothing where its server keeps them in memory."""
        if self._bucket is not None:
            return [self._bucket.stored(key.replace("/", "_")) for key in self._keys[document.name]]
        if self._folder is None:
            return []
        names = {key.replace("/", "-") for key in self._keys[document.name]}
        files = {path.name.rpartition(".")[0]: path for path in self._folder.iterdir()}
        return [stored_file(files[key]) for key in self._keys[document.name] if key in names & files.keys()]

    def other_weights(self, folder: Path | None) -> None:
        self._stand.use_weights(folder)
        self.peer.order(do="weights", folder=str(folder or self._stand.checkpoint))

    def close(self) -> None:
        """Ends its process."""
        self._running.close()
        self._peer = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def ways(stand: Stand, python: Path, folder: Path, s3: S3Server | None, running: contextlib.ExitStack) -> Iterator[Lmcache]:
    """LMCache on this machine's disk, before a server of its own, and before S3; what they need ends with `running`."""
    disk = folder / "lmcache-disk"
    disk.mkdir()
    log = [folder / f"lmcache-{number}.log" for number in range(4)]
    local = {"local_disk": f"file://{disk}/", "max_local_disk_size": 20.0}
    yield Lmcache(stand, "LMCache, local disk", python, log[0], local, folder=disk)
    server = running.enter_context(lmcache_server(python, folder / "lmcache-server.log"))
    remote = {"remote_url": f"lm://{HOST}:{server.port}"}
    yield Lmcache(stand, "LMCache, its server", python, log[1], {**remote, "remote_serde": "naive"}, server=server)
    cachegen = {**remote, "remote_serde": "cachegen"}
    yield Lmcache(stand, "LMCache, its server, CacheGen", python, log[2], cachegen, server=server, lossy=True)
    if s3 is not None:
        bucket = Bucket(s3, VIRTUAL_BUCKET)
        running.callback(bucket.close)
        bucket.make()
        yield Lmcache(stand, "LMCache, S3", python, log[3], s3_settings(s3), server=bucket.server, bucket=bucket)


def s3_settings(s3: S3Server) -> Mapping[str, Any]:
    """Its S3 connector signs for a bucket that is a host's name, and knows no other way to name one."""
    access = {"aws_access_key_id": s3.writer.access_key, "aws_secret_access_key": s3.writer.secret_key}
    return {
        "remote_url": f"s3://{VIRTUAL_BUCKET}.{VIRTUAL_DOMAIN}:{s3.port}",
        "remote_serde": "naive",
        "extra_config": {"s3_region": s3.region, "disable_tls": True, "s3_prefer_http2": False, **access},
    }


@contextlib.contextmanager
def lmcache_server(python: Path, log: Path) -> Iterator[Server]:
    """LMCache's own server of chunks, which keeps them in memory."""
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    with log.open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603 - in the environment that the user named
            [str(python), "-P", "-m", "lmcache.v1.server", HOST, str(port), "cpu"],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env={**environment, **ENVIRONMENT},
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError("LMCache's server does not start: " + log.read_text(errors="replace")[-500:])
            time.sleep(0.05)
        yield Server(port, lambda: [process.pid])
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lmcache_version(python: Path) -> str:
    """What is installed there."""
    words = [str(python), "-P", "-c", "from importlib.metadata import version; print(version('lmcache'))"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603 - as above
    return done.stdout.strip() or "unknown"
