"""Weights in memory: whether they are their checkpoint's, and whether they are what they were, without reading all.

What changes whole weights after loading is caught, such as a merged or trained adapter, and every write that torch counts; so
are modules that are replaced, and what kvcdn/model/settings.py looks at. What changes single numbers through `.data` is left to
a recomputation of some tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from blake3 import blake3
from safetensors import safe_open
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from kvcdn.digest import Digest
from kvcdn.errors import UnsupportedModelError
from kvcdn.model.fingerprint import weight_files
from kvcdn.model.rope import follows_prompts
from kvcdn.model.settings import PROCESS, Settings, stand

_SAMPLES = 16
"""Values taken of each tensor, evenly spaced: whoever changes a whole tensor changes some, and a look costs milliseconds."""


_AS_SAVED = "give the model as its checkpoint has it, or leave it without a cache"

_INSERTED = (".base_layer", ".original_module")
"""What peft puts into the names of weights that it wraps."""


def sample_weights(model: PreTrainedModel) -> Digest:
    """A digest of values from all over `model`'s weights, buffers (rope is one) and settings as they are in memory now.

    A checkpoint's files are fingerprinted once; what is done to the model afterwards is not in them. torch counts writes to a
    tensor, but not those through `.data`, as which adapters are merged: those are seen by the values.
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
        self.settings = Settings(model)
        self._pointers: list[tuple[torch.Tensor, int]] = []
        self._forms = b""
        self._views: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._scattered: list[torch.Tensor] = []
        for tensor in chain(model.parameters(), _buffers(model)):
            self._forms += f"{tensor.dtype} {tuple(tensor.shape)}\n".encode()
            if tensor.is_meta or not tensor.numel():
                continue
            self._pointers.append((tensor, tensor.data_ptr()))
            if tensor not in _first_versions:
                _first_versions[tensor] = _version(tensor)
            if tensor.is_contiguous():
                self._views[tensor.device, tensor.dtype].append(_sampled(tensor))
            else:
                self._scattered.append(tensor)

    def stand(self) -> bool:
        """Whether every tensor of the model is still the one it was, in the same memory."""
        return stand(self._tables) and all(tensor.data_ptr() == pointer for tensor, pointer in self._pointers)

    def _written(self) -> bytes:
        """Which tensors were written to since they were first looked at, and how often; nothing where none was."""
        versions = [(number, _version(tensor), _first_versions[tensor]) for number, (tensor, _) in enumerate(self._pointers)]
        counts = [(number, now) for number, now, first in versions if now != first]
        return repr((PROCESS, counts)).encode() if counts else b""

    def digest(self) -> Digest:
        hasher = blake3(self._forms)
        hasher.update(self.settings.encoded())
        hasher.update(self._written())
        with torch.inference_mode():
            # One copy from the device for all tensors of a dtype.
            groups = [torch.cat(views) for views in self._views.values()] + [_sampled(tensor) for tensor in self._scattered]
            for values in groups:
                hasher.update(bytes(values.cpu().contiguous().view(torch.uint8).numpy()))
        return Digest(hasher.digest())


def _buffers(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - by module, since modules say which are their own affair
            if buffer is not None and not follows_prompts(module, name):
                yield buffer


def runs_foreign_code(model: PreTrainedModel) -> bool:
    """Whether code of no known library is around or in place of the model's: what it does now it may not do later."""
    sample_weights(model)
    return _places[model].settings.foreign


_places: WeakKeyDictionary[PreTrainedModel, _Places] = WeakKeyDictionary()

_first_versions: Any = WeakIdKeyDictionary()
"""torch's counter of writes to a tensor when it was first looked at."""


def _version(tensor: torch.Tensor) -> int:
    # Made in inference mode, it has no counter.
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no other way to see a change


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Values of `tensor`, evenly spaced; a view of its memory where it is contiguous."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.shape[0] // _SAMPLES, 1)]


def require_checkpoint_weights(model: Any, folder: Path) -> None:
    """Raises UnsupportedModelError where the first or last row of a weight in memory is not the one in `folder`'s files.

    Weights that are renamed, converted or absent in memory are passed over, and those into which adapters are merged. Those
    that were quantised in memory are refused: no file says how.
    """
    _require_plain_tensors(model)
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


def _require_plain_tensors(model: Any) -> None:
    """Raises UnsupportedModelError for weights that are made of several tensors, or are packed away in a layer.

    Not for those of bitsandbytes: how they are quantised the checkpoint's configuration says, which the fingerprint covers.
    """
    for name, tensor in model.named_parameters():
        kind = type(tensor)
        if hasattr(tensor, "__tensor_flatten__"):  # torch's sign of a tensor that is made of others
            raise UnsupportedModelError(
                f"the weight {name} is a {kind.__module__}.{kind.__name__}, which is not supported", hint=_AS_SAVED
            )
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao."):
            what = type(module).__name__
            raise UnsupportedModelError(f"{name} is a {what} quantised in memory, which is not supported", hint=_AS_SAVED)


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
