"""The journal: what an entry says, and that a changed, removed, replaced or cut one shows."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.digest import Digest, ModelTag, hash_bytes
from kvcdn.envelope import JOURNAL_MAGIC, seal_envelope
from kvcdn.errors import CorruptError, UnavailableError, UsageError
from kvcdn.journal import (
    MAX_ADDRESSES,
    MAX_ENTRY_BYTES,
    NOTHING,
    START,
    Entry,
    Head,
    Published,
    Removed,
    Retired,
    Revoked,
    Rotated,
    chain_digest,
    journal_key,
    open_entry,
)
from kvcdn.keyring import keep_journal_head, load_journal_head
from kvcdn.numbered import find_last
from kvcdn.origin.upkeep.journal import Journal, find_head
from kvcdn.origin.upkeep.journal_check import Fault, check_journal
from kvcdn.signing import PublicKey, SigningKey, TrustList
from kvcdn.stores.folder import FolderStore
from kvcdn.stores.memory import MemoryStore
from support.life import KINDS, new_store

KEY, OTHER = SigningKey.generate(), SigningKey.generate()

TRUST = TrustList.of(KEY.public, OTHER.public)

ADDRESS, TAG = Digest(bytes(range(32))), ModelTag(bytes(range(16)))

DEEDS = (
    Published(TAG, ADDRESS, Digest(bytes(32)), None),
    Published(TAG, ADDRESS, Digest(bytes(32)), 1_900_000_000, "copy"),
    Removed(TAG, (ADDRESS,)),
    Removed(TAG, tuple(Digest(number.to_bytes(32, "big")) for number in range(MAX_ADDRESSES)), "repair"),
    Retired(TAG),
    Revoked(7, ADDRESS),
    Rotated(ADDRESS, OTHER.public),
)


def entry(number: int = 3, **fields) -> Entry:
    return replace(Entry(number, ADDRESS, 1_800_000_000, DEEDS[0]), **fields)


def written(store, count: int) -> Journal:
    """A journal of `count` entries by two signers."""
    journals = [Journal(store, KEY), Journal(store, OTHER)]
    for number in range(count):
        journals[number % 2].append(DEEDS[number % len(DEEDS)])
    return journals[0]


def overwrite(store: MemoryStore, number: int, data: bytes) -> None:
    store.delete(journal_key(number))
    store.create(journal_key(number), [data])


def faults(store, trust=TRUST, seen=None) -> list[tuple[int, Fault]]:
    return [(finding.number, finding.fault) for finding in check_journal(store, trust, seen=seen).findings]


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.action)
def test_an_entry_reads_as_it_was_sealed(deed) -> None:
    """Whatever was done, for a tenant or not; the longest has room."""
    for tenant in ("", "acme"):
        made = entry(deed=deed, tenant=tenant)
        data = made.seal(KEY)
        assert replace(made, signer=KEY.public) == open_entry(data, 3, "entry")
        assert len(data) <= MAX_ENTRY_BYTES


def header(**changes):
    deed = {"address": str(ADDRESS), "etag": str(ADDRESS), "expires": None, "model": str(TAG)}
    fields = {"type": "journal", "v": 1, "number": 3, "previous": str(ADDRESS), "time": 1, "tenant": ""}
    return {**fields, "action": "publish", "deed": deed, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "revocations"},
        {"v": 2},
        {"number": 4},
        {"number": 0},
        {"previous": str(TAG)},
        {"time": -1},
        {"tenant": "x" * 65},
        {"action": "retire"},
        {"action": "forgive"},
        {"action": "remove", "deed": {"addresses": [], "model": str(TAG)}},
        {"action": "remove", "deed": {"addresses": [str(ADDRESS)] * 2, "model": str(TAG)}},
        {"action": "repair", "deed": {"addresses": ["1" * 64, "0" * 64], "model": str(TAG)}},
        {"action": "revoke", "deed": {"etag": str(ADDRESS), "version": 0}},
        {"deed": []},
        {"more": 1},
    ],
    ids=str,
)
def test_other_entries_are_corrupt(changes) -> None:
    """A well signed object that is not quite an entry, or not this one, is none."""
    open_entry(seal_envelope(JOURNAL_MAGIC, header(), KEY), 3, "entry")
    with pytest.raises(CorruptError):
        open_entry(seal_envelope(JOURNAL_MAGIC, header(**changes), KEY), 3, "entry")


@given(st.integers(0, 2000), st.integers(1, 255))
def test_any_changed_byte_is_found(place, change) -> None:
    """The signature covers all of it, and nothing follows."""
    data = bytearray(entry().seal(KEY))
    data[place % len(data)] ^= change
    with pytest.raises(CorruptError):
        open_entry(bytes(data), 3, "entry")
    with pytest.raises(CorruptError):
        open_entry(entry().seal(KEY) + b"x", 3, "entry")


def test_an_entry_made_by_the_letter_of_the_format() -> None:
    """Put together from FORMAT.md alone: JSON, a length, a signature; the next entry names its BLAKE3."""
    secret = Ed25519PrivateKey.generate()
    raw = secret.public_key().public_bytes_raw()
    before = "00" * 32
    store = MemoryStore()
    for number in (1, 2):
        fields = {
            "type": "journal", "v": 1, "number": number, "previous": before, "time": 1_800_000_000, "tenant": "acme",
            "action": "retire", "deed": {"model": "0f" * 16}, "publisher": raw.hex(),
        }  # fmt: skip
        encoded = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        head = b"KVCDNJ1\n" + len(encoded).to_bytes(4, "little") + encoded
        data = head + secret.sign(b"kvcdn v1 signature\x00" + head)
        store.create(f"v1/journal/{number}", [data])
        before = blake3(data).hexdigest()
    found = []
    checked = check_journal(store, TrustList.of(PublicKey(raw)), follow=found.append)
    assert ([], before, 2) == (checked.findings, str(checked.head.digest), len(found))
    assert ("acme", Retired(ModelTag(b"\x0f" * 16))) == (found[0].tenant, found[0].deed)


def test_an_entry_names_at_most_500_documents() -> None:
    """More take several entries."""
    many = [Digest(number.to_bytes(32, "big")) for number in range(MAX_ADDRESSES + 1)]
    for addresses in ((), tuple(many)):
        with pytest.raises(UsageError):
            Removed(TAG, addresses)
    store = MemoryStore()
    Journal(store, KEY).remove(TAG, many)
    found = []
    assert 0 == check_journal(store, TRUST, follow=found.append).exit_code
    assert many == [address for each in found for address in each.deed.addresses]
    assert [MAX_ADDRESSES, 1] == [len(each.deed.addresses) for each in found]


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_the_last_number_is_found(last, known) -> None:
    """From any number that is there, in few questions, and not behind the bound."""
    asked: list[int] = []

    def ask(number: int) -> int | None:
        asked.append(number)
        return number if number <= last else None

    known = min(known, last)
    assert (last, last if last > known else None) == find_last(ask, known, 1 << 31)
    assert len(asked) <= 2 * (last - known + 1).bit_length() + 2
    assert min(last, known + 100) == find_last(ask, known, known + 100)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_journal(kind, tmp_path, request) -> None:
    """Two signers' entries, one chain, at every store."""
    store = new_store(kind, tmp_path, request)
    written(store, 12)
    seen = []
    checked = check_journal(store, TRUST, follow=seen.append)
    assert (12, [], list(range(1, 13))) == (checked.entries, checked.findings, [each.number for each in seen])
    assert {KEY.public: 6, OTHER.public: 6} == checked.signers
    assert NOTHING == seen[0].previous
    assert [chain_digest(store.read(journal_key(number))) for number in range(1, 12)] == [each.previous for each in seen[1:]]
    assert checked.head == Head(12, chain_digest(store.read(journal_key(12)))) == find_head(store, START)


