"""The prefill service on a real Ray cluster of this machine: actors, and what of them and of their machines may be lost."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import trustme
import urllib3

from kvcdn.errors import UsageError
from kvcdn.keyring import create_signing_key, signing_key_path
from kvcdn.origin.jobs.jobs import JobState
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.service.ray_environment import ray_environment, require_ray
from kvcdn.origin.service.service_settings import load_settings
from kvcdn.origin.upkeep.catalog import list_published
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.command import kvcdn
from support.origin_process import children, descendants, running_origin
from support.tiny import TEXT
from support.waiting import PROCESS_SECONDS, until
from support.web import Answer, running_web

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(900),
]

LISTENING = "0A"
"""In /proc/net/tcp."""

DRAIN_SECONDS = 5
"""For a signal to pass from the service to an actor."""


def actors(pid: int) -> list[int]:
    """The actors below the process `pid`."""
    return [child for child, name in descendants(pid).items() if name.startswith("ray::Actor") and is_alive(child)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Rig:
    """A service, its queue, and a web server whose answers wait at a gate, so that jobs last as long as a test likes."""

    def __init__(self, url: str, queue: JobQueue, web, folder: Path) -> None:
        self.url, self.queue, self.web, self.folder = url, queue, web, folder
        self.gate = threading.Event()
        web.answers.extend(
            Answer(200, {"Content-Type": "text/plain"}, f"Document {number}. {TEXT[:4000]}".encode()) for number in range(9)
        )
        web.bend = self._pass

    def _pass(self, answer: Answer) -> Answer:
        self.gate.wait(PROCESS_SECONDS)
        return answer

    def submit(self, jobs: int) -> list[str]:
        """Has documents published that are fetched; waits for none."""
        answers = [
            urllib3.request("POST", f"{self.url}/v1/jobs", json={"url": f"{self.web.url}/{number}"}) for number in range(jobs)
        ]
        return [answer.json()["jobs"][0]["id"] for answer in answers]

    def until_fetched(self, times: int) -> None:
        until(lambda: len(self.web.requests) >= times, seconds=PROCESS_SECONDS)

    def require_published(self, documents: int) -> None:
        """So many jobs ended published; their documents, and no others, lie there."""
        until(lambda: self.queue.counts().get("published") == documents, seconds=PROCESS_SECONDS)
        results = {job.result["address"] for job in self.queue.list(state=JobState.PUBLISHED)}
        addresses = [str(listed.manifest.address) for listed in list_published(FolderStore(self.folder / "origin"))]
        assert results == set(addresses)
        assert documents == len(addresses) == len(results)


def require_loopback(pids: list[int]) -> None:
    """None of these processes listens on more."""
    links = []
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(str(link.readlink()))
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    listening = {fields[1].rpartition(":")[0] for fields in lines if fields[3] == LISTENING and fields[9] in inodes}
    assert "0100007F" in listening | {address[-8:] for address in listening}
    assert set() == listening - {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_actors_come_and_go(tmp_path, tiny_llama, monkeypatch) -> None:
    """On loopback; the job of one that is killed is done by another; jobs are cancelled, and given back on SIGTERM."""
    monkeypatch.setenv("KVCDN_KEY_PASSPHRASE", "open sesame")
    secrets = (create_signing_key(signing_key_path(), b"open sesame").to_pem().splitlines()[1], b"open sesame")
    with (
        running_web(MemoryStore()) as web,
        running_origin(tmp_path, tiny_llama, executor="ray", workers="2", allow_internal_urls="1") as (url, process),
    ):
        queue = JobQueue(tmp_path / "queue")
        rig = Rig(url, queue, web, tmp_path)
        rig.submit(3)
        rig.until_fetched(2)
        below = [pid for pid in descendants(process.pid) if is_alive(pid)]
        require_loopback(below)
        for pid in set(below) - set(children(process.pid)):
            told = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert not [secret for secret in secrets if secret in told]
        os.kill(actors(process.pid)[0], signal.SIGKILL)
        rig.gate.set()
        rig.require_published(3)
        assert [1, 1, 2] == sorted(job.attempts for job in queue.list())

        rig.gate.clear()
        fetched = len(web.requests)
        (unwanted,) = rig.submit(1)
        rig.until_fetched(fetched + 1)
        assert 200 == urllib3.request("DELETE", f"{url}/v1/jobs/{unwanted}").status
        until(lambda: queue.get(unwanted).ended, seconds=PROCESS_SECONDS)
        assert JobState.CANCELLED is queue.get(unwanted).state
        rig.gate.set()
        rig.submit(1)
        rig.require_published(4)

        rig.gate.clear()
        fetched = len(web.requests)
        (left,) = rig.submit(1)
        rig.until_fetched(fetched + 1)
        below = list(descendants(process.pid))
        process.terminate()
        time.sleep(DRAIN_SECONDS)
        rig.gate.set()
        assert 0 == process.wait(PROCESS_SECONDS)
        assert (JobState.QUEUED, 0) == (queue.get(left).state, queue.get(left).attempts)
        until(lambda: not any(map(is_alive, below)), seconds=PROCESS_SECONDS)
        assert 0 == kvcdn("fsck", "--origin", str(tmp_path / "origin")).code
        queue.close()


def test_a_machine_is_lost(tmp_path, tiny_llama, monkeypatch) -> None:
    """An actor on each of two, with token and TLS; the job of the one that is lost is done on the other."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    files = {name: tmp_path / f"ray-{name}.pem" for name in ("CA_CERT", "SERVER_CERT", "SERVER_KEY")}
    authority.cert_pem.write_to_path(files["CA_CERT"])
    certificate.cert_chain_pems[0].write_to_path(files["SERVER_CERT"])
    certificate.private_key_pem.write_to_path(files["SERVER_KEY"])
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name, path in files.items():
        monkeypatch.setenv(f"RAY_TLS_{name}", str(path))
    program = Path(__file__).with_name("support") / "ray_nodes.py"
    nodes = subprocess.Popen([sys.executable, "-P", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    address = nodes.stdout.readline().strip()
    below = [nodes.pid, *descendants(nodes.pid)]
    try:
        settings = {"executor": "ray", "workers": "2", "ray_address": address, "allow_internal_urls": "1"}
        with running_web(MemoryStore()) as web, running_origin(tmp_path, tiny_llama, **settings) as (url, process):
            queue = JobQueue(tmp_path / "queue")
            rig = Rig(url, queue, web, tmp_path)
            rig.submit(3)
            rig.until_fetched(2)
            # One job may ask twice where a busy machine has it wait.
            until(lambda: queue.counts().get("running") == 2, seconds=PROCESS_SECONDS)
            assert (0, 2) == (len(actors(process.pid)), len(actors(nodes.pid)))
            nodes.stdin.write("lose the second\n")
            nodes.stdin.flush()
            assert "lost\n" == nodes.stdout.readline()
            assert 1 == len(actors(nodes.pid))
            rig.gate.set()
            rig.require_published(3)
            assert [1, 1, 2] == sorted(job.attempts for job in queue.list())
            queue.close()
    finally:
        nodes.communicate()
    until(lambda: not any(map(is_alive, below)), seconds=PROCESS_SECONDS)


def test_settings_are_checked(monkeypatch) -> None:
    """`--check-config` says what a start would."""
    monkeypatch.setenv("KVCDN_SERVICE_RAY_ADDRESS", "10.0.0.7:6379")
    words = ("origin", "--model", "m", "--origin", "s3://bucket/prefix", "--check-config")
    assert 0 == kvcdn(*words).code
    ran = kvcdn(*words, "--executor", "ray")
    assert (2, True) == (ran.code, "10.0.0.7:6379 is reached by others" in ran.err)
    monkeypatch.delenv("KVCDN_SERVICE_RAY_ADDRESS")
    assert 0 == kvcdn(*words, "--executor", "ray").code


def test_a_cluster_is_used_where_it_is_safe() -> None:
    """One's own has a token that no other has; another's needs token and TLS, or a word that its network is nobody else's."""
    given = {"models": ("m",), "executor": "ray"}
    own = load_settings(None, given)
    require_ray(own, {})
    told = [ray_environment(own, {"HOME": "/h", "KVCDN_SERVICE_TOKEN": "secret"}) for _ in range(2)]
    assert "secret" not in told[0].values()
    assert told[0]["RAY_AUTH_TOKEN"] != told[1]["RAY_AUTH_TOKEN"]
    assert ("/h", "token", "0") == (told[0]["HOME"], told[0]["RAY_AUTH_MODE"], told[0]["RAY_USAGE_STATS_ENABLED"])
    token, tls = {"RAY_AUTH_MODE": "token"}, {"RAY_USE_TLS": "1"}
    for address in ("10.0.0.7:6379", "127.0.0.1:6379"):
        far = load_settings(None, {**given, "ray_address": address, "origin": "s3://b/p"})
        for environment in ({}, token, tls):
            with pytest.raises(UsageError, match="reached by others"):
                require_ray(far, environment)
        require_ray(far, token | tls)
        require_ray(far.model_copy(update={"insecure_ray": True}), {})
    for wrong in ({"ray_address": "10.0.0.7:6379"}, {"device": "cuda"}, {"ray_address": "head", "origin": "s3://b/p"}):
        with pytest.raises(UsageError):
            load_settings(None, {**given, **wrong})
