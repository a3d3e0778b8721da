"""Faults that users of other S3 clients and job queues have reported in public, replayed: a listing that ends in the middle,
odd keys, credentials that are renewed, bytes damaged on the way, completions answered twice, refusals without a reason,
whoever stands between and says yes or shows a page, conditions that hold for one writer at a time, a lost reply to a
conditional write, a source that goes while it is copied, jobs that wait longer than a claim lasts, and a queue's file that
another process holds. Others stand beside what they
concern: a machine that slept (test_origin_lease.py), lines within JSON and half surrogate pairs (test_origin_service.py), a
server that sends a byte now and then (test_origin_fetching.py), readers of events that come again for ever
(test_origin_service.py), jobs that are cancelled while they fail (test_origin_queue.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kvcdn.errors import UnavailableError
from kvcdn.keys import block_key
from kvcdn.manifest import Manifest
from kvcdn.origin.jobs.jobs import Job, JobRequest
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.upkeep import copy
from kvcdn.origin.upkeep.check import check_origin
from kvcdn.origin.upkeep.collect import collect_garbage
from kvcdn.store import BlobStore
from kvcdn.stores import open_store, s3
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.s3 import S3Store
from support.faults import Fault, FaultyLink, faulty_link
from support.library import Library, keys
from support.seaweed import Keys, S3Server
from support.waiting import WAIT_SECONDS

SLOW_DOWN = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

LISTING = b"list-type=2"

LATER = 10 * 86400.0


@pytest.fixture
def link(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyLink]:
    for name, value in s3_server.writer.environment().items():
        monkeypatch.setenv(name, value)
    with faulty_link(s3_server.port) as found:
        yield found


@pytest.fixture
def store(s3_server: S3Server, link: FaultyLink) -> S3Store:
    return S3Store(s3_server.bucket, uuid.uuid4().hex, endpoint=link.url)


def page(token: str | None, *names: str) -> bytes:
    """A server's answer to a listing that goes on at `token`, if it says where."""
    keys = "".join(f"<Contents><Key>{name}</Key><Size>1</Size></Contents>" for name in names)
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{more}{keys}</ListBucketResult>".encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("token", [None, "the-same-each-time"])
def test_a_listing_that_cannot_go_on_is_no_short_one(store: S3Store, link: FaultyLink, ordered: bool, token: str | None):
    """Truncated, without a token or with one that leads nowhere: an error, and no end, and no endless loop (kache #278)."""
    store._ordered = ordered
    store.create("v1/a", [b"x"])
    link.inject(Fault(when=LISTING, answer=page(token)), times=1000)
    with pytest.raises(UnavailableError, match="listing"):
        list(store.list("v1/"))


def test_garbage_is_not_collected_by_a_short_listing(store: S3Store, link: FaultyLink):
    """What a listing does not show of the manifests is named all the same: nothing is removed."""
    library = Library(store)
    library.publish((1, 2))
    orphan = block_key(library.tag, library.names((7,)).blocks[0].address)
    store.create(orphan, [b"a block"])
    kept = {info.key for info in store.list("v1/")}
    link.inject(Fault(when=b"manifests%2F&", answer=page(None)), times=1000)
    with pytest.raises(UnavailableError):
        collect_garbage(store, grace_seconds=0, now=datetime.now(UTC).timestamp() + LATER)
    link.inject(Fault(), times=0)
    assert kept <= {info.key for info in store.list("v1/")}


@pytest.mark.parametrize("times", [1, 100])
def test_a_listing_that_is_told_to_slow_down(store: S3Store, link: FaultyLink, times: int):
    """Once it is asked again; where that does not help, it is an error and no empty store."""
    store.create("v1/a", [b"x"])
    link.inject(Fault(when=LISTING, answer=SLOW_DOWN), times=times)
    if times == 1:
        assert ["v1/a"] == [info.key for info in store.list("v1/")]
        return
    with pytest.raises(UnavailableError, match="503"):
        list(store.list("v1/"))


