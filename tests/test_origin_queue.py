"""The queue: nothing accepted is lost, nothing ends twice, whoever dies when."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.errors import CorruptError, NotFoundError, UnavailableError, UsageError
from kvcdn.keys import LOSSY, PRECISION_NATIVE
from kvcdn.origin.jobs.jobs import DAY_SECONDS, Job, JobState, Window, read_request
from kvcdn.origin.jobs.queue import MAX_DEATHS, MAX_FAILURES, JobQueue
from kvcdn.origin.jobs.queue_errors import ClaimLostError, QueueFullError


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def queue(tmp_path, clock):
    queue = JobQueue(tmp_path / "queue.sqlite", most=6, most_of_tenant=4, clock=clock)
    yield queue
    queue.close()


def submit(queue, tenant="a", **fields) -> Job:
    (job,) = queue.accept([(tenant, read_request({"text": "A text.", **fields}))])
    assert isinstance(job, Job), job
    return job


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"text": ""},
        {"text": "a", "url": "http://a.example"},
        {"url": "file:///etc/passwd"},
        {"url": "ftp://a.example/"},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"text": "a", "tools": [{}]},
        {"text": "a", "priority": 10},
        {"text": "a", "ttl": 0},
        {"text": "a", "window": "22:00"},
        {"text": "a", "window": "22:00-22:00"},
        {"text": "a", "not_before": float("nan")},
        {"text": "a", "min_quality": float("inf")},
        {"text": "a", "path": "/etc/passwd"},
    ],
)
def test_other_jobs_are_refused(value) -> None:
    """A job is one document and known wishes; the message shows nothing of the text."""
    with pytest.raises(UsageError) as caught:
        read_request(value)
    assert "passwd" not in str(caught.value)


@pytest.mark.parametrize("precision", [PRECISION_NATIVE, *LOSSY])
def test_every_precision_may_be_asked_for(precision) -> None:
    """By jobs, as by `kvcdn publish`."""
    assert precision == read_request({"text": "a", "precision": precision}).precision


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 4 * 10**9))
def test_a_window_opens_when_it_is_open(start, end, now) -> None:
    """The moment told is within it, not before now, less than a day away, and now where it is open."""
    if start == end:
        return
    window = Window.parse(f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}")
    opens = window.opens(float(now))
    assert now <= opens < now + DAY_SECONDS
    minute = opens % DAY_SECONDS / 60
    assert start <= minute < end if start < end else minute >= start or minute < end
    assert opens in (now, opens // DAY_SECONDS * DAY_SECONDS + start * 60)


def test_the_order_of_jobs(queue, clock) -> None:
    """Urgent ones first, then the oldest; those of later, or of another hour, when their time has come."""
    hour = int(clock.now % DAY_SECONDS // 3600)
    late = submit(queue, not_before=clock.now + 100, priority=9)
    night = submit(queue, window=f"{(hour + 2) % 24:02}:00-{(hour + 3) % 24:02}:00", priority=8)
    first, urgent = submit(queue), submit(queue, tenant="b", priority=7)
    assert [urgent.id, first.id, None] == [job and job.id for job in (queue.claim(), queue.claim(), queue.claim())]
    clock.now += 101
    assert late.id == queue.claim().id
    assert queue.claim().id in (urgent.id, first.id)  # nobody has renewed their claims
    clock.now += 3 * 3600
    claimed = set()
    while job := queue.claim():
        claimed.add(job.id)
    assert night.id not in claimed  # its window is over for today


def test_a_full_queue_takes_no_more(queue) -> None:
    """Neither of one tenant nor of all; what has ended makes room; a key that is known needs none."""
    mine = [submit(queue, idempotency_key=str(number)) for number in range(4)]
    (refused,) = queue.accept([("a", read_request({"text": "more"}))])
    assert isinstance(refused, QueueFullError)
    answers = queue.accept([("b", read_request({"text": "more"}))] * 3)
    assert [Job, Job, QueueFullError] == [type(answer) for answer in answers]
    assert mine[1].id == submit(queue, idempotency_key="1").id
    (other,) = queue.accept([("a", read_request({"text": "Another text.", "idempotency_key": "1"}))])
    assert isinstance(other, UsageError)
    queue.cancel(mine[0].id)
    assert submit(queue, idempotency_key="other").id not in {job.id for job in mine}


def test_a_job_ends_once(queue, clock) -> None:
    """Whoever lost a claim changes nothing; who has it ends the job, and a second end is harmless."""
    submit(queue)
    dead = queue.claim()
    clock.now += 31
    alive = queue.claim()
    assert (dead.id, 2, "its worker died") == (alive.id, alive.attempts, alive.reason)
    assert (False, False) == (queue.finish(dead, {"n": 1}), queue.fail(dead, "no", for_good=True))
    with pytest.raises(ClaimLostError):
        queue.renew(dead)
    queue.renew(alive, {"tokens_done": 3})
    assert {"tokens_done": 3} == queue.get(alive.id).progress
    assert (True, False) == (queue.finish(alive, {"n": 2}), queue.finish(alive, {"n": 3}))
    job = queue.get(alive.id)
    assert (JobState.PUBLISHED, {"n": 2}) == (job.state, job.result)
    assert 1 == queue.forget(clock.now + 1)
    with pytest.raises(NotFoundError):
        queue.get(alive.id)


def test_failures_are_tried_again_and_then_told(queue, clock) -> None:
    """With longer and longer pauses; the last reason stays; by hand it begins anew; who kills every worker is dead as well."""
    job, pauses = submit(queue), []
    for number in range(MAX_FAILURES):
        assert queue.fail(queue.claim(), f"reason {number}", for_good=False)
        pauses.append(queue.get(job.id).not_before - clock.now)
        assert queue.claim() is None
        clock.now += 1000
    dead = queue.get(job.id)
    assert (JobState.DEAD, f"reason {MAX_FAILURES - 1}") == (dead.state, dead.reason)
    assert all(2 * 2**number <= pause <= 4 * 2**number for number, pause in enumerate(pauses[:-1]))
    assert (JobState.QUEUED, 0) == (queue.retry(job.id).state, queue.get(job.id).attempts)
    for _ in range(MAX_DEATHS):
        assert queue.claim() is not None
        clock.now += 31
    assert queue.claim() is None
    assert (JobState.DEAD, "its worker died, every time") == (queue.get(job.id).state, queue.get(job.id).reason)
    with pytest.raises(UsageError):
        queue.retry(submit(queue).id)


def test_releasing_is_no_attempt_and_cancelling_ends(queue, clock) -> None:
    """A worker that stops gives its job back as it was; a running job ends once it is cancelled."""
    job = submit(queue)
    assert queue.release(queue.claim())
    assert (JobState.QUEUED, 0) == (queue.get(job.id).state, queue.get(job.id).attempts)
    claimed = queue.claim()
    assert JobState.RUNNING == queue.cancel(job.id).state
    with pytest.raises(ClaimLostError):
        queue.renew(claimed)
    assert queue.abandon(claimed)
    assert JobState.CANCELLED == queue.get(job.id).state == queue.cancel(job.id).state
    other = submit(queue)
    queue.claim()
    queue.cancel(other.id)
    clock.now += 31
    assert queue.claim() is None
    assert JobState.CANCELLED == queue.get(other.id).state


def test_documents_come_with_the_claim(queue) -> None:
    """A list of jobs does not read them; the worker has them as they were given."""
    wanted = {"messages": [{"role": "system", "content": "ü", "parts": [1]}], "tools": [{"name": "t"}]}
    (job,) = queue.accept([("a", read_request(wanted))])
    assert [(None, [])] == [(listed.request.messages, listed.request.tools) for listed in queue.list()]
    claimed = queue.claim()
    assert (job.id, wanted["messages"], wanted["tools"]) == (claimed.id, claimed.request.messages, claimed.request.tools)
    assert (wanted["messages"], wanted["tools"]) == (claimed.request.document().messages(), claimed.request.document().tools())


def test_pages_and_tenants(queue) -> None:
    """Lists go on behind a job, and show one tenant's where that is asked."""
    jobs = [submit(queue, tenant=tenant) for tenant in ("a", "b", "a")]
    assert [jobs[0].id, jobs[2].id] == [job.id for job in queue.list(tenant="a")]
    assert [jobs[1].id] == [job.id for job in queue.list(after=jobs[0].id, limit=1, state=JobState.QUEUED)]
    assert {"queued": 3} == queue.counts()


