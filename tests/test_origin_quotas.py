"""Quotas of bytes: what is submitted and what is stored counts by tenant and day, whatever restarts, and nothing twice."""

from __future__ import annotations

import pytest

from kvcdn.access.allowance import DAY_SECONDS
from kvcdn.origin.jobs.jobs import Job, JobRequest
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.jobs.queue_errors import QueueFullError
from kvcdn.origin.jobs.quotas import Quotas

NOON = 20_000 * DAY_SECONDS + DAY_SECONDS / 2


class Stage:
    def __init__(self, path, **quotas) -> None:
        self.path, self.now, self.quotas = path, NOON, Quotas(**quotas)
        self.open()

    def open(self) -> None:
        self.queue = JobQueue(self.path, quotas=self.quotas, clock=lambda: self.now)

    def submit(self, *sizes: int, tenant: str = "acme", **more) -> list[bool]:
        """Documents of these sizes; whether each was accepted."""
        orders = [(tenant, JobRequest(text="é" * (size // 2) + "x" * (size % 2), **more)) for size in sizes]
        self.last = self.queue.accept(orders)
        return [isinstance(answer, Job) for answer in self.last]


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path / "queue", submitted=1000)


def test_what_is_submitted_counts_in_bytes(stage) -> None:
    """Until the quota, to the byte; one that does not fit is refused, and a smaller one after it is not."""
    assert [True, False, True, False] == stage.submit(700, 301, 300, 1)
    refusal = stage.last[1]
    assert isinstance(refusal, QueueFullError)
    assert ("bytes-per-day" in str(refusal), "1,000" in str(refusal)) == (True, True)
    assert DAY_SECONDS / 2 == refusal.retry_seconds
    assert {"queued": 2} == stage.queue.counts()


def test_each_tenant_and_each_day_has_its_own(stage) -> None:
    """Midnight is UTC's."""
    assert [[True], [False], [True]] == [stage.submit(1000), stage.submit(1), stage.submit(1000, tenant="other")]
    stage.now += DAY_SECONDS / 2 - 1
    assert [False] == stage.submit(1)
    assert 1 == stage.last[0].retry_seconds
    stage.now += 1
    assert [True, False] == stage.submit(1000, 1)
    stage.queue.forget(0)
    stage.now += 10 * DAY_SECONDS
    stage.queue.forget(0)
    assert [] == stage.queue._base.execute("SELECT * FROM quota_days").fetchall()


def test_a_restart_forgets_nothing(stage) -> None:
    """Nor do several services on one queue count apart."""
    other = Stage(stage.path, submitted=1000)
    assert [[True], [True], [False]] == [stage.submit(400), other.submit(600), stage.submit(1)]
    stage.open()
    assert [False] == stage.submit(1)


def test_the_same_job_again_costs_nothing(stage) -> None:
    """Asked for with its key, after a lost answer."""
    assert [[True]] * 3 == [stage.submit(900, idempotency_key="k") for _ in range(3)]
    assert [True] == stage.submit(100)


def test_tokens_limit_further(stage) -> None:
    """The smaller of the two counts; other tenants are not concerned."""
    order = lambda size, tenant="acme": [(tenant, JobRequest(text="x" * size))]  # noqa: E731
    accept = stage.queue.accept
    assert isinstance(accept(order(501), bytes_per_day={"acme": 500})[0], QueueFullError)
    assert isinstance(accept(order(500), bytes_per_day={"acme": 500})[0], Job)
    assert isinstance(accept(order(1), bytes_per_day={"acme": 500})[0], QueueFullError)
    assert isinstance(accept(order(900, "other"), bytes_per_day={"acme": 500})[0], Job)
    assert isinstance(accept(order(501), bytes_per_day={"acme": 5000})[0], QueueFullError)


def test_what_is_stored_counts_when_it_is_there(tmp_path) -> None:
    """Jobs that were accepted end; then no more is accepted. What was there already was not stored."""
    stage = Stage(tmp_path / "queue", stored=1000)
    assert [True] * 3 == stage.submit(10, 10, 10)
    for stored in (0, 999):
        assert stage.queue.finish(stage.queue.claim(), {"uploaded_bytes": stored})
        assert [True] == stage.submit(10)
    job = stage.queue.claim()
    assert stage.queue.finish(job, {"uploaded_bytes": 10**12})
    assert not stage.queue.finish(job, {"uploaded_bytes": 10**12})
    assert [[False], [True]] == [stage.submit(1), stage.submit(1, tenant="other")]
    assert "1,000,000,000,999 are used" in str(stage.submit(1) and stage.last[0])
    assert stage.queue.finish(stage.queue.claim(), {})


def test_what_is_fetched_counts_afterwards(stage) -> None:
    """Its size is nobody's knowledge before."""
    stage.queue.accept([("acme", JobRequest(url="https://example.org/a"))])
    job = stage.queue.claim()
    assert stage.queue.finish(job, {"fetched_bytes": 990})
    assert [False] == stage.submit(1)


def test_a_transaction_that_fails_counts_nothing(stage) -> None:
    """Accepted and counted are one."""

    def dying(_base, _job) -> None:
        raise MemoryError("killed")

    with pytest.raises(MemoryError):
        stage.queue.accept([("acme", JobRequest(text="x" * 1000))], also=dying)
    assert [True] == stage.submit(1000)


def test_the_service_answers_429_until_midnight(tmp_path) -> None:
    """With the quota of the settings, and with that of a token."""
    from test_origin_service import submit, with_service

    from kvcdn.access.grant import Grant, Scope
    from kvcdn.access.tokens import issue_token
    from kvcdn.signing import SigningKey

    issuer = SigningKey.generate()
    issuers = tmp_path / "issuers"
    issuers.write_text(issuer.public.text)

    def bearer(tenant: str, most: int | None) -> dict[str, str]:
        import time

        grant = Grant(tenant, frozenset((Scope.PUBLISH,)), bytes_per_day=most)
        return {"Authorization": f"Bearer {issue_token(issuer, grant, seconds=60, now=time.time())}"}

    async def steps(client, _queue):
        for tenant, most, size in (("a", None, 101), ("b", 50, 51)):
            answer = await client.post("/v1/jobs", json={"text": "x" * size}, headers=bearer(tenant, most))
            assert 429 == answer.status
            assert 0 < int(answer.headers["Retry-After"]) <= DAY_SECONDS
            assert "bytes-per-day" in (await answer.json())["error"]
        await submit(client, {"text": "x" * 100}, **bearer("a", None))
        await submit(client, {"text": "x" * 50}, **bearer("b", 50))
        await submit(client, {"text": "x"}, 429, **bearer("b", 50))

    with_service(tmp_path, steps, issuers_file=issuers, submit_bytes_per_day=100)
