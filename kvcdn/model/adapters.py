"""LoRA adapters (peft): which ones a model in memory applies, and that they are those of the folders it was given.

peft replaces layers in place. What a pass computes then hangs on the state of every one of these layers: disabled, merged
into the weights, or active, alone or several in an order. That state is read anew for every prompt, since it may change at
any time; the adapters' tensors and settings are compared with their files whenever it has. FORMAT.md 2.1 makes a
fingerprint of it. peft itself is imported only where a model has such layers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvcdn.digest import Digest
from kvcdn.errors import UnsupportedModelError, UsageError
from kvcdn.model.checkpoint import first_line
from kvcdn.model.fingerprint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapted_fingerprint,
    fingerprint_adapter,
    read_adapter_config,
    relevant_adapter_config,
)
from kvcdn.model.layers import DTYPE_NAMES

_RELOAD = "load the base model and the adapter anew"

_FILE_PREFIX = "base_model.model."
"""What peft puts before every name in an adapter's file."""


@dataclass(frozen=True)
class AdapterState:
    """What the layers of a model apply: adapters in order, and whether they are merged into the weights.

    `stamp` changes whenever their tensors are replaced, or changed by torch's own operations.
    """

    names: tuple[str, ...] = ()
    merged: bool = False
    stamp: tuple[tuple[int, int], ...] = field(default=(), repr=False)


