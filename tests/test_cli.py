"""The command line: results, exit codes, and one clear line for every kind of bad input."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from kvcdn.stores.folder import FolderStore
from support.command import kvcdn
from support.tiny import TEXT, tiny_checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A home, a document published from there, and the model it was published with."""
    folder = tmp_path_factory.mktemp("place")
    model = tiny_checkpoint(folder / "model", dtype=torch.float32)
    document = folder / "doc.txt"
    document.write_text(TEXT[:6000])
    ran = kvcdn("publish", document, "--model", model, "--origin", folder / "origin", "--json", home=folder / "home")
    assert 0 == ran.code, ran.err
    return Place(folder, model, document, folder / "origin", ran.json)


class Place:
    def __init__(self, folder, model, document, origin, published):
        self.folder, self.model, self.document, self.origin, self.published = folder, model, document, origin, published

    def run(self, *arguments, **options):
        return kvcdn(*arguments, home=self.folder / "home", **options)

    def reading(self, command="ask", *more, origin=None, **options):
        question = ["What is it?", "--mode", "fetch"] if command == "ask" else []
        where = ["--origin", origin or self.origin]
        return self.run(command, self.document, *question, "--model", self.model, *where, "--json", *more, **options)


def test_publish_says_what_it_did_and_a_second_run_does_nothing(place):
    """The JSON is stable, and the numbers agree with what lies at the origin."""
    published = place.published
    assert "published" == published["status"]
    stored = [info for info in FolderStore(place.origin).list("v1/") if "/blocks/" in info.key]
    assert published["blocks"] == len(stored)
    assert published["stored_bytes"] == sum(info.size for info in stored)
    again = place.run("publish", place.document, "--model", place.model, "--origin", place.origin, "--json").json
    assert ("exists", 0) == (again["status"], again["uploaded_bytes"])
    assert published["address"] == again["address"]


def test_ask_answers_from_the_cache_and_shows_a_report(place):
    """In JSON and for people."""
    ran = place.reading("ask", "--max-tokens", "4")
    assert 0 == ran.code, ran.err
    assert (place.published["tokens"], None) == (ran.json["report"]["tokens_reused"], ran.json["report"]["reason"])
    for_people = place.run(
        "ask", place.document, "What?", "-m", place.model, "--origin", place.origin, "--max-tokens", "4", "--mode", "fetch"
    )
    assert 0 == for_people.code
    assert "tokens reused" in for_people.err


def test_another_hash_seed_reads_what_was_published(place):
    """Names do not hang on a process."""
    reports = [
        place.reading("ask", "--max-tokens", "1", process=True, PYTHONHASHSEED=seed).json["report"] for seed in ("1", "2")
    ]
    assert [place.published["tokens"]] * 2 == [report["tokens_reused"] for report in reports]


def test_verify_shows_equal_bytes_and_equal_bits(place):
    """On the machine that published, everything is equal."""
    found = place.reading("verify", "--greedy", "8").json
    assert (True, True, True, True) == tuple(
        found[name] for name in ("loaded_equals_published", "same_stack", "bit_identical", "sound")
    )
    assert place.published["tokens"] == found["tokens"] == found["document_tokens"]
    assert found["one_pass"]["greedy_equal"] <= found["one_pass"]["greedy_total"] == 8
    assert found["one_pass"]["kl_mean"] < 1e-3


def test_inspect_and_ls_show_what_is_public(place):
    """By address, by its beginning, by key and by file; blocks and manifests."""
    address = place.published["address"]
    listed = place.run("ls", "--origin", place.origin, "--json").json["documents"]
    assert [address] == [document["address"] for document in listed]
    shown = place.run("inspect", address[:10], "--origin", place.origin, "--json").json
    assert ("manifest", place.published["tokens"], True) == (shown["type"], shown["tokens"], shown["trusted"])
    key = next(info.key for info in FolderStore(place.origin).list("v1/") if "/blocks/" in info.key)
    block = place.run("inspect", place.origin / key, "--json").json
    assert ("block", True, True) == (block["type"], block["start"] in (0, 1024), block["complete"])
    table = place.run("ls", "--origin", place.origin)
    assert address[:12] in table.out


