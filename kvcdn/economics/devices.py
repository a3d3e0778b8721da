"""Devices and links: how fast prefill runs and bytes travel.

A GPU's prefill is its dense bfloat16 peak times a utilisation, which is an assumption (0.40 unless told otherwise), and never
faster than its memory can be read. Devices that were measured have a measurement in place of a peak; other models are
scaled from it by FLOPs. Links are examples: round figures, not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcdn.economics.checks import number
from kvcdn.economics.models import MODELS, Model

UTILISATION = 0.40
"""Share of the peak that a well-fed prefill reaches: an assumption, in the middle of what serving engines are seen to do."""

WEIGHTS_ROOM = 1.2
"""A device must hold the weights and a fifth more, for KV and activations."""


@dataclass(frozen=True)
class Measured:
    """A prefill that somebody timed."""

    model: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Device:
    """What prefills. Either `peak_flops` or `measured` tells its speed."""

    name: str
    usd_per_hour: float
    peak_flops: float | None = None
    memory_bytes_per_s: float | None = None
    memory_bytes: float | None = None
    measured: Measured | None = None
    source: str = "given"
    price_source: str = "given"
    date: str = ""

    def __post_init__(self) -> None:
        number(f"{self.name}: usd_per_hour", self.usd_per_hour)
        for field in ("peak_flops", "memory_bytes_per_s", "memory_bytes"):
            if getattr(self, field) is not None:
                number(f"{self.name}: {field}", getattr(self, field), positive=True)

    def count_for(self, model: Model) -> int:
        """The fewest devices, a power of two, whose memory holds the model's weights and room to work."""
        count = 1
        while self.memory_bytes and count * self.memory_bytes < WEIGHTS_ROOM * model.resident_bytes:
            count *= 2
        return count

    def sustained_flops(self, utilisation: float) -> float:
        """FLOPs a second of one device; a measured one has its utilisation in the measurement."""
        if self.measured is not None:
            return MODELS[self.measured.model].flops(0, self.measured.tokens) / self.measured.seconds
        return (self.peak_flops or 0.0) * utilisation


@dataclass(frozen=True)
class Link:
    """What lies between a reader and the nearest copy."""

    name: str
    bytes_per_s: float
    round_trip_s: float
    source: str = "given"

    def __post_init__(self) -> None:
        number("--link", self.bytes_per_s, positive=True)
        number("--rtt", self.round_trip_s, most=60)


_NVIDIA = "NVIDIA datasheet, dense bfloat16"

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("h100", 3.99, 989.4e12, 3.35e12, 80e9, None, f"H100 SXM, {_NVIDIA}",
               "RunPod, upper end of 2.69 to 3.99 (AWS 6.88, Azure 12.29); data-receipts", "2026-11-09"),
        Device("h200", 4.59, 989.4e12, 4.8e12, 141e9, None, f"H200 SXM, {_NVIDIA}", "RunPod", "2026-10-07"),
        Device("a100", 1.79, 312e12, 2.039e12, 80e9, None, f"A100 SXM 80 GB, {_NVIDIA}",
               "upper end of 1.39 to 1.79; data-receipts", "2026-11-09"),
        Device("l40s", 0.99, 362.05e12, 0.864e12, 48e9, None, f"L40S, {_NVIDIA}", "weak source", "2026-09-20"),
        Device("rtx-4090", 0.44, 165.2e12, 1.008e12, 24e9, None, f"RTX 4090, {_NVIDIA}", "weak source", "2026-09-20"),
        Device("m1-pro", 0.0, measured=Measured("qwen3-4b", 3774, 14.71),
               source="Apple M1 Pro: 14.71 s for 3,774 tokens of Qwen3-4B, arXiv 2606.13361",
               price_source="a reader's own machine, not paid by the hour", date="2026-06"),
        Device("cpu-2-cores", 0.0, measured=Measured("smollm2-135m", 3774, 7.1),
               source="2 cores of a server CPU: 7.1 s for 3,774 tokens of SmolLM2-135M, bfloat16, blocks of 256",
               price_source="a reader's own machine, not paid by the hour", date="2026-11"),
    )
}  # fmt: skip

_EXAMPLE = "an example, not a measurement"

LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link("rack", 100e9 / 8, 0.0002, f"100 Gbit/s, 0.2 ms: {_EXAMPLE}"),
        Link("region", 25e9 / 8, 0.001, f"25 Gbit/s, 1 ms, within a cloud region: {_EXAMPLE}"),
        Link("office", 1e9 / 8, 0.010, f"1 Gbit/s, 10 ms, to an edge in town: {_EXAMPLE}"),
        Link("overseas", 1e9 / 8, 0.150, f"1 Gbit/s, 150 ms, to another continent: {_EXAMPLE}"),
        Link("home", 250e6 / 8, 0.020, f"250 Mbit/s, 20 ms: {_EXAMPLE}"),
        Link("mobile", 50e6 / 8, 0.050, f"50 Mbit/s, 50 ms: {_EXAMPLE}"),
    )
}
