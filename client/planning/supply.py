"""A supply: where caches come from, and what they pass before their use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcdn.client.loading.local import LocalPrefixes
from kvcdn.client.sources.source import Source
from kvcdn.client.trust.gate import Gate
from kvcdn.keys import Namespace

if TYPE_CHECKING:
    from kvcdn.client.planning.refine import Refiner


@dataclass(frozen=True)
class Supply:
    """What all prompts of a client share."""

    source: Source
    gate: Gate
    namespace: Namespace
    precisions: tuple[str, ...]
    max_kl: float | None
    local: LocalPrefixes | None = None
    refiner: Refiner | None = None
    """Where prompts may begin with coarse KV, what makes it exact behind their answers."""
