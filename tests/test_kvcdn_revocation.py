"""Revocations: what a list says, who is believed, and that no older list passes for the last."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn import canonical
from kvcdn.digest import Digest, ModelTag
from kvcdn.envelope import REVOCATIONS_MAGIC, seal_envelope
from kvcdn.errors import CorruptError, RevokedError, UntrustedError, UsageError
from kvcdn.keyring import keep_revocations, load_revocations, revocations_dir
from kvcdn.origin.upkeep.revocation import Targets, change_revocations, newest_list
from kvcdn.revocation import (
    CLOCK_SECONDS,
    MAX_ADDRESSES,
    MAX_LIFE_SECONDS,
    RevocationList,
    Revocations,
    find_newest,
    open_revocations,
    revocation_key,
)
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.memory import MemoryStore

NOW = 1_800_000_000

KEY, OTHER = SigningKey.generate(), SigningKey.generate()

TRUST = TrustList.of(KEY.public, OTHER.public)

ADDRESS, TAG = Digest(bytes(range(32))), ModelTag(bytes(range(16)))


def made(version: int = 1, **fields) -> RevocationList:
    return replace(RevocationList(version, NOW - 10, NOW + 1000), **fields)


def sealed(version: int = 1, key: SigningKey = KEY, **fields) -> RevocationList:
    return open_revocations(made(version, **fields).seal(key), "list")


@given(st.frozensets(st.binary(min_size=32, max_size=32)), st.frozensets(st.binary(min_size=16, max_size=16)))
def test_a_list_reads_as_it_was_sealed(addresses, tags) -> None:
    """Whatever is on it, and by whom."""
    listed = made(
        addresses=frozenset(map(Digest, addresses)),
        models=frozenset(map(ModelTag, tags)),
        publishers=frozenset((OTHER.public,)),
    )
    assert replace(listed, signer=KEY.public) == open_revocations(listed.seal(KEY), "list")


def header(**changes):
    fields = {"type": "revocations", "v": 1, "version": 1, "created": NOW, "expires": NOW + 1}
    return {**fields, "addresses": [], "publishers": [], "models": [], **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "manifest"},
        {"v": 2},
        {"version": 0},
        {"version": (1 << 31) + 1},
        {"expires": NOW},
        {"expires": NOW + MAX_LIFE_SECONDS + 1},
        {"addresses": [str(ADDRESS), str(ADDRESS)]},
        {"models": ["b" * 32, "a" * 32]},
        {"addresses": [str(TAG)]},
        {"publishers": [7]},
        {"addresses": [f"{number:064x}" for number in range(MAX_ADDRESSES + 1)]},
        {"more": 1},
    ],
    ids=lambda changes: f"{next(iter(changes))}",
)
def test_other_lists_are_corrupt(changes) -> None:
    """A well signed object that is not quite a list is none."""
    with pytest.raises(CorruptError):
        open_revocations(seal_envelope(REVOCATIONS_MAGIC, header(**changes), KEY), "list")
    assert canonical.encode(header())  # the changes are what is wrong


@given(st.integers(0, 2000), st.integers(1, 255))
def test_any_changed_byte_is_found(place, change) -> None:
    """The signature covers all of it."""
    data = bytearray(made(addresses=frozenset((ADDRESS,))).seal(KEY))
    data[place % len(data)] ^= change
    with pytest.raises(CorruptError):
        open_revocations(bytes(data), "list")
    with pytest.raises(CorruptError):
        open_revocations(made().seal(KEY) + b"x", "list")


def test_what_a_list_can_hold() -> None:
    """A list that no reader would take is not made."""
    with pytest.raises(UsageError):
        made(expires=NOW + MAX_LIFE_SECONDS)
    full = made(addresses=frozenset(Digest(number.to_bytes(32, "big")) for number in range(MAX_ADDRESSES)))
    assert MAX_ADDRESSES == len(open_revocations(full.seal(KEY), "list").addresses)


@pytest.mark.parametrize(
    "found",
    [
        sealed(key=SigningKey.generate()),
        sealed(1),
        sealed(2, addresses=frozenset((ADDRESS,))),
        sealed(3, created=NOW - 100, expires=NOW),
        sealed(3, created=NOW + CLOCK_SECONDS + 1, expires=NOW + 2000),
    ],
    ids=["stranger", "replayed", "second-of-its-number", "expired", "future"],
)
def test_lists_that_are_not_believed(found) -> None:
    """Neither strangers' lists, nor old ones, nor two under one number, nor expired ones change what is known."""
    with pytest.raises(UntrustedError):
        Revocations().learn(sealed(2), TRUST, NOW).learn(found, TRUST, NOW)


