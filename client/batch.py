"""Batches: several prompts in one run of the model, each beside a cache of its own, aligned at their ends.

Rows of a batch are padded on the left, so row i begins at pad_i. Keys carry their positions in them and not their places, so
a loaded cache may be put anywhere in its row; the mask hides what is before it, and positions are counted from the mask. All
rows go on from one place. Of full attention that is the place up to which every row is loaded, and a row that is loaded further
reads the rest again. A window or a state has only what belongs to its own end: there all rows go on from the place of the one
that is loaded furthest, and what others lack before it, each computes by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kvcdn.client.answer import Answer, Prepared
from kvcdn.client.forms import known_tokens
from kvcdn.client.generation import Generation
from kvcdn.client.loading.report import Report
from kvcdn.client.rest import completed
from kvcdn.errors import UsageError
from kvcdn.layout import LayerSpec
from kvcdn.model.cache import cache_argument
from kvcdn.model.place import device_of
from kvcdn.model.states import join_states
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
        if self.cache is None:
            return 0
        told = not all(self.cache.is_linear)
        return self.cache.get_seq_length() if told else self.report.tokens_reused + self.report.tokens_computed


def run_batch(client: Client, rows: Sequence[Row], started: float, options: Mapping[str, Any]) -> list[Answer]:
    """An answer for each of `rows`, in order. Raises UsageError for no rows, and for beams."""
    if not rows:
        raise UsageError("a batch has at least one prompt")
    generation = Generation(client.model, client.tokenizer, rows[0].prompt, options)
    if generation.copies > 1:
        raise UsageError("a batch has one sequence a prompt", hint="ask for several sequences of one prompt")
    length = max(len(row.prompt.token_ids) for row in rows)
    pads = [length - len(row.prompt.token_ids) for row in rows]
    place, cache = _joined(client, rows, pads, length)
    ids, mask = _padded(client, rows, length)
    # The library cannot ask a cache of states alone how many tokens it has seen, and would read all of them again.
    left_out = place if cache is not None and all(cache.is_linear) else 0
    output = generation.run(Prepared(ids, mask, cache, rows[0].report, cache_argument(client.model.forward), left_out))
    ended = time.perf_counter()
    for row, pad in zip(rows, pads, strict=True):
        row.report.tokens_reused = min(row.report.tokens_reused, max(place - pad, 0))
        row.report.tokens_kept = min(row.report.tokens_kept, row.report.tokens_reused)
        row.report.seconds["first_token"], row.report.seconds["total"] = generation.first_token_at - started, ended - started
    return generation.answers(output[:, length:], [row.report for row in rows])


def _padded(client: Client, rows: Sequence[Row], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A token that was added to the tokenizer alone has no row in the model.
    known = known_tokens(client.model)
    special = (client.tokenizer.pad_token_id, client.tokenizer.eos_token_id)
    filler = next((int(token) for token in special if token is not None and (known is None or token < known)), 0)
    ids = torch.full((len(rows), length), filler, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        begin = length - len(row.prompt.token_ids)
        ids[index, begin:], mask[index, begin:] = torch.tensor(row.prompt.token_ids), 1
    return ids.to(device_of(client.model)), mask.to(device_of(client.model))


def _joined(client: Client, rows: Sequence[Row], pads: Sequence[int], length: int) -> tuple[int, Cache | None]:
    """The place from which all rows go on, and the library's own cache of what is before it; 0 and None where nothing is."""
    if not any(row.cached for row in rows):
        return 0, None
    loaded = client.current()
    if not loaded.reads(max(len(row.prompt.token_ids) for row in rows)):
        return 0, None  # one long row has the keys of all made otherwise
    specs = loaded.identity.layout.layers
    if all(spec.kind in ("kv", "indexed") and not spec.states for spec in specs):
        place = min(pad + row.cached for pad, row in zip(pads, rows, strict=True))
        by_row = [[] if row.cache is None else list(row.cache.layers) for row in rows]
        for layer in (layer for layers in by_row for layer in layers):
            layer.settle()
    else:
        place = max(*(pad + row.cached for pad, row in zip(pads, rows, strict=True)), max(pads) + 1)
        if place >= length:
            return 0, None  # a row has a single token, which is read with the others
        by_row = [
            completed(loaded, row.cache, row.prompt.token_ids, place - pad, row.cached)
            for pad, row in zip(pads, rows, strict=True)
        ]
    if not any(place > pad for pad in pads):
        return 0, None
    cache = DynamicCache(config=client.model.config)
    for index, (target, spec) in enumerate(zip(cache.layers, specs, strict=True)):
        held = [layers[index] if layers else None for layers in by_row]
        if spec.tensors:
            _join_rows(target, spec, held, pads, place)
        if spec.states:
            join_states(target, held)
    return place, cache


def _join_rows(target: Any, spec: LayerSpec, held: Sequence[Any], pads: Sequence[int], place: int) -> None:
    """Fills a layer of the library's with the tokens of each of `held` before `place`, each behind its padding."""
    first = spec.first_needed(place)
    joined: list[torch.Tensor] = []
    for number, (layer, pad) in enumerate(zip(held, pads, strict=True)):
        if layer is None or place <= pad:
            continue
        begin = max(first, pad)
        for index, rows in enumerate(layer.rows(begin - pad, place - pad)):
            if index == len(joined):
                joined.append(rows.new_zeros((len(held), rows.shape[1], place - first, rows.shape[2])))
            joined[index][number, :, begin - first :] = rows.transpose(0, 1)
    target.lazy_initialization(*joined[:2])
    target.keys, target.values = joined[:2]
    if spec.kind == "window":
        target.cumulative_length = place
    if spec.kind == "indexed":
        target.indexer_keys, target.is_indexer_initialized = joined[2][:, 0], True
