"""Kills of a prefill service at random moments: every accepted job ends published, each document once, and fsck is clean.

KVCDN_SOAK_KILLS=200 pytest -s -p no:xdist --timeout 0 tests/soak/soak_origin.py

With KVCDN_SOAK_EXECUTOR=ray the workers are two actors of a Ray cluster, and what is killed of them is one, or the process that
hands them jobs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

import urllib3

from kvcdn.origin.jobs.jobs import JobState
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.upkeep.catalog import list_published
from kvcdn.stores.folder import FolderStore
from support.command import kvcdn
from support.origin_process import children, descendants, running_origin
from support.tiny import TEXT

KILLS = int(os.environ.get("KVCDN_SOAK_KILLS", "200"))

JOBS_BETWEEN = 3
"""Documents submitted before each kill."""

EXECUTOR = os.environ.get("KVCDN_SOAK_EXECUTOR", "processes")

LONGEST_SECONDS = 8.0 if EXECUTOR == "processes" else 25.0
"""From a start to its kill: some hit the imports, some a model being loaded, most a job."""

DRAIN_SECONDS = 1200

SETTINGS = {"executor": EXECUTOR, "workers": "1" if EXECUTOR == "processes" else "2"}


def submit(url: str, number: int) -> dict[str, str] | None:
    """Submits document `number`; None where the service died before it said that it was accepted."""
    start = 37 * number % 5000
    text = f"Document {number}. {TEXT[start : start + 1500 + 400 * (number % 7)]}"
    body = json.dumps({"text": text, "idempotency_key": str(number)}).encode()
    try:
        answer = urllib3.request(
            "POST", f"{url}/v1/jobs", body=body, headers={"Content-Type": "application/json"}, retries=False, timeout=30
        )
    except urllib3.exceptions.HTTPError:
        return None
    assert answer.status == 202, answer.data
    job: dict[str, str] = answer.json()["jobs"][0]
    return job


def pick(pid: int, chance: random.Random) -> list[int]:
    """The workers of the service `pid` that die this time."""
    if EXECUTOR == "processes":
        return children(pid)
    actors = [child for child, name in descendants(pid).items() if name.startswith("ray::Actor")]
    return [chance.choice(children(pid) + actors)]


def test_every_accepted_job_ends_published_once(tmp_path, tiny_llama) -> None:
    """Service, worker, or both are killed, at random moments, again and again."""
    seed = int(os.environ.get("KVCDN_SOAK_SEED", str(time.time_ns())))
    chance = random.Random(seed)
    sys.stderr.write(f"seed {seed}\n")
    accepted: dict[int, str] = {}
    killed = {"service": 0, "worker": 0, "both": 0}
    number = 0
    while sum(killed.values()) < KILLS:
        with running_origin(tmp_path, tiny_llama, **SETTINGS) as (url, process):
            for _ in range(JOBS_BETWEEN):
                job = submit(url, number)
                if job is not None:
                    assert accepted.setdefault(number, job["id"]) == job["id"]
                number += 1
            for _ in range(chance.randint(1, 3)):
                time.sleep(chance.random() * LONGEST_SECONDS)
                what = chance.choice(sorted(killed))
                if what != "service":
                    for worker in pick(process.pid, chance):
                        os.kill(worker, signal.SIGKILL)
                killed[what] += 1
                if what != "worker":
                    break
            process.kill()
    queue = JobQueue(tmp_path / "queue")
    with running_origin(tmp_path, tiny_llama, **SETTINGS):
        deadline = time.monotonic() + DRAIN_SECONDS
        while {JobState.QUEUED, JobState.RUNNING} & set(queue.counts()):
            assert time.monotonic() < deadline, queue.counts()
            time.sleep(0.5)
    jobs = {job.id: job for job in queue.list(limit=1_000_000)}
    dead = {job.reason for job in jobs.values() if job.state is not JobState.PUBLISHED}
    sys.stderr.write(f"killed {killed}, accepted {len(accepted)}, jobs {len(jobs)}, ends {queue.counts()}\n")
    assert set() == dead
    assert set(accepted.values()) <= set(jobs)
    addresses = {str(listed.manifest.address) for listed in list_published(FolderStore(tmp_path / "origin"))}
    assert addresses == {job.result["address"] for job in jobs.values()}
    assert len(addresses) == len(jobs)
    ran = kvcdn("fsck", "--origin", str(tmp_path / "origin"))
    assert 0 == ran.code, ran.out + ran.err
    queue.close()
