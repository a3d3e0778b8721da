"""Several prefill services on one S3 bucket: the same documents and others, at once, through kills at random moments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time

import pytest
import urllib3

from kvcdn.origin.jobs.jobs import JobState
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.upkeep.catalog import list_published
from kvcdn.stores import open_store
from support.command import kvcdn
from support.origin_process import children, running_origin
from support.tiny import TEXT

SERVICES = 2

ROUNDS = int(os.environ.get("KVCDN_BUCKET_ROUNDS", "2"))
"""Each ends with the death of all services."""

LONGEST_SECONDS = 1.5
"""Before a kill."""

DRAIN_SECONDS = 400


def submit(url: str, text: str) -> None:
    body = json.dumps({"text": text, "idempotency_key": text[:40]}).encode()
    with contextlib.suppress(urllib3.exceptions.HTTPError):  # it was killed: whether the job was taken is the queue's to say
        urllib3.request("POST", f"{url}/v1/jobs", body=body, headers={"Content-Type": "application/json"}, retries=False)


def until(condition, seconds: float) -> bool:
    """Waits for it; False where it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Services:
    """The services of one bucket, each with a folder of its own."""

    def __init__(self, folder, model, origin: str, endpoint: str) -> None:
        self._model, self._settings = model, {"origin": origin, "endpoint": endpoint}
        self._folders = [folder / str(number) for number in range(SERVICES)]
        for one in self._folders:
            one.mkdir()
        self.queues = [JobQueue(one / "queue") for one in self._folders]

    @contextlib.contextmanager
    def running(self):
        """All of them: their URLs and processes."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(running_origin(one, self._model, **self._settings)) for one in self._folders]

    def count(self, *states: JobState) -> int:
        return sum(queue.counts().get(state, 0) for queue in self.queues for state in states)


def kill_all(services, running, chance: random.Random) -> None:
    """Once somebody works: workers and, of some, their service, one after another."""
    until(lambda: services.count(JobState.RUNNING), DRAIN_SECONDS)
    for _, process in chance.sample(running, SERVICES):
        time.sleep(chance.random() * LONGEST_SECONDS)
        for worker in children(process.pid):
            os.kill(worker, signal.SIGKILL)
        if chance.random() < 0.5:
            process.kill()


@pytest.mark.timeout(900)
def test_each_document_is_published_once(tmp_path, tiny_llama, s3_server, monkeypatch) -> None:
    """Whoever dies, and whoever is first: what was accepted is there, once, complete, and nothing else is."""
    seed = int(os.environ.get("KVCDN_SOAK_SEED", str(time.time_ns())))
    sys.stderr.write(f"seed {seed}\n")
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    origin = s3_server.url("many-services")
    services = Services(tmp_path, tiny_llama, origin, s3_server.endpoint)
    for round_number in range(ROUNDS):
        with services.running() as running:
            for number in range(3):
                for service, (url, _) in enumerate(running):
                    whose = "all" if number else f"service {service}"
                    submit(url, f"Round {round_number}, document {number} of {whose}. {TEXT[: 3000 + 900 * number]}")
            kill_all(services, running, random.Random(seed + round_number))
    with services.running():
        assert until(lambda: not services.count(JobState.QUEUED, JobState.RUNNING), DRAIN_SECONDS)
    jobs = [job for queue in services.queues for job in queue.list(limit=1000)]
    assert {JobState.PUBLISHED} == {job.state for job in jobs}, {job.reason for job in jobs}
    store = open_store(origin, endpoint=s3_server.endpoint)
    addresses = [str(listed.manifest.address) for listed in list_published(store)]
    assert sorted({job.result["address"] for job in jobs}) == sorted(addresses)
    assert ROUNDS * (SERVICES + 2) == len(addresses)
    ran = kvcdn("fsck", "--origin", origin, "--endpoint", s3_server.endpoint)
    assert 0 == ran.code, ran.out + ran.err
    for queue in services.queues:
        queue.close()
