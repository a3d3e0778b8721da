"""Precisions: how large KV is as stored, against the raw 16 bits, as measured on one small model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcdn.economics.checks import number


@dataclass(frozen=True)
class Precision:
    """A way to store KV. `ratio` is stored bytes over raw bytes."""

    name: str
    ratio: float
    source: str = "given"
    date: str = ""

    def __post_init__(self) -> None:
        number("--stored-ratio", self.ratio, positive=True, most=2)


_MEASURED = "measured on SmolLM2-135M, 3,774 tokens of GPL-3; larger models are not measured"

_SHORT = (
    "`kvcdn bench codec`, SmolLM2-135M, 2,048 tokens of GPL-3, where recomputing is at 0.0022; larger models are not measured"
)

_DATE = "2026-11"

PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("bf16", 0.67, f"bfloat16, lossless (exponents apart, zstd): {_MEASURED}", _DATE),
        Precision(
            "fp16", 0.95, "float16, lossless: 1.05 times smaller, the lower end of the 1.05 to 1.35 that were seen", _DATE
        ),
        Precision("raw", 1.0, "not compressed", _DATE),
        Precision("int8", 0.51, f"lossy, next-token KL 0.0019 on what follows: {_SHORT}", _DATE),
        Precision("int4", 0.29, f"lossy, next-token KL 0.0065 on what follows: {_SHORT}", _DATE),
        Precision("tc-high", 0.29, f"lossy, next-token KL 0.0022 on what follows: {_SHORT}", _DATE),
        Precision("tc-medium", 0.16, f"lossy, next-token KL 0.0027 on what follows: {_SHORT}", _DATE),
        Precision("tc-low", 0.11, f"lossy, next-token KL 0.0049 on what follows: {_SHORT}", _DATE),
        Precision("tc-least", 0.084, f"lossy, next-token KL 0.0089 on what follows: {_SHORT}", _DATE),
    )
}