def test_a_full_disk_is_told_and_passes(queue) -> None:
    """What was not accepted is said not to be, and when there is room again all is as before."""
    first = submit(queue)
    (pages,) = queue._base.execute("PRAGMA page_count").fetchone()
    queue._base.execute(f"PRAGMA max_page_count = {pages + 1}").fetchone()
    with pytest.raises(UnavailableError):
        submit(queue, text="x" * 100_000)
    queue._base.execute("PRAGMA max_page_count = 1000000").fetchone()
    second = submit(queue, text="x" * 100_000)
    assert [first.id, second.id] == [job.id for job in queue.list()]


def test_a_failure_within_a_transaction_leaves_none_open(queue) -> None:
    """Whatever it is."""
    with pytest.raises(ZeroDivisionError), queue._transaction():
        raise ZeroDivisionError
    submit(queue)


def test_a_damaged_file_is_told(tmp_path) -> None:
    """It is not written over."""
    path = tmp_path / "queue.sqlite"
    path.write_bytes(b"not a database at all, but longer than a header" * 40)
    with pytest.raises(CorruptError):
        JobQueue(path)


def test_another_version_is_told(tmp_path) -> None:
    """A queue with other tables is neither read nor changed."""
    JobQueue(tmp_path / "queue").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "queue")) as base:
        base.execute("PRAGMA user_version = 99")
    with pytest.raises(UsageError):
        JobQueue(tmp_path / "queue")


