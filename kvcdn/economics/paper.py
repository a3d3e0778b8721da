"""The published case: arXiv 2606.13361, "Can I Buy Your KV Cache?" (June 2026), as it computes, and with other assumptions.

It multiplies 80 million reads by an implied tariff of $5 a million tokens for prefilling, and by the ratio of two times on a
laptop (0.296 s with the KV in memory against 14.71 s) for reuse. No byte is moved in that sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvcdn.economics.case import GB, Speed
from kvcdn.economics.devices import DEVICES, UTILISATION
from kvcdn.economics.models import MODELS
from kvcdn.economics.prices import DELIVERIES, STORES, TARIFFS
from kvcdn.layout import Layout

PIECE_BYTES = 1 << 20
"""Of a block, where a reader asks a store for a layer or so at a time: what that costs is one of the corrections."""

SOURCE = "arXiv 2606.13361, June 2026"

MODEL = "qwen3-4b"

TOKENS = 3774

READS = 80_000_000

TARIFF_USD_PER_MILLION = 5.0

PREFILL_S = 14.71

REUSE_S = 0.296
"""Time to the first token with the KV already in memory, on the same M1 Pro."""

GPU_HOURS: dict[str, tuple[float, str]] = {
    "RunPod, low": (2.69, "data-receipts, 2026-11-09"),
    "RunPod, high": (3.99, "data-receipts, 2026-11-09"),
    "AWS": (6.88, "data-receipts, 2026-11-09"),
    "Azure": (12.29, "data-receipts, 2026-11-09"),
}
"""USD an hour of an H100 SXM."""


@dataclass(frozen=True)
class Row:
    """The case with some assumptions changed."""

    changed: str
    reprefill_usd: float
    reuse_usd: float

    @property
    def ratio(self) -> float:
        return self.reprefill_usd / self.reuse_usd

    @property
    def pays(self) -> bool:
        return self.ratio > 1

    def to_json(self) -> dict[str, Any]:
        return {
            "changed": self.changed,
            "reprefill_usd": round(self.reprefill_usd, 2),
            "reuse_usd": round(self.reuse_usd, 2),
            "ratio": round(self.ratio, 3),
            "pays": self.pays,
        }


def raw_gb() -> float:
    """The document's KV: float16, not compressed, as the paper has it."""
    return MODELS[MODEL].kv_bytes(TOKENS) / GB


