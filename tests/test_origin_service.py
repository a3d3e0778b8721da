"""The prefill service over HTTP: what it accepts, of whom, and what it tells; and a real one that publishes."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import time

import pytest
import urllib3
from aiohttp.test_utils import TestClient, TestServer

from kvcdn.access.grant import Grant, Scope
from kvcdn.access.tokens import issue_token
from kvcdn.errors import UsageError
from kvcdn.origin.jobs.jobs import JobState
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.service.openapi import describe
from kvcdn.origin.service.service import Service
from kvcdn.origin.service.service_settings import load_settings
from kvcdn.origin.upkeep.catalog import list_published
from kvcdn.origin.watching.watched import WatchBook
from kvcdn.signing import SigningKey
from kvcdn.stores.folder import FolderStore
from support.command import kvcdn
from support.origin_process import START_SECONDS, children, running_origin
from support.tiny import TEXT
from support.waiting import WAIT_SECONDS, until

ISSUER = SigningKey.generate()


def with_service(tmp_path, steps, **settings):
    """Runs `steps(client, queue)` against a service without workers."""

    async def run():
        given = load_settings(
            None, {"models": ("m", "n"), "queue_file": tmp_path / "queue", "max_document": 10_000, **settings}
        )
        queue = given.open_queue()
        book = WatchBook(given.queue_path, queue)
        service = Service(given, queue, given.guard(), book)
        try:
            async with TestClient(TestServer(service.application())) as client:
                await steps(client, queue)
        finally:
            service.close()
            book.close()
            queue.close()

    asyncio.run(run())


async def submit(client, value=None, status=202, **headers):
    answer = await client.post("/v1/jobs", json={"text": "A text."} if value is None else value, headers=headers)
    told = await answer.json()
    assert status == answer.status, told
    return told["jobs"][0] if status == 202 else told


def test_jobs_come_in_all_forms(tmp_path) -> None:
    """JSON, lines of JSON, plain text with a query; refused as a whole where one is not a job; no text is shown again."""

    async def steps(client, queue):
        job = await submit(client, {"text": "secret words", "model": "n", "labels": {"a": "b"}})
        assert ("queued", "n", {"a": "b"}, "local") == (job["state"], job["model"], job["labels"], job["tenant"])
        assert "secret" not in json.dumps(job)
        lines = json.dumps({"text": "a"}) + "\n\n" + json.dumps({"messages": [{"role": "system", "content": "b"}]}) + "\n"
        answer = await client.post("/v1/jobs", data=lines, headers={"Content-Type": "application/jsonl"})
        assert (202, 2) == (answer.status, len((await answer.json())["jobs"]))
        answer = await client.post("/v1/jobs?priority=7&model=m", data="a text", headers={"Content-Type": "text/plain"})
        assert 7 == (await answer.json())["jobs"][0]["priority"]
        for body, kind in (
            (lines + "{}", "application/jsonl"),
            ("{", "application/json"),
            (b"\xff", "text/plain"),
            ("x", "a/b"),
        ):
            answer = await client.post("/v1/jobs", data=body, headers={"Content-Type": kind})
            assert (400, {"error", "hint"}) == (answer.status, set(await answer.json()))
        for value in ({"text": "a", "model": "other"}, {"text": "a", "namespace": "other"}, [], {"text": "a", "path": "/etc"}):
            await submit(client, value, status=400)
        answer = await client.post("/v1/jobs", data="x" * 20_000, headers={"Content-Type": "text/plain"})
        assert 413 == answer.status
        assert {"queued": 4} == queue.counts()

    with_service(tmp_path, steps)


def nested(levels: int) -> str:
    return '{"messages": [{"role": "user", "content": %s}]}' % ("[" * levels + "]" * levels)


HOSTILE = {
    "half a pair in a text": '{"text": "\\ud800"}',
    "half a pair in labels": '{"text": "a", "labels": {"\\ud800": "b"}}',
    "half a pair in a message": '{"messages": [{"role": "user", "content": "\\udc00"}]}',
    "half a pair in a key": '{"text": "a", "\\ud800": 1}',
    "levels": nested(400),
    "more levels": nested(2000),
    "no number": '{"messages": [{"role": "user", "content": NaN}]}',
    "infinite": '{"text": "a", "not_before": 1e999}',
    "digits": '{"text": "a", "priority": %s}' % ("9" * 5000),
    "a password": '{"url": "http://user:secret@a.example/"}',
    "no host": '{"url": "http:///a"}',
    "half a host": '{"url": "http://[::1"}',
    "another scheme": '{"url": "file:///etc/passwd"}',
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_jobs_are_refused_alone(tmp_path, kind) -> None:
    """With 400 and no word of theirs; whoever is accepted at the same time is accepted.

    Half a pair as in https://github.com/encode/django-rest-framework/issues/7026.
    """

    async def steps(client, queue):
        headers = {"Content-Type": "application/json"}
        one, other = await asyncio.gather(
            client.post("/v1/jobs", data=HOSTILE[kind], headers=headers), client.post("/v1/jobs", json={"text": "sound"})
        )
        told = await one.json()
        assert (400, {"error", "hint"}, 202) == (one.status, set(told), other.status)
        assert "secret" not in json.dumps(told)
        assert {"queued": 1} == queue.counts()

    with_service(tmp_path, steps)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content-Encoding": "gzip"}, b"junk"),
        ({"Content-Encoding": "gzip"}, gzip.compress(bytes(10_000_000), mtime=0)),
        ({"Content-Type": "text/plain; charset=utf-16"}, "text".encode("utf-16")),
        ({"Content-Type": "text/plain; charset=nonsense"}, b"text"),
        ({"Content-Encoding": "rot13"}, b"text"),
        ({"Content-Encoding": "gzip, gzip"}, gzip.compress(gzip.compress(b"text", mtime=0), mtime=0)),
        ({}, "text".encode("utf-16")),
        ({}, b"a\0b"),
        ({}, b"\xef\xbb\xbf \r\n\t"),
        ({"Content-Type": "application/json"}, b'{"text": " \\n\\u3000"}'),
    ],
)
def test_bodies_that_are_not_what_their_headers_say(tmp_path, headers, body) -> None:
    """Damaged, larger unpacked than anything may be, in another encoding, binary, packed otherwise, or blank: refused."""

    async def steps(client, queue):
        answer = await client.post("/v1/jobs", data=body, headers={"Content-Type": "text/plain", **headers})
        assert answer.status in (400, 413)
        assert {"error", "hint"} == set(await answer.json())
        assert {} == queue.counts()

    with_service(tmp_path, steps)


def test_lines_end_where_json_says(tmp_path) -> None:
    """Characters that other texts end lines with may be in a string as they are; a mark of the byte order is no text.

    As in https://github.com/datalad/datalad/issues/3523 and https://github.com/wbolster/jsonlines/issues/53.
    """
    text = "one\u2028two\u2029three\x85four"

    async def steps(client, queue):
        lines = json.dumps({"text": text}, ensure_ascii=False) + "\r\n" + json.dumps({"text": "b"})
        answer = await client.post("/v1/jobs", data=lines.encode(), headers={"Content-Type": "application/jsonl"})
        assert (202, 2) == (answer.status, len((await answer.json())["jobs"]))
        assert text == queue.claim().request.text
        queue.claim()
        await client.post("/v1/jobs", data=b"\xef\xbb\xbfc", headers={"Content-Type": "text/plain"})
        assert "c" == queue.claim().request.text

    with_service(tmp_path, steps)


@pytest.mark.parametrize("source", ["http://user:secret@a.example/list", "http://[::1", "http:///x", "/etc/passwd"])
def test_watches_that_are_none(tmp_path, source) -> None:
    """A password would be shown to whoever lists watches."""

    async def steps(client, _queue):
        answer = await client.post("/v1/watches", json={"name": "a", "kind": "list", "source": source})
        told = await answer.text()
        assert (400, False) == (answer.status, "secret" in told)

    with_service(tmp_path, steps)


def test_jobs_are_shown_cancelled_and_followed(tmp_path) -> None:
    """In pages; as events until the end; a dead one can be tried again."""

    async def steps(client, queue):
        jobs = [await submit(client) for _ in range(3)]
        page = await (await client.get("/v1/jobs?limit=2")).json()
        assert [job["id"] for job in jobs[:2]] == [job["id"] for job in page["jobs"]]
        rest = await (await client.get(f"/v1/jobs?limit=2&after={page['next']}")).json()
        assert ([jobs[2]["id"]], None) == ([job["id"] for job in rest["jobs"]], rest["next"])
        assert 400 == (await client.get("/v1/jobs?state=nonsense")).status
        assert 404 == (await client.get("/v1/jobs/nonsense")).status
        assert 405 == (await client.put("/v1/jobs")).status
        events = await client.get(f"/v1/jobs/{jobs[0]['id']}/events")
        assert [b"retry: 2000", b"event: queued"] == (await events.content.readuntil(b"\n\n")).splitlines()[:2]
        claimed = queue.claim()
        assert claimed.id == jobs[0]["id"]
        queue.fail(claimed, "no such page", for_good=True)
        told = (await events.text()).strip().split("\n\n")
        assert "event: dead" == told[-1].splitlines()[0]
        assert "no such page" == json.loads(told[-1].splitlines()[2].removeprefix("data: "))["reason"]
        assert "queued" == (await (await client.post(f"/v1/jobs/{jobs[0]['id']}/retry")).json())["state"]
        assert "cancelled" == (await (await client.delete(f"/v1/jobs/{jobs[1]['id']}")).json())["state"]

    with_service(tmp_path, steps)


def test_who_comes_again_is_told_what_is_new(tmp_path) -> None:
    """With the id of the last event, as browsers do: nothing twice, and 204 once nothing more will come.

    As in https://github.com/inaka/EventSource/issues/23, where a stream that had ended was asked for again and again.
    """

    async def steps(client, queue):
        job = await submit(client)
        path = f"/v1/jobs/{job['id']}/events"
        events = await client.get(path)
        fields = dict(line.split(": ", 1) for line in (await events.content.readuntil(b"\n\n")).decode().strip().splitlines())
        assert ("queued", "2000") == (fields["event"], fields["retry"])
        events.close()  # who leaves, and comes again
        known = {"Last-Event-ID": fields["id"]}
        queue.finish(queue.claim(), {"n": 1})
        told = await (await client.get(path, headers=known)).text()
        assert ["published"] == re.findall("event: (.*)", told)
        (last,) = re.findall("id: (.*)", told)
        answer = await client.get(path, headers={"Last-Event-ID": last})
        assert (204, b"") == (answer.status, await answer.read())
        for other in ("nonsense", fields["id"], ""):
            again = await (await client.get(path, headers={"Last-Event-ID": other})).text()
            assert ["published"] == re.findall("event: (.*)", again)

    with_service(tmp_path, steps)


def test_lines_are_accepted_together_or_not_at_all(tmp_path) -> None:
    """A request that is answered with 429 has left nothing behind, however much of it would have had room."""

    async def steps(client, queue):
        lines = "\n".join(json.dumps({"text": str(number)}) for number in range(3))
        headers = {"Content-Type": "application/jsonl"}
        assert 429 == (await client.post("/v1/jobs", data=lines, headers=headers)).status
        assert {} == queue.counts()
        await submit(client)

    with_service(tmp_path, steps, max_jobs=2)


def test_a_full_queue_says_when_to_come_again(tmp_path) -> None:
    """429 with Retry-After; a key that is known is answered all the same."""

    async def steps(client, _queue):
        first = await submit(client, {"text": "a", "idempotency_key": "k"})
        answer = await client.post("/v1/jobs", json={"text": "b"})
        assert (429, True) == (answer.status, int(answer.headers["Retry-After"]) > 0)
        assert first["id"] == (await submit(client, {"text": "a", "idempotency_key": "k"}))["id"]

    with_service(tmp_path, steps, max_jobs=1)


def bearer(tenant, *scopes, **limits):
    token = issue_token(ISSUER, Grant(tenant, frozenset(scopes), **limits), seconds=60, now=time.time())
    return {"Authorization": f"Bearer {token}"}


def test_tenants_see_their_own(tmp_path) -> None:
    """Without a token nothing; with one what its scopes, models and namespaces say; an admin all."""
    issuers = tmp_path / "issuers"
    issuers.write_text(ISSUER.public.text)

    async def steps(client, _queue):
        mine, yours = bearer("a", Scope.PUBLISH), bearer("b", Scope.PUBLISH, models=("n",))
        job = await submit(client, **mine)
        await submit(client, status=401)
        await submit(client, status=403, **bearer("a", Scope.READ))
        await submit(client, status=403, **yours)
        await submit(client, {"text": "x", "model": "n"}, **yours)
        for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", ""), ("POST", "/retry")):
            assert 404 == (await client.request(method, f"/v1/jobs/{job['id']}{path}", headers=yours)).status
        assert [1, 2] == [
            len((await (await client.get("/v1/jobs", headers=headers)).json())["jobs"])
            for headers in (mine, bearer("boss", Scope.ADMIN))
        ]
        assert [200, 200] == [(await client.get(path)).status for path in ("/healthz", "/v1/openapi.json")]

    with_service(tmp_path, steps, issuers_file=issuers)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.168.1.7:80", "some.example:80"])
def test_beyond_this_machine_not_without_tokens_and_tls(tmp_path, listen) -> None:
    """Neither open, nor with tokens in plain HTTP."""
    issuers = tmp_path / "issuers"
    issuers.write_text(ISSUER.public.text)
    for more in ({}, {"issuers_file": issuers}):
        with pytest.raises(UsageError):
            load_settings(None, {"models": ("m",), "listen": listen, **more}).guard()
    load_settings(None, {"models": ("m",), "listen": listen, "issuers_file": issuers, "insecure_http": True}).guard()


def test_without_torch_there_are_no_workers(tmp_path, monkeypatch) -> None:
    """That is told at the start, instead of by workers that die."""
    from kvcdn.origin.service import serve

    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="torch"):
        serve.run(load_settings(None, {"models": ("m",), "queue_file": tmp_path / "queue"}))
    assert not (tmp_path / "queue").exists()


def test_the_description_is_of_this_service(tmp_path) -> None:
    """Every route is described and every description is a route; references lead somewhere; a job has the fields described."""

    async def steps(client, _queue):
        app = client.server.app
        routes = {(route.resource.canonical, route.method.lower()) for route in app.router.routes() if route.method != "HEAD"}
        told = await (await client.get("/v1/openapi.json")).json()
        assert routes == {(path, method) for path, methods in told["paths"].items() for method in methods}
        assert set(told["components"]["schemas"]["Job"]["properties"]) == set(await submit(client))
        names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(told)))
        assert names == set(told["components"]["schemas"])
        assert json.loads(json.dumps(describe())) == told

    with_service(tmp_path, steps)


def states_at(url: str) -> set[str]:
    """The states of all jobs of the service at `url`."""
    return {job["state"] for job in urllib3.request("GET", f"{url}/v1/jobs").json()["jobs"]}


# -- a real one ---------------------------------------------------------------------------------------------------------------


def test_one_document_that_is_refused_stops_no_other(tmp_path, tiny_llama) -> None:
    """By the program, of a folder: what cannot be read, and what the service refuses, is told; the rest is accepted."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\0binary")
    (folder / "b.txt").write_text("x" * 5000)
    (folder / "c.txt").write_text("A short text.")
    with running_origin(tmp_path, tiny_llama, workers="0", max_document="2000") as (url, _):
        ran = kvcdn("publish", folder, "--service", url, "--no-wait")
        assert ("2 of 3 documents were not published", 2) == (ran.complaint.rpartition("kvcdn: ")[2], ran.code)
        assert "is a binary file" in ran.complaint
        assert "Too Large" in ran.complaint
        assert "c.txt: queued" in ran.out
        assert 2 == kvcdn("publish", folder / "b.txt", "--service", url, "--no-wait").code
        answer = urllib3.request("GET", f"{url}/v1/jobs").json()
        assert ["queued"] == [job["state"] for job in answer["jobs"]]