def test_an_empty_journal_is_whole() -> None:
    """Nothing was done yet."""
    checked = check_journal(MemoryStore(), TRUST)
    assert (0, [], START) == (checked.entries, checked.findings, checked.head)


def test_who_changes_an_entry_is_seen() -> None:
    """Even its own signer: the entry behind it is another's."""
    store = MemoryStore()
    written(store, 6)
    third = open_entry(store.read(journal_key(3)), 3, "entry")
    overwrite(store, 3, replace(third, deed=Retired(TAG)).seal(KEY))
    assert [(4, Fault.UNCHAINED)] == faults(store)
    data = bytearray(store.read(journal_key(5)))
    data[40] ^= 1
    overwrite(store, 5, bytes(data))
    assert [(4, Fault.UNCHAINED), (5, Fault.CORRUPT), (6, Fault.UNCHAINED)] == faults(store)


def test_who_removes_an_entry_is_seen() -> None:
    """A gap shows, and so does an entry that was put in its place later."""
    store = MemoryStore()
    written(store, 6)
    taken = store.read(journal_key(2))
    store.delete(journal_key(2))
    assert [(2, Fault.MISSING)] == faults(store)
    Journal(store, KEY).append(Retired(TAG))
    assert [(2, Fault.MISSING)] == faults(store)
    overwrite(store, 2, Entry(2, chain_digest(store.read(journal_key(1))), 1_900_000_000, Retired(TAG)).seal(KEY))
    assert [(3, Fault.UNCHAINED), (3, Fault.CLOCK)] == faults(store)
    overwrite(store, 2, taken)
    assert [] == faults(store)
    # Entries that change places, and one that is there twice.
    overwrite(store, 4, store.read(journal_key(2)))
    assert [(4, Fault.CORRUPT), (5, Fault.UNCHAINED)] == faults(store)


