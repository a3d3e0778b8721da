"""`kvcdn warm` on a document: what it has an edge fetch is what `kvcdn publish` published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcdn.stores.folder import FolderStore
from support.command import kvcdn
from support.edge_process import edge_in_thread
from support.tiny import TEXT, tiny_checkpoint


@pytest.mark.parametrize("options", [[], ["--chat"], ["--namespace", "ours"]], ids=["text", "chat", "namespace"])
def test_a_document_is_warmed_by_its_text(tmp_path: Path, options: list[str]) -> None:
    """In the form and the namespace in which it was published, and in no other."""
    home, model, document = tmp_path / "home", tiny_checkpoint(tmp_path / "model", dtype=torch.float32), tmp_path / "doc.txt"
    document.write_text(TEXT, encoding="utf-8")
    assert 0 == kvcdn("keygen", home=home).code
    assert 0 == kvcdn("keygen", "--namespace", "ours", home=home).code
    origin = tmp_path / "origin"
    origin.mkdir()
    published = kvcdn("publish", document, "--model", model, "--origin", origin, *options, "--json", home=home)
    assert 0 == published.code, published.err
    with edge_in_thread(FolderStore(origin), tmp_path / "cache", admin_listen="127.0.0.1:0") as edge:
        where = ["--model", model, "--edge", edge.admin_url, "--json"]
        told = kvcdn("warm", document, *where, *options, home=home)
        assert 0 == told.code, told.err
        assert len(edge.cache) == told.json["objects"] >= 2
        assert told.json["bytes"] == sum(edge.cache.size_of(key) or 0 for key in edge.cache.snapshot())
        assert 3 == kvcdn("warm", document, *where, *([] if options else ["--namespace", "ours"]), home=home).code
