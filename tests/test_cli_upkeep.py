"""The commands that keep an origin in order: results, exit codes, JSON of exactly one object, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys

from kvcdn.keyring import trust_publisher
from kvcdn.origin.upkeep.catalog import list_published
from kvcdn.origin.upkeep.revocation import Targets, change_revocations
from kvcdn.signing import SigningKey
from kvcdn.stores.folder import FolderStore
from support.command import kvcdn
from support.library import Library, keys, small_model
from support.waiting import PROCESS_SECONDS


def test_upkeep_needs_no_torch(tmp_path):
    """A bare install does all of it: nothing that these commands import is more than an edge has."""
    modules = ("remove", "collect", "check", "copy", "doctor", "policy", "catalog", "standing", "journal_check")
    names = [*(f"kvcdn.origin.upkeep.{name}" for name in modules), "kvcdn.cli.main", "kvcdn.stores.s3", "kvcdn.stores.folder"]
    program = f"import sys, importlib; [importlib.import_module(n) for n in {names!r}]; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PROCESS_SECONDS, cwd=tmp_path
    )
    loaded = {module.split(".")[0] for module in done.stdout.split()}
    assert set() == loaded & {"torch", "numpy", "blosc2", "transformers", "safetensors"}


def test_rm_removes_by_the_beginning_of_an_address(library, run):
    """Several at once; what others share stays; what is not there is code 3."""
    library.publish((1, 2), (1, 3), (4,))
    ran = run("rm", library.address((1, 2))[:12], library.address((4,)), "--json")
    assert (0, 2, 2, 1) == (ran.code, *(ran.json["models"][0][name] for name in ("documents", "blocks", "blocks_shared")))
    assert sorted(library.manifest_key(spec) for spec in ((1, 2), (4,))) == ran.json["removed"]
    ran = run("rm", library.address((4,)))
    assert (3, True) == (ran.code, "kvcdn ls" in ran.complaint)
    assert (3, 2) == (run("rm", "../x").code, run("rm", "xyz").code)
    ran = run("rm", library.address((1, 3)))
    assert (0, True) == (ran.code, "1 document, 2 blocks" in ran.out)
    assert [] == keys(library.store)


def test_retire_asks_first(library, run):
    """Without --yes nothing goes where nobody can be asked."""
    library.publish((1, 2), (3,))
    ran = run("retire", "--model", library.model.name)
    assert (2, True) == (ran.code, "all 2 documents" in ran.complaint and "--yes" in ran.complaint)
    assert 5 == len(keys(library.store))
    ran = run("retire", "--model", library.model.name, "--yes", "--json")
    assert (0, 2, 3) == (ran.code, ran.json["documents"], ran.json["blocks"])
    assert 3 == run("retire", "--model", library.model.name, "--yes").code


def test_gc_says_what_it_frees(library, run):
    """A dry run first; young blocks wait; a model that cannot be read is code 4."""
    library.publish((1, 2))
    library.write_blocks((5,))
    assert (0, 1) == (run("gc", "--json").json["blocks_removed"], run("gc", "--json").json["blocks_young"])
    assert 1 == run("gc", "--grace", "0s", "--dry-run", "--json").json["blocks_removed"]
    ran = run("gc", "--grace", "0s")
    assert (0, True) == (ran.code, "0 expired documents, 1 block," in ran.out)
    (library.store._root / library.manifest_key((1, 2))).chmod(0o600)
    (library.store._root / library.manifest_key((1, 2))).write_bytes(b"broken")
    ran = run("gc", "--json")
    assert (4, 1, True) == (ran.code, len(ran.json["skipped"]), "fsck" in ran.err)
    for grace in ("24", "-1h", "1w", ""):
        assert 2 == run("gc", "--grace", grace).code


def test_fsck_tells_damage_and_loss_apart(library, run):
    """0 for whole, 3 for missing, 4 for corrupt; --repair removes, and the next check is clean."""
    library.publish((1, 2), (3, 4))
    assert 0 == run("fsck").code
    library.store.delete(library.block_keys((1, 2))[1])
    ran = run("fsck", "--json")
    assert (3, ["block-missing"]) == (ran.code, [problem["kind"] for problem in ran.json["problems"]])
    path = library.store._root / library.block_keys((3, 4))[0]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])
    ran = run("fsck", "--repair")
    assert (4, True) == (ran.code, library.block_keys((3, 4))[0] in ran.out)
    assert all(f"publish again: {library.address(spec)}" in ran.err for spec in ((1, 2), (3, 4)))
    ran = run("fsck", "--json", "--model", str(library.tag))
    assert (0, 0, 2) == (ran.code, ran.json["documents"], ran.json["orphan_blocks"])
    assert 3 == run("fsck", "--model", "nobody").code


def test_cp_copies_and_says_what_it_could_not(library, tmp_path):
    """Exit code 4 for what is damaged at the source, 1 for what is another object at the target."""
    library.publish((1, 2), (3,))
    ran = kvcdn("cp", tmp_path / "origin", tmp_path / "copy", "--json")
    assert (0, 2, 3) == (ran.code, ran.json["documents"], ran.json["blocks"])
    assert keys(library.store) == keys(FolderStore(tmp_path / "copy"))
    Library(FolderStore(tmp_path / "other"), key=SigningKey.generate()).publish((1, 9))
    ran = kvcdn("cp", tmp_path / "origin", tmp_path / "other", "--model", library.model.name)
    assert (1, True) == (ran.code, library.manifest_key((1, 2)) in ran.err)
    library.store.delete(library.block_keys((3,))[0])
    assert 4 == kvcdn("cp", tmp_path / "origin", tmp_path / "third").code
    ran = kvcdn("cp", "http://127.0.0.1:9", tmp_path / "fourth")
    assert (2, True) == (ran.code, "cannot be listed" in ran.complaint)


def test_doctor_ends_with_5_where_something_is_not_as_needed(run, tmp_path):
    """Otherwise with 0; the JSON has every trial."""
    ran = run("doctor", "--json")
    assert (0, True, "operator") == (ran.code, ran.json["ok"], ran.json["for"])
    assert {"ok"} == {trial["status"] for trial in ran.json["trials"]}
    assert "ok   reach" in run("doctor").out
    ran = kvcdn("doctor", "--origin", "http://127.0.0.1:9", "--for", "edge")
    assert (5, True) == (ran.code, ran.out.startswith("NOT  reach") and "to mend it: check that it runs" in ran.out)


def test_doctor_prints_policies():
    """As JSON that can be fed to AWS's tools; only for S3."""
    for wanted, action in (("publisher", "s3:PutObject"), ("edge", "s3:GetObject"), ("operator", "s3:DeleteObject")):
        ran = kvcdn("doctor", "--policy", wanted, "--origin", "s3://kvcdn/production")
        assert (0, True) == (ran.code, action in json.dumps(json.loads(ran.out)["Statement"]))
    assert "Rules" in kvcdn("doctor", "--policy", "lifecycle", "--origin", "s3://kvcdn/production", "--json").json
    assert 2 == kvcdn("doctor", "--policy", "edge").code
    assert 2 == kvcdn("doctor", "--policy", "edge", "--origin", "/folder").code


