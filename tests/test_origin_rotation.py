"""Rotation: statements that both keys sign, once for ever; who follows them and who is not followed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.digest import Digest
from kvcdn.envelope import SUCCESSION_MAGIC, seal_envelope
from kvcdn.errors import CorruptError, RevokedError, UntrustedError, UsageError
from kvcdn.journal import Rotated
from kvcdn.keyring import create_signing_key, load_signing_key, load_trust, next_key_path, signing_key_path, trust_publisher
from kvcdn.origin.upkeep.journal_check import check_journal
from kvcdn.origin.upkeep.revocation import Targets, change_revocations, newest_list
from kvcdn.origin.upkeep.rotation import announce_successor, find_successor, follow_successors
from kvcdn.revocation import Revocations
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.memory import MemoryStore
from kvcdn.succession import MAX_STEPS, open_succession, seal_succession, succession_key
from support.command import kvcdn
from support.life import KINDS, new_store
from support.tiny import TEXT

OLD, NEW, OTHER = (SigningKey.generate() for _ in range(3))

NOW = 1_800_000_000

ADDRESS = Digest(bytes(range(32)))

TRUST = TrustList.of(OLD.public)


def followed(store, trust=TRUST, known=None):
    return [step.successor for step in follow_successors(store, OLD.public, trust, known or Revocations())]


# -- statements --------------------------------------------------------------------------------------------------------


def test_a_statement_reads_as_it_was_sealed() -> None:
    """By the old key only, and by no other."""
    data = seal_succession(OLD, NEW, now=NOW)
    found = open_succession(data, OLD.public, "succession")
    assert (OLD.public, NEW.public, NOW) == (found.old, found.successor, found.created)
    with pytest.raises(CorruptError, match="not by"):
        open_succession(data, OTHER.public, "succession")
    with pytest.raises(UsageError):
        seal_succession(OLD, OLD, now=NOW)


@given(st.integers(0, 1000), st.integers(1, 255))
def test_any_changed_byte_is_found(place, change) -> None:
    """The signature covers all of it, and nothing follows."""
    data = bytearray(seal_succession(OLD, NEW, now=NOW))
    data[place % len(data)] ^= change
    for other in (bytes(data), seal_succession(OLD, NEW, now=NOW) + b"x", bytes(5000)):
        with pytest.raises(CorruptError):
            open_succession(other, OLD.public, "succession")


def header(successor=NEW, proof=None, **changes):
    signed = b"kvcdn v1 succession\x00" + OLD.public + successor.public
    fields = {"type": "succession", "v": 1, "created": NOW, "successor": str(successor.public)}
    return {**fields, "proof": successor.private.sign(proof or signed).hex(), **changes}


@pytest.mark.parametrize(
    "wrong",
    [
        header(proof=b"kvcdn v1 succession\x00" + OTHER.public + NEW.public),
        header(successor=NEW) | {"successor": str(OTHER.public)},
        header(OLD),
        header(v=2),
        header(created=-1),
        header(more=1),
    ],
    ids=["another's proof", "without consent", "oneself", "version", "time", "unknown field"],
)
def test_other_statements_are_corrupt(wrong) -> None:
    """The new key has to agree to this very succession: nobody is named who did not want to."""
    open_succession(seal_envelope(SUCCESSION_MAGIC, header(), OLD), OLD.public, "succession")
    with pytest.raises(CorruptError):
        open_succession(seal_envelope(SUCCESSION_MAGIC, wrong, OLD), OLD.public, "succession")


# -- at an origin ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_has_one_successor(kind, tmp_path, request) -> None:
    """Saying it again changes nothing; another is refused, whoever asks. The journal has it once."""
    store = new_store(kind, tmp_path, request)
    assert [False, True] == [announce_successor(store, OLD, NEW).existed for _ in range(2)]
    with pytest.raises(UsageError, match=NEW.public.text) as caught:
        announce_successor(store, OLD, OTHER)
    assert "kvcdn revoke" in caught.value.hint
    assert [NEW.public] == followed(store)
    deeds = []
    check_journal(store, TRUST, follow=lambda entry: deeds.append(entry.deed))
    assert [(Rotated, NEW.public)] == [(type(deed), deed.successor) for deed in deeds]


def test_what_the_old_key_revoked_stays_revoked() -> None:
    """By a list of the new key's own; saying it again makes no list more."""
    store = MemoryStore()
    change_revocations(store, OLD, Targets(frozenset((ADDRESS,)), frozenset((OTHER.public, NEW.public))))
    assert 1 == announce_successor(store, OLD, NEW).revocations.version
    assert announce_successor(store, OLD, NEW).revocations is None
    listed = newest_list(store, NEW.public)
    assert ({ADDRESS}, {OTHER.public}) == (listed.addresses, listed.publishers)


def test_successors_of_successors_are_followed() -> None:
    """As far as they go, but not for ever, and not in a circle."""
    keys = [OLD, *(SigningKey.generate() for _ in range(MAX_STEPS + 3))]
    store = MemoryStore()
    for old, new in pairwise(keys):
        announce_successor(store, old, new)
    assert [key.public for key in keys[1 : MAX_STEPS + 1]] == followed(store)
    circle = MemoryStore()
    for old, new in ((OLD, NEW), (NEW, OTHER), (OTHER, OLD)):
        announce_successor(circle, old, new)
    with pytest.raises(CorruptError, match="circle"):
        followed(circle)
    assert [] == followed(MemoryStore())


