"""A supply: where caches come from, and what they pass before their use."""

from __future__ import annotations

from dataclasses import dataclass

from kvcdn.client.gate import Gate
from kvcdn.client.transport import Source
from kvcdn.keys import Namespace


@dataclass(frozen=True)
class Supply:
    """What all prompts of a client share."""

    source: Source
    gate: Gate
    namespace: Namespace
