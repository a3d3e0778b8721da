"""What the S3 store owes beyond the suite, at a real server and through a link that fails: lost replies, refusals, cuts."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from kvcdn.errors import NotFoundError, UnavailableError, UsageError
from kvcdn.stores import body, open_store, s3, s3_plain
from kvcdn.stores.s3 import PART_BYTES, S3Store
from kvcdn.stores.s3_errors import translated
from support.faults import Fault, FaultyLink, faulty_link
from support.seaweed import S3Server

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CONFLICT = (
    b"HTTP/1.1 409 Conflict\r\nContent-Type: application/xml\r\nContent-Length: 82\r\nConnection: close\r\n\r\n"
    b"<Error><Code>ConditionalRequestConflict</Code><Message>try again</Message></Error>"
)
DATA = random.Random(5).randbytes(3_000_000)


@pytest.fixture
def credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.writer.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def prefix() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def direct(credentials: None, s3_server: S3Server, prefix: str) -> S3Store:
    """The server without a fault in between."""
    return S3Store(s3_server.bucket, prefix, endpoint=s3_server.endpoint)


@pytest.fixture
def link(s3_server: S3Server) -> Iterator[FaultyLink]:
    with faulty_link(s3_server.port) as found:
        yield found


@pytest.fixture
def linked(credentials: None, s3_server: S3Server, link: FaultyLink, prefix: str) -> S3Store:
    """The same store through the faulty link."""
    return S3Store(s3_server.bucket, prefix, endpoint=link.url)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multipart from 6 MB on, in parts of 5 MiB, the smallest that S3 knows."""
    monkeypatch.setattr(s3, "MULTIPART_BYTES", 6_000_000)
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_lost_reply(linked: S3Store, direct: S3Store, link: FaultyLink, reset: bool):
    """A create whose reply is lost after the server acted is a success: the retry meets our own object and knows it."""
    link.inject(Fault(when=b"PUT /", pass_bytes=len(CONTINUE), reset=reset))
    assert linked.create("a", [DATA])
    assert 0 == link.pending
    assert DATA == direct.read("a")


def test_lost_reply_after_another_won(linked: S3Store, direct: S3Store, link: FaultyLink, monkeypatch: pytest.MonkeyPatch):
    """The same, when the object that is met is another's, of the same size: not ours, so False."""
    monkeypatch.setattr(linked, "stat", lambda key: None)  # the other writer comes between the look and the write
    direct.create("a", [DATA[::-1]])
    link.inject(Fault(when=b"PUT /", pass_bytes=0))
    assert not linked.create("a", [DATA])
    assert 0 == link.pending
    assert DATA[::-1] == direct.read("a")


def test_conditional_write_is_asked_for(direct: S3Store, monkeypatch: pytest.MonkeyPatch):
    """It is the server, not our look before, that keeps a later writer from overwriting; small and in parts."""
    direct.create("a", [b"first"])
    monkeypatch.setattr(direct, "stat", lambda key: None)
    assert not direct.create("a", [b"second"])
    monkeypatch.setattr(s3, "MULTIPART_BYTES", 10)
    assert not direct.create("a", [b"second, in parts"])
    assert b"first" == direct.read("a")


def test_lost_reply_to_a_completion(linked: S3Store, direct: S3Store, link: FaultyLink, small_parts: None):
    """A multipart upload whose last reply is lost is a success too."""
    pieces = [DATA, DATA, DATA]
    link.inject(Fault(when=b"<CompleteMultipartUpload", pass_bytes=0))
    assert linked.create("a", pieces)
    assert 0 == link.pending
    assert DATA * 3 == direct.read("a")


def test_broken_part_is_sent_again(linked: S3Store, direct: S3Store, link: FaultyLink, small_parts: None):
    """A part whose connection breaks goes up again."""
    link.inject(Fault(when=b"partNumber=2", pass_bytes=0, reset=True))
    assert linked.create("a", [DATA] * 4)
    assert 0 == link.pending
    assert DATA * 4 == direct.read("a")


