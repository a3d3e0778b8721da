"""The certificate of a lossy publish: how far its KV is from the exact one, as its publisher measured (FORMAT.md 5.1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from kvcdn.errors import CorruptError
from kvcdn.fields import Fields
from kvcdn.keys import LOSSY

MICRO = 1_000_000
"""Fractions and perplexities are counted in millionths: canonical JSON has no floating point."""

NANO = 1_000_000_000
"""Divergences are counted in billionths of a nat."""

MAX_VALUE = (1 << 53) - 1

MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class Certificate:
    """Distances of the published KV from the exact one, over the document's last `continuation` tokens, teacher-forced.

    `kl_mean` and `kl_p99` are of KL(exact || published) of the next-token distributions, `kl_recompute` is the mean for an
    exact KV that was computed in passes of another length, all in billionths of a nat. `top1` is the share of equal most likely
    tokens in millionths. `greedy_equal` of `greedy_total` tokens behind the document are equal, counted from the first.
    The perplexities of the continuation are in millionths.
    """

    continuation: int
    greedy_equal: int
    greedy_total: int
    kl_mean: int
    kl_p99: int
    kl_recompute: int
    perplexity: int
    perplexity_exact: int
    top1: int

    def meets(self, max_kl: float | None) -> bool:
        """Whether the mean divergence is at most `max_kl` nats; None accepts all."""
        return max_kl is None or self.kl_mean <= round(max_kl * NANO)

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, what: str) -> Self:
        """Raises CorruptError for anything that is not a certificate."""
        read = Fields(value, f"{what}: certificate")
        bounds = {"continuation": MAX_TOKENS, "greedy_equal": MAX_TOKENS, "greedy_total": MAX_TOKENS, "top1": MICRO}
        numbers = {field.name: read.integer(field.name, 0, bounds.get(field.name, MAX_VALUE)) for field in fields(cls)}
        read.done()
        certificate = cls(**numbers)
        if certificate.greedy_equal > certificate.greedy_total:
            raise CorruptError(f"{what}: certificate: more greedy tokens are equal than were compared")
        return certificate

    def __str__(self) -> str:
        noise = f"{self.kl_mean / self.kl_recompute:.1f} x recompute noise" if self.kl_recompute else "no recompute noise"
        return (
            f"KL {self.kl_mean / NANO:.5f} ({noise}; p99 {self.kl_p99 / NANO:.4f}), top-1 {self.top1 / MICRO:.1%},"
            f" {self.greedy_equal} of {self.greedy_total} greedy tokens equal, perplexity {self.perplexity / MICRO:.3f}"
            f" (exact {self.perplexity_exact / MICRO:.3f}), over {self.continuation} tokens"
        )


def read_certificate(fields: Fields, precision: str, what: str) -> Certificate | None:
    """The header's field: there in a lossy precision, and only there. Raises CorruptError."""
    return Certificate.from_json(fields.any("certificate"), what) if precision in LOSSY else None