def test_strangers_entries_are_named_and_do_no_harm() -> None:
    """Whoever can write to the origin can write entries; they are not believed, and stop nobody."""
    store = MemoryStore()
    journal = written(store, 2)
    Journal(store, SigningKey.generate()).append(Retired(TAG))
    followed = []
    journal.append(Retired(TAG))
    checked = check_journal(store, TRUST, follow=followed.append)
    assert [(3, Fault.UNTRUSTED)] == [(finding.number, finding.fault) for finding in checked.findings]
    assert [1, 2, 4] == [each.number for each in followed]


@pytest.mark.parametrize("junk", [b"", b"junk", b"KVCDNJ1\n" + b"\xff" * 100, bytes(MAX_ENTRY_BYTES + 9)], ids=len)
def test_junk_does_not_stop_the_journal(junk) -> None:
    """It is chained to, whatever it is and however long."""
    store = MemoryStore()
    journal = written(store, 2)
    store.create(journal_key(3), [junk])
    assert 4 == journal.append(Retired(TAG)).number
    assert [(3, Fault.CORRUPT)] == faults(store)


def test_junk_far_away_costs_nothing() -> None:
    """An object under the greatest number, and names that are no numbers: neither reader nor writer walks there."""
    store = MemoryStore()
    journal = written(store, 2)
    for name in ("2147483648", "2147483649", "007", "0", "x", "9" * 30):
        store.create(f"v1/journal/{name}", [b"junk"])
    assert 3 == journal.append(Retired(TAG)).number
    assert [(4, Fault.MISSING), (2147483648, Fault.CORRUPT)] == faults(store)


def test_an_end_that_was_seen_is_missed() -> None:
    """Cutting off the end, or the whole journal, shows to whoever has seen it; so does another end in its place."""
    store = MemoryStore()
    written(store, 6)
    seen = check_journal(store, TRUST).head
    for number in (6, 5):
        store.delete(journal_key(number))
    assert [] == faults(store)  # nobody who never looked can tell
    assert [(6, Fault.CUT)] == faults(store, seen=seen)
    written(store, 3)
    assert ([], [(6, Fault.REWRITTEN)]) == (faults(store), faults(store, seen=seen))
    assert [(6, Fault.CUT)] == faults(MemoryStore(), seen=seen)


def test_a_clock_that_goes_back_is_told() -> None:
    """Clocks differ by minutes; not by more."""
    store = MemoryStore()
    head = START
    for number, time in enumerate((1000, 800, 1200, 899), 1):
        data = Entry(number, head.digest, time, Retired(TAG)).seal(KEY)
        store.create(journal_key(number), [data])
        head = Head(number, chain_digest(data))
    assert [(4, Fault.CLOCK)] == faults(store)


@pytest.mark.parametrize("kind", KINDS)
def test_many_write_at_once(kind, tmp_path, request) -> None:
    """Every entry is there once, and the chain is whole."""
    store = new_store(kind, tmp_path, request)
    barrier = threading.Barrier(4)

    def write(name: int) -> None:
        journal = Journal(store, KEY if name % 2 else OTHER)
        barrier.wait()
        for number in range(8):
            journal.append(Revoked(1 + number, hash_bytes(b"%d" % name)))

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = []
    assert [] == check_journal(store, TRUST, follow=found.append).findings
    expected = {(1 + number, hash_bytes(b"%d" % name)) for name in range(4) for number in range(8)}
    assert (32, expected) == (len(found), {(each.deed.version, each.deed.etag) for each in found})


def test_a_writer_keeps_what_it_wrote(tmp_path) -> None:
    """So that the next check on this machine knows; but it never covers up that the journal was cut before."""
    store = FolderStore(tmp_path / "origin")
    journal = written(store, 4)
    kept = load_journal_head(store.url)
    assert check_journal(store, TRUST).head == kept
    for number in (3, 4):
        store.delete(journal_key(number))
    assert 3 == Journal(store, KEY).append(Retired(TAG)).number
    assert kept == load_journal_head(store.url)
    assert [(4, Fault.CUT)] == faults(store, seen=kept)
    # A writer that still runs goes on behind the entry that it wrote, and what was put in its place shows.
    assert 4 == journal.append(Retired(TAG)).number
    assert [(4, Fault.UNCHAINED)] == faults(store)
    assert kept == load_journal_head(store.url)


def test_a_home_that_cannot_be_written_stops_nobody(tmp_path, monkeypatch) -> None:
    """Keeping is a courtesy to whoever verifies."""
    store = FolderStore(tmp_path / "origin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "origin" / "v1" / "journal" / "1"))
    assert [1, 2] == [Journal(store, KEY).append(Retired(TAG)).number for _ in range(2)]
    with pytest.raises(UnavailableError):
        keep_journal_head(store.url, START)
