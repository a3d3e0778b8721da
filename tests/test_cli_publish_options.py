"""`kvcdn publish` and its kin: an option that would do nothing is refused, and what was not done is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command import kvcdn
from support.tiny import TEXT

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(TEXT[:2000], "utf-8")
    return path


@pytest.mark.parametrize(
    "option",
    [
        ("--origin", "/tmp/origin"),
        ("--endpoint", NOWHERE),
        ("--key", "key.pem"),
        ("--trust", "trust"),
        ("--config", "origin.toml"),
        ("--device", "cpu"),
        ("--adapter", "adapter"),
        ("--usage", "usage.sqlite"),
        ("--dry-run",),
    ],
    ids=lambda option: option[0],
)
def test_a_service_is_not_told_what_it_does_not_read(document, option):
    """Least of all --dry-run, with which nothing may be published."""
    ran = kvcdn("publish", document, "--service", NOWHERE, *option)
    assert 2 == ran.code
    assert f"{option[0]} says nothing to a prefill service" in ran.complaint


def test_variables_that_are_for_other_commands_are_no_options(document):
    """An origin in the environment is that of this machine's other commands."""
    assert 5 == kvcdn("publish", document, "--service", NOWHERE, KVCDN_ORIGIN="/tmp/origin", KVCDN_USAGE="u.sqlite").code


@pytest.mark.parametrize("option", [("--priority", "3"), ("--window", "22:00-06:00"), ("--no-wait",)], ids=lambda one: one[0])
def test_what_only_a_service_knows_needs_one(document, option):
    """It would be ignored."""
    ran = kvcdn("publish", document, *option)
    assert 2 == ran.code
    assert f"{option[0]} goes with --service" in ran.complaint


def test_what_a_published_document_keeps_is_said(document, tiny_llama, tmp_path):
    """Its label, and an expiry that is late enough; and where a precision was too coarse, which one it is."""
    words = ("publish", document, "--model", tiny_llama, "--origin", tmp_path / "origin")
    assert "stays" not in kvcdn(*words, "--label", "one", "--days", "30").out
    again = kvcdn(*words, "--label", "other", "--days", "20").out
    assert "stays      its label, 'one' and its expiry, 2" in again
    assert "to change that, kvcdn rm " in again
    longer = kvcdn(*words, "--label", "other", "--days", "60").out
    assert ("renewed" in longer, "stays" in longer) == (True, False)
    assert "its label, 'other' and its expiry" in kvcdn(*words, "--label", "one", "--days", "58").out
    assert "renewed" in kvcdn(*words).out
    assert "stays      that it never expires" in kvcdn(*words, "--label", "other", "--days", "60").out
    finer = kvcdn(*words, "--precision", "int8", "--min-quality", "0").out
    assert "finer      int8 is not within --min-quality 0, so this is native" in finer


def test_a_document_that_is_not_published_is_named_by_its_own_name(document, tiny_llama, tmp_path):
    """Not by the key that its tokens would have."""
    ran = kvcdn("show", document, "--model", tiny_llama, "--precision", "int8", "--origin", tmp_path)
    assert 3 == ran.code
    assert f"{document} is not published at" in ran.complaint
    assert "in int8, namespace public" in ran.complaint
    assert "manifests/" not in ran.complaint


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("revoke", "--renew", "abcd"), 2, "--renew changes nothing but the date"),
        (("revoke", "--renew", "--undo"), 2, "--renew changes nothing but the date"),
        (("revoke",), 2, "there is nothing to revoke"),
        (("gc",), 0, "nothing is published at"),
        (("fsck",), 0, "nothing is published at"),
        (("ls",), 0, "nothing is published at"),
        (("ls", "--label", "x"), 0, "is of that kind"),
        (("ls", "--publisher", "nobody"), 0, "is of that kind"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_origin_without_documents(tmp_path, words, code, said):
    """Is told as one, as a name is easily mistyped; and what was asked for is told apart from what is there."""
    ran = kvcdn(*words, "--origin", tmp_path / "origin")
    assert code == ran.code
    assert said in ran.err


def test_copies_that_cannot_be(tmp_path):
    """Onto the origin itself, of nothing, or with a key that is not there, which is told before anything is copied."""
    one, other = tmp_path / "one", tmp_path / "other"
    assert 2 == kvcdn("cp", one, one).code
    ran = kvcdn("cp", one, other)
    assert (0, True) == (ran.code, "nothing is published at" in ran.err)
    ran = kvcdn("cp", one, other, "--key", tmp_path / "nokey")
    assert 3 == ran.code
    assert "there is no signing key" in ran.complaint
