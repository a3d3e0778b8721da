"""A supply: where caches come from, and what they pass before their use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcdn.client.gate import Gate
from kvcdn.client.local import LocalPrefixes
from kvcdn.client.source import Source
from kvcdn.keys import Namespace

if TYPE_CHECKING:
    from kvcdn.client.refine import Refiner


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
