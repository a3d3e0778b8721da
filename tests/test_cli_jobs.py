"""`kvcdn jobs` on a real prefill service, without workers where nothing is to be published."""

from __future__ import annotations

import contextlib
import json

import pytest
import urllib3

from kvcdn.origin.jobs.queue import JobQueue
from support.command import kvcdn
from support.origin_process import START_SECONDS, running_origin
from support.waiting import WAIT_SECONDS, until


def submit(service: str, **job: object) -> str:
    answer = urllib3.request("POST", f"{service}/v1/jobs", json=job, timeout=WAIT_SECONDS)
    assert answer.status == 202, answer.data
    return str(answer.json()["jobs"][0]["id"])


def asked(*words: str) -> dict[str, object]:
    ran = kvcdn("jobs", *words, "--json")
    assert 0 == ran.code, ran.out + ran.err
    found: dict[str, object] = json.loads(ran.out)
    return found


def test_jobs_are_listed_by_pages_shown_and_cancelled(tmp_path, tiny_llama) -> None:
    """What a name says to a terminal is written out; a job that does not exist is told."""
    with running_origin(tmp_path, tiny_llama, workers="0") as (url, _):
        names = [submit(url, text=f"Text {number}", name=f"{number}\x1b[2J.txt") for number in range(3)]
        page = asked("ls", "--limit", "2", "--service", url)
        assert (names[:2], names[1]) == ([job["id"] for job in page["jobs"]], page["next"])
        rest = asked("ls", "--limit", "2", "--after", names[1], "--service", url)
        assert (names[2:], None) == ([job["id"] for job in rest["jobs"]], rest["next"])
        assert "cancelled" == asked("cancel", names[0], "--service", url)["state"]
        assert "queued" == asked("show", names[1], "--service", url)["state"]
        queued = asked("ls", "--state", "queued", "--service", url)
        assert names[1:] == [job["id"] for job in queued["jobs"]]
        table = kvcdn("jobs", "ls", "--service", url)
        assert "\x1b" not in table.out
        assert "0\\u001b[2J.txt" in table.out
        assert 3 == kvcdn("jobs", "show", "nothing", "--service", url).code
        assert 2 == kvcdn("jobs", "ls", "--state", "odd", "--service", url).code
        assert 2 == kvcdn("jobs", "retry", names[1], "--service", url).code


@pytest.mark.timeout(2 * START_SECONDS)
def test_a_dead_job_is_told_and_tried_again(tmp_path, tiny_llama) -> None:
    """A document with nothing in it is dead at once, with its reason."""
    with running_origin(tmp_path, tiny_llama) as (url, _):
        name = submit(url, url=f"{url}/healthz")  # an internal address, which no job may read
        show = lambda: asked("show", name, "--service", url)  # noqa: E731
        until(lambda: show()["state"] == "dead", show, seconds=START_SECONDS)
        job = show()
        assert job["reason"]
        shown = kvcdn("jobs", "ls", "--state", "dead", "--service", url)
        assert str(job["reason"])[:30] in shown.out
        assert asked("retry", name, "--service", url)["state"] in ("queued", "running")


def test_all_dead_jobs_are_tried_again(tmp_path, tiny_llama) -> None:
    """By one command, and no others; a name and all of them is not said at once."""
    with running_origin(tmp_path, tiny_llama, workers="0") as (url, _):
        names = [submit(url, text=f"Text {number}") for number in range(4)]
        with contextlib.closing(JobQueue(tmp_path / "queue")) as queue:
            for _ in range(3):
                queue.fail(queue.claim(), "no such model", for_good=True)
        asked("cancel", names[3], "--service", url)
        assert 3 == asked("retry", "--dead", "--service", url)["retried"]
        states = {job["id"]: job["state"] for job in asked("ls", "--service", url)["jobs"]}
        assert {**dict.fromkeys(names[:3], "queued"), names[3]: "cancelled"} == states
        assert "0 jobs" in kvcdn("jobs", "retry", "--dead", "--service", url).out
        for words in (["retry"], ["retry", names[0], "--dead"]):
            assert 2 == kvcdn("jobs", *words, "--service", url).code
