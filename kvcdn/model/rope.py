"""Rope that hangs on how much is read: up to a length it does not, and up to there a prefix has one cache.

`longrope` has a short set of frequencies and a long one, chosen by the last position of a pass; `dynamic` ones grow with it
from a length on. Behind that length a prefix has other keys in each prompt, so only prompts up to it use what is published.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def steady_tokens(config: Any) -> int | None:
    """The most tokens that are read with the same rope as fewer; None where that is any number."""
    limits = []
    for rope in _ropes(config):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind == "longrope":
            limits.append(_limit(rope.get("original_max_position_embeddings")))
        elif "dynamic" in kind:
            # The library forgets a longer prompt's frequencies at the first that is shorter than this, not at one as long.
            limits.append(_limit(getattr(config, "max_position_embeddings", None)) - 1)
    return min(limits) if limits else None


def _limit(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))


def follows_prompts(module: torch.nn.Module, name: str) -> bool:
    """Whether `module` itself sets its buffer or attribute `name` anew for every prompt, which is then no change of it."""
    kinds = getattr(module, "rope_type", None)
    listed = kinds.values() if isinstance(kinds, dict) else [kinds]
    if not any(kind == "longrope" or "dynamic" in str(kind) for kind in listed):
        return False
    return name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling")) and "original" not in name
