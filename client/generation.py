"""Generation: what of the model's own generate() belongs to the client, and when its first token was there."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria

from kvcdn.errors import UsageError

_OWNED = (
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache",
    "cache_implementation",
)


def refuse_what_we_own(options: dict[str, Any], model: PreTrainedModel) -> None:
    """Raises UsageError for options that would make a loaded cache silently wrong."""
    for name in _OWNED:
        if name in options:
            raise UsageError(f"{name} is made by the client", hint="use prepare() and call model.generate yourself")
    config = options.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name) or getattr(config, name, None) or 1) > 1:
            raise UsageError(
                f"{name} above 1 needs one cache per sequence, which is not supported yet", hint="ask once per answer"
            )


class FirstTokenClock(StoppingCriteria):  # type: ignore[misc] # transformers is untyped here
    """Stops nothing; notes when the first token was there. Called by generate() after every token."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002 - the library's
        self.at = self.at or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
