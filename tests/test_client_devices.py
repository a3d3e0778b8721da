"""Models on accelerators, and spread over several: each layer's cache lies where it computes, and answers are the same.

Without a GPU the devices are simulated (`support/accelerators.py`): placement, copies and arithmetic are real, streams are not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.tiny import tiny_checkpoint

KINDS = {"gemma3_text": 7, "qwen3_next": 1, "deepseek_v32": 3}
"""Windows, states beside attention, and latents with an indexer; layers that have keys."""

GPUS = torch.cuda.device_count()

one_gpu = pytest.mark.skipif(GPUS < 1, reason="there is no GPU here")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"a model is spread over two GPUs, and here are {GPUS}")


def ran(tmp_path: Path, what: str, devices: str) -> dict:
    """What `support/spread.py` found in a process of its own: devices are made known to torch for good."""
    program = Path(__file__).parent / "support" / "spread.py"
    paths = os.pathsep.join([str(program.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(program), what, str(tmp_path), devices],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "XDG_DATA_HOME": str(tmp_path / "data")},
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def require_same(found: dict, devices: str, keyed: int) -> None:
    """All that a client and a publisher do with the spread model comes to what the model on one device does."""
    first, second = (f"{devices}:{number}" for number in range(2))
    assert {first, second} == set(found["devices"])
    assert keyed == len(found["lies on"])
    assert set(found["lies on"]) <= {first, second}
    assert [True] * 3 == [found["identity"], found["audited"], found["rows"]]
    alone, end = found["alone"], found["end"]
    for way in ("fetch", "both", "batch", "stream", "published"):
        assert [[alone, end, ""]] * len(found[way]) == found[way], way
    assert [found["one pass"]] * 2 == [tokens for tokens, *_ in found["compute"]]
    assert [True, True, True] == found["verified"]
    if "local" in found:
        assert ([[alone, end, ""]], end) == (found["local"], found["from here"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_spread_answers_the_same(tmp_path, kind):
    """Fetched, raced, batched, streamed, audited, mapped from the host's store, verified, and published."""
    require_same(ran(tmp_path, kind, "sim"), "sim", KINDS[kind])


@two_gpus
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_spread_over_gpus_answers_the_same(tmp_path, kind):
    require_same(ran(tmp_path, kind, "cuda"), "cuda", KINDS[kind])


def require_same_rows(found: dict) -> None:
    for precisions in found.values():
        assert {precision: [200, 200, True, ""] for precision in ("int8", "int4", "tc-low", "int4+")} == precisions


def test_numbers_are_computed_on_the_device_as_on_the_host(tmp_path):
    """Of every lossy precision, and refined, all rows are the same to the bit, on one device and on several."""
    found = ran(tmp_path, "lossy", "sim")
    assert ["one", "spread"] == list(found)
    require_same_rows(found)


@one_gpu
def test_numbers_are_computed_on_a_gpu_as_on_the_host(tmp_path):
    require_same_rows(ran(tmp_path, "lossy", "cuda"))


def test_each_layer_is_where_the_hooks_have_it_compute(tmp_path):
    """Offloaded weights are brought to one device; a map of one device is no spreading."""
    from accelerate import dispatch_model

    from kvcdn.model.load import load_model
    from kvcdn.model.place import is_spread, layer_devices

    loaded = load_model(str(tiny_checkpoint(tmp_path)))
    layout = loaded.identity.layout
    for places in ({"": "cpu"}, {"model": "cpu", "lm_head": "disk"}):
        model = dispatch_model(loaded.model, places, offload_dir=str(tmp_path / "offloaded"), force_hooks=True)
        assert not is_spread(model)
        assert (torch.device("cpu"),) * len(layout.layers) == layer_devices(model, layout)