def test_a_page_without_keys_is_not_the_last(store: S3Store, link: FaultyLink):
    """A server may find nothing on a page and go on (s3ql pull request 166)."""
    store._ordered = True
    store.create("v1/a", [b"x"])
    token = f"{store._prefix}/v0"
    link.inject(Fault(when=LISTING, answer=page(token)))
    assert ["v1/a"] == [info.key for info in store.list("v1/")]


@pytest.mark.parametrize("ordered", [False, True])
def test_keys_that_others_wrote_oddly(store: S3Store, ordered: bool):
    """Signs that URLs and XML escape, some twice (minio #6706, floci #1589): not ours, and none of ours is lost for them."""
    store._ordered = ordered
    names = ["a+b", "a%2Fb", "50%", "a&amp;b", "<a>", "a b", "a'b", "ы", "a=b"]
    for name in names:
        store._client.put_object(Bucket=store._bucket, Key=f"{store._prefix}/v1/{name}", Body=b"x")
    for key in ("v1/a", "v1/b/c", "v1/z"):
        store.create(key, [b"x"])
    assert ["v1/a", "v1/b/c", "v1/z"] == [info.key for info in store.list("v1/")]
    assert ["v1/z"] == [info.key for info in store.list("v1/", "v1/b/c")]


def test_credentials_that_are_renewed_are_used(s3_server: S3Server, link: FaultyLink, tmp_path: Path, monkeypatch):
    """Of a process that hands them out for a while: both ways of reading take the new ones, in the same store (s5cmd #683)."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    told = tmp_path / "told.json"

    def hand_out(keys: Keys) -> None:
        # Renewed at each request: botocore asks ten minutes before they end.
        until = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
        written = {"Version": 1, "AccessKeyId": keys.access_key, "SecretAccessKey": keys.secret_key, "Expiration": until}
        (tmp_path / "new.json").write_text(json.dumps(written))
        (tmp_path / "new.json").replace(told)

    hand_out(s3_server.writer)
    script = f"{sys.executable} -c \"print(open('{told}').read())\""
    (tmp_path / "config").write_text(f"[profile kv]\nregion = us-east-1\ncredential_process = {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    store = open_store(f"s3://{s3_server.bucket}/{uuid.uuid4().hex}?endpoint={link.url}&profile=kv")
    assert store.create("a", [b"x"])
    hand_out(s3_server.reader)
    link.heads.clear()
    assert b"x" == store.read("a")
    assert store.stat("a") is not None
    heads = [head for head in link.heads if re.match(rb"(GET|HEAD) ", head)]
    assert heads
    assert all(f"Credential={s3_server.reader.access_key}/".encode() in head for head in heads)


def refused(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("code", ["BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"])
@pytest.mark.parametrize("parts", [False, True])
def test_bytes_that_were_damaged_on_the_way_are_sent_again(
    store: S3Store, link: FaultyLink, monkeypatch: pytest.MonkeyPatch, code: str, parts: bool
):
    """The library gives up at once: https://github.com/aws/aws-sdk-ruby/issues/2796, https://github.com/boto/botocore/issues/1188."""
    if parts:
        monkeypatch.setattr(s3, "MULTIPART_BYTES", 10)
    link.inject(Fault(when=b"partNumber=1" if parts else b"PUT /", answer=refused("400 Bad Request", code)), times=2)
    assert store.create("a", [b"x" * 50])
    assert 0 == link.pending
    assert b"x" * 50 == store.read("a")


