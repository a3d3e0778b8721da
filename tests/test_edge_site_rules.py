"""A site's rules without a network: who is asked for what, who keeps it, who is too busy, and what stays for a moment."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import pytest

from kvcdn.digest import Digest, ModelTag
from kvcdn.edge.disk.staging import Spool
from kvcdn.edge.fills.fill import Fill
from kvcdn.edge.fills.guests import GUEST_SECONDS, Guests
from kvcdn.edge.fills.load import FEW_BODIES, TOLD_SECONDS, SiteLoad
from kvcdn.edge.fills.peers import Peers
from kvcdn.edge.http.outcome import Reason
from kvcdn.edge.http.target import Kind, ObjectName
from kvcdn.edge.settings import load_settings
from kvcdn.edge.tenants.guard import Guard
from kvcdn.errors import UsageError
from kvcdn.rendezvous import Contender

URLS = [f"https://edge-{number}.example.org:8400" for number in range(5)]

KEYS = [f"v1/{number:032x}/manifests/{number:064x}" for number in range(200)]


def _first(urls: list[str], key: str) -> str:
    return max(urls, key=lambda url: Contender(url).weight(key))


def test_one_edge_asks_no_peer_and_two_keep() -> None:
    """For every key; and those who keep are those who come first."""
    site = {url: Peers(URLS, url, lambda: 0) for url in URLS}
    for key in KEYS:
        order = sorted(URLS, key=lambda url: Contender(url).weight(key), reverse=True)
        assert [order[:place][:2] for place in range(5)] == [[origin.url for origin in site[url].before(key)] for url in order]
        assert [True, True, False, False, False] == [site[url].keeps(key) for url in order]


def test_every_edge_comes_first_for_its_share() -> None:
    """Of 200 keys each of five edges is the first for 20 or more."""
    first = [_first(URLS, key) for key in KEYS]
    assert min(first.count(url) for url in URLS) >= 20


def test_an_edge_more_takes_only_its_own_keys() -> None:
    """What goes elsewhere when a sixth edge comes goes to that one."""
    sixth = "https://edge-5.example.org:8400"
    moved = {after for key in KEYS if (after := _first([*URLS, sixth], key)) != _first(URLS, key)}
    assert {sixth} == moved


def test_an_order_is_asked_in_one_direction_only() -> None:
    """Of two edges exactly one refuses the other, and each itself: no circle of any length is possible."""
    site = {url: Peers(URLS, url, lambda: 0) for url in URLS}
    for key in KEYS[:20]:
        for one in URLS:
            refusal = site[one].refusal(one, "0", key)
            assert refusal is not None
            assert Reason.LOOP is refusal.reason
            for other in URLS:
                refused = [site[one].refusal(other, "0", key), site[other].refusal(one, "0", key)]
                assert one == other or 1 == sum(found is not None for found in refused)


def test_a_stranger_tells_no_load() -> None:
    """Only those on the list count for the mean; what is no number counts for nothing."""
    peers = Peers(URLS, URLS[0], lambda: FEW_BODIES + 1)
    key = next(key for key in KEYS if Contender(URLS[0]).weight(key) > Contender(URLS[1]).weight(key))
    stranger = next(url for url in map("http://stranger-{}".format, range(99)) if peers.refusal(url, "0", key) is None)
    assert peers.refusal(stranger, "0", key) is None
    for load in (None, "", "many", "-1", "٣"):
        assert peers.refusal(URLS[1], load, key) is None
    refusal = peers.refusal(URLS[1], "0", key)
    assert refusal is not None
    assert Reason.BUSY is refusal.reason


def test_a_load_is_too_much_beside_the_others() -> None:
    """Never up to a few bodies, never where nobody has told of himself lately, and otherwise beyond 1.5 times the mean."""
    now = [0.0]
    site = SiteLoad(lambda: now[0])
    assert not site.too_much(1000)
    site.note("a", 0)
    assert not site.too_much(FEW_BODIES)
    assert site.too_much(FEW_BODIES + 1)
    site.note("a", 40)
    site.note("b", 40)
    assert not site.too_much(60 - 1)
    assert site.too_much(100)
    now[0] = TOLD_SECONDS + 1
    assert not site.too_much(1000)


def _filled(number: int, size: int) -> Fill:
    fill = Fill(ObjectName(Kind.MANIFEST, ModelTag(bytes(16)), Digest(number.to_bytes(32, "big"))), 60)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(size))
        file.flush()
        spool = Spool(os.dup(file.fileno()))
    fill.open(spool, size, "tag", time.monotonic() + 60, stored=False)
    fill.advance(size)
    fill.finish()
    return fill


def test_guests_have_a_share_of_the_capacity() -> None:
    """The least recently used leaves for a new one; what is on its way counts; more than the share is not taken."""

    async def live() -> None:
        guests = Guests(3 * 4096)
        fills = [_filled(number, 4096) for number in range(3)]
        for fill in fills:
            assert guests.admit(fill.size)
            guests.hold(fill)
        assert guests.get(fills[0].name.key) is not None
        assert guests.admit(1)
        assert guests.get(fills[1].name.key) is None
        assert guests.get(fills[0].name.key) is not None
        assert guests.admit(2 * 4096)
        assert not guests.admit(1)
        guests.release(2 * 4096)
        assert guests.admit(4096)
        assert not guests.admit(4 * 4096)

    asyncio.run(live())


def test_a_guest_leaves_when_nobody_asks() -> None:
    """After its time, though nobody touches anything; a use begins its time anew; its file is closed then."""

    async def live() -> None:
        now = [0.0]
        guests = Guests(1 << 20, lambda: now[0])
        fill = _filled(1, 100)
        assert fill.spool is not None
        closing = fill.spool.closing
        key = fill.name.key
        assert guests.admit(fill.size)
        guests.hold(fill)
        now[0] = GUEST_SECONDS - 1
        assert guests.get(key) is not None
        now[0] = GUEST_SECONDS + 1
        guests._expire()
        found = guests.get(key)
        assert found is not None
        assert 21 == found[2]
        del fill, found
        now[0] = 3 * GUEST_SECONDS
        guests._expire()
        assert guests.get(key) is None
        assert not closing.alive

    asyncio.run(live())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"peers": URLS}, "go together"),
        ({"self": URLS[0]}, "go together"),
        ({"peers": URLS[:2], "self": URLS[3]}, "none of peers"),
        ({"peers": [URLS[0], URLS[0] + "/"], "self": URLS[0]}, "twice"),
        ({"peers": ["ftp://x", "s3://y"], "self": "ftp://x"}, "not the URL of an edge"),
    ],
)
def test_a_site_that_cannot_be_is_refused(given: dict[str, object], words: str) -> None:
    """By the settings, in words."""
    with pytest.raises(UsageError, match=words):
        load_settings(None, {"origin": "memory:", **given})


def test_peers_need_a_token_where_readers_do(tmp_path: Path) -> None:
    """And it does not travel in plain HTTP beyond this machine, unless the operator says that the network is his."""
    (tmp_path / "token").write_text("0123456789abcdef0123")
    plain = ["http://10.0.0.1:8400", "http://10.0.0.2:8400"]
    with pytest.raises(UsageError, match="peers have none to show"):
        Guard.of(load_settings(None, {"origin": "memory:", "token": "x" * 16, "peers": URLS, "self": URLS[0]}))
    given = {"origin": "memory:", "token": "x" * 16, "peers": plain, "self": plain[0], "peer_token_file": tmp_path / "token"}
    with pytest.raises(UsageError, match="in plain HTTP"):
        Guard.of(load_settings(None, given))
    Guard.of(load_settings(None, {**given, "insecure_http": True}))
    Guard.of(load_settings(None, {**given, "peers": URLS, "self": URLS[0]}))
