"""`kvcdn journal`: what the commands write into it, what is listed, and what a check says."""

from __future__ import annotations

from kvcdn.digest import Digest
from kvcdn.journal import journal_key
from kvcdn.keyring import create_signing_key, signing_key_path
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.signing import SigningKey
from kvcdn.stores.folder import FolderStore
from support.command import kvcdn
from support.tiny import TEXT


def entries(run, *words):
    return run("journal", "ls", "--json", *words).json["entries"]


def test_every_command_that_changes_an_origin_writes(library, run, tmp_path):
    """rm, retire, revoke, fsck --repair and cp; what only looks writes nothing, and neither does what finds nothing to do."""
    library.publish((1, 2), (3,), (4,), (5,))
    for words in (("ls",), ("fsck",), ("fsck", "--repair"), ("gc",), ("journal", "ls"), ("rm", "00" * 32)):
        run(*words)
    assert [] == entries(run)
    assert 0 == run("rm", library.address((1, 2)), library.address((3,))).code
    assert 0 == run("revoke", library.address((4,))).code
    (library.store._root / library.manifest_key((5,))).chmod(0o600)
    (library.store._root / library.manifest_key((5,))).write_bytes(b"broken")
    assert 4 == run("fsck", "--repair").code
    kvcdn("cp", tmp_path / "origin", tmp_path / "copy")
    other = create_signing_key(signing_key_path("other"))
    assert 0 == run("retire", "--model", str(library.tag), "--yes", "--key", signing_key_path("other")).code
    found = entries(run)
    assert [1, 2, 3, 4] == [each["number"] for each in found]
    assert ["remove", "revoke", "repair", "retire"] == [each["action"] for each in found]
    assert sorted(library.address(spec) for spec in ((1, 2), (3,))) == found[0]["addresses"]
    assert ([library.address((5,))], str(library.tag)) == (found[2]["addresses"], found[3]["model"])
    assert [False, False, False, True] == [each["signer"] == other.public.text for each in found]
    copied = kvcdn("journal", "ls", "--origin", tmp_path / "copy", "--json").json["entries"]
    assert [("copy", library.address((4,)))] == [(each["action"], each["address"]) for each in copied]
    ran = run("journal", "verify", "--documents", "--json")
    assert (0, 4, []) == (ran.code, ran.json["entries"], ran.json["findings"])


def test_publishing_writes_and_a_second_time_does_not(tmp_path, tiny_llama, run):
    """One entry a document, before its manifest is there; nothing where there is nothing to do."""
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT[number * 500 : 2000])
    publish = ("publish", tmp_path / "texts", "--model", tiny_llama, "--days", "3", "--json")
    done = [run(*publish).code for _ in range(2)]
    assert [0, 0] == done
    listed = {each["address"]: each for each in run("ls", "--json").json["documents"]}
    found = entries(run)
    assert ["publish"] * 3 == [each["action"] for each in found]
    assert sorted(listed) == sorted(each["address"] for each in found)
    assert all(listed[each["address"]]["expires"] == each["expires"] for each in found)
    checked = run("journal", "verify", "--documents", "--json").json
    nothing = {"documents": 3, "unrecorded": [], "returned": [], "gone": []}
    assert (3, {"publish": 3}, nothing) == (checked["entries"], checked["actions"], checked["documents"])


def test_listing_filters_and_pages(library, run):
    """The newest last; by action, document, signer; before a number."""
    key, other = create_signing_key(signing_key_path()), SigningKey.generate()
    addresses = [Digest(bytes([number]) * 32) for number in range(6)]
    for number, each in enumerate(addresses):
        Journal(library.store, other if number == 2 else key).remove(library.tag, [each], "repair" if number % 2 else "remove")
    assert [5, 6] == [each["number"] for each in entries(run, "--limit", "2")]
    assert [3, 4] == [each["number"] for each in entries(run, "--limit", "2", "--before", "5")]
    assert [2, 4, 6] == [each["number"] for each in entries(run, "--action", "repair")]
    assert [5] == [each["number"] for each in entries(run, "--address", "0404")]
    assert [3] == [each["number"] for each in entries(run, "--signer", other.public.text[:20])]
    assert [1, 2, 4, 5, 6] == [each["number"] for each in entries(run, "--signer", "myself (default)")]
    assert 2 == run("journal", "ls", "--action", "forgive").code
    table = run("journal", "ls").out
    assert ["(not trusted)" in line for line in table.splitlines()[1:]] == [False, False, True, False, False, False]
    assert "no such entry" in run("journal", "ls", "--address", "ffff").err


def test_a_check_remembers_the_end(library, run):
    """What was cut off since the last check is code 4, until it is said that this was meant."""
    key = create_signing_key(signing_key_path())
    for _ in range(3):
        Journal(library.store, key).remove(library.tag, [Digest(bytes(32))])
    assert 0 == run("journal", "verify").code
    library.store.delete(journal_key(3))
    ran = run("journal", "verify")
    assert (4, True) == (ran.code, "cut: entry 3" in ran.out)
    assert 4 == run("journal", "verify", "--json").code
    assert 0 == run("journal", "verify", "--forget").code
    assert "whole" in run("journal", "verify").out


def test_documents_that_no_entry_explains(library, run):
    """Written by something that keeps no journal, put back, and deleted behind its back. None of it breaks the chain."""
    library.publish((1,), (2,), (3,))
    create_signing_key(signing_key_path())
    kept = {spec: library.store.read(library.manifest_key(spec)) for spec in ((1,), (2,))}
    run("rm", library.address((1,)))
    ran = run("journal", "verify", "--documents", "--json").json["documents"]
    assert (2, 2, [], []) == (ran["documents"], len(ran["unrecorded"]), ran["returned"], ran["gone"])
    copy = library.store._root.parent / "copy"
    kvcdn("cp", library.store._root, copy)
    store = FolderStore(copy)
    store.delete(library.manifest_key((3,)))
    assert 0 == kvcdn("rm", library.address((2,)), "--origin", copy).code
    store.create(library.manifest_key((2,)), [kept[(2,)]])
    store.create(library.manifest_key((1,)), [kept[(1,)]])
    ran = kvcdn("journal", "verify", "--documents", "--json", "--origin", copy)
    found = ran.json["documents"]
    assert 0 == ran.code
    assert [[library.address(spec)] for spec in ((1,), (2,), (3,))] == [
        found[name] for name in ("unrecorded", "returned", "gone")
    ]
    assert "no entry removed it" in kvcdn("journal", "verify", "--documents", "--origin", copy).out
