"""Watches: what has changed is published, once; what is old or gone goes after its grace; and no source leads anywhere else."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
import tracemalloc
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import urllib3

from kvcdn.errors import KvcdnError, NotFoundError, UsageError
from kvcdn.model.load import load_model
from kvcdn.model.tokens import encode_text
from kvcdn.origin.jobs.fetching import Validators, fetch_bytes, resolve_public
from kvcdn.origin.jobs.jobs import JobState
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.origin.service.service_settings import ServiceSettings, load_settings
from kvcdn.origin.upkeep.catalog import list_published
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.origin.upkeep.journal_check import check_journal
from kvcdn.origin.watching import watch_sources
from kvcdn.origin.watching.watch import Watcher
from kvcdn.origin.watching.watch_settings import WatchSettings
from kvcdn.origin.watching.watch_sources import MAX_LISTING_BYTES, WatchSource, read_sitemap
from kvcdn.origin.watching.watched import WatchBook
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.command import kvcdn
from support.origin_process import START_SECONDS, running_origin
from support.tiny import TEXT
from support.waiting import until

KEY = SigningKey.generate()

GRACE = 100.0

AGO = 100_000
"""Seconds that the clock of a stage is behind."""

URLSET = '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{}</urlset>'


def here(_host: str, _port: int) -> str:
    """Everything is on this machine."""
    return "127.0.0.1"


@pytest.fixture(scope="module")
def loaded(tiny_llama):
    return load_model(str(tiny_llama))


@dataclass
class Site:
    """A web server whose pages may change, and that knows what it was asked."""

    port: int = 0
    pages: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    validators: str = "etag"
    down: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def site():
    made = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = made.pages.get(self.path)
            tag = f'"{abs(hash(page))}"'
            if made.down or page is None:
                self.send_response(503 if made.down else 404)
                self.end_headers()
                return
            same = made.validators == "etag" and self.headers.get("If-None-Match") == tag
            made.asked.append(f"{self.path} {304 if same else 200}")
            self.send_response(304 if same else 200)
            if made.validators == "etag":
                self.send_header("ETag", tag)
            self.end_headers()
            if not same:
                self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        server.shutdown()
        thread.join()


class Stage:
    """A watch with its queue, its book, a store, and a worker that is asked to work."""

    def __init__(self, tmp_path, loaded, kind="folder", source=None, **watch) -> None:
        self.now = time.time() - AGO  # manifests are made later than the jobs that they are of
        self.folder = tmp_path / "documents"
        self.folder.mkdir(exist_ok=True)
        self.path = tmp_path / "queue"
        self.loaded, self.store = loaded, MemoryStore()
        self.settings = WatchSettings(name="docs", kind=kind, source=source or str(self.folder), every=10, grace=GRACE, **watch)
        self.open()

    def open(self) -> None:
        """As a service does when it starts."""
        self.queue = JobQueue(self.path, clock=lambda: self.now)
        self.book = WatchBook(self.path, self.queue, clock=lambda: self.now)
        source = WatchSource(self.settings, here, 1_000_000)
        self.watcher = Watcher(self.settings, source, self.queue, self.book, self.store, Journal(self.store, KEY))

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        os.utime(path, (self.now + 1000, self.now + 1000))  # long ago, and another time at every step

    def step(self, seconds: float = 10.0) -> None:
        """Time passes, and the watch looks."""
        self.now += seconds
        self.watcher.step()

    def work(self) -> int:
        """Publishes what waits, as a worker does; how many jobs."""
        count = 0
        while (job := self.queue.claim()) is not None:
            token_ids = encode_text(self.loaded.tokenizer, job.request.text).token_ids
            expires = job.request.ttl and int(self.now + AGO) + job.request.ttl
            publisher = Publisher(self.loaded, self.store, KEY, tenant=job.tenant)
            result = publisher.publish(token_ids, label=job.request.label, expires=expires)
            assert self.queue.finish(job, result.to_json())
            count += 1
        return count

    def round(self, seconds: float = 10.0) -> int:
        """A look, the work that comes of it, and what the watch makes of that."""
        self.step(seconds)
        count = self.work()
        self.watcher.settle()
        return count

    def published(self) -> set[str]:
        return {str(listed.manifest.address) for listed in list_published(self.store)}

    def address(self, text: str) -> str:
        token_ids = encode_text(self.loaded.tokenizer, text).token_ids
        publisher = Publisher(self.loaded, MemoryStore(), KEY)
        return str(publisher._names(token_ids, "native").manifest_address)


@pytest.fixture
def stage(tmp_path, loaded):
    return Stage(tmp_path, loaded, label="watched")


A, B, C = (TEXT[start : start + 1200] for start in (0, 1500, 3000))


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_change_is_published_and_the_old_version_goes(stage) -> None:
    """Once each; the old one stays until the new one is there, and for the grace period; the journal says who removed it."""
    stage.write("one.txt", A)
    stage.write("two.txt", B)
    assert [2, 0, 0] == [stage.round() for _ in range(3)]
    assert {stage.address(A), stage.address(B)} == stage.published()
    stage.write("one.txt", C)
    assert 1 == stage.round()
    both = {stage.address(text) for text in (A, B, C)}
    assert both == stage.published()
    stage.step(GRACE - 20)
    assert both == stage.published()
    stage.step(21)
    assert {stage.address(B), stage.address(C)} == stage.published()
    (entry,) = [each for each in _journal(stage.store) if each.deed.action == "remove"]
    assert ([stage.address(A)], KEY.public) == ([str(each) for each in entry.deed.addresses], entry.signer)
    assert [0, 0] == [stage.round() for _ in range(2)]


def _journal(store):
    found = []
    assert [] == check_journal(store, TrustList.of(KEY.public), follow=found.append).findings
    return found


def test_a_document_that_is_gone_goes_after_its_grace(stage) -> None:
    """And stays where it comes back in time; afterwards it is published anew."""
    stage.write("one.txt", A)
    stage.write("two.txt", B)
    stage.round()
    (stage.folder / "one.txt").unlink()
    stage.step()
    stage.step(GRACE - 20)
    stage.write("one.txt", A)
    assert 0 == stage.round()
    stage.step(3 * GRACE)
    assert {stage.address(A), stage.address(B)} == stage.published()
    (stage.folder / "one.txt").unlink()
    stage.step()
    stage.step(GRACE + 1)
    assert {stage.address(B)} == stage.published()
    stage.write("one.txt", A)
    assert 1 == stage.round()
    assert {stage.address(A), stage.address(B)} == stage.published()


def test_content_that_comes_back_stays(stage) -> None:
    """A, then B, then A again: what is published is what is there, at every moment, also beyond the grace."""
    stage.write("one.txt", A)
    stage.round()
    for text in (B, A):
        stage.write("one.txt", text)
        stage.round()
        assert stage.address(text) in stage.published()
    stage.step(GRACE + 30)
    stage.step(GRACE + 30)
    assert {stage.address(A)} == stage.published()
    stage.write("one.txt", C)
    stage.round()
    stage.step(GRACE + 30)
    assert {stage.address(C)} == stage.published()


def test_content_that_another_document_has_stays(stage) -> None:
    """Two names for one text are one published document."""
    stage.write("one.txt", A)
    stage.write("two.txt", A)
    stage.round()
    stage.write("one.txt", B)
    stage.round()
    stage.step(GRACE + 30)
    assert {stage.address(A), stage.address(B)} == stage.published()


def test_what_others_published_stays(stage) -> None:
    """The watch found it there: it is not its own to remove."""
    stage.write("one.txt", A)
    stage.step()
    others = Publisher(stage.loaded, stage.store, SigningKey.generate())
    result = others.publish(encode_text(stage.loaded.tokenizer, A).token_ids)
    job = stage.queue.claim()
    assert stage.queue.finish(job, {**result.to_json(), "status": "exists"})  # as the worker tells who trusts that publisher
    stage.watcher.settle()
    stage.write("one.txt", B)
    stage.round()
    stage.step(GRACE + 30)
    assert {stage.address(A), stage.address(B)} == stage.published()


def test_a_job_that_was_taken_up_again_is_the_watchs_own(stage) -> None:
    """Its worker died between the manifest and the word about it: the second one finds it there, and it goes in its time."""
    stage.write("one.txt", A)
    stage.step()
    job = stage.queue.claim()
    token_ids = encode_text(stage.loaded.tokenizer, A).token_ids
    Publisher(stage.loaded, stage.store, KEY).publish(token_ids)
    stage.now += 100
    assert 1 == stage.work()
    assert "exists" == stage.queue.get(job.id).result["status"]
    stage.watcher.settle()
    stage.write("one.txt", B)
    stage.round()
    stage.step(GRACE + 30)
    assert {stage.address(B)} == stage.published()


def test_a_change_overtakes_a_waiting_job(stage) -> None:
    """Of three changes before anybody works, the last is published."""
    for text in (A, B, C):
        stage.write("one.txt", text)
        stage.step()
    assert 1 == stage.work()
    stage.watcher.settle()
    assert {stage.address(C)} == stage.published()
    assert {"cancelled": 2, "published": 1} == stage.queue.counts()


def test_a_crash_loses_no_change_and_publishes_none_twice(stage, monkeypatch) -> None:
    """Before, within and after the transaction that accepts the job; each time another process goes on."""
    stage.write("one.txt", A)
    insert = JobQueue._insert

    def dying(queue, *given):
        insert(queue, *given)
        raise SystemExit("killed")

    monkeypatch.setattr(JobQueue, "_insert", dying)
    with pytest.raises(SystemExit):
        stage.step()
    monkeypatch.setattr(JobQueue, "_insert", insert)
    stage.open()
    assert {} == stage.queue.counts()
    stage.step()
    stage.open()  # it died just after: the job is there, and no second one
    assert [1, 0] == [stage.round(), stage.round()]
    assert {"published": 1} == stage.queue.counts()


def test_two_services_see_a_change_once(stage) -> None:
    """They share the queue's file: looks are claimed, and where both look all the same, one submits."""
    stage.write("one.txt", A)
    stage.now += 10
    other = Stage.__new__(Stage)
    other.__dict__.update(stage.__dict__)
    other.open()
    assert [True, False] == [each.book.claim("docs", 10) for each in (stage, other)]
    known = [each.book.documents("docs") for each in (stage, other)]
    assert [{}, {}] == known
    stage.watcher.look()
    other.watcher._look_at(str(stage.folder / "one.txt"), None, renew=False)
    assert {"queued": 1} == stage.queue.counts()