def test_a_dry_run_measures_and_writes_nothing(place, tmp_path):
    """Size, time, break-even; no folder appears."""
    origin = tmp_path / "none"
    ran = place.run("publish", place.document, "--model", place.model, "--origin", origin, "--dry-run", "--json")
    assert 0 == ran.code, ran.err
    assert place.published["raw_bytes"] == ran.json["raw_bytes"]
    assert ran.json["break_even_bytes_per_second"] > 0
    assert not origin.exists()
    for_people = place.run("publish", place.document, "--model", place.model, "--dry-run")
    assert "break-even" in for_people.out


def test_a_pipe_and_a_folder_can_be_published(place, tmp_path):
    """One JSON object a document; a bad one does not keep the others back, and shows in the exit code."""
    piped = place.run("publish", "-", "--model", place.model, "--origin", tmp_path / "o", "--json", stdin=b"from a pipe")
    assert (0, "standard input") == (piped.code, piped.json["document"])
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, data in {"a.txt": b"one", "b.txt": b"\x00binary", "c.txt": b"three"}.items():
        (texts / name).write_bytes(data)
    ran = place.run("publish", texts, "--model", place.model, "--origin", tmp_path / "o", "--json")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [True, False, True] == ["address" in line for line in lines]
    assert (2, True) == (ran.code, "b.txt" in ran.complaint)


def test_a_private_document_needs_the_namespace(place, tmp_path):
    """Without the secret nothing is found; with it, everything."""
    origin = tmp_path / "origin"
    assert 0 == place.run("keygen", "--namespace", "team").code
    published = place.run("publish", place.document, "--model", place.model, "--origin", origin, "-n", "team", "--json").json
    assert published["address"] != place.published["address"]
    assert place.reading("ask", "-n", "team", origin=origin).json["report"]["tokens_reused"] == published["tokens"]
    assert "not-published" == place.reading("ask", origin=origin).json["report"]["reason"]
    missing = place.reading("ask", "-n", "nobody", origin=origin)
    assert (3, True) == (missing.code, "keygen --namespace nobody" in missing.complaint)


def test_a_chat_can_be_published_and_asked(place, tmp_path):
    """--chat puts the document into the model's template, on both sides."""
    origin = tmp_path / "origin"
    published = place.run("publish", place.document, "--model", place.model, "--origin", origin, "--chat", "--json").json
    report = place.reading("ask", "--chat", origin=origin).json["report"]
    assert published["tokens"] == report["tokens_reused"]


def test_keygen_makes_a_key_once_and_trusts_others(tmp_path):
    """A key is never overwritten; modes keep others out."""
    made = kvcdn("keygen", "--json", home=tmp_path).json
    assert 0o600 == Path(made["file"]).stat().st_mode & 0o777
    again = kvcdn("keygen", home=tmp_path)
    assert (2, True) == (again.code, "not overwritten" in again.complaint)
    assert made["public_key"] == kvcdn("keygen", "--show", "--json", home=tmp_path).json["public_key"]
    other = "ed25519:" + "ab" * 32
    assert ["added", "was on the list"] == [
        kvcdn("keygen", "--trust", other, "--json", home=tmp_path).json["status"] for _ in "12"
    ]
    bad = kvcdn("keygen", "--trust", "nonsense", home=tmp_path)
    assert (2, True) == (bad.code, "not a public key" in bad.complaint)


# -- bad input ---------------------------------------------------------------------------------------------------------


def unsupported(folder):
    tiny_checkpoint(folder, "mamba")


def pickled(folder):
    tiny_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def config_only(folder):
    tiny_checkpoint(folder)
    (folder / "model.safetensors").unlink()


def not_a_model(folder):
    folder.mkdir()


