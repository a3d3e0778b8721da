"""The doctor: what is fine is ok, and each thing that is not is named with what to do; the probe never stays."""

from __future__ import annotations

import re
import threading
import time

import pytest

from kvcdn.errors import UnavailableError, UsageError
from kvcdn.origin.upkeep.doctor import PROBE_PREFIX, RACE_SUFFIX, RACERS, Role, Status, examine
from kvcdn.origin.upkeep.policy import lifecycle, policy
from kvcdn.store import BlobInfo
from kvcdn.stores.http import HttpStore
from kvcdn.stores.memory import MemoryStore
from kvcdn.stores.s3 import S3Store
from support.lax_s3 import lax_s3
from support.library import Library, Watched, keys
from support.life import KINDS, new_store
from support.waiting import WAIT_SECONDS
from support.web import running_web

EVERYTHING = [
    "reach",
    "list",
    "write",
    "create only where nothing is",
    "create only once",
    "read",
    "read a range",
    "list what was written",
    "clock",
    "delete",
]


def by_status(trials, status):
    return [trial.name for trial in trials if trial.status is status]


def use(monkeypatch, keys):
    for name, value in keys.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_origin_is_ok(kind, tmp_path, request):
    """Every trial, at every kind of store, and nothing stays."""
    store = new_store(kind, tmp_path, request)
    assert EVERYTHING == by_status(examine(store), Status.OK)
    assert [] == keys(store)
    Library(store).publish((1,))
    assert ["reach", "list", "read"] == by_status(examine(store, Role.EDGE), Status.OK)


def test_who_may_only_read(s3_server, monkeypatch):
    """An edge needs no more; as a publisher or operator the same identity is told what it lacks."""
    use(monkeypatch, s3_server.writer)
    Library(S3Store(s3_server.bucket, "readonly", endpoint=s3_server.endpoint)).publish((1,))
    use(monkeypatch, s3_server.reader)
    store = S3Store(s3_server.bucket, "readonly", endpoint=s3_server.endpoint)
    assert ["reach", "list", "read"] == by_status(examine(store, Role.EDGE), Status.OK)
    trials = examine(store)
    assert (["reach", "list"], ["write", "delete"]) == (by_status(trials, Status.OK), by_status(trials, Status.FAILED))
    assert all("403" in trial.detail and trial.hint for trial in trials if trial.status is Status.FAILED)
    trials = examine(store, Role.PUBLISHER)
    assert ["write"] == by_status(trials, Status.FAILED)
    assert [] == keys(store, "doctor")


@pytest.mark.parametrize("wrong", ["secret key", "access key", "bucket", "port"])
def test_what_cannot_be_reached(s3_server, monkeypatch, wrong):
    """One failed trial with the reason, and nothing tried after it."""
    use(monkeypatch, s3_server.writer)
    if wrong.endswith("key"):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY" if wrong == "secret key" else "AWS_ACCESS_KEY_ID", "WRONG" * 4)
    bucket = "no-such-bucket" if wrong == "bucket" else s3_server.bucket
    endpoint = "http://127.0.0.1:9" if wrong == "port" else s3_server.endpoint
    trials = examine(S3Store(bucket, "x", endpoint=endpoint))
    assert [("reach", Status.FAILED)] == [(trial.name, trial.status) for trial in trials]
    assert trials[0].hint
    if wrong == "bucket":
        assert "no such bucket" in trials[0].detail


