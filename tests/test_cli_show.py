"""`kvcdn show`: a document by its address or by itself, its blocks, its expiry, and who has revoked it."""

from __future__ import annotations

import time

import pytest

from kvcdn.keyring import create_signing_key, signing_key_path, trust_publisher
from kvcdn.signing import SigningKey
from kvcdn.stores.folder import FolderStore
from support.command import kvcdn
from support.library import CREATED, Library
from support.life import KINDS, new_store
from support.tiny import TEXT


@pytest.fixture
def key():
    return create_signing_key(signing_key_path())


@pytest.fixture
def library(tmp_path, key):
    return Library(FolderStore(tmp_path / "origin"), key=key)


def test_a_whole_document(library, run, key):
    """By the beginning of its address, its address, or its key: manifest and standing in one object."""
    library.publish((1, 2), (3,), label="two blocks")
    full = library.address((1, 2))
    shown = [run("show", name, "--json") for name in (full[:10], full, library.manifest_key((1, 2)))]
    assert [0] * 3 == [ran.code for ran in shown]
    assert shown[0].json == shown[1].json == shown[2].json
    found = shown[0].json
    assert (full, library.model.name, str(library.tag)) == (found["address"], found["model"], found["model_tag"])
    assert (2, 2048, "native", "two blocks") == tuple(found[name] for name in ("blocks", "tokens", "precision", "label"))
    assert (True, 2, [], []) == tuple(found[name] for name in ("complete", "blocks_there", "blocks_missing", "blocks_resized"))
    assert (CREATED, None, False, []) == tuple(found[name] for name in ("created", "expires", "expired", "revoked"))
    assert (key.public.text, True) == (found["publisher"], found["trusted"])
    stored = [library.store.stat(name).size for name in (*library.block_keys((1, 2)), library.manifest_key((1, 2)))]
    assert (sum(stored[:2]), stored[2]) == (found["stored_bytes"], found["manifest_bytes"])


def test_people_read_it(library, run):
    """Each question has its line."""
    library.publish((1, 2))
    lines = dict(line.split("  ", 1) for line in run("show", library.address((1, 2))).out.splitlines())
    assert "never" == lines["expires"].strip()
    assert "no" == lines["revoked"].strip()
    assert lines["blocks there"].strip().startswith("all 2 of the right size")


def test_lost_and_altered_blocks_are_named(library, run):
    """A block that is gone and one of another size; the others count as there."""
    library.publish((1, 2, 3))
    gone, altered, _ = library.block_keys((1, 2, 3))
    library.store.delete(gone)
    path = library.store._root / altered
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])
    found = run("show", library.address((1, 2, 3)), "--json").json
    assert (False, 1) == (found["complete"], found["blocks_there"])
    assert ([gone[-64:]], [altered[-64:]]) == (found["blocks_missing"], found["blocks_resized"])
    assert "publish the document again" in run("show", library.address((1, 2, 3))).out


def test_expired_documents_are_shown_as_such(library, run):
    """They are there until they are collected."""
    library.publish((1,), expires=int(time.time()) - 10)
    library.publish((2,), expires=int(time.time()) + 86400 * 3)
    assert [True, False] == [run("show", library.address(spec), "--json").json["expired"] for spec in ((1,), (2,))]
    assert "kvcdn gc removes it" in run("show", library.address((1,))).out
    assert "in 3.0 days" in run("show", library.address((2,))).out


def test_revocations_say_by_whom_and_of_what(library, run, key, tmp_path):
    """A document, its publisher, its model: each with the number of the list. A stranger's counts for who trusts him."""
    library.publish((1, 2), (1, 3))
    assert 0 == run("revoke", library.address((1, 2))).code
    found = run("show", library.address((1, 2)), "--json").json["revoked"]
    expected = [{"what": what, "signer": key.public.text, "list": 1, "trusted": True} for what in ("document", "block")]
    assert expected == found
    assert [] == run("show", library.address((1, 3)), "--json").json["revoked"]
    other = create_signing_key(signing_key_path("other"))
    assert 0 == run("revoke", "--model", str(library.tag), "--key", signing_key_path("other")).code
    found = run("show", library.address((1, 3)), "--json").json["revoked"]
    assert [("model", other.public.text, True)] == [(each["what"], each["signer"], each["trusted"]) for each in found]
    alone = tmp_path / "trust"
    alone.write_text(f"{SigningKey.generate().public.text} somebody\n")
    assert [] == run("show", library.address((1, 3)), "--json", "--trust", alone).json["revoked"]
    # The publisher's own list is looked at in any case, and its readers are told that it is not theirs.
    found = run("show", library.address((1, 2)), "--json", "--trust", alone).json
    assert ([False, False], False) == ([each["trusted"] for each in found["revoked"]], found["trusted"])


def test_a_list_that_was_seen_counts_where_the_origin_has_lost_it(library, run):
    """Removing a list from the origin takes nothing back."""
    library.publish((1,))
    run("revoke", library.address((1,)))
    for info in list(library.store.list("v1/revocations/")):
        library.store.delete(info.key)
    assert ["document", "block"] == [each["what"] for each in run("show", library.address((1,)), "--json").json["revoked"]]


def test_what_is_not_there_or_cannot_be_read(library, run):
    """Code 3 for no document, 2 for no address, 4 for a manifest that is none."""
    library.publish((1,))
    assert [3, 2, 2] == [run("show", name).code for name in ("00" * 32, "handbook.txt", "")]
    assert 2 == run("show", library.address((1,)), "--precision", "int8").code
    path = library.store._root / library.manifest_key((1,))
    path.chmod(0o600)
    path.write_bytes(b"broken")
    assert 4 == run("show", library.address((1,))).code


@pytest.mark.parametrize("kind", KINDS)
def test_standing_at_every_store(kind, tmp_path, request):
    """The same answer from memory, a folder and S3."""
    from kvcdn.origin.upkeep.catalog import find_manifest, read_manifest
    from kvcdn.origin.upkeep.standing import look_up_standing

    library = Library(new_store(kind, tmp_path, request))
    library.publish((1, 2, 3))
    library.store.delete(library.block_keys((1, 2, 3))[2])
    listed = read_manifest(library.store, find_manifest(library.store, library.address((1, 2, 3))))
    trust_publisher(library.key.public, "me")
    standing = look_up_standing(library.store, listed.manifest, _trust(), now=time.time())
    assert (2, [library.block_keys((1, 2, 3))[2][-64:]]) == (standing.blocks_there, [str(each) for each in standing.missing])
    assert (False, ()) == (standing.expired, standing.revoked)


def _trust():
    from kvcdn.keyring import load_trust

    return load_trust()


def test_the_document_itself_with_its_model(tmp_path, tiny_llama, run):
    """The text that was published names its document, for the model, the namespace and the precision it was published for."""
    document = tmp_path / "document.txt"
    document.write_text(TEXT[:2000])
    kvcdn("keygen", "--namespace", "acme")
    published = run("publish", document, "--model", tiny_llama, "--namespace", "acme", "--json").json
    found = run("show", document, "--model", tiny_llama, "--namespace", "acme", "--json").json
    assert (published["address"], True) == (found["address"], found["complete"])
    assert 3 == run("show", document, "--model", tiny_llama).code
    assert 3 == run("show", document, "--model", tiny_llama, "--namespace", "acme", "--precision", "int8").code