def test_only_the_trusted_are_followed() -> None:
    """A stranger's successor, a refused one, and one that a trusted signer revoked, are nobody's."""
    store = MemoryStore()
    announce_successor(store, OLD, NEW)
    with pytest.raises(UntrustedError):
        followed(store, TrustList.of(OTHER.public))
    for refused in (OLD, NEW):
        with pytest.raises(UntrustedError):
            followed(store, TRUST.without({refused.public: "an audit failed"}))
    trust = TrustList.of(OLD.public, OTHER.public)
    for revoked in (OLD, NEW):
        lists = MemoryStore()
        announce_successor(lists, OLD, NEW)
        change_revocations(lists, OTHER, Targets(publishers=frozenset((revoked.public,))))
        with pytest.raises(RevokedError):
            followed(lists, trust)
        assert [NEW.public] == followed(lists)  # who does not trust that signer does not hear him


def test_a_stolen_key_that_its_successor_revokes_is_not_followed() -> None:
    """Which of the two is the thief cannot be told from statements."""
    store = MemoryStore()
    announce_successor(store, OLD, NEW)
    change_revocations(store, NEW, Targets(publishers=frozenset((OLD.public,))))
    with pytest.raises(RevokedError, match=NEW.public.text):
        followed(store)


def test_junk_in_its_place_is_corrupt() -> None:
    """Whoever can write may put anything there first: it is named, and no successor is made up."""
    store = MemoryStore()
    store.create(succession_key(OLD.public), [seal_succession(OTHER, NEW, now=NOW)])
    for ask in (find_successor, lambda store, key: follow_successors(store, key, TRUST, Revocations())):
        with pytest.raises(CorruptError):
            ask(store, OLD.public)
    with pytest.raises(CorruptError):
        announce_successor(store, OLD, NEW)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_publisher_rotates_and_a_reader_follows(run, tmp_path, tiny_llama) -> None:
    """Old documents stay good, new ones are the new key's; the reader takes it only when told."""
    for name, text in (("old", TEXT[:1500]), ("new", TEXT[1500:3000])):
        (tmp_path / name).write_text(text)
    reader = tmp_path / "reader"
    assert 0 == run("publish", tmp_path / "old", "--model", tiny_llama).code
    old = load_signing_key(signing_key_path())
    reader.write_text(f"{old.public.text} docs team\n")
    ran = run("rotate-key", "--json")
    assert (0, old.public.text) == (ran.code, ran.json["old_key"])
    new = load_signing_key(signing_key_path())
    assert (new.public.text, False) == (ran.json["new_key"], new.public == old.public)
    assert old.public == load_signing_key(signing_key_path(f"default-{str(old.public)[:8]}")).public
    assert not next_key_path(signing_key_path()).exists()
    assert {old.public, new.public} <= set(load_trust().names)
    assert 0 == run("publish", tmp_path / "new", "--model", tiny_llama).code
    shown = run("ls", "--json", "--trust", reader).json["documents"]
    assert {old.public.text: True, new.public.text: False} == {each["publisher"]: each["trusted"] for each in shown}
    ran = run("trust", "follow", old.public.text, "--trust", reader, "--json")
    assert (0, [new.public.text]) == (ran.code, ran.json["added"])
    assert {old.public: "docs team", new.public: f"docs team, after {str(old.public)[:12]}"} == dict(load_trust(reader).names)
    assert all(each["trusted"] for each in run("ls", "--json", "--trust", reader).json["documents"])
    ran = run("trust", "follow", old.public.text, "--trust", reader)
    assert (0, True) == (ran.code, "as before" in ran.out)
    assert 3 == run("trust", "follow", new.public.text).code
    assert 4 == run("trust", "follow", OTHER.public.text).code


def test_an_interrupted_rotation_is_taken_up(run, tmp_path, monkeypatch) -> None:
    """Wherever it ended: with the same new key, and one statement."""
    old = create_signing_key(signing_key_path())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "v1").write_text("no folder")
    ran = kvcdn("rotate-key", "--origin", tmp_path / "origin", "--origin", broken, "--json")
    assert ran.code != 0
    waiting = load_signing_key(next_key_path(signing_key_path()))
    assert old.public == load_signing_key(signing_key_path()).public
    ran = run("rotate-key", "--json")
    assert (0, waiting.public.text, True) == (ran.code, ran.json["new_key"], ran.json["origins"][0]["existed"])
    assert waiting.public == load_signing_key(signing_key_path()).public


def test_another_origin_is_told_later(run, tmp_path) -> None:
    """No third key is made for it."""
    create_signing_key(signing_key_path())
    first = run("rotate-key", "--json").json
    ran = kvcdn("rotate-key", "--announce", first["old_file"], "--origin", tmp_path / "second", "--json")
    assert (0, first["old_key"], first["new_key"]) == (ran.code, ran.json["old_key"], ran.json["new_key"])
    trust_publisher(load_signing_key(signing_key_path()).public, "me")
    assert 0 == kvcdn("trust", "follow", first["old_key"], "--origin", tmp_path / "second").code
    assert 2 == run("rotate-key", "--name", "x", "--key", tmp_path / "y").code
    assert 3 == run("rotate-key", "--name", "nothing").code


def test_an_encrypted_key_is_followed_by_an_encrypted_one(run) -> None:
    """Under the passphrase of the environment."""
    words = {"KVCDN_KEY_PASSPHRASE": "seven green bottles"}
    assert 0 == kvcdn("keygen", "--encrypt", **words).code
    assert 2 == run("rotate-key").code
    assert 0 == run("rotate-key", **words).code
    assert b"ENCRYPTED" in signing_key_path().read_bytes()
    load_signing_key(signing_key_path(), lambda: b"seven green bottles")
