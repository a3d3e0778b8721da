"""Weights in memory: whether they are their checkpoint's, and whether they are what they were, without reading all.

What changes whole weights after loading is caught, such as a merged or trained adapter; so are modules that are replaced, their
settings (a scale of rope, an epsilon, a window), and code that is put around or in place of theirs (hooks, other forwards).
What changes single numbers is left to a recomputation of some tokens.
"""

from __future__ import annotations

import operator
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from blake3 import blake3
from safetensors import safe_open
from transformers import PreTrainedModel

from kvcdn.digest import Digest
from kvcdn.errors import UnsupportedModelError
from kvcdn.model.fingerprint import weight_files

_SAMPLES = 16
"""Values taken of each tensor, evenly spaced: whoever changes a whole tensor changes some, and a look costs milliseconds."""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_KNOWN_CODE = ("torch.", "transformers.", "accelerate.", "peft.", "kvcdn.")
"""Packages whose hooks and forwards compute what the model does: they move weights, watch, or compile."""

_PROCESS = os.urandom(16)
"""Code that is not known is told apart by its place in memory, which says nothing to another process."""

_INSERTED = (".base_layer", ".original_module")
"""What peft puts into the names of weights that it wraps."""


def sample_weights(model: PreTrainedModel) -> Digest:
    """A digest of values from all over `model`'s weights, buffers (rope is one) and settings as they are in memory now.

    A checkpoint's files are fingerprinted once; what is done to the model afterwards is not in them. torch counts writes to a
    tensor, but not those through `.data`, as which adapters are merged.
    """
    places = _places.get(model)
    if places is None or not places.stand():
        places = _places[model] = _Places(model)
    return places.digest()


class _Places:
    """Where the values are that are looked at: found once, since a look comes before every prompt, beside busy threads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tables = [
            (table, tuple(table.values()))
            for module in model.modules()
            for table in (module._parameters, module._buffers, module._modules)  # noqa: SLF001 - torch has no other way to see a change
            if table
        ]
        self._settings = _Settings(list(model.modules()))
        self._pointers: list[tuple[torch.Tensor, int]] = []
        self._forms = b""
        self._views: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._scattered: list[torch.Tensor] = []
        for tensor in chain(model.parameters(), model.buffers()):
            self._forms += f"{tensor.dtype} {tuple(tensor.shape)}\n".encode()
            if tensor.is_meta or not tensor.numel():
                continue
            self._pointers.append((tensor, tensor.data_ptr()))
            if tensor.is_contiguous():
                self._views[tensor.device, tensor.dtype].append(_sampled(tensor))
            else:
                self._scattered.append(tensor)

    def stand(self) -> bool:
        """Whether every tensor of the model is still the one it was, in the same memory."""
        return _stand(self._tables) and all(tensor.data_ptr() == pointer for tensor, pointer in self._pointers)

    def digest(self) -> Digest:
        hasher = blake3(self._forms)
        hasher.update(self._settings.encoded())
        with torch.inference_mode():
            # One copy from the device for all tensors of a dtype.
            groups = [torch.cat(views) for views in self._views.values()] + [_sampled(tensor) for tensor in self._scattered]
            for values in groups:
                hasher.update(bytes(values.cpu().contiguous().view(torch.uint8).numpy()))
        return Digest(hasher.digest())


class _Settings:
    """What decides a pass besides tensors: plain attributes of modules, and code that is not their class's or its library's."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._classes = list({type(module): None for module in modules})
        self._tables: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._forwards: list[Any] = []
        self._known = b""

    def encoded(self) -> bytes:
        """Told anew where anything was assigned since the last look, which is a comparison of addresses."""
        forwards = [kind.forward for kind in self._classes]
        if not self._tables or forwards != self._forwards or not _stand(self._tables):
            self._forwards = forwards
            self._tables = [
                (table, tuple(table.values()))
                for module in self._modules
                for table in (vars(module), *(vars(module)[name] for name in _HOOKS))
            ]
            self._known = repr([[_code(forward) for forward in forwards], *map(_told, self._modules)]).encode()
        return self._known


def _told(module: torch.nn.Module) -> list[Any]:
    own = vars(module)
    told = [value for name, value in own.items() if type(value) in (bool, int, float, str) and name[0] != "_"]
    codes = [_code(hook) for table in _HOOKS for hook in own[table].values()]
    codes += [_code(own["forward"])] if "forward" in own else []
    return [*told, *(code for code in codes if code)]


def _stand(tables: Sequence[tuple[Mapping[str, Any], tuple[Any, ...]]]) -> bool:
    """Whether every table holds the very objects that it held."""
    return all(len(table) == len(values) and all(map(operator.is_, table.values(), values)) for table, values in tables)


def _code(function: Any) -> str:
    """Which function this is: by name where its package is known."""
    place = str(getattr(function, "__module__", None) or type(function).__module__)
    if f"{place}.".startswith(_KNOWN_CODE):
        return ""
    return f"{place} {id(function)} {_PROCESS.hex()}"


_places: WeakKeyDictionary[PreTrainedModel, _Places] = WeakKeyDictionary()


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Values of `tensor`, evenly spaced; a view of its memory where it is contiguous."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.shape[0] // _SAMPLES, 1)]


def require_checkpoint_weights(model: Any, folder: Path) -> None:
    """Raises UnsupportedModelError where the first or last row of a weight in memory is not the one in `folder`'s files.

    Weights that are renamed, converted or absent in memory are passed over, and those into which adapters are merged.
    """
    held = dict(_unmerged(model))
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in sorted(held.keys() & set(file.keys())):
                tensor, rows = held[name], file.get_slice(name)
                if list(tensor.shape) != rows.get_shape() or not tensor.is_floating_point() or not tensor.numel():
                    continue
                for row in (slice(0, 1), slice(tensor.shape[0] - 1, tensor.shape[0])):
                    if not torch.equal(rows[row].to(tensor.dtype), tensor.detach()[row].cpu()):
                        raise UnsupportedModelError(
                            f"the weight {name} in memory is not the one in {path}",
                            hint="save the changed model as a checkpoint of its own, or load the checkpoint anew",
                        )


def _unmerged(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under the names they have in a checkpoint, but for those that have an adapter merged into them."""
    merged = {f"{name}." for name, module in model.named_modules() if getattr(module, "merged_adapters", None)}
    for name, tensor in model.named_parameters():
        if not tensor.dim() or tensor.is_meta or any(name.startswith(prefix) for prefix in merged):
            continue
        plain = name
        for inserted in _INSERTED:
            plain = plain.replace(inserted, "")
        yield plain, tensor