def test_nothing_is_gone_because_a_disk_is_not_mounted(stage) -> None:
    """A source that is empty, or not there, says nothing about documents."""
    stage.write("one.txt", A)
    stage.round()
    aside = stage.folder.rename(stage.folder.with_name("aside"))
    stage.step()
    stage.folder.mkdir()
    stage.step(GRACE + 50)
    stage.step(GRACE + 50)
    assert {stage.address(A)} == stage.published()
    assert stage.book.status()[0]["reason"]
    stage.folder.rmdir()
    aside.rename(stage.folder)
    stage.step()
    assert ("", 1) == (stage.book.status()[0]["reason"], stage.book.status()[0]["current"])


def test_files_that_are_nothing_to_publish(stage) -> None:
    """Binary, empty, too large, or just being written: passed over, told, and the others go on; the last is taken up later."""
    stage.write("good.txt", A)
    for name, data in (("binary.txt", b"\x00" * 100), ("empty.txt", b" \n"), ("large.txt", b"x" * 1_000_001)):
        (stage.folder / name).write_bytes(data)
        os.utime(stage.folder / name, (1, 1))
    (stage.folder / "new.txt").write_text(B)
    assert 1 == stage.round()
    os.utime(stage.folder / "new.txt", (1, 1))
    assert 1 == stage.round()
    # A good one that turns bad keeps what was published of it.
    stage.write("good.txt", "\x00")
    assert 0 == stage.round()
    stage.step(GRACE + 30)
    assert {stage.address(A), stage.address(B)} == stage.published()
    (status,) = stage.book.status()
    assert 4 == status["failing"]
    assert {"binary.txt", "empty.txt", "large.txt", "good.txt"} == {Path(one["document"]).name for one in status["failures"]}
    assert all(one["reason"] for one in status["failures"])