@pytest.fixture
def any_keys(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")


def test_a_server_that_overwrites(any_keys):
    """Conditional writes that are ignored are found out, though the store itself looks before it writes."""
    with lax_s3() as endpoint:
        store = S3Store("bucket", "x", endpoint=endpoint)
        trials = examine(store)
        assert ["create only where nothing is"] == by_status(trials, Status.FAILED)
        (failed,) = [trial for trial in trials if trial.status is Status.FAILED]
        assert "If-None-Match" in failed.detail
        assert [] == keys(store)


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_clocks_that_differ(any_keys, skew):
    """By how much, and what to do."""
    with lax_s3(skew_seconds=skew) as endpoint:
        trials = examine(S3Store("bucket", "x", endpoint=endpoint))
    clock = next(trial for trial in trials if trial.name == "clock")
    assert Status.FAILED is clock.status
    assert re.search(r"by 3,(59|60)\d s", clock.detail)


class Odd(Watched):
    """A store with one thing wrong."""

    def __init__(self, wrong: str) -> None:
        super().__init__(MemoryStore(), lambda *_: None)
        self.inner, self.wrong = self._store, wrong

    def read(self, key, start=0, length=None):
        if self.wrong == "read a range" and length is not None:
            return self.inner.read(key)
        data = self.inner.read(key, start, length)
        return data[::-1] if self.wrong == "read" and length is None else data

    def list(self, prefix, after=""):
        if self.wrong == "list":
            raise UnavailableError("listing is not for you", hint="ask")
        return iter(()) if self.wrong == "list what was written" else self.inner.list(prefix, after)

    def stat(self, key):
        if self.wrong == "reach":
            return BlobInfo(key, 1, time.time())
        return self.inner.stat(key)

    def delete(self, key):
        if self.wrong != "delete":
            self.inner.delete(key)


@pytest.mark.parametrize("wrong", ["reach", "list", "read", "read a range", "list what was written", "delete"])
def test_each_fault_is_named(wrong):
    """That one trial fails, with a hint."""
    trials = examine(Odd(wrong))
    failed = {trial.name: trial.hint for trial in trials if trial.status is Status.FAILED}
    assert failed[wrong]
    # A store that reads wrongly cannot show that it kept what was there, nor can one that does not list show what it lists.
    assert set(failed) - {"create only where nothing is", "list what was written"} == {wrong} - {"list what was written"}


def test_a_publisher_that_may_not_delete_is_as_it_should_be():
    """The probe stays, and the report says which object and who removes it."""
    odd = Odd("delete")
    trials = examine(odd, Role.PUBLISHER)
    assert [] == by_status(trials, Status.FAILED)
    probe, race = keys(odd.inner, PROBE_PREFIX)
    assert (Status.SKIPPED, True) == (trials[-1].status, probe in trials[-1].detail)
    assert probe + RACE_SUFFIX == race


class LooksAndWrites(MemoryStore):
    """A server whose condition holds only where nobody writes at the same time, as that of
    https://github.com/seaweedfs/seaweedfs/issues/8800."""

    def __init__(self) -> None:
        super().__init__()
        self._all_have_looked = threading.Barrier(RACERS)

    def create_unseen(self, key, pieces):
        if self.stat(key) is not None:
            return False
        if key.endswith(RACE_SUFFIX):
            self._all_have_looked.wait(WAIT_SECONDS)
        self.create(key, pieces)
        return True


def test_a_server_whose_condition_is_no_lock():
    """It refuses a second writer that comes later, and tells all who come at once that they are first."""
    store = LooksAndWrites()
    trials = examine(store)
    assert ["create only once"] == by_status(trials, Status.FAILED)
    assert [] == keys(store)


def test_an_interrupted_examination_removes_its_probe():
    """Whatever ends it."""
    store = MemoryStore()

    def listen(operation, key):
        if operation == "read":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(Watched(store, listen))
    assert [] == keys(store)


def test_an_edge_as_origin():
    """HTTP cannot be listed: that is skipped, and writing is refused with the way out."""
    with running_web(MemoryStore()) as web:
        trials = examine(HttpStore(web.url), Role.EDGE)
        assert (["reach"], []) == (by_status(trials, Status.OK), by_status(trials, Status.FAILED))
        trials = examine(HttpStore(web.url), Role.OPERATOR)
        assert ["write", "delete"] == by_status(trials, Status.FAILED)


def test_something_else_than_ours_is_noticed():
    """An edge's origin that holds other bytes under our names."""
    store = MemoryStore()
    store.create("v1/x/blocks/aa/bb", [b"<html>"])
    assert ["read"] == by_status(examine(store, Role.EDGE), Status.FAILED)


# -- policies ----------------------------------------------------------------------------------------------------------


def allowed(document, action, resource):
    """Whether an IAM policy allows the action there: some statement does, and none denies it."""
    from fnmatch import fnmatchcase

    effects = set()
    for statement in document["Statement"]:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        if action in actions and fnmatchcase(resource, statement["Resource"]):
            effects.add(statement["Effect"])
    return effects == {"Allow"}


BLOCK = "arn:aws:s3:::kvcdn/production/v1/00/blocks/aa/bb"
ENTRY = "arn:aws:s3:::kvcdn/production/v1/journal/7"
LEASE = "arn:aws:s3:::kvcdn/production/v1/00/leases/cc"
ELSEWHERE = "arn:aws:s3:::kvcdn/other/v1/00/blocks/aa/bb"

RIGHTS = {
    Role.EDGE: {"s3:GetObject": (True, True), "s3:PutObject": (False, False), "s3:DeleteObject": (False, False)},
    Role.PUBLISHER: {"s3:GetObject": (True, True), "s3:PutObject": (True, True), "s3:DeleteObject": (False, True)},
    Role.OPERATOR: {"s3:GetObject": (True, True), "s3:PutObject": (True, True), "s3:DeleteObject": (True, True)},
}


@pytest.mark.parametrize("role", list(Role))
def test_a_policy_allows_no_more_than_is_needed(role):
    """Of blocks and of leases, under the prefix only; everyone may list."""
    document = policy(role, "s3://kvcdn/production")
    for action, (block, lease) in RIGHTS[role].items():
        assert (block, lease, False) == tuple(allowed(document, action, place) for place in (BLOCK, LEASE, ELSEWHERE))
    assert allowed(document, "s3:ListBucket", "arn:aws:s3:::kvcdn")
    assert not allowed(document, "s3:DeleteObject", ENTRY)
    assert allowed(document, "s3:PutObject", ENTRY) is (role is not Role.EDGE)


def test_policies_are_for_s3():
    """With and without a prefix; for anything else there is none."""
    assert allowed(policy(Role.EDGE, "s3://kvcdn"), "s3:GetObject", "arn:aws:s3:::kvcdn/v1/x")
    assert "production/v1/" == lifecycle("s3://kvcdn/production")["Rules"][0]["Filter"]["Prefix"]
    assert "v1/" == lifecycle("s3://kvcdn/")["Rules"][0]["Filter"]["Prefix"]
    for origin in ("/folder", "https://host", "s3://"):
        with pytest.raises(UsageError, match="for S3"):
            policy(Role.EDGE, origin)
