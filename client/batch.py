"""Batches: several prompts in one run of the model, each beside a cache of its own, aligned at their ends.

Rows of a batch are padded on the left, so row i begins at pad_i. Keys carry their positions in them and not their places, so
a loaded cache may be put anywhere in its row; the mask hides what is before it, and positions are counted from the mask. What
is common to all rows is the place up to which every row is loaded: a row that is loaded further reads the rest again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kvcdn.client.answer import Answer, Prepared
from kvcdn.client.generation import Generation
from kvcdn.client.report import Report
from kvcdn.errors import UsageError
from kvcdn.model.cache import cache_argument
from kvcdn.model.states import WithStates
from kvcdn.model.tokens import Prompt

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from kvcdn.client.client import Client


@dataclass(frozen=True)
class Row:
    """One prompt, a complete cache of its beginning, or None, and where that came from."""

    prompt: Prompt
    cache: Cache | None
    report: Report

    @property
    def cached(self) -> int:
        return 0 if self.cache is None else self.cache.get_seq_length()


def run_batch(client: Client, rows: Sequence[Row], started: float, options: Mapping[str, Any]) -> list[Answer]:
    """An answer for each of `rows`, in order. Raises UsageError for no rows, beams, and caches that cannot be moved."""
    if not rows:
        raise UsageError("a batch has at least one prompt")
    generation = Generation(client.model, client.tokenizer, rows[0].prompt, options)
    if generation.copies > 1:
        raise UsageError("a batch has one sequence a prompt", hint="ask for several sequences of one prompt")
    if any(isinstance(layer, WithStates) for row in rows if row.cache is not None for layer in row.cache.layers):
        raise UsageError(
            f"the cache of {client.model.config.model_type} has layers with states, which padding would change",
            hint="ask one after the other",
        )
    length = max(len(row.prompt.token_ids) for row in rows)
    pads = [length - len(row.prompt.token_ids) for row in rows]
    loaded_to = min(pad + row.cached for pad, row in zip(pads, rows, strict=True))
    cache = _joined(client, rows, pads, loaded_to) if any(row.cached for row in rows) else None
    if cache is None:
        loaded_to = 0
    ids, mask = _padded(client, rows, length)
    output = generation.run(Prepared(ids, mask, cache, rows[0].report, cache_argument(client.model.forward)))
    ended = time.perf_counter()
    for row, pad in zip(rows, pads, strict=True):
        row.report.tokens_reused = min(row.report.tokens_reused, max(loaded_to - pad, 0))
        row.report.tokens_kept = min(row.report.tokens_kept, row.report.tokens_reused)
        row.report.seconds["first_token"], row.report.seconds["total"] = generation.first_token_at - started, ended - started
    return generation.answers(output[:, length:], [row.report for row in rows])


def _padded(client: Client, rows: Sequence[Row], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    filler = next((token for token in (client.tokenizer.pad_token_id, client.tokenizer.eos_token_id) if token is not None), 0)
    ids = torch.full((len(rows), length), int(filler), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        begin = length - len(row.prompt.token_ids)
        ids[index, begin:], mask[index, begin:] = torch.tensor(row.prompt.token_ids), 1
    return ids.to(client.model.device), mask.to(client.model.device)


def _joined(client: Client, rows: Sequence[Row], pads: Sequence[int], loaded_to: int) -> Cache | None:
    """The library's own cache of `loaded_to` places for every row; None where a row has nothing that is loaded so far."""
    layout = client.current().identity.layout
    kinds = {spec.kind for spec in layout.layers} - {"kv"}
    if kinds:
        raise UsageError(
            f"the cache of {client.model.config.model_type} has layers of the kind {min(kinds)}, which padding would misplace",
            hint="ask one after the other",
        )
    if loaded_to <= 0:
        return None
    cache = DynamicCache(config=client.model.config)
    for index, target in enumerate(cache.layers):
        tensors = []
        for tensor in range(2):
            spec = layout.layers[index].tensors[tensor]
            joined: torch.Tensor | None = None
            for number, (row, pad) in enumerate(zip(rows, pads, strict=True)):
                if row.cache is None or loaded_to <= pad:
                    continue
                layer = row.cache.layers[index]
                layer.settle()
                loaded = layer.rows(0, loaded_to - pad)[tensor]
                if joined is None:
                    joined = loaded.new_zeros((len(rows), spec.heads, loaded_to, spec.dim))
                joined[number, :, pad:] = loaded.transpose(0, 1)
            if joined is None:
                return None
            tensors.append(joined)
        target.lazy_initialization(*tensors)
        target.keys, target.values = tensors
    return cache