@pytest.mark.parametrize("ours", [True, False])
def test_a_completion_that_somebody_between_has_retried(store: S3Store, monkeypatch: pytest.MonkeyPatch, ours: bool):
    """No such upload, says the server, as it is completed already, or was aborted: what is there tells which, by its bytes.

    https://github.com/peak/s5cmd/issues/450, https://github.com/ClickHouse/ClickHouse/pull/114375.
    """
    monkeypatch.setattr(s3, "MULTIPART_BYTES", 10)
    complete = store._client.complete_multipart_upload

    def answered_twice(**given):
        if ours:
            complete(**given)
        else:  # a lifecycle rule; and another's object of the same size
            store._client.abort_multipart_upload(**{name: given[name] for name in ("Bucket", "Key", "UploadId")})
            store._client.put_object(Bucket=given["Bucket"], Key=given["Key"], Body=b"y" * 50)
        answer = {"Error": {"Code": "NoSuchUpload"}, "ResponseMetadata": {"HTTPStatusCode": 404, "RetryAttempts": 0}}
        raise store._client.exceptions.ClientError(answer, "CompleteMultipartUpload")

    monkeypatch.setattr(store._client, "complete_multipart_upload", answered_twice)
    if ours:
        assert store.create("a", [b"x" * 50])
    else:
        with pytest.raises(UnavailableError, match="NoSuchUpload"):
            store.create("a", [b"x" * 50])
    assert (b"x" if ours else b"y") * 50 == store.read("a")


def test_writes_need_nothing_new_of_a_server(store: S3Store, link: FaultyLink, monkeypatch: pytest.MonkeyPatch):
    """A plain body with its checksum and length before it, as other servers take: https://github.com/boto/boto3/issues/4400."""
    assert store.create("a", [b"x" * 50])
    monkeypatch.setattr(s3, "MULTIPART_BYTES", 10)
    assert store.create("b", [b"x" * 50])
    heads = [head.lower() for head in link.heads if head.startswith(b"PUT /")]
    assert len(heads) >= 2
    for head in heads:
        assert b"x-amz-checksum-crc32: " in head
        assert b"content-length: 50" in head
        assert not {word for word in (b"aws-chunked", b"x-amz-trailer", b"transfer-encoding") if word in head}


def test_a_queue_waits_for_whoever_writes(tmp_path: Path):
    """Its file is held by another process's transaction: that is waited for, and read anew after (jentic-one #529)."""
    path = tmp_path / "queue.sqlite"
    queue = JobQueue(path)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    ended = threading.Timer(0.5, lambda: other.execute("COMMIT"))
    ended.start()
    (accepted,) = queue.accept([("acme", JobRequest(text="one"))])
    assert not other.in_transaction
    # Someone who reads on for long holds nobody up, and makes nobody's own reading old.
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM jobs").fetchone()
    queue.accept([("acme", JobRequest(text="two"))])
    assert {"queued": 2} == queue.counts()
    other.execute("ROLLBACK")
    ended.join()
    other.close()
    queue.close()
    assert accepted


def answer(status: str, body: bytes = b"", kind: str = "application/xml", *, head: bytes = b"") -> bytes:
    """What a server, or somebody in its place, may say."""
    length = f"Content-Length: {len(body)}\r\nConnection: close\r\n".encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n".encode() + length + head + b"\r\n" + body


PORTAL = answer("200 OK", b"<!DOCTYPE html><html><body>Please log in.</body></html>", "text/html")
"""What a hotel's network says to everything."""


@pytest.mark.parametrize("status", ["400 Bad Request", "403 Forbidden"])
def test_a_refusal_that_a_head_cannot_explain(store: S3Store, link: FaultyLink, status: str):
    """Once, it is asked again; for good, the reason is told: https://github.com/aws/aws-sdk-js/issues/2219."""
    assert store.create("v1/a", [b"x"])
    link.inject(Fault(when=b"HEAD ", answer=answer(status)))
    assert 1 == store.stat("v1/a").size
    assert 0 == link.pending
    link.inject(Fault(when=b"HEAD ", answer=answer(status)))
    assert store.stat("v1/missing") is None
    assert store.create("v1/empty", [])
    link.inject(Fault(when=b"HEAD ", answer=answer(status)))
    assert 0 == store.stat("v1/empty").size
    link.inject(Fault(answer=refused(status, "ExpiredToken")), times=1000)
    with pytest.raises(UnavailableError, match="ExpiredToken") as caught:
        store.stat("v1/a")
    assert "log in again" in (caught.value.hint or "")