def test_what_failed_before_it_was_ever_published(stage) -> None:
    """It is told with its reason, is published once it is good, and is forgotten once it is gone."""
    for name in ("a.txt", "b.txt"):
        (stage.folder / name).write_bytes(b"\x00" * 100)
        os.utime(stage.folder / name, (1, 1))
    assert 0 == stage.round()
    assert ["a.txt", "b.txt"] == [Path(one["document"]).name for one in stage.book.status()[0]["failures"]]
    stage.write("a.txt", A)
    (stage.folder / "b.txt").unlink()
    assert 1 == stage.round()
    (status,) = stage.book.status()
    assert (0, [], 1, 1) == (status["failing"], status["failures"], status["documents"], status["current"])
    assert {stage.address(A)} == stage.published()


def test_other_terms_publish_anew(stage) -> None:
    """Another label or model, another version."""
    stage.write("one.txt", A)
    stage.round()
    stage.settings = stage.settings.model_copy(update={"ttl": 1000})
    stage.open()
    stage.step()
    assert {"published": 1, "queued": 1} == stage.queue.counts()


@pytest.mark.parametrize("kind", ["folder", "list"])
def test_what_stays_as_it_is_does_not_expire(tmp_path, loaded, site, kind) -> None:
    """A document with a ttl is published again while it is seen, though nothing changed; and is one version all the same."""
    stage = Stage(tmp_path, loaded, kind, source=f"{site.url}/list" if kind == "list" else None, ttl=1000)
    site.pages = {"/list": f"{site.url}/a".encode(), "/a": TEXT[:1500].encode()}
    stage.write("a.txt", TEXT[:1500])
    assert [1, 0, 0] == [stage.round(), stage.round(), stage.round(400)]
    (first,) = (listed.manifest for listed in list_published(stage.store))
    for _ in range(3):
        assert [1, 0] == [stage.round(500), stage.round()]
    (last,) = (listed.manifest for listed in list_published(stage.store))
    assert (first.address, True) == (last.address, last.expires >= first.expires + 1000)
    (status,) = stage.book.status()
    assert (1, 0, 0) == (status["current"], status["old"], status["failing"])
    site.pages["/a"] = TEXT[:1400].encode()
    stage.write("a.txt", TEXT[:1400])
    assert 1 == stage.round()
    stage.step(GRACE)
    assert {stage.address(TEXT[:1400])} == stage.published()


