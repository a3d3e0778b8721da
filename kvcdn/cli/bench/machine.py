"""The machine that figures were measured on: what every benchmark's JSON says of it, and how medians are told."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvcdn import __version__
from kvcdn.model.processor import cpu

if TYPE_CHECKING:
    from kvcdn.model.load import LoadedModel

_LIBRARIES = ("torch", "transformers", "numpy", "blosc2", "aiohttp")

_BF16 = {"avx512_bf16", "amx_bf16"}

_LOAD_BEFORE = os.getloadavg()[0]
"""When the command began: what ran before, and beside, a benchmark."""


_REAL_TIME = {os.SCHED_FIFO: "fifo", os.SCHED_RR: "round-robin"}


def _scheduling() -> str:
    """`normal`, or a real-time policy, under which whoever computes keeps others from their core for long at a time."""
    return _REAL_TIME.get(os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, "normal")


def machine(loaded: LoadedModel | None = None) -> dict[str, Any]:
    """Processor, memory, versions, UTC time and load; with a model also its name, dtype, device and libraries.

    The load average tells what else was running: above the number of cores, times are noisy. `load_before` is that of the
    minute before the command began, without the benchmark itself. `scheduling` is `normal`, or a real-time policy.
    """
    name, instructions = cpu()
    told: dict[str, Any] = {
        "cpu": name,
        "cores": os.cpu_count(),
        "bf16_instructions": sorted(_BF16 & set(instructions)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "time": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "load_before": round(_LOAD_BEFORE, 2),
        "scheduling": _scheduling(),
        "python": platform.python_version(),
        "kvcdn": __version__,
        **dict(_versions()),
    }
    if loaded is None:
        return told
    import torch  # noqa: PLC0415 - seconds to import, and loaded already where a model is

    return {
        **told,
        "threads": torch.get_num_threads(),
        "device": str(loaded.model.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "model": loaded.identity.name,
    }


def spread(samples: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median, least and most of some samples, and how many there are."""
    told = {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}
    return {**{name: round(value, digits) for name, value in told.items()}, "runs": len(samples)}


def _versions() -> Iterator[tuple[str, str]]:
    """What is installed of the libraries that figures hang on."""
    for package in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
