"""Identities without weights: what an empty model tells is what the loaded one tells."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from kvcdn.errors import KvcdnError, NotFoundError, UnsupportedModelError
from kvcdn.model.fingerprint import config_differences, fingerprint_checkpoint, remembered_checkpoints, weights_dtype
from kvcdn.model.identity import identify_model, layout_dtype
from kvcdn.model.load import load_model
from kvcdn.model.speed import prefill_speed_of, prefill_speeds, remember_prefill
from support.tiny import tiny_checkpoint

KINDS = ("gpt2", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "llama4_text", "gemma3n_text")
"""Absolute positions, experts, latents, windows, chunks, shared layers."""

DTYPES = {"qwen3_moe": torch.bfloat16, "gpt_oss": torch.bfloat16, "llama4_text": torch.float32}
"""Others in float16, in which experts cannot run without weights."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_model_has_the_identity_of_the_loaded_one(tmp_path, kind):
    """Fingerprint, layout and name, for every kind of layer."""
    folder = str(tiny_checkpoint(tmp_path, kind, dtype=DTYPES.get(kind, torch.float16)))
    known = identify_model(folder)
    assert load_model(folder).identity == known.identity
    assert DTYPES.get(kind, torch.float16) == layout_dtype(known.identity)


def test_a_checkpoint_that_does_not_say_its_dtype_has_that_of_its_weights(tiny_llama, tmp_path):
    """As loading with dtype="auto" has it."""
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert "bfloat16" == weights_dtype(folder)
    assert load_model(str(folder)).identity == identify_model(str(folder)).identity


def test_what_cannot_be_identified_is_refused_by_name(tiny_llama, tmp_path):
    """No such model, no weights, an unknown architecture: a KvcdnError."""
    with pytest.raises(NotFoundError):
        identify_model(str(tmp_path / "nothing"))
    bare = shutil.copytree(tiny_llama, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(KvcdnError):
        identify_model(str(bare))
    odd = shutil.copytree(tiny_llama, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "model_type": "odd"}))
    with pytest.raises(UnsupportedModelError):
        identify_model(str(odd))
    (odd / "config.json").write_text(json.dumps({**config, "num_attention_heads": "many"}))
    with pytest.raises(KvcdnError):
        identify_model(str(odd))


def test_checkpoints_are_remembered_by_fingerprint(tiny_llama, tmp_path):
    """Copies of one model together; folders that are gone are forgotten; differences are keys of the configuration."""
    copy, other = shutil.copytree(tiny_llama, tmp_path / "copy"), shutil.copytree(tiny_llama, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.25, "use_cache": False}))
    for folder in (tiny_llama, copy, other):
        fingerprint_checkpoint(folder)
    same = fingerprint_checkpoint(tiny_llama)
    assert {tiny_llama.resolve(), copy.resolve()} == set(remembered_checkpoints()[same])
    assert ["rms_norm_eps"] == config_differences(tiny_llama, other)
    assert [] == config_differences(tiny_llama, copy)
    shutil.rmtree(copy)
    assert [tiny_llama.resolve()] == remembered_checkpoints()[same]


def test_the_speed_of_a_model_is_known_without_loading_it(tiny_llama):
    """What the loaded model measured is found by its identity."""
    loaded, known = load_model(str(tiny_llama)), identify_model(str(tiny_llama))
    assert prefill_speed_of(known.identity.tag, layout_dtype(known.identity)) is None
    remember_prefill(loaded, 1000, 2.0)
    found = prefill_speed_of(known.identity.tag, layout_dtype(known.identity))
    assert prefill_speeds(loaded).prompts == found
    assert 500.0 == pytest.approx(1 / found.base)
