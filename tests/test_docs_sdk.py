"""The examples of docs/sdk.md run, in their order, over HTTP, with a tiny model in the place of the documented one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvcdn.client import Answer, Client
from kvcdn.keyring import trust_publisher
from support.published import publish_text
from support.slow import remember_slow_models
from support.tiny import tiny_checkpoint
from support.web import running_web

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "sdk.md"

ELSEWHERE = ("10.0.0.7", "qwen3-4b", "PeftModel", "/scratch/kv")
"""What marks an example that needs machines, models or disks of its own; adapters and local stores have tests of their own."""


def examples():
    """Each Python block with the heading above it."""
    text = DOCUMENT.read_text("utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield re.findall(r"^## (.+)$", text[: match.start()], re.MULTILINE)[-1], match[1]


def test_every_example_runs(tmp_path, monkeypatch, capsys):
    """None raises, and what they print is there."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    published = publish_text(tiny_checkpoint(tmp_path / "model", dtype=torch.float32), tokens=1300)
    trust_publisher(published.key.public, "the publisher")
    remember_slow_models(monkeypatch)
    Path("handbook.txt").write_text(published.text)
    with running_web(published.store) as web:
        ours = {"http://127.0.0.1:8400": web.url, "smollm2-135m": str(tmp_path / "model")}
        tools = [{"type": "function", "function": {"name": "search", "description": "Looks up.", "parameters": {}}}]
        names = {"folder": str(tmp_path / "model"), "source": web.url, "tools": tools}
        ran = []
        for heading, code in examples():
            if any(mark in code for mark in ELSEWHERE):
                continue
            for documented, here in ours.items():
                code = code.replace(documented, here)  # noqa: PLW2901 - the same example, here
            # Only what is refined behind an answer needs a local store, which tests have none of.
            monkeypatch.setenv("KVCDN_LOCAL", str(tmp_path / "local") if "progressive" in code else "0")
            exec(compile(code, f"{DOCUMENT.name}: {heading}", "exec"), names)
            ran.append(heading)
            if len(ran) == 1:
                # The first example closes its client; the others go on from one that is open.
                assert (1300, None) == (names["answer"].report.tokens_reused, names["answer"].report.reason)
                names["client"] = Client.load(ours["smollm2-135m"], web.url)
            assert isinstance(names["answer"], Answer)
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "1,300 of" in out
    assert {"A question on a document", "Piece by piece", "Conversations", "Coroutines", "Canary and audit"} <= set(ran)


@pytest.mark.parametrize("mark", ELSEWHERE)
def test_what_is_left_out_is_still_in_the_document(mark):
    """So that the list does not outlive its reasons."""
    assert any(mark in code for _, code in examples())
