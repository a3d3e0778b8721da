"""Devices that a person names: what is none, and what is not here, is said in a line before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from kvcdn.client import Client
from kvcdn.client.loading import room
from kvcdn.client.loading.report import MissReason
from kvcdn.errors import UnsupportedModelError, UsageError
from kvcdn.model.load import bind_model, load_model, require_device
from support.command import kvcdn
from support.published import asked, publish_text
from support.tiny import tiny_checkpoint

COUNT = torch.cuda.device_count()


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "cuda:-1"])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(UsageError, match="is no device") as raised:
        require_device(device)
    assert "cpu, cuda and cuda:1" in str(raised.value.hint)


def test_a_gpu_that_is_not_here_is_refused_with_what_is():
    """By its number, or because there is none at all."""
    with pytest.raises(UsageError, match=f"no device cuda:{COUNT}") as raised:
        require_device(f"cuda:{COUNT}")
    assert ("cuda:0" if COUNT else "--device cpu") in str(raised.value.hint)
    require_device("cpu")


def test_the_model_is_not_looked_for_first():
    """Who names a wrong device and a wrong model hears of the device at once."""
    with pytest.raises(UsageError, match="no device"):
        load_model("no such model", f"cuda:{COUNT}")


def test_a_person_is_told_in_one_line(tmp_path):
    text = tmp_path / "text"
    text.write_text("A text.", "utf-8")
    done = kvcdn("publish", str(text), "--model", "any", "--origin", str(tmp_path), "--device", f"cuda:{COUNT}")
    assert 2 == done.code
    assert "no device" in done.err
    assert 2 >= len(done.err.splitlines())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("part", ["the model", "its body", "a wrapper"])
def test_a_compiled_model_is_refused(tmp_path, part):
    """By name, when it is bound and when it is compiled later; nothing is compiled until it runs."""
    loaded = load_model(str(tiny_checkpoint(tmp_path)))
    model = loaded.model
    if part == "a wrapper":
        model = torch.compile(model)
    else:
        (model if part == "the model" else model.model).compile()
        with pytest.raises(UnsupportedModelError, match=r"torch\.compile is not supported"):
            loaded.current()
    with pytest.raises(UnsupportedModelError, match=r"torch\.compile is not supported"):
        bind_model(model, loaded.tokenizer, str(tmp_path))


def test_a_device_that_is_full_is_a_miss(tmp_path, monkeypatch):
    """Memory for the cache is asked for before anything is fetched; without it the model is left to answer by itself."""
    published = publish_text(tiny_checkpoint(tmp_path, dtype=torch.float32), tokens=200)

    def full(*_args, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    expected = published.client().generate(asked(published), max_new_tokens=4, do_sample=False).token_ids
    monkeypatch.setattr(room, "make_layer", full)
    with published.client(local_store=None) as client:
        assert isinstance(client, Client)
        answer = client.generate(asked(published), max_new_tokens=4, do_sample=False)
    assert expected == answer.token_ids
    assert (0, MissReason.UNAVAILABLE) == (answer.report.tokens_reused, answer.report.reason)
    assert "no room for a cache" in answer.report.detail