def test_what_is_gone_already_is_deleted(store: S3Store, link: FaultyLink):
    """Some servers say of a retried deletion that nothing is there (https://github.com/restic/restic/issues/2473)."""
    store.create("v1/a", [b"x"])
    link.inject(Fault(when=b"DELETE ", answer=refused("404 Not Found", "NoSuchKey")))
    store.delete("v1/a")
    assert 0 == link.pending
    link.inject(Fault(when=b"DELETE ", answer=refused("404 Not Found", "NoSuchBucket")))
    with pytest.raises(UnavailableError, match="no such bucket"):
        store.delete("v1/a")


@pytest.mark.parametrize("when", [b"PUT ", b"GET ", b"HEAD ", LISTING])
def test_a_page_of_html_from_somebody_between(store: S3Store, link: FaultyLink, when: bytes):
    """503 and a page: tried again, and then an error in words (https://github.com/huggingface/huggingface_hub/issues/3071)."""
    store.create("v1/a", [b"x"])
    page_of_html = answer("503 Service Unavailable", b"<!DOCTYPE HTML><HTML><BODY><H1>503</H1></BODY></HTML>", "text/html")

    def ask() -> object:
        if when == LISTING:
            return [info.key for info in store.list("v1/")]
        return {b"PUT ": lambda: store.create(f"v1/{uuid.uuid4().hex}", [b"y"]), b"GET ": lambda: store.read("v1/a")}.get(
            when, lambda: store.stat("v1/a") is not None
        )()

    link.inject(Fault(when=when, answer=page_of_html), times=1)
    assert ask()
    assert 0 == link.pending
    link.inject(Fault(when=when, answer=page_of_html), times=1000)
    with pytest.raises(UnavailableError, match="503"):
        ask()


@pytest.mark.parametrize("said", [PORTAL, answer("200 OK")])
def test_somebody_between_who_says_yes_to_all(store: S3Store, link: FaultyLink, said: bytes):
    """200, and no server has seen the request: nothing is taken to be written, and no origin to be empty."""
    store.create("v1/a", [b"x"])
    link.inject(Fault(when=b"PUT ", answer=said), times=1000)
    with pytest.raises(UnavailableError):
        store.create("v1/b", [b"y"])
    link.inject(Fault(when=LISTING, answer=said), times=1000)
    for ordered in (True, False):
        store._ordered = ordered
        with pytest.raises(UnavailableError):
            list(store.list("v1/"))
    link.inject(Fault(when=b"HEAD ", answer=said), times=1000)
    with pytest.raises(UnavailableError):
        store.stat("v1/a")
    link.inject(Fault())
    assert store.stat("v1/b") is None


def test_parts_that_nobody_keeps(store: S3Store, link: FaultyLink, monkeypatch: pytest.MonkeyPatch):
    """A part that is answered without its tag was not taken: no crash, and no upload that ends."""
    monkeypatch.setattr(s3, "MULTIPART_BYTES", 1)
    link.inject(Fault(when=b"partNumber", answer=answer("200 OK")), times=1000)
    with pytest.raises(UnavailableError):
        store.create("v1/a", [b"x" * 100])
    link.inject(Fault())
    assert store.stat("v1/a") is None


def test_what_is_refused_for_good_is_not_tried_for_ever(store: S3Store, link: FaultyLink):
    """A full account: https://github.com/huggingface/huggingface_hub/issues/3325."""
    link.inject(Fault(when=b"PUT ", answer=refused("403 Forbidden", "QuotaExceeded")), times=1000)
    with pytest.raises(UnavailableError, match="QuotaExceeded"):
        store.create("v1/a", [b"x"])
    assert 999 == link.pending


def test_a_request_that_took_too_long_is_no_matter_of_clocks_alone(store: S3Store, link: FaultyLink):
    """On a slow link a signature is old when its body is there: https://github.com/concourse/s3-resource/issues/34."""
    link.inject(Fault(when=b"PUT ", answer=refused("403 Forbidden", "RequestTimeTooSkewed")), times=1000)
    with pytest.raises(UnavailableError) as caught:
        store.create("v1/a", [b"x"])
    assert "slow" in (caught.value.hint or "")


