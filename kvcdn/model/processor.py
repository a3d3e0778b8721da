"""Processors, in words: kernels are chosen by what they are, and other kernels round otherwise. Without torch."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MATRIX_INSTRUCTIONS = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_tile", "bf16", "sve"}
)
"""Of a processor's flags, as Linux calls them, those that kernels of attention and matrix products are chosen by."""


def describe_devices(devices: Iterable[torch.device]) -> str:
    """What a model computes on, each device once, in the order of its layers."""
    return ", ".join(dict.fromkeys(map(describe_device, devices)))


def describe_device(device: torch.device) -> str:
    """`cpu (Intel(R) Xeon(R) Processor; avx2 avx512f)`, `cuda:0 (NVIDIA H200)`; the device alone where no more is known."""
    if device.type == "cuda":
        import torch  # noqa: PLC0415 - a processor is described without it

        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type != "cpu":
        return str(device)
    name, flags = cpu()
    return f"cpu ({name}{'; ' if flags else ''}{' '.join(flags)})"


@functools.cache
def cpu() -> tuple[str, tuple[str, ...]]:
    """The processor's name, and which of MATRIX_INSTRUCTIONS it has."""
    fields: dict[str, str] = {}
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name") or platform.processor() or platform.machine(), tuple(sorted(flags & MATRIX_INSTRUCTIONS))


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return []