def requests(piece: float = math.inf) -> int:
    """Requests that read the document: whole blocks, or pieces of so many bytes; and one to match."""
    blocks = -(-TOKENS // Layout.uniform_kv(36, 8, 128, "float16").block_tokens)
    return blocks * max(1, math.ceil(raw_gb() * GB / blocks / piece)) + 1


def original() -> Row:
    """As published."""
    reprefill = READS * TOKENS * TARIFF_USD_PER_MILLION / 1e6
    return Row("as published", reprefill, reprefill * REUSE_S / PREFILL_S)


def h100_seconds() -> float:
    """Prefill of the document on one H100, at the assumed utilisation."""
    device = DEVICES["h100"]
    speed = Speed.of_device(device, 1, UTILISATION)
    return speed.seconds(MODELS[MODEL], 0, TOKENS)


def _delivered(gb_usd: float, request_usd_per_1000: float = 0.0, piece: float = math.inf) -> float:
    return READS * (raw_gb() * gb_usd + requests(piece) * request_usd_per_1000 / 1000)


def _deliveries() -> list[tuple[str, float]]:
    s3, r2, near = STORES["s3"], STORES["r2"], STORES["s3-in-region"]
    bunny = DELIVERIES["bunny-volume"]
    return [
        (
            f"delivered from S3 over the internet, ${s3.egress_usd_per_gb}/GB",
            _delivered(s3.egress_usd_per_gb, s3.read_usd_per_1000),
        ),
        (f"delivered by Bunny's volume network, ${bunny.egress_usd_per_gb}/GB", _delivered(bunny.egress_usd_per_gb)),
        ("delivered from R2 without egress fee, read in pieces of 1 MiB", _delivered(0, r2.read_usd_per_1000, PIECE_BYTES)),
        ("delivered from R2 without egress fee, read by whole blocks", _delivered(0, r2.read_usd_per_1000)),
        ("delivered from S3 within its region, read by whole blocks", _delivered(0, near.read_usd_per_1000)),
        ("delivered by an edge beside the model, nothing paid", 0.0),
    ]


def corrections() -> list[Row]:
    """What becomes of the case when delivery is paid, and when prefill costs GPU time in place of a tariff."""
    base = original()
    rows = [Row(what, base.reprefill_usd, base.reuse_usd + usd) for what, usd in _deliveries()]
    for place, (hour, _) in GPU_HOURS.items():
        gpu = READS * h100_seconds() * hour / 3600
        label = f"prefill on an H100 at ${hour}/h ({place})"
        rows += [Row(f"{label}, {what}", gpu, gpu * REUSE_S / PREFILL_S + usd) for what, usd in _deliveries()]
    for name in ("claude-sonnet-4-6", "gpt-6.1-sol", "deepseek-v4-flash"):
        tariff = TARIFFS[name]
        charged, cached = (READS * TOKENS * usd / 1e6 for usd in (tariff.input_usd_per_million, tariff.cached_usd_per_million))
        rows.append(Row(f"{name}: its input tariff against its own cached-read tariff", charged, cached))
    return rows


def sensitivity() -> list[dict[str, Any]]:
    """Which assumption carries the result: each changed alone, and by what factor the ratio moves."""
    base = original()
    gpu = READS * h100_seconds() * DEVICES["h100"].usd_per_hour / 3600
    shipped = base.reuse_usd + _deliveries()[0][1]
    alone = [
        (
            "reuse is priced as a ratio of compute times and moves no byte",
            "delivery from S3 at its internet price is added",
            base.reprefill_usd / shipped,
        ),
        (
            "prefill costs an API's retail tariff",
            "prefill costs H100 time; reuse keeps its price in dollars",
            gpu / base.reuse_usd,
        ),
        (
            "both: prefill at retail, delivery free",
            "prefill costs H100 time, and delivery from S3 is added",
            gpu / (gpu * REUSE_S / PREFILL_S + _deliveries()[0][1]),
        ),
    ]
    return [
        {"assumption": what, "instead": instead, "ratio": round(ratio, 4), "ratio_moves_by": round(base.ratio / ratio, 1)}
        for what, instead, ratio in alone
    ]


def assumptions() -> dict[str, dict[str, Any]]:
    """Every assumption of the published case and of the corrections."""
    h100, s3 = DEVICES["h100"], STORES["s3"]
    r2, bunny = STORES["r2"], DELIVERIES["bunny-volume"]
    rows: list[tuple[str, Any, str, str]] = [
        ("model", MODEL, "", SOURCE),
        ("tokens", TOKENS, "tokens", SOURCE),
        ("reads", READS, "reads", SOURCE),
        ("tariff_usd_per_million", TARIFF_USD_PER_MILLION, "USD, implied", SOURCE),
        ("prefill_s", PREFILL_S, "seconds, Apple M1 Pro", SOURCE),
        ("reuse_s", REUSE_S, "seconds, KV in memory", SOURCE),
        ("bytes_moved", 0, "bytes: none in the published sum", SOURCE),
        ("kv_bytes", raw_gb() * GB, "bytes, float16, not compressed", MODELS[MODEL].source),
        ("requests_per_read", requests(), "whole blocks by FORMAT.md 2.4, and one to match", "computed"),
        (
            "requests_per_read_in_pieces",
            requests(PIECE_BYTES),
            "pieces of 1 MiB, as a reader that asks for layers by themselves",
            "computed",
        ),
        ("h100_peak_flops", h100.peak_flops, "FLOPs a second", h100.source),
        ("utilisation", UTILISATION, "of the peak", "assumed"),
        ("h100_prefill_s", h100_seconds(), "seconds", "computed"),
        ("h100_usd_per_hour", {place: hour for place, (hour, _) in GPU_HOURS.items()}, "USD", "data-receipts, 2026-11-09"),
        ("s3_egress_usd_per_gb", s3.egress_usd_per_gb, "USD", f"{s3.source}, {s3.date}"),
        ("s3_read_usd_per_1000", s3.read_usd_per_1000, "USD", f"{s3.source}, {s3.date}"),
        ("r2_read_usd_per_1000", r2.read_usd_per_1000, "USD", f"{r2.source}, {r2.date}"),
        ("bunny_volume_usd_per_gb", bunny.egress_usd_per_gb, "USD", f"{bunny.source}, {bunny.date}"),
    ]
    return {name: {"value": value, "unit": unit, "source": source} for name, value, unit, source in rows}


def to_json() -> dict[str, Any]:
    """What `kvcdn economics --preset paper --json` prints."""
    base = original()
    return {
        "preset": "paper",
        "source": SOURCE,
        "reprefill_usd": round(base.reprefill_usd, 2),
        "reuse_usd": round(base.reuse_usd, 2),
        "ratio": round(base.ratio, 1),
        "carried_by": sensitivity(),
        "corrections": [row.to_json() for row in corrections()],
        "assumptions": assumptions(),
    }