def unwrapped(model: Any) -> Any:
    """The transformers model inside a model of peft; whatever is not LoRA stays as it is, to be refused."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    if any(config.peft_type != peft.PeftType.LORA for config in model.peft_config.values()):
        return model
    return model.get_base_model()


def attach_adapters(model: Any, folders: Sequence[Path]) -> dict[str, Path]:
    """Loads the adapters in `folders` into `model`, in place, and activates them in this order. Returns their names.

    Raises UsageError without peft, NotFoundError, CorruptError or UnsupportedModelError.
    """
    if not folders:
        return {}
    for folder in folders:
        # It comes first: it refuses what is not read here before anything loads it.
        fingerprint_adapter(folder)
    try:
        from peft import PeftModel  # noqa: PLC0415 - an extra
    except ImportError:
        raise UsageError("adapters need the package peft", hint="pip install 'kvcdn[adapters]'") from None
    names = {f"kvcdn{index}": folder for index, folder in enumerate(folders)}
    wrapper: Any = None
    for name, folder in names.items():
        try:
            if wrapper is None:
                wrapper = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
            else:
                wrapper.load_adapter(str(folder), adapter_name=name)
        except (ValueError, TypeError, KeyError, RuntimeError, OSError, AttributeError) as error:
            raise UnsupportedModelError(f"peft cannot load the adapter {folder}: {first_line(error)}") from None
    try:
        wrapper.base_model.set_adapter(list(names))
    except ValueError as error:
        raise UnsupportedModelError(f"these adapters cannot be active together: {first_line(error)}") from None
    model.eval()
    return names


def adapter_state(model: Any) -> AdapterState:
    """What `model` applies now. Raises UnsupportedModelError for what a fingerprint cannot tell, naming it."""
    layers = list(_adapted_layers(model))
    if not layers:
        return AdapterState()
    effective = [_effective(name, layer, model) for name, layer in layers]
    if any("adapter_names" in getattr(hook, "keywords", ()) for _, layer in layers for hook in _hooks(layer)):
        raise UnsupportedModelError(
            "adapter_names= gives rows adapters of their own", hint="activate adapters for the whole model"
        )
    merged = {is_merged for _, is_merged in effective if is_merged is not None}
    if len(merged) > 1:
        raise UnsupportedModelError("adapters are merged into some layers and not into others", hint=_RELOAD)
    order: list[str] = max((names for names, _ in effective), key=len)
    for (name, layer), (names, _) in zip(layers, effective, strict=True):
        if names != [adapter for adapter in order if adapter in _available(layer)]:
            raise UnsupportedModelError(
                f"{name} applies the adapters {names}, other layers {order}", hint="activate adapters for the whole model"
            )
    stamp = [
        (tensor.data_ptr(), tensor._version)  # noqa: SLF001 - torch has no public name for it
        for _, layer in layers
        for name, tensor in layer.named_parameters()
        if "lora_" in name or "modules_to_save" in name
    ]
    return AdapterState(tuple(order), bool(order) and merged == {True}, tuple(stamp))


def bind_adapters(model: Any, state: AdapterState, base: Digest, folders: Mapping[str, Path]) -> Digest:
    """The fingerprint of `model`, whose checkpoint has the fingerprint `base`, with the adapters that `state` names.

    Raises UnsupportedModelError where one is not what its folder in `folders` holds.
    """
    applied = []
    for name in state.names:
        folder = folders.get(name)
        if folder is None:
            raise UnsupportedModelError(
                f"the model applies the adapter {name!r}, and nothing says which files it was loaded from",
                hint=f"give its folder: adapters={{{name!r}: folder}}, or --adapter on the command line",
            )
        digest = fingerprint_adapter(folder)
        _require_same_settings(model, name, folder)
        applied.append((digest, "merged" if state.merged else "active", _require_same_tensors(model, name, folder)))
    return adapted_fingerprint(base, applied) if applied else base


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    if "peft" not in sys.modules:
        return
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415 - loaded already
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper  # noqa: PLC0415

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer | ModulesToSaveWrapper):
            yield name, module
        elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise UnsupportedModelError(
                f"{name} is a {type(module).__name__} of peft; of its methods only LoRA is supported",
                hint="merge the adapter (merge_and_unload) and save the result as a checkpoint of its own",
            )


def _hooks(layer: Any) -> list[Any]:
    """What runs before `layer`: with `adapter_names=` peft has it told there which adapters each row has, for one pass."""
    return list(layer._forward_pre_hooks.values())  # noqa: SLF001 - torch has no other way to see them


def _available(layer: Any) -> set[str]:
    """The adapters that `layer` has."""
    return set(layer._get_available_adapters())  # noqa: SLF001 - the one list that LoRA in linear layers and embeddings share


def _effective(name: str, layer: Any, model: Any) -> tuple[list[str], bool | None]:
    """The adapters that `layer` applies, and whether they are merged; None where that says nothing."""
    if layer.disable_adapters:
        if layer.merged_adapters:
            # At the next pass peft subtracts what it added, which leaves other bits than were there.
            raise UnsupportedModelError(f"adapters merged into {name} are disabled", hint=_RELOAD)
        return [], None
    merged = list(layer.merged_adapters)
    names = merged or [adapter for adapter in layer.active_adapters if adapter in _available(layer)]
    for adapter in names:
        _require_scale(name, layer, adapter, model)
    return names, bool(merged) if names and hasattr(layer, "scaling") else None


def _require_scale(name: str, layer: Any, adapter: str, model: Any) -> None:
    config = _config(model, adapter)
    if config.peft_type != "LORA":
        raise UnsupportedModelError(f"the adapter {adapter!r} is {config.peft_type}; of peft only LoRA is supported")
    if not hasattr(layer, "scaling"):
        return
    rank = layer.r[adapter]
    expected = layer.lora_alpha[adapter] / (math.sqrt(rank) if config.use_rslora else rank)
    if layer.scaling[adapter] != expected:
        raise UnsupportedModelError(
            f"{name} scales the adapter {adapter!r} by {layer.scaling[adapter]}, its configuration says {expected}",
            hint="save the adapter with the scale you want, or set it back",
        )


def _config(model: Any, adapter: str) -> Any:
    config = (getattr(model, "peft_config", None) or {}).get(adapter)
    if config is None:
        raise UnsupportedModelError(f"the model has layers of the adapter {adapter!r} and no configuration of it", hint=_RELOAD)
    return config


def _require_same_settings(model: Any, adapter: str, folder: Path) -> None:
    stored = relevant_adapter_config(read_adapter_config(folder))
    # As peft would write it; sets and enumerations are its own.
    written = json.loads(json.dumps(_config(model, adapter).to_dict(), default=list))
    in_memory = relevant_adapter_config(written)
    for key, value in stored.items():
        if in_memory.get(key) != value:
            raise UnsupportedModelError(
                f"the adapter {adapter!r} in memory has {key} = {in_memory.get(key)!r}, {folder / ADAPTER_CONFIG} {value!r}",
                hint=_RELOAD,
            )


def _require_same_tensors(model: Any, adapter: str, folder: Path) -> str:
    """The dtype in which the adapter's matrices run."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - loaded already

    held = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    held = {name.removeprefix(_FILE_PREFIX): tensor for name, tensor in held.items()}
    whole = model.state_dict()
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        stored = {name.removeprefix(_FILE_PREFIX): name for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        differing = sorted(held.keys() - stored.keys())
        for name, in_file in stored.items():
            tensor = held.get(name, whole.get(name))
            if tensor is None or not torch.equal(file.get_tensor(in_file).to(tensor.dtype), tensor.detach().cpu()):
                differing.append(name)
    if differing:
        raise UnsupportedModelError(
            f"the adapter {adapter!r} in memory is not the one in {folder}: {differing[0]} differs",
            hint="save the adapter, or give the folder it was loaded from",
        )
    dtypes = {tensor.dtype for name, tensor in held.items() if "lora_" in name}
    if len(dtypes) != 1 or not dtypes <= DTYPE_NAMES.keys():
        raise UnsupportedModelError(f"the adapter {adapter!r} runs in {sorted(map(str, dtypes))}; supported is one of them")
    return DTYPE_NAMES[dtypes.pop()]
