"""Answers, and inputs prepared for a generate() of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvcdn.client.loading.report import Report


@dataclass
class Prepared:
    """What generate() takes: [1, n] ids and mask, and a cache of the prompt's beginning.

    It holds the first `report.tokens_reused + report.tokens_computed` tokens.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    cache: Cache | None
    report: Report
    _argument: str = "past_key_values"
    left_out: int = 0
    """Leading tokens that `inputs` leaves out: those of a cache of states alone, which the library cannot count."""

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for `model.generate`. Use them once: decoding grows the cache."""
        ids, mask = (tensor[:, self.left_out :] for tensor in (self.input_ids, self.attention_mask))
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        return inputs if self.cache is None else {**inputs, self._argument: self.cache}


@dataclass(frozen=True)
class Continuation:
    """One of several sequences that were asked for."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What the model wrote, and where its cache came from. `others` are further sequences (`num_return_sequences`)."""

    text: str
    token_ids: tuple[int, ...]
    report: Report
    others: tuple[Continuation, ...] = ()