def test_a_job_that_is_dead_is_told_and_not_for_ever(stage) -> None:
    """It can be tried again by hand; once it is forgotten the document is looked at anew. One that was cancelled is not."""
    stage.write("a.txt", TEXT[:1500])
    stage.step()
    stage.queue.fail(stage.queue.claim(), "no such model", for_good=True)
    assert 0 == stage.round()
    (status,) = stage.book.status()
    assert (1, 1, 0) == (status["failing"], status["submitted"], status["current"])
    assert "no such model" in status["failures"][0]["reason"]
    (dead,) = stage.queue.list(state=JobState.DEAD)
    stage.queue.retry(dead.id)
    stage.queue.fail(stage.queue.claim(), "no such model", for_good=True)
    assert 1 == stage.queue.forget(stage.now + 1)
    stage.watcher.settle()
    assert 1 == stage.round()
    (status,) = stage.book.status()
    assert (0, 0, 1) == (status["failing"], status["submitted"], status["current"])
    stage.write("a.txt", TEXT[:1400])
    stage.step()
    (job,) = stage.queue.list(state=JobState.QUEUED)
    stage.queue.cancel(job.id)
    assert [0, 0] == [stage.round(), stage.round()]
    assert {stage.address(TEXT[:1500])} == stage.published()


def test_a_ttl_outlives_looks() -> None:
    """Or documents would expire between two of them."""
    with pytest.raises(ValueError, match="ttl"):
        WatchSettings(name="a", kind="folder", source="/a", every=10, ttl=29)
    assert 30 == WatchSettings(name="a", kind="folder", source="/a", every=10, ttl=30).ttl


def test_a_full_queue_is_no_loss(stage) -> None:
    """What found no room is submitted at the next look."""
    for number in range(3):
        stage.write(f"{number}.txt", TEXT[number * 300 : number * 300 + 500])
    stage.queue._most = 2
    stage.step()
    assert (2, True) == (stage.queue.counts()["queued"], "holds 2 jobs" in stage.book.status()[0]["reason"])
    assert 2 == stage.work()
    assert 1 == stage.round()
    assert 3 == len(stage.published())