def test_failed_multipart_leaves_nothing(linked: S3Store, direct: S3Store, link: FaultyLink, small_parts: None):
    """An upload that fails is aborted: no object, no parts that cost money."""
    link.inject(Fault(when=b"partNumber=2", answer=b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"))
    with pytest.raises(UnavailableError, match="writing a "):
        linked.create("a", [DATA] * 4)
    assert direct.stat("a") is None
    uploads = direct._client.list_multipart_uploads(Bucket=direct._bucket, Prefix=direct._prefix)
    assert [] == uploads.get("Uploads", [])


@pytest.mark.parametrize("sizes", [[5], [0, 3, 0], [PART_BYTES], [PART_BYTES, 1], [PART_BYTES - 1, 2, PART_BYTES * 2]], ids=str)
def test_parts_cover_the_object(sizes: list[int]):
    """The parts are the joined pieces; each but the last has the exact part size."""
    pieces = [random.Random(size).randbytes(size) for size in sizes]
    parts = list(s3._parts(pieces, PART_BYTES))
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(part) == PART_BYTES for part in parts[:-1])
    assert 0 < len(parts[-1]) <= PART_BYTES


def test_conflict_is_retried(linked: S3Store, direct: S3Store, link: FaultyLink):
    """409 says that somebody else is at work on the key: tried again."""
    link.inject(Fault(when=b"PUT /", answer=CONFLICT), times=2)
    assert linked.create("a", [b"x"])
    assert 0 == link.pending
    assert b"x" == direct.read("a")


def test_endless_conflict(linked: S3Store, direct: S3Store, link: FaultyLink, monkeypatch: pytest.MonkeyPatch):
    """409 without end is an error in the end."""
    monkeypatch.setattr(body, "RESUME_PAUSE_SECONDS", 0.01)
    link.inject(Fault(when=b"PUT /", answer=CONFLICT), times=99)
    with pytest.raises(UnavailableError, match="409"):
        linked.create("a", [b"x"])
    assert 99 - s3.CONFLICT_ATTEMPTS == link.pending
    assert direct.stat("a") is None


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(("start", "length"), [(0, None), (1_000, 2_500_000)])
def test_cut_body_is_resumed(linked: S3Store, direct: S3Store, link: FaultyLink, reset: bool, start: int, length: int | None):
    """A body cut short is taken up where it broke off: the bytes are right and each travels about once."""
    direct.create("a", [DATA])
    link.inject(Fault(when=b"GET /", pass_bytes=1_000_000, reset=reset), times=2)
    expected = DATA[start:] if length is None else DATA[start : start + length]
    assert expected == b"".join(linked.stream("a", start, length))
    assert 0 == link.pending
    if not reset:  # a reset throws away what had arrived
        assert link.bytes_passed < len(DATA) + 2 * s3.READ_BYTES + 10_000


def test_body_that_is_always_cut(linked: S3Store, direct: S3Store, link: FaultyLink, monkeypatch: pytest.MonkeyPatch):
    """A link that cuts every time ends in an error that names the object and how far it got; never in a short object."""
    monkeypatch.setattr(body, "RESUME_PAUSE_SECONDS", 0.01)
    direct.create("a", [DATA])
    link.inject(Fault(when=b"GET /", pass_bytes=300_000), times=99)
    with pytest.raises(UnavailableError, match=r"/.*: a: broke off at byte [\d,]+ of 3,000,000"):
        linked.read("a")


def test_object_replaced_between_resumes(linked: S3Store, direct: S3Store, link: FaultyLink):
    """If the object is another one when the stream is taken up again, the two are not mixed."""
    direct.create("a", [DATA])
    link.inject(Fault(when=b"GET /", pass_bytes=100_000))
    stream = linked.stream("a")
    next(stream)
    direct.delete("a")
    direct.create("a", [DATA[::-1]])
    with pytest.raises(UnavailableError, match="changed while it was read"):
        list(stream)


def test_stalled_body(credentials: None, s3_server: S3Server, link: FaultyLink, direct: S3Store, prefix: str, monkeypatch):
    """A server that falls silent in mid-body is given up after the stall limit and taken up on a new connection."""
    from kvcdn.stores import s3_client

    # Longer than a busy machine is silent by itself: the second connection is given up for no such reason.
    monkeypatch.setattr(s3_client, "STALL_SECONDS", 5)
    direct.create("a", [DATA])
    store = S3Store(s3_server.bucket, prefix, endpoint=link.url)
    link.inject(Fault(when=b"GET /", pass_bytes=500_000, stall=True))
    began = time.monotonic()
    assert DATA == store.read("a")
    assert 5 <= time.monotonic() - began


def test_closed_port(credentials: None, s3_server: S3Server):
    """An endpoint where nobody listens is told in one line that names it."""
    store = S3Store(s3_server.bucket, endpoint="http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9.* cannot be reached") as caught:
        store.stat("a")
    assert "\n" not in str(caught.value)
    assert "endpoint" in caught.value.hint


def test_refused_connections(linked: S3Store, link: FaultyLink):
    """A port that resets every connection: the same."""
    link.refusing = True
    with pytest.raises(UnavailableError, match="cannot be reached"):
        linked.read("a")


def test_unknown_access_key(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    """Credentials that the server does not know are named, with where they came from, and without the secret."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASTRANGER")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-strangers")
    store = open_store(s3_server.url("x"))
    for call in (
        lambda: store.read("a"),
        lambda: store.create("a", [b"x"]),
        lambda: list(store.list("")),
        lambda: store.delete("a"),
    ):
        with pytest.raises(UnavailableError) as caught:
            call()
        assert "access key AKIASTRANGER (from: env)" in str(caught.value)
        assert "secret-of" not in str(caught.value) + caught.value.hint
        assert caught.value.hint


def test_wrong_secret_key(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    """A wrong secret for a known key is told apart from an unknown key."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.writer.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UnavailableError, match="SignatureDoesNotMatch") as caught:
        open_store(s3_server.url()).read("a")
    assert "secret key does not belong" in caught.value.hint


def test_read_only_identity(direct: S3Store, s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch):
    """An identity that may only read does read and list; its create and delete are refused in words, and change nothing."""
    direct.create("a", [b"x"])
    for name, value in s3_server.reader.environment().items():
        monkeypatch.setenv(name, value)
    reader = S3Store(s3_server.bucket, prefix, endpoint=s3_server.endpoint)
    assert b"x" == reader.read("a")
    assert ["a"] == [info.key for info in reader.list("")]
    assert reader.stat("b") is None
    for call in (lambda: reader.create("b", [b"y"]), lambda: reader.delete("a")):
        with pytest.raises(UnavailableError, match="403 AccessDenied") as caught:
            call()
        assert "let that identity" in caught.value.hint
    assert ["a"] == [info.key for info in direct.list("")]


def test_no_credentials(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without credentials anywhere it is a usage error at opening, with what to set."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UsageError, match="no credentials") as caught:
        open_store(s3_server.url())
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    with pytest.raises(UsageError, match="nobody"):
        open_store(s3_server.url() + "&profile=nobody")


def test_profile_and_configured_endpoint(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str):
    """Credentials and endpoint may come from AWS's own files, by profile."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    keys = s3_server.writer
    (tmp_path / "config").write_text(
        f"[profile kv]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint}\n"
        f"aws_access_key_id = {keys.access_key}\naws_secret_access_key = {keys.secret_key}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    store = open_store(f"s3://{s3_server.bucket}/{prefix}?profile=kv")
    assert store.create("a", [b"x"])
    assert b"x" == store.read("a")


def _requests(link: FaultyLink) -> list[bytes]:
    """Heads of requests that passed `link`."""
    return [head for head in link.heads if re.match(rb"(GET|HEAD|PUT|POST|DELETE) /", head)]


def test_a_requester_pays(credentials: None, s3_server: S3Server, link: FaultyLink, small_parts: None):
    """Every request says so, signed, whichever way it goes: a real server takes them, and no other store sends it."""
    where = f"s3://{s3_server.bucket}/{uuid.uuid4().hex}?endpoint={link.url}"
    for payer, store in ((True, open_store(f"{where}&request_payer=requester")), (False, open_store(where))):
        link.heads.clear()
        key = f"a{payer}"
        assert store.create(key, [DATA[:1000]])
        assert store.create(f"large{payer}", [DATA, DATA[:-1], DATA[:-2]])
        assert store.stat("missing") is None
        assert DATA[:1000] == store.read(key)
        assert DATA[10:30] == store.read(key, 10, 20)
        with pytest.raises(NotFoundError):
            store.read("missing")
        assert {key, f"large{payer}"} <= {info.key for info in store.list("")}
        store.delete(key)
        heads = _requests(link)
        assert {b"GET", b"HEAD", b"PUT", b"POST", b"DELETE"} == {head.split()[0] for head in heads}
        said = [head for head in heads if b"x-amz-request-payer: requester\r\n" in head]
        assert (heads if payer else []) == said
        assert all(b"x-amz-request-payer" in re.search(rb"SignedHeaders=([^,]+)", head)[1] for head in said)


def test_a_plain_read_pays_too(credentials: None, s3_server: S3Server, link: FaultyLink):
    """What goes around botocore says it as well, so that it is not refused first each time."""
    store = open_store(f"s3://{s3_server.bucket}/{uuid.uuid4().hex}?endpoint={link.url}&request_payer=requester")
    assert store.create("a", [b"x"])
    link.heads.clear()
    assert b"x" == store.read("a")
    (head,) = _requests(link)
    assert b"Boto3" not in head
    assert b"x-amz-request-payer: requester\r\n" in head


@pytest.mark.parametrize("payer", ["", "owner", "REQUESTER"])
def test_another_payer_is_refused(credentials: None, payer: str):
    """By its name, with what can be written."""
    with pytest.raises(UsageError, match="request_payer") as caught:
        open_store(f"s3://bucket/prefix?request_payer={payer}")
    assert "request_payer=requester" in caught.value.hint


def test_missing_bucket(credentials: None, s3_server: S3Server):
    """A bucket that does not exist is not an empty store, whatever is asked first."""
    calls = (
        lambda store: store.stat("a"),
        lambda store: store.read("a"),
        lambda store: store.create("a", [b"x"]),
        lambda store: list(store.list("")),
    )
    for call in calls:
        with pytest.raises(UnavailableError, match="no such bucket") as caught:
            call(S3Store("no-such-bucket", endpoint=s3_server.endpoint))
        assert "bucket" in caught.value.hint


def test_prefixes_are_apart(direct: S3Store, s3_server: S3Server, prefix: str):
    """A store sees what is under its prefix and no neighbour whose name begins alike."""
    neighbour = S3Store(s3_server.bucket, f"{prefix}x", endpoint=s3_server.endpoint)
    inner = S3Store(s3_server.bucket, f"{prefix}/in", endpoint=s3_server.endpoint)
    neighbour.create("a", [b"neighbour"])
    inner.create("b", [b"inner"])
    assert ["in/b"] == [info.key for info in direct.list("")]
    assert direct.stat("a") is None
    assert b"inner" == direct.read("in/b")


def test_flat_listing(direct: S3Store):
    """Servers that list in key order are asked page by page; with our own keys this one does too."""
    keys = sorted(f"v1/{tag:02x}/blocks/{n:02x}/{n:02x}00" for tag in range(3) for n in range(5))
    for key in keys:
        direct.create(key, [b"x"])
    direct._ordered = True
    assert keys == [info.key for info in direct.list("")]
    assert keys[5:10] == [info.key for info in direct.list("v1/01/")]


def test_foreign_objects_are_not_listed(direct: S3Store):
    """What others put under the prefix, with names that are no keys, is not ours."""
    direct.create("a", [b"x"])
    for name in ("with space", "ä", ".hidden"):
        direct._client.put_object(Bucket=direct._bucket, Key=f"{direct._prefix}/{name}", Body=b"x")
    assert ["a"] == [info.key for info in direct.list("")]
    direct._ordered = True
    assert ["a"] == [info.key for info in direct.list("")]


def test_damaged_upload_is_refused(direct: S3Store, monkeypatch: pytest.MonkeyPatch):
    """Every write carries a checksum that the server compares: bytes that changed on the way do not become an object."""
    monkeypatch.setattr(s3, "_crc32", lambda data: "AAAAAA==")
    with pytest.raises(UnavailableError, match="writing a"):
        direct.create("a", [b"x"])
    monkeypatch.setattr(s3, "MULTIPART_BYTES", 10)
    with pytest.raises(UnavailableError, match="writing a"):
        direct.create("a", [b"x" * 20])
    assert direct.stat("a") is None


def test_objects_say_that_they_never_change(direct: S3Store):
    """A CDN over the bucket may keep objects for ever (FORMAT.md 7)."""
    direct.create("a", [b"x"])
    found = direct._client.head_object(Bucket=direct._bucket, Key=f"{direct._prefix}/a")
    assert "public, max-age=31536000, immutable" == found["CacheControl"]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "ExpiredToken", "log in again"),
        (301, "PermanentRedirect", "region"),
        (400, "AuthorizationHeaderMalformed", "region"),
        (501, "NotImplemented", "conditional writes"),
        (503, "SlowDown", "try again later"),
        (404, "NoSuchBucket", "bucket"),
        (0, "", "try again later"),
    ],
)
def test_refusals_in_words(status: int, code: str, words: str):
    """Each refusal that a server can give leads to a hint for its cause."""
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(UnavailableError) as caught, translated("s3://b", "reading a", "access key A (from: env)"):
        raise ClientError(response, "GetObject")
    assert words in caught.value.hint
    assert str(caught.value).startswith("s3://b: reading a")


def test_missing_object_through_a_link(linked: S3Store, link: FaultyLink):
    """A missing object is missing at once: no retries."""
    link.inject(Fault(when=b"GET /", pass_bytes=1 << 30), times=10)  # which counts, and does no harm
    with pytest.raises(NotFoundError):
        linked.read("nothing")
    assert 9 == link.pending


def test_connections_are_reused(linked: S3Store, link: FaultyLink):
    """Writes and looks share one connection, whole reads and ranges another; a stream closed early gives up its own."""
    for number in range(4):
        linked.create(f"a{number}", [DATA])
        linked.stat("a0")
        linked.read("a0")
        linked.read("a0", 5, 10)
        list(linked.list(""))
    assert 2 == link.connections
    stream = linked.stream("a0")
    next(stream)
    stream.close()
    linked.read("a0")
    assert 3 == link.connections


REFUSED = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
LENGTHLESS = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc"


@pytest.mark.parametrize("times", [1, 3])
def test_read_while_the_server_wants_less(linked: S3Store, direct: S3Store, link: FaultyLink, times: int):
    """SlowDown to a plain read, and to what botocore sends then: it is asked again, later."""
    direct.create("a", [DATA])
    link.inject(Fault(when=b"GET /", answer=REFUSED), times=times)
    assert DATA == linked.read("a")
    assert 0 == link.pending


def test_answer_without_a_length(linked: S3Store, direct: S3Store, link: FaultyLink):
    """An answer that does not say how long the object is may have been cut: refused in words."""
    direct.create("a", [b"abc"])
    link.inject(Fault(when=b"GET /", answer=LENGTHLESS), times=9)
    with pytest.raises(UnavailableError, match="does not say how long"):
        linked.read("a")


def test_plain_reads_that_are_vain_end(linked: S3Store, direct: S3Store, link: FaultyLink):
    """A server that refuses plain requests is read through botocore, and soon through nothing else."""
    direct.create("a", [b"x"])
    linked._plain._base = f"{link.url}/another-bucket/"
    for _ in range(s3_plain.IN_VAIN):
        assert b"x" == linked.read("a")
    link.inject(Fault(when=b"GET /another-bucket/", answer=REFUSED))
    assert b"x" == linked.read("a")
    assert 1 == link.pending


def test_plain_and_full_reads_say_the_same(direct: S3Store):
    """Whatever is asked, and whether it is there: with plain requests, and without."""
    direct.create("a", [DATA[:100]])

    def answers() -> list[object]:
        found: list[object] = []
        for key, start, length in [("a", 0, None), ("a", 3, 5), ("a", 99, 9), ("a", 100, 1), ("a", 200, None), ("b", 0, 9)]:
            try:
                found.append(direct.read(key, start, length))
            except NotFoundError as error:
                found.append(str(error))
        return found

    plain = answers()
    direct._plain._vain = s3_plain.IN_VAIN
    assert plain == answers()
    assert [DATA[:100], DATA[3:8], DATA[99:100], b"", b""] == plain[:5]


@pytest.mark.parametrize(
    "body",
    [b"<Error><Code>InternalError</Code><Message>try again</Message></Error>", b"<Other/>", b"   "],
    ids=["error", "other", "blank"],
)
def test_a_completion_that_failed_behind_its_200(linked: S3Store, direct: S3Store, link: FaultyLink, small_parts: None, body):
    """S3 says 200 before it has put the parts together: without its result nothing was written, and nobody may think so."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    link.inject(Fault(when=b"<CompleteMultipartUpload", answer=head + body), times=9)
    with pytest.raises(UnavailableError):
        linked.create("a", [DATA] * 3)
    assert direct.stat("a") is None
