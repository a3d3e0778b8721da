"""Accelerators that are none: devices `sim:0`, `sim:1` and so on, whose tensors lie on the CPU and are computed there.

To torch they are devices like any other: `.to("sim:1")` copies, tensors of two devices, or of one and the CPU, do not meet in
an operation, and none has memory that numpy could see. So what code does about devices is tried for real on a machine that has
none. Streams are beyond it: everything is done when the call returns. `install` is for a process of its own, as it lasts.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"

_MOVES = {"aten::_to_copy", "aten::copy_"}
"""Operations that have tensors of two devices."""


class SimTensor(torch.Tensor):
    """A tensor of such a device; `held` is where its numbers are."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> Self:
        # A view that is taken in inference mode of what was made outside it is no inference tensor.
        with torch.inference_mode(mode=False):
            made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=device,
                requires_grad=False,
            )
        made.held = held
        return made  # type: ignore[no-any-return]

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"SimTensor({self.held}, device={self.device})"

    def tolist(self) -> Any:
        """As of any tensor; torch has it for its own kind only."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, shape = tree_flatten((args, kwargs))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        devices = {one.device for one in tensors if one.dim() or isinstance(one, SimTensor)}
        name = func._schema.name
        if name == "aten::to":  # inference mode hands it over whole
            return func.decompose(*args, **kwargs)
        if name not in _MOVES and len(devices) > 1:
            raise RuntimeError(f"{name}: tensors of the devices {sorted(map(str, devices))}")
        device = next((one.device for one in tensors if isinstance(one, SimTensor)), torch.device("cpu"))
        if name in _MOVES or "device" in kwargs:
            device = torch.device(kwargs.get("device") or tensors[0].device)
        args, kwargs = tree_unflatten([one.held if isinstance(one, SimTensor) else one for one in flat], shape)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if name == "aten::histc":  # the CPU's has no integers, others' have
            args = (args[0].float(), *args[1:])
        out = func(*args, **kwargs)
        known = {id(one.held): one for one in tensors if isinstance(one, SimTensor)}
        if name == "aten::copy_":
            return tensors[0]
        return tree_map(lambda one: _shown(one, known, device), out)


def _shown(one: Any, known: dict[int, SimTensor], device: torch.device) -> Any:
    if not isinstance(one, torch.Tensor) or device.type == "cpu":
        return one
    return known[id(one)] if id(one) in known else SimTensor(one, device)


def _where(device: Any) -> torch.device:
    found = torch.device(device)
    return torch.device(found.type, found.index or 0)


def _empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, memory_format: Any = None
) -> Any:
    return SimTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format), _where(device))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return SimTensor(torch.empty_strided(size, stride, dtype=dtype), _where(device))


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    _held(target).copy_(_held(source))
    return target


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.held if isinstance(tensor, SimTensor) else tensor


_library: list[Any] = []


def install() -> None:
    """Makes the devices known to torch, for the rest of this process."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    _library.append(library)