# -- lists and sitemaps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("validators", ["etag", "none"])
def test_a_list_of_urls(tmp_path, loaded, site, validators) -> None:
    """Entity tags spare the download, and the digest the job, where a server has none."""
    site.validators = validators
    site.pages = {"/a": A.encode(), "/b": B.encode()}
    urls = tmp_path / "urls"
    urls.write_text(f"# ours\n{site.url}/a  the first\n\n{site.url}/b\n{site.url}/missing\n")
    stage = Stage(tmp_path, loaded, "list", str(urls))
    assert [2, 0] == [stage.round(), stage.round()]
    second = 304 if validators == "etag" else 200
    assert ["/a 200", "/b 200", f"/a {second}", f"/b {second}"] == site.asked
    site.pages["/a"] = C.encode()
    assert 1 == stage.round()
    site.down = True
    stage.step(GRACE + 30)
    assert {stage.address(text) for text in (B, C)} == stage.published()
    stage.step(GRACE + 30)
    assert {stage.address(text) for text in (B, C)} == stage.published()
    site.down = False
    del site.pages["/b"]
    stage.step()
    stage.step(GRACE + 30)
    assert {stage.address(C)} == stage.published()


def test_a_document_that_nobody_thought_of_stops_no_other(stage, monkeypatch) -> None:
    """Whatever looking at one raises, those behind it are looked at, and the watch says which failed."""
    for name in ("a.txt", "b.txt"):
        stage.write(name, f"{name} {A}")
    look = WatchSource.look

    def odd(self, document, known):
        if document.endswith("a.txt"):
            raise RecursionError("too deep")
        return look(self, document, known)

    assert 2 == stage.round()
    both = stage.published()
    stage.write("b.txt", C)
    monkeypatch.setattr(WatchSource, "look", odd)
    assert 1 == stage.round()
    assert {*both, stage.address(C)} == stage.published()
    assert 1 == stage.book.status()[0]["failing"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_sitemap(tmp_path, loaded, site, packed) -> None:
    """An index of two, packed or not; pages of another host are none of its business."""
    pages = {"/a": A.encode(), "/b": B.encode()}
    maps = {
        "/index.xml": f"<sitemapindex><sitemap><loc>{site.url}/one.xml</loc></sitemap>"
        f"<sitemap><loc> {site.url}/two.xml </loc></sitemap></sitemapindex>",
        "/one.xml": URLSET.format(f"<url><loc>{site.url}/a</loc><lastmod>2026-01-01</lastmod></url>"),
        "/two.xml": URLSET.format(
            f"<url><loc>{site.url}/b</loc></url><url><loc>http://127.0.0.1:{site.port + 1}/c</loc></url>"
            "<url><loc>file:///etc/passwd</loc></url><url><loc>http://[/</loc></url><url><loc/></url>"
        ),
    }
    packer = gzip.compress if packed else bytes
    site.pages = pages | {name: packer(text.encode()) for name, text in maps.items()}
    stage = Stage(tmp_path, loaded, "sitemap", f"{site.url}/index.xml")
    assert [2, 0] == [stage.round(), stage.round()]
    assert {stage.address(A), stage.address(B)} == stage.published()


HOSTILE = {
    "entities": '<!DOCTYPE a [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><urlset><url><loc>&b;</loc></url></urlset>',
    "external": '<!DOCTYPE a [<!ENTITY a SYSTEM "file:///etc/passwd">]><urlset><url><loc>&a;</loc></url></urlset>',
    "type": '<!DOCTYPE a SYSTEM "http://127.0.0.1/x"><urlset/>',
    "levels": "<a>" * 1000,
    "cut": "<urlset><url><loc>http://a/b</loc>",
    "text": "no XML at all",
    "nothing": "",
    "encoding": '<?xml version="1.0" encoding="nonsense"?><urlset/>',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_sitemaps(text) -> None:
    """No entity is expanded, no file and no address is looked at: one error."""
    with pytest.raises(UsageError, match="not a sitemap"):
        list(read_sitemap(text.encode(), "sitemap.xml"))


def test_a_sitemap_that_unpacks_to_more_than_it_may() -> None:
    """Its length is bounded while it is unpacked."""
    with pytest.raises(UsageError, match="larger"):
        list(read_sitemap(gzip.compress(bytes(MAX_LISTING_BYTES + 1)), "sitemap.xml"))
    with pytest.raises(UsageError, match="damaged"):
        list(read_sitemap(b"\x1f\x8bjunk", "sitemap.xml"))


@pytest.mark.parametrize("text", ["<urlset>{}</urlset>", "<urlset><url>{}</url></urlset>"])
def test_a_sitemap_of_countless_elements(text, monkeypatch) -> None:
    """Those that are nothing are not kept, and are passed over up to a bound."""
    data = text.format("<a/>" * 200_000).encode()
    list(read_sitemap(b"<urlset/>", "sitemap.xml"))  # loads what it needs
    tracemalloc.start()
    try:
        assert [] == list(read_sitemap(data, "sitemap.xml"))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 << 20
    monkeypatch.setattr(watch_sources, "MAX_ELEMENTS", 1000)
    with pytest.raises(UsageError, match="elements"):
        list(read_sitemap(data, "sitemap.xml"))


def test_a_list_that_names_more_than_it_may(tmp_path, monkeypatch) -> None:
    """Documents, or bytes: nothing of it is left out without a word."""
    monkeypatch.setattr(watch_sources, "MAX_DOCUMENTS", 10)
    (tmp_path / "urls").write_text("".join(f"http://a.example/{number}\n" for number in range(11)))
    source = WatchSource(WatchSettings(name="x", kind="list", source=str(tmp_path / "urls")), here, 1000)
    with pytest.raises(UsageError, match="more than"):
        source.documents()
    monkeypatch.setattr(watch_sources, "MAX_LISTING_BYTES", 100)
    with pytest.raises(UsageError, match="larger"):
        source.documents()


@pytest.mark.parametrize("kind", ["list", "sitemap"])
def test_internal_addresses_are_not_asked(tmp_path, site, kind) -> None:
    """Neither for a listing nor for a page, unless the settings allow it."""
    site.pages = {"/x": f"{site.url}/a\n".encode(), "/a": A.encode()}
    source = WatchSource(WatchSettings(name="x", kind=kind, source=f"{site.url}/x"), resolve_public, 1000)
    with pytest.raises(UsageError, match="internal"):
        source.documents()
    with pytest.raises(UsageError, match="internal"):
        source.look(f"{site.url}/a", Validators())
    assert [] == site.asked


def test_validators_are_bounded_and_only_sent_where_they_were_told(site) -> None:
    """A tag too long, or with anything but plain characters, is none."""
    assert Validators() == Validators.of({"ETag": "x" * 1025, "Last-Modified": "a\x01b"})
    told = Validators('"a"', "Mon, 01 Jan 2026 00:00:00 GMT")
    assert ({"If-None-Match": '"a"'}, {}) == (told.conditions(), Validators().conditions())
    site.pages = {"/a": A.encode()}
    first = fetch_bytes(f"{site.url}/a", resolve=here)
    again = fetch_bytes(f"{site.url}/a", resolve=here, known=first.validators)
    assert (A.encode(), False, True) == (first.data, first.unchanged, again.unchanged)


@pytest.mark.parametrize("text", ["", "# nothing\n", "ftp://a/b\n", "/etc/passwd\n", "http://a/" + "x" * 3000])
def test_lists_that_are_none(tmp_path, text) -> None:
    """Empty ones, and those that name anything but web pages."""
    (tmp_path / "urls").write_text(text)
    source = WatchSource(WatchSettings(name="x", kind="list", source=str(tmp_path / "urls")), here, 1000)
    with pytest.raises(KvcdnError):
        source.documents()
    with pytest.raises(NotFoundError):
        WatchSource(WatchSettings(name="x", kind="folder", source=str(tmp_path / "no")), here, 1000).documents()


# -- settings and the service ------------------------------------------------------------------------------------------


def test_settings(tmp_path) -> None:
    """From a file, with times as people write them; what cannot be is told by name."""
    path = tmp_path / "service.toml"
    path.write_text(
        'models = ["m"]\n[[watch]]\nname = "docs"\nkind = "folder"\nsource = "/srv"\nevery = "15m"\ngrace = "7d"\n'
        '[[watch]]\nname = "site"\nkind = "sitemap"\nsource = "https://example.org/sitemap.xml"\nwindow = "22:00-06:00"\n'
    )
    first, second = load_settings(path, {}).watch
    assert (900.0, 604800.0, "22:00-06:00") == (first.every, first.grace, second.window)
    again = ServiceSettings.model_validate_json(load_settings(path, {}).model_dump_json(exclude={"token"}))
    assert (first, second) == again.watch
    good = {"name": "a", "kind": "folder", "source": "/srv"}
    for wrong in (
        [{**good, "every": "now"}], [{**good, "every": 0}], [{**good, "kind": "feed"}], [{**good, "name": "a b"}], [good, good],
        [{**good, "model": "other"}], [{**good, "namespace": "other"}], [{**good, "window": "x"}], [{**good, "more": 1}],
    ):  # fmt: skip
        with pytest.raises(UsageError, match="watch"):
            load_settings(None, {"models": ("m",), "watch": wrong})


@pytest.mark.timeout(3 * START_SECONDS)
def test_a_service_that_is_killed_publishes_each_change_once(tmp_path, tiny_llama, monkeypatch) -> None:
    """The real service: a document and a change, with kill -9 between; the old version goes, and /v1/watches tells."""
    folder, store = tmp_path / "documents", FolderStore(tmp_path / "origin")
    folder.mkdir()
    watch = {"name": "docs", "kind": "folder", "source": str(folder), "every": "1s", "grace": "1s"}
    monkeypatch.setenv("KVCDN_SERVICE_WATCH", json.dumps([watch]))

    def wait_for_one_but(before: set[str]) -> set[str]:
        """Until one document is published, not one of those before, and no version waits for anything."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = {str(listed.manifest.address) for listed in list_published(store) if listed.manifest}
            watches = urllib3.request("GET", f"{url}/v1/watches").json()["watches"]
            waiting = [watches[0][state] for state in ("submitted", "old", "failing", "current")] if watches else []
            if len(found) == 1 and not found & before and waiting == [0, 0, 0, 1]:
                return found
            time.sleep(0.2)
        raise AssertionError((found, watches))

    (folder / "one.txt").write_text(A)
    with running_origin(tmp_path, tiny_llama) as (url, process):
        first = wait_for_one_but(set())
        process.kill()
    (folder / "one.txt").write_text(B)
    with running_origin(tmp_path, tiny_llama) as (url, process):
        second = wait_for_one_but(first)
        queue = JobQueue(tmp_path / "queue")
        jobs = queue.list()
        queue.close()
    assert [JobState.PUBLISHED] * 2 == [job.state for job in jobs]
    assert [first, second] == [{job.result["address"]} for job in jobs]


def test_watches_are_added_and_removed_by_command(tmp_path, tiny_llama, site) -> None:
    """They outlive the service that took them, submit what they see, and name nothing on the service's own machine."""
    site.pages = {"/list": f"{site.url}/a\n".encode(), "/a": A.encode()}
    with running_origin(tmp_path, tiny_llama, workers="0", allow_internal_urls="true") as (url, _):
        words = ("watches", "add", "docs", f"{site.url}/list", "--kind", "list", "--every", "1s", "--service", url, "--json")
        added = kvcdn(*words)
        assert (0, "docs", 1.0) == (added.code, added.json["name"], added.json["every"])
        assert (2, True) == ((again := kvcdn(*words)).code, "already" in again.json["error"])
        for kind, source in (("folder", "/etc"), ("list", "/etc/passwd"), ("sitemap", "file:///etc/passwd"), ("feed", url)):
            refused = kvcdn("watches", "add", "other", source, "--kind", kind, "--service", url)
            assert (2, True) == (refused.code, "watch" in refused.complaint)
        assert 2 == kvcdn("watches", "add", "other", f"{site.url}/list", "-m", "unknown", "--service", url).code
        assert 2 == kvcdn("watches", "add", "a b", f"{site.url}/list", "--service", url).code
    queue = JobQueue(tmp_path / "queue")
    with running_origin(tmp_path, tiny_llama, workers="0", allow_internal_urls="true") as (url, _):

        def submitted() -> list[dict]:
            watches = kvcdn("watches", "ls", "--service", url, "--json").json["watches"]
            return [watch for watch in watches if watch["submitted"] and watch["added"]["source"] == f"{site.url}/list"]

        until(submitted)
        assert [f"{site.url}/a"] == [job.request.name for job in queue.list()]
        shown = kvcdn("watches", "ls", "--service", url).out
        assert "docs" in shown
        assert "added" in shown
        assert 0 == kvcdn("watches", "rm", "docs", "--service", url).code
        assert 3 == kvcdn("watches", "rm", "docs", "--service", url).code
        assert [] == kvcdn("watches", "ls", "--service", url, "--json").json["watches"]
    queue.close()