def test_a_range_that_somebody_between_does_not_know(store: S3Store, link: FaultyLink):
    """A whole object where a part was asked for is not the part, and not given as the part."""
    store.create("v1/a", [b"0123456789"])
    whole = answer(
        "200 OK",
        b"0123456789",
        "application/octet-stream",
        head=b'ETag: "x"\r\nLast-Modified: Mon, 30 Nov 2026 18:00:00 GMT\r\n',
    )
    link.inject(Fault(when=b"GET ", answer=whole), times=1)
    with contextlib.suppress(UnavailableError):
        assert b"345" == store.read("v1/a", 3, 3)


def test_of_many_writers_at_once_one_is_first(store: S3Store):
    """As in https://github.com/seaweedfs/seaweedfs/issues/8800, where all were; on the server that these tests run."""
    for turn in range(5):
        key, writers = f"v1/{turn}", range(8)
        together = threading.Barrier(len(writers))

        def write(number: int, key: str = key, together: threading.Barrier = together) -> bool:
            together.wait(WAIT_SECONDS)
            return store.create_unseen(key, [b"%d" % number])

        with ThreadPoolExecutor(len(writers)) as pool:
            first = [number for number, won in enumerate(pool.map(write, writers)) if won]
        assert [int(store.read(key))] == first


@pytest.mark.parametrize("ours", [True, False])
def test_a_conditional_write_whose_reply_is_lost(store: S3Store, link: FaultyLink, ours: bool):
    """The retry is told that there is an object: ours, which is success, or another's, which is not.

    As in https://github.com/aws/aws-sdk-java-v2/issues/6580.
    """
    if not ours:
        store.create("v1/a", [b"theirs"])
    link.inject(Fault(when=b"PUT ", pass_bytes=0))
    assert ours is store.create_unseen("v1/a", [b"ours"])
    assert (0, b"ours" if ours else b"theirs") == (link.pending, store.read("v1/a"))


def test_a_source_that_goes_while_it_is_copied(store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No document is at the target in part: not one whose block goes, nor one whose block is cut short.

    As in https://github.com/rclone/rclone/issues/7449, where an object was made of what had been read until then.
    """
    source = Library(FolderStore(tmp_path / "source"))
    source.publish((1, 2, 3), (4, 5), (6,))
    read_block = copy.read_block

    def read_and_lose(origin: BlobStore, key: str, manifest: Manifest, index: int) -> bytes:
        for whole, spec in ((False, (1, 2, 3)), (True, (4, 5))):
            if key == source.block_keys(spec)[1]:
                path = tmp_path / "source" / key
                path.unlink() if whole else os.truncate(path, path.stat().st_size // 2)
        return read_block(origin, key, manifest, index)

    monkeypatch.setattr(copy, "read_block", read_and_lose)
    copied = copy.copy_documents(source.store, store)
    assert (1, 2) == (copied.documents, len(copied.damaged))
    assert [source.manifest_key((6,))] == [key for key in keys(store) if "/manifests/" in key]
    assert [] == check_origin(store).problems


def test_a_job_that_waits_longer_than_a_claim_lasts(tmp_path: Path):
    """It is begun once, when its time has come, however many workers ask meanwhile; a cancelled one never.

    As in https://github.com/celery/celery/issues/2599, where each time-out put it into the queue once more, and
    https://github.com/rq/rq/issues/1669, where it ran although it was cancelled.
    """
    now = 1_800_000_000.0
    queue = JobQueue(tmp_path / "queue", lease_seconds=30, clock=lambda: now)
    kept, cancelled = queue.accept([("acme", JobRequest(text=text, not_before=now + 3600)) for text in ("one", "two")])
    assert isinstance(kept, Job)
    assert isinstance(cancelled, Job)
    queue.cancel(cancelled.id)
    for _ in range(100):
        assert queue.claim() is None
        now += 35
    now = 1_800_000_000.0 + 3600
    claimed = queue.claim()
    assert claimed is not None
    assert (kept.id, 1) == (claimed.id, claimed.attempts)
    queue.finish(claimed, {})
    now += 7200
    assert queue.claim() is None
    assert {"published": 1, "cancelled": 1} == queue.counts()
    queue.close()
