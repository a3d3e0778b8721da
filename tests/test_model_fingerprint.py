"""Fingerprints: whatever may decide the KV changes them, nothing else does."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvcdn.errors import CorruptError, NotFoundError, UnsupportedModelError
from kvcdn.model.fingerprint import fingerprint_checkpoint
from kvcdn.model.load import bind_model, load_model
from kvcdn.paths import cache_dir


@pytest.fixture
def checkpoint(tiny_llama, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weight(folder):
    weights = load_file(folder / "model.safetensors")
    name = min(weights)
    weights[name] = weights[name].clone()
    weights[name].view(torch.int16).view(-1)[0] ^= 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


CHANGES = {
    "one bit of one weight": change_weight,
    "rope theta": lambda folder: change_config(folder, rope_parameters={"rope_theta": 10001.0, "rope_type": "default"}),
    "a norm's epsilon": lambda folder: change_config(folder, rms_norm_eps=2e-6),
    "a window": lambda folder: change_config(folder, sliding_window=128),
    "a key nobody has heard of": lambda folder: change_config(folder, secret_sauce=True),
    "an activation": lambda folder: change_config(folder, hidden_act="gelu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_may_decide_the_kv_changes_the_fingerprint(checkpoint, change):
    """A fine-tune, another rope, an unknown key: another fingerprint, hence other addresses."""
    before = fingerprint_checkpoint(checkpoint)
    CHANGES[change](checkpoint)
    assert before != fingerprint_checkpoint(checkpoint)


def shard(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"b-00001.safetensors": names[::2], "a-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SAMENESS = {
    "sharding and file names": shard,
    "the library's version": lambda folder: change_config(folder, transformers_version="9.9.9"),
    "how it generates": lambda folder: change_config(folder, temperature=0.3, use_cache=False, eos_token_id=7),
    "modification time": lambda folder: os.utime(folder / "model.safetensors", (1, 1)),
}


@pytest.mark.parametrize("change", SAMENESS)
def test_what_cannot_decide_the_kv_does_not(checkpoint, change):
    """Resharding or a new library is no reason for a miss."""
    before = fingerprint_checkpoint(checkpoint)
    SAMENESS[change](checkpoint)
    assert before == fingerprint_checkpoint(checkpoint)


def test_a_remembered_fingerprint_is_not_trusted_past_a_change(checkpoint):
    """The memory is keyed by the files' state; a damaged memory is ignored."""
    first = fingerprint_checkpoint(checkpoint)
    memory = cache_dir() / "fingerprints.json"
    assert first == fingerprint_checkpoint(checkpoint)
    memory.write_text("{broken")
    assert first == fingerprint_checkpoint(checkpoint)


def test_other_weight_formats_are_refused(checkpoint):
    """Pickled weights are never opened."""
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="not safetensors"):
        fingerprint_checkpoint(checkpoint)


def test_a_missing_shard_is_named(checkpoint):
    """An interrupted download is told from a finished one."""
    shard(checkpoint)
    (checkpoint / "a-00002.safetensors").unlink()
    with pytest.raises(NotFoundError, match="a-00002"):
        fingerprint_checkpoint(checkpoint)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"\x10" + bytes(7) + b"not json at all!"])
def test_a_broken_weights_file_ends_in_one_error(checkpoint, damage):
    """Empty, absurd or truncated files."""
    (checkpoint / "model.safetensors").write_bytes(damage)
    with pytest.raises(CorruptError):
        fingerprint_checkpoint(checkpoint)


def test_a_model_changed_when_loading_is_refused(tiny_llama):
    """An override that the checkpoint's files do not show would make the key lie."""
    loaded = load_model(str(tiny_llama))
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, rms_norm_eps=0.5).eval()
    with pytest.raises(UnsupportedModelError, match="rms_norm_eps"):
        bind_model(model, loaded.tokenizer)