def test_what_is_known_goes_on_counting() -> None:
    """Lists of several signers count together; the next of one takes back its own entries only; expiry takes back nothing."""
    first = sealed(1, publishers=frozenset((OTHER.public,)), models=frozenset((TAG,)))
    known = Revocations().learn(first, TRUST, NOW).learn(sealed(7, OTHER, addresses=frozenset((ADDRESS,))), TRUST, NOW)
    assert {OTHER.public} == set(known.publishers)
    with pytest.raises(RevokedError):
        known.require_address(ADDRESS)
    with pytest.raises(RevokedError):
        known.require_model(TAG)
    with pytest.raises(RevokedError):
        TRUST.revoking(known.publishers).require(OTHER.public, "block")
    after = known.learn(sealed(2), TRUST, NOW)
    assert {} == after.publishers
    assert 1 == after.lead([Digest(bytes(32)), ADDRESS, Digest(bytes(32))])
    assert 2 == after.of(TrustList.of(KEY.public)).lead([Digest(bytes(32)), ADDRESS])


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_newest_is_found_in_few_questions(last, known) -> None:
    """Whatever is known already, in about twice the logarithm of what is new."""
    asked = []

    def read(version):
        asked.append(version)
        return str(version).encode() if version <= last else None

    assert (str(last).encode() if last > known else None) == find_newest(read, known)
    assert len(asked) <= 2 * max(last - known, 1).bit_length() + 1
    assert all(version > known for version in asked)


def test_changes_make_the_next_list() -> None:
    """Each change is a new object; of two at once with one key both count; undoing is a list without."""
    store = MemoryStore()
    change_revocations(store, KEY, Targets(addresses=frozenset((ADDRESS,))))

    class Raced(MemoryStore):
        raced = False

        def read(self, *given):
            return store.read(*given)

        def create(self, key, pieces):
            if not self.raced:
                self.raced = True
                change_revocations(store, KEY, Targets(models=frozenset((TAG,))))
            return store.create(key, pieces)

    listed, data = change_revocations(Raced(), KEY, Targets(publishers=frozenset((OTHER.public,))))
    assert (3, {ADDRESS}, {TAG}, {OTHER.public}) == (listed.version, listed.addresses, listed.models, listed.publishers)
    assert data == store.read(revocation_key(KEY.public, 3))
    undone, _ = change_revocations(store, KEY, Targets(addresses=frozenset((ADDRESS,))), undo=True)
    assert (4, set(), {TAG}) == (undone.version, undone.addresses, undone.models)
    assert replace(undone, signer=KEY.public) == newest_list(store, KEY.public)
    assert newest_list(store, OTHER.public) is None


def test_a_host_remembers() -> None:
    """The last list of each signer is kept as it was signed; a damaged one is an error, not forgotten."""
    assert Revocations() == load_revocations()
    keep_revocations(made(1).seal(KEY))
    keep_revocations(made(2).seal(KEY))
    keep_revocations(made(1, models=frozenset((TAG,))).seal(OTHER))
    assert {KEY.public: 2, OTHER.public: 1} == {key: found.version for key, found in load_revocations().lists.items()}
    (revocations_dir() / str(KEY.public)).write_bytes(b"damaged")
    with pytest.raises(CorruptError):
        load_revocations()