_WRITER = """
import sys, time
from pathlib import Path
from kvcdn.origin.jobs.jobs import read_request
from kvcdn.origin.jobs.queue import JobQueue
queue = JobQueue(Path(sys.argv[1]))
number = 0
while True:
    keys = [f"{sys.argv[2]}-{number + i}" for i in range(3)]
    jobs = queue.accept([("a", read_request({"text": "x", "idempotency_key": key})) for key in keys])
    number += 3
    print(*(job.id for job in jobs), flush=True)
    done = queue.claim()
    queue.finish(done, {"id": done.id})
    print("finished", done.id, flush=True)
"""


def test_nothing_that_was_told_is_lost_by_kill(tmp_path) -> None:
    """A process is killed while it accepts and ends jobs, again and again: what it said of them holds."""
    accepted, finished = set(), set()
    for turn in range(3):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _WRITER, str(tmp_path / "queue"), str(turn)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(5 + 4 * turn):
            words = process.stdout.readline().split()
            (finished if words[0] == "finished" else accepted).update(words[words[0] == "finished" :])
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        for line in rest.splitlines(keepends=True):
            if line.endswith("\n"):
                words = line.split()
                (finished if words[0] == "finished" else accepted).update(words[words[0] == "finished" :])
    queue = JobQueue(tmp_path / "queue")
    found = {job.id: job.state for job in queue.list(limit=100_000)}
    assert accepted <= set(found)
    assert finished
    assert {JobState.PUBLISHED} == {found[name] for name in finished}
    queue.close()