def test_ls_filters_and_pages(library, run):
    """By model, label, publisher and expiry; pages join."""
    other = Library(library.store, model=small_model(1), key=SigningKey.generate())
    library.publish((1,), label="The Handbook")
    library.publish((2,), expires=1_700_000_001)
    other.publish((3,), label="a handbook")
    other.publish((4,), expires=1 << 40)
    trust_publisher(other.key.public, "docs team")

    def listed(*words):
        return {document["object"] for document in run("ls", "--json", *words).json["documents"]}

    first, second = (library.manifest_key((n,)) for n in (1, 2))
    third, fourth = (other.manifest_key((n,)) for n in (3, 4))
    assert {first, second, third, fourth} == listed()
    for model in (str(library.tag), str(library.model.fingerprint), library.model.name):
        assert {first, second} == listed("--model", model)
    assert {first, third} == listed("--label", "HANDBOOK")
    assert {third} == listed("--label", "handbook", "--model", other.model.name)
    for publisher in (other.key.public.text, str(other.key.public)[:10], "docs team"):
        assert {third, fourth} == listed("--publisher", publisher)
    assert {second} == listed("--expired")
    assert set() == listed("--label", "nothing")
    pages, after = [], []
    while True:
        page = run("ls", "--json", "--limit", "3", *after).json
        pages += [document["object"] for document in page["documents"]]
        if page["next"] is None:
            break
        after = ["--after", page["next"]]
    assert sorted({first, second, third, fourth}) == pages
    assert "--after v1/" in run("ls", "--limit", "1").err
    assert 2 == run("ls", "--after", "nonsense").code
    first_column = [line.split()[0] for line in run("ls").out.splitlines()]
    assert ["ADDRESS", *(key[-64:-52] for key in pages)] == first_column


def test_cp_signs_anew_what_is_trusted(library, tmp_path):
    """By nobody but those on the trust list, not by a revoked one, and not in place."""
    library.publish((1, 2))
    words = ("cp", tmp_path / "origin", tmp_path / "copy", "--resign", "--json")
    trust = tmp_path / "trust"
    trust.write_text("")
    ran = kvcdn(*words, "--trust", trust)
    assert (4, 1, True) == (ran.code, len(ran.json["untrusted"]), "not on the trust list" in ran.err)
    trust.write_text(f"{library.key.public.text} me\n")
    ran = kvcdn(*words, "--trust", trust)
    assert (0, 1, 2) == (ran.code, ran.json["documents"], ran.json["blocks"])
    publishers = {listed.manifest.publisher for listed in list_published(FolderStore(tmp_path / "copy"))}
    assert len(publishers - {library.key.public}) == 1
    ran = kvcdn("cp", tmp_path / "origin", tmp_path / "origin", "--resign")
    assert (2, True) == (ran.code, "nothing is overwritten" in ran.complaint)
    change_revocations(library.store, library.key, Targets(publishers=frozenset([library.key.public])))
    ran = kvcdn("cp", tmp_path / "origin", tmp_path / "third", "--resign", "--trust", trust, "--json")
    assert (4, True) == (ran.code, "revoked" in ran.json["untrusted"][0]["reason"])