MODELS = {
    "a missing model": (lambda folder: None, 3, "no model"),
    "a folder that is no checkpoint": (not_a_model, 2, "config.json"),
    "a checkpoint without weights": (config_only, 3, "no model.safetensors"),
    "pickled weights": (pickled, 2, "not safetensors"),
    "an unsupported kind": (unsupported, 2, "linear attention"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_bad_model_is_one_clear_line(place, tmp_path, case):
    """Exit code, words, and nothing written."""
    make, code, words = MODELS[case]
    make(tmp_path / "model")
    ran = place.run("publish", place.document, "--model", tmp_path / "model", "--origin", tmp_path / "origin")
    assert (code, True) == (ran.code, words in ran.complaint), ran.err
    assert len(ran.complaint.splitlines()) <= 2
    assert not (tmp_path / "origin").exists()


DOCUMENTS = {
    "empty": (b"", 2, "empty"),
    "binary": (b"\x7fELF\x00\x00", 2, "binary"),
    "not UTF-8": (b"caf\xe9", 2, "UTF-8"),
    "too long for the model": (b"licence terms " * 9000, 2, "reads at most"),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_a_bad_document_is_one_clear_line(place, tmp_path, case):
    """Exit code, words, and nothing written."""
    data, code, words = DOCUMENTS[case]
    (tmp_path / "bad.txt").write_bytes(data)
    ran = place.run("publish", tmp_path / "bad.txt", "--model", place.model, "--origin", tmp_path / "origin")
    assert (code, True) == (ran.code, words in ran.complaint), ran.err
    assert len(ran.complaint.splitlines()) <= 2
    assert not (tmp_path / "origin").exists()


ORIGINS = {
    "a closed port": (["--origin", "s3://bucket/x", "--endpoint", "http://127.0.0.1:9"], 5, "127.0.0.1:9"),
    "a read-only origin": (["--origin", "http://127.0.0.1:9"], 2, "can only be read"),
    "an unknown scheme": (["--origin", "ftp://host/x"], 2, "ftp"),
    "a file": (["--origin", "/etc/hostname"], 2, "/etc/hostname"),
}


@pytest.mark.parametrize("case", ORIGINS)
def test_a_bad_origin_is_one_clear_line(place, case):
    """Unreachable, impossible, or not an origin at all."""
    options, code, words = ORIGINS[case]
    credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
    ran = place.run("publish", place.document, "--model", place.model, *options, **credentials)
    assert (code, True) == (ran.code, words in ran.complaint), ran.err
    assert len(ran.complaint.splitlines()) <= 2


def test_an_unreachable_edge_still_gets_an_answer(place):
    """For a reader, an edge that is down is a miss, not a failure."""
    ran = place.run(
        "ask", place.document, "Q?", "-m", place.model, "--edge", "http://127.0.0.1:9", "--max-tokens", "2", "--json"
    )
    assert (0, "unavailable") == (ran.code, ran.json["report"]["reason"])
    ran = place.run("verify", place.document, "-m", place.model, "--edge", "http://127.0.0.1:9")
    assert (5, True) == (ran.code, "cannot be reached" in ran.complaint)


def test_several_edges_are_given_by_options_or_by_a_variable(place, tmp_path):
    """One of the two is down, which no report mentions: the other serves everything."""
    from kvcdn.edge.launch import launch_edge

    with launch_edge(origin=str(place.origin), cache_dir=tmp_path / "cache") as edge:
        ask = ("ask", place.document, "Q?", "-m", place.model, "--max-tokens", "1", "--mode", "fetch", "--json")
        by_option = place.run(*ask, "--edge", "http://127.0.0.1:9", "--edge", edge.url)
        by_variable = place.run(*ask, KVCDN_EDGE=f"{edge.url}, http://127.0.0.1:9")
    for ran in (by_option, by_variable):
        assert (place.published["tokens"], None) == (ran.json["report"]["tokens_reused"], ran.json["report"]["reason"])
        assert {edge.url, "http://127.0.0.1:9"} == set(ran.json["report"]["source"].split(","))
    wrong = place.run(*ask, "--edge", f"{edge.url},/tmp")
    assert (2, True) == (wrong.code, "--origin" in wrong.complaint)


def damage(place, tmp_path, kind, position):
    """A copy of the origin with one byte of one object changed, and the key of that object."""
    origin = shutil.copytree(place.origin, tmp_path / "origin")
    key = next(info.key for info in FolderStore(origin).list("v1/") if f"/{kind}/" in info.key)
    data = bytearray((origin / key).read_bytes())
    data[position] ^= 1
    (origin / key).chmod(0o600)
    (origin / key).write_bytes(data)
    return origin, key


@pytest.mark.parametrize("position", [0, 100, 1300, -1])
def test_a_tampered_block_is_never_used(place, tmp_path, position):
    """Reading misses with the reason and answers; verifying fails with code 4; both name the block."""
    origin, key = damage(place, tmp_path, "blocks", position)
    ran = place.reading("ask", "--max-tokens", "2", origin=origin)
    assert (0, "corrupt") == (ran.code, ran.json["report"]["reason"])
    ran = place.reading("verify", origin=origin)
    assert (4, True) == (ran.code, key.rsplit("/", 1)[1] in ran.complaint)


@pytest.mark.parametrize("position", [0, 100, -1])
def test_a_tampered_manifest_is_code_4(place, tmp_path, position):
    """`inspect` and a republish refuse it by name; `ls` goes on with the others."""
    origin, key = damage(place, tmp_path, "manifests", position)
    ran = place.run("inspect", key, "--origin", origin)
    assert (4, True) == (ran.code, key.rsplit("/", 1)[1] in ran.complaint)
    ran = place.run("publish", place.document, "--model", place.model, "--origin", origin)
    assert (4, True) == (ran.code, key.rsplit("/", 1)[1] in ran.complaint)
    assert [] == place.run("ls", "--origin", origin, "--json").json["documents"]


def test_an_untrusted_publisher_is_refused(place, tmp_path):
    """Another user, who trusts nobody yet: a miss for `ask`, code 4 for `verify`, with the command that would trust."""
    stranger = tmp_path / "home"
    arguments = (place.document, "--model", place.model, "--origin", place.origin)
    ran = kvcdn("ask", arguments[0], "Q?", *arguments[1:], "--max-tokens", "2", "--json", home=stranger)
    assert (0, "untrusted") == (ran.code, ran.json["report"]["reason"])
    ran = kvcdn("verify", *arguments, home=stranger)
    assert (4, True) == (ran.code, "kvcdn keygen --trust ed25519:" in ran.complaint)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_code_5(place, tmp_path):
    """Permissions are the operator's business: say which folder."""
    (tmp_path / "origin").mkdir(mode=0o500)
    ran = place.run("publish", place.document, "--model", place.model, "--origin", tmp_path / "origin")
    assert 5 == ran.code


def test_a_failure_in_json_is_one_object_too(place, tmp_path):
    """Standard output stays parseable when something is wrong."""
    ran = place.run("inspect", "feed", "--origin", place.origin, "--json")
    assert (3, 3) == (ran.code, ran.json["exit_code"])


def test_a_wrong_token_is_told_from_a_missing_document(place, tmp_path):
    """An edge that wants a token: the right one works, a wrong one is a miss with the reason, and code 5 for `verify`."""
    from kvcdn.edge.launch import launch_edge

    with launch_edge(origin=str(place.origin), cache_dir=tmp_path / "cache", token="a-long-enough-token-of-ours") as edge:
        command = (
            "ask",
            place.document,
            "Q?",
            "-m",
            place.model,
            "--edge",
            edge.url,
            "--max-tokens",
            "1",
            "--json",
            "--mode",
            "fetch",
        )
        right = place.run(*command, KVCDN_TOKEN="a-long-enough-token-of-ours")
        wrong = place.run(*command, "--token", "wrong")
        verified = place.run("verify", place.document, "-m", place.model, "--edge", edge.url, "--token", "wrong")
    assert place.published["tokens"] == right.json["report"]["tokens_reused"]
    assert (0, "unavailable") == (wrong.code, wrong.json["report"]["reason"])
    assert (5, True) == (verified.code, "KVCDN_TOKEN" in verified.complaint)
    assert "wrong" not in wrong.json["report"]["detail"]


def test_a_settings_file_stands_for_options(place, tmp_path):
    """What a publisher says every time goes into a file; an option is stronger, and a wrong key is named."""
    config = tmp_path / "origin.toml"
    config.write_text(f'model = "{place.model}"\norigin = "{tmp_path / "from-file"}"\nlabel = "from the file"\n')
    ran = place.run("publish", place.document, "--config", config, "--origin", tmp_path / "from-option", "--json")
    assert (0, "published") == (ran.code, ran.json["status"])
    listed = place.run("ls", "--origin", tmp_path / "from-option", "--json").json["documents"]
    assert ["from the file"] == [document["label"] for document in listed]
    assert not (tmp_path / "from-file").exists()
    config.write_text("modle = 1\n")
    ran = place.run("publish", place.document, "--config", config)
    assert (2, True) == (ran.code, "modle is no setting" in ran.complaint)


def test_a_chat_that_is_all_there_has_no_reason(place, tmp_path):
    """The question behind the document is not something that could have been published."""
    origin = tmp_path / "origin"
    place.run("publish", place.document, "--model", place.model, "--origin", origin, "--chat")
    assert place.reading("ask", "--chat", origin=origin).json["report"]["reason"] is None