@pytest.mark.timeout(2 * START_SECONDS)
def test_documents_are_published_through_kills(tmp_path, tiny_llama) -> None:
    """Service and worker die while jobs run; started again, each document is published once, and SIGTERM ends all in order."""
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(3):
        (documents / f"{number}.txt").write_text(f"Document {number}. {TEXT[: 2000 + 500 * number]}")
    with running_origin(tmp_path, tiny_llama) as (url, process):
        ran = kvcdn("publish", documents, "--service", url, "--no-wait")
        assert 0 == ran.code, ran.err
        # Or they are done before that is seen, on a machine that is busy with something else.
        until(lambda: JobState.RUNNING in (states := states_at(url)) or JobState.QUEUED not in states, seconds=START_SECONDS)
        (worker,) = children(process.pid)
        os.kill(worker, signal.SIGKILL)
        process.kill()
    queue = JobQueue(tmp_path / "queue")
    assert 3 == sum(queue.counts().values())
    with running_origin(tmp_path, tiny_llama) as (url, process):
        again = kvcdn("publish", documents / "0.txt", "--service", url, "--json")
        assert (0, "published") == (again.code, again.json["state"])
        until(lambda: {"published": 4} == queue.counts(), queue.counts)
        process.terminate()
        assert 0 == process.wait(WAIT_SECONDS)
    results = [job.result for job in queue.list(state=JobState.PUBLISHED)]
    addresses = {listed.manifest.address for listed in list_published(FolderStore(tmp_path / "origin"))}
    assert {str(address) for address in addresses} == {result["address"] for result in results}
    assert 3 == len(addresses)
    assert 0 == kvcdn("fsck", "--origin", str(tmp_path / "origin")).code
    queue.close()
