"""Fingerprints of models and adapters from their files (FORMAT.md 2.1, 2.2), once per file state and remembered. No torch.

Files, because engines rename and fuse tensors in memory while the checkpoint is the same everywhere; every weight, because
a name or a revision says nothing about what was loaded.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcdn import canonical
from kvcdn.digest import Digest, derive, hash_bytes
from kvcdn.errors import CorruptError, NotFoundError, UnsupportedModelError
from kvcdn.model.remembered import Remembered

_IRRELEVANT = frozenset(
    [
        "_name_or_path",
        "_model_name_or_path",
        "_commit_hash",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "task_specific_params",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "return_dict_in_generate",
        "tokenizer_class",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "initializer_range",
        "auto_map",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "do_sample",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "max_length",
        "min_length",
        "length_penalty",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "diversity_penalty",
        "early_stopping",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "prefix",
        "output_scores",
        "chunk_size_feed_forward",
        "pruned_heads",
    ]
)
"""Configuration keys that cannot decide the KV: FORMAT.md 2.2 is the list. What is not here counts."""

_ADAPTER_IRRELEVANT = frozenset(
    ["auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision", "task_type"]
)
"""Keys of an adapter's configuration that cannot decide the KV (FORMAT.md 2.1)."""

_ADAPTER_SETS = frozenset(["exclude_modules", "modules_to_save", "target_modules"])
"""Keys whose arrays peft writes in any order: they are sets."""

_ADAPTER_REFUSED = ("alora_invocation_tokens", "arrow_config", "layer_replication", "megatron_config")
"""Variants of LoRA whose KV hangs on more than weights and the tokens before."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes in which models run, by safetensors' names."""

_MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
"""The limit safetensors itself sets."""


def fingerprint_checkpoint(folder: Path) -> Digest:
    """The fingerprint of the checkpoint in `folder`; 32 bytes.

    Raises NotFoundError without weights, UnsupportedModelError for weights that are not safetensors, CorruptError for
    broken files.
    """
    files = [folder / "config.json", *weight_files(folder)]
    return _once(files, lambda: _fingerprint("kvcdn v1 model fingerprint", relevant_config(read_config(folder)), files[1:]))


def fingerprint_adapter(folder: Path) -> Digest:
    """The digest of the LoRA adapter in `folder`, as peft saves it; 32 bytes.

    Raises NotFoundError, CorruptError, or UnsupportedModelError for what is not LoRA, or not safetensors.
    """
    files = [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS]
    config = read_adapter_config(folder)
    if not files[1].is_file():
        raise UnsupportedModelError(
            f"{folder} has no {ADAPTER_WEIGHTS}, and other formats are not read",
            hint="save the adapter with peft: model.save_pretrained(folder)",
        )
    return _once(files, lambda: _fingerprint("kvcdn v1 adapter", relevant_adapter_config(config), files[1:]))


def adapted_fingerprint(base: Digest, applied: Sequence[tuple[Digest, str, str]]) -> Digest:
    """The fingerprint of a model that applies adapters: of each, in order, its digest, `active` or `merged`, and its dtype."""
    listed = canonical.encode([[str(digest), how, dtype] for digest, how, dtype in applied])
    return Digest(derive("kvcdn v1 adapted fingerprint", base + listed))


def _once(files: Sequence[Path], compute: Callable[[], Digest]) -> Digest:
    """What `compute` makes of `files`, which all lie in one folder, or what it made when they were last in this state."""
    state, key = _file_state(files), str(files[0].resolve().parent)
    remembered = Remembered("fingerprints")
    entry = remembered.get(key)
    if isinstance(entry, dict) and entry.get("state") == state:
        with suppress(CorruptError):
            return Digest.parse(entry.get("fingerprint"), "remembered fingerprint")
    computed = compute()
    if _file_state(files) == state:
        remembered.put(key, {"state": state, "fingerprint": str(computed)})
    return computed


def remembered_checkpoints() -> dict[Digest, list[Path]]:
    """The checkpoints whose fingerprints this machine remembers and whose folders are still there. Never raises."""
    found: dict[Digest, list[Path]] = {}
    for folder, entry in Remembered("fingerprints").items():
        fingerprint = Digest.read(entry.get("fingerprint")) if isinstance(entry, dict) else None
        if fingerprint is not None and (Path(folder) / "config.json").is_file():
            found.setdefault(fingerprint, []).append(Path(folder))
    return found


def config_differences(ours: Path, theirs: Path) -> list[str]:
    """The configuration keys that may decide the KV and in which two checkpoints differ, sorted; `a.b` for nested ones."""
    left, right = (flat_config(relevant_config(read_config(folder))) for folder in (ours, theirs))
    return sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))


def flat_config(value: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration's values by the path to them: `a.b` for nested ones."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        name: item for key in value for name, item in flat_config(value[key], f"{prefix}.{key}" if prefix else str(key)).items()
    }