def test_a_batch_is_accepted_whole_or_not_at_all(queue) -> None:
    """Whoever is told to come again with all of it would submit the first part twice. Others' batches are not concerned."""
    jobs = [read_request({"text": f"{number}", "idempotency_key": str(number)}) for number in range(5)]
    other = [read_request({"text": "b"})]
    many, few, theirs = queue.accept_together([("a", jobs), ("a", jobs[:4]), ("b", other)])
    assert (QueueFullError, 4, 1) == (type(many), len(few), len(theirs))
    assert {"queued": 5} == queue.counts()
    clash = [jobs[0], read_request({"text": "x", "idempotency_key": "1"})]
    (again, refused, last) = queue.accept_together([("a", jobs[:2]), ("a", clash), ("b", other)])
    assert [job.id for job in few[:2]] == [job.id for job in again]
    assert (UsageError, 1) == (type(refused), len(last))
    assert {"queued": 6} == queue.counts()


def test_a_window_that_closes_holds_nobody_up(tmp_path, clock) -> None:
    """A night's rest waits for the next night in one step, however much it is; what is urgent is claimed beside it."""
    clock.now = clock.now // DAY_SECONDS * DAY_SECONDS + 23 * 3600
    queue = JobQueue(tmp_path / "queue", clock=clock)
    night = [("a", read_request({"text": "x", "window": "22:00-06:00", "priority": 9}))] * 50
    jobs = queue.accept(night)
    queue.release(queue.claim())
    clock.now += 8 * 3600
    urgent = submit(queue)
    written: list[str] = []
    queue._base.set_trace_callback(written.append)
    assert urgent.id == queue.claim().id
    assert 1 == sum("SET not_before" in statement for statement in written)
    assert {clock.now // DAY_SECONDS * DAY_SECONDS + 22 * 3600} == {queue.get(job.id).not_before for job in jobs}
    clock.now += 16 * 3600
    assert jobs[0].id == queue.claim().id
    queue.close()


def test_jobs_that_wait_are_not_read_to_find_one_that_may_begin(queue) -> None:
    """The index tells: a hundred thousand of them cost each look at the queue next to nothing."""
    asked = "SELECT id FROM jobs WHERE state = 'queued' AND not_before <= 0 ORDER BY priority DESC, number LIMIT 1"
    (plan,) = [row[-1] for row in queue._base.execute(f"EXPLAIN QUERY PLAN {asked}")]
    assert "jobs_due" in plan
    assert ["state", "priority", "number", "not_before"] == [
        row[2] for row in queue._base.execute("PRAGMA index_info(jobs_due)")
    ]


def test_a_page_behind_a_job_that_is_forgotten(queue, clock) -> None:
    """It is said to be unknown: a list that began anew would show everything twice."""
    first = submit(queue)
    submit(queue)
    queue.cancel(first.id)
    queue.forget(clock.now + 1)
    with pytest.raises(NotFoundError, match="go on behind"):
        queue.list(after=first.id)


@pytest.mark.parametrize("end", ["fails", "fails for good", "stops", "dies", "publishes"])
def test_cancelled_while_it_runs(queue, clock, end) -> None:
    """However the attempt ends, unless it has published, the job is cancelled: not queued again, and not among the dead.

    As in https://github.com/celery/celery/issues/6793, where a task that was revoked came back as one to be tried again.
    """
    job = submit(queue)
    claimed = queue.claim()
    queue.cancel(job.id)
    match end:
        case "fails":
            queue.fail(claimed, "no link", for_good=False)
        case "fails for good":
            queue.fail(claimed, "no model", for_good=True)
        case "stops":
            queue.release(claimed)
        case "publishes":
            queue.finish(claimed, {"n": 1})
        case "dies":
            clock.now += 31
            assert queue.claim() is None
    found = queue.get(job.id)
    ended = (JobState.PUBLISHED, "") if end == "publishes" else (JobState.CANCELLED, "cancelled")
    assert ended == (found.state, found.reason)


def test_a_quarter_of_an_hour_without_an_origin_kills_no_job(queue, clock) -> None:
    """The pauses of a job that fails for now add up to more than a quarter of an hour before it is dead."""
    job, began = submit(queue), clock.now
    while queue.get(job.id).state is JobState.QUEUED:
        clock.now = max(clock.now, queue.get(job.id).not_before)
        queue.fail(queue.claim(), "no link", for_good=False)
    assert clock.now - began > 900