def weights_dtype(folder: Path) -> str:
    """The dtype of the first floating-point tensor of a checkpoint, in torch's words. Raises as `fingerprint_checkpoint`."""
    for path in weight_files(folder):
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            for entry in _read_safetensors_header(view, path):
                if entry[1] in _FLOATS:
                    return _FLOATS[entry[1]]
    raise UnsupportedModelError(f"the weights in {folder} are none of {', '.join(_FLOATS.values())}")


def read_config(folder: Path) -> dict[str, Any]:
    """The raw config.json of a checkpoint. Raises NotFoundError or CorruptError."""
    return _read_json(folder / "config.json", "give the folder of a transformers checkpoint")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The raw configuration of a LoRA adapter.

    Raises NotFoundError, CorruptError, or UnsupportedModelError for another method of peft.
    """
    config = _read_json(folder / ADAPTER_CONFIG, "give the folder of an adapter that peft saved")
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"the adapter {folder} is {config.get('peft_type')!r}; of peft only LORA is supported")
    for key in _ADAPTER_REFUSED:
        if config.get(key):
            raise UnsupportedModelError(f"the adapter {folder} sets {key}, a variant of LoRA that is not supported")
    return config


def relevant_adapter_config(config: Mapping[str, Any]) -> Any:
    """`config` without the keys that cannot decide the KV, and without those that are null, in the form of FORMAT.md 2.1."""
    kept = {key: value for key, value in config.items() if key not in _ADAPTER_IRRELEVANT and value is not None}
    for key in _ADAPTER_SETS & kept.keys():
        if isinstance(kept[key], list):
            kept[key] = sorted(kept[key], key=str)
    return _exact(kept)


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"{path.parent} has no {path.name}", hint=hint) from None
    except (ValueError, OSError) as error:
        raise CorruptError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CorruptError(f"{path} is not a JSON object")
    return config


def relevant_config(config: Any) -> Any:
    """`config` without the keys that cannot decide the KV, numbers in the form of FORMAT.md 2.2."""
    return _exact(config, _IRRELEVANT)


def _exact(config: Any, without: frozenset[str] = frozenset()) -> Any:
    if isinstance(config, dict):
        return {key: _exact(value, without) for key, value in config.items() if key not in without}
    if isinstance(config, list):
        return [_exact(value, without) for value in config]
    if isinstance(config, float):
        return "f:" + (repr(config) if math.isfinite(config) else str(config))
    if isinstance(config, int) and not isinstance(config, bool) and abs(config) > canonical.MAX_INTEGER:
        return f"i:{config}"
    return config


def _fingerprint(context: str, config: Any, weights: Sequence[Path]) -> Digest:
    encoded = canonical.encode(config)
    return Digest(derive(context, struct.pack("<I", len(encoded)) + encoded + _tensor_lines(weights)))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises NotFoundError, CorruptError or UnsupportedModelError."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"{index} cannot be read: {error!r}") from None
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise CorruptError(f"{index} names files outside its folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise NotFoundError(f"{folder} lacks {missing[0]}, which its index names", hint="download the checkpoint again")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.gguf")) or any(folder.glob("*.pt")):
        raise UnsupportedModelError(
            f"the weights in {folder} are not safetensors, and other formats are not read",
            hint="convert once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(new_folder)",
        )
    raise NotFoundError(f"{folder} has no model.safetensors", hint="give the folder of a transformers checkpoint")


def _tensor_lines(files: Sequence[Path]) -> bytes:
    lines: dict[str, bytes] = {}
    for path in files:
        for name, line in _hash_tensors(path):
            if name in lines:
                raise CorruptError(f"{path} repeats the tensor {name!r}")
            lines[name] = line
    return b"".join(lines[name] for name in sorted(lines, key=lambda name: name.encode("utf-8")))


def _hash_tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    if not path.stat().st_size:
        raise CorruptError(f"{path} is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        for name, dtype, shape, start, end in _read_safetensors_header(view, path):
            with view[start:end] as data:
                digest = hash_bytes(data, parallel=True)
            yield name, canonical.encode([name, dtype, shape, str(digest)]) + b"\n"


def _read_safetensors_header(view: memoryview, path: Path) -> list[tuple[str, str, list[int], int, int]]:
    try:
        (length,) = struct.unpack_from("<Q", view)
        if length > min(_MAX_SAFETENSORS_HEADER_BYTES, len(view) - 8):
            raise ValueError("header longer than the file")
        header = json.loads(bytes(view[8 : 8 + length]))
        header.pop("__metadata__", None)
        base = 8 + int(length)
        entries = []
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= len(view) - base:
                raise ValueError(f"tensor {name!r} lies outside the file")
            entries.append((name, entry["dtype"], entry["shape"], base + start, base + end))
        return entries
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptError(f"{path} is not a readable safetensors file: {error}") from None


def _file_state(files: Sequence[Path]) -> list[list[int | str]]:
    stats = [(path.name, path.stat()) for path in files]
    return [[name, s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats]
