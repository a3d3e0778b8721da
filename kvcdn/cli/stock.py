"""The model without kvcdn: stock generate() over the whole prompt at once, the fastest a user has.

What benchmarks compare with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcdn.client.generation import FirstTokenClock
from kvcdn.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from kvcdn.client import Client


@dataclass(frozen=True)
class StockAnswer:
    """Greedy tokens, and seconds until the first of them."""

    token_ids: tuple[int, ...]
    first_token_s: float


def stock_answer(client: Client, document: str, question: str, tokens: int) -> StockAnswer:
    """Tokenises the whole prompt and generates, timed from the text on."""
    started = time.perf_counter()
    return timed_answer(client, client.question(document, question).token_ids, None, tokens, started)


def floor_answer(client: Client, token_ids: tuple[int, ...], cache: Cache, tokens: int) -> StockAnswer:
    """Generates from a KV cache that is in memory already: no kvcdn, no prefill, no tokenising. Uses the cache up."""
    return timed_answer(client, token_ids, cache, tokens, time.perf_counter())


def scheduled_answer(client: Client, document_tokens: int, document: str, question: str, tokens: int) -> StockAnswer:
    """Prefills the document here on the publisher's schedule and generates from that: what a loaded cache must equal."""
    from kvcdn.model.prefill import ScheduledPrefill  # noqa: PLC0415 - see kvcdn.cli

    if client.loaded is None:
        raise UnsupportedModelError("this model's cache is not supported")
    started = time.perf_counter()
    token_ids = client.question(document, question).token_ids
    prefill = ScheduledPrefill(client.model, client.loaded.identity.layout, len(token_ids) + tokens)
    for _ in prefill.run(token_ids[:document_tokens]):
        pass
    return timed_answer(client, token_ids, prefill.cache, tokens, started)


def timed_answer(client: Client, token_ids: tuple[int, ...], cache: Cache | None, tokens: int, started: float) -> StockAnswer:
    """Generates from `cache`, or from nothing, timed from `started` on the clock of time.perf_counter."""
    from kvcdn.model.cache import cache_argument  # noqa: PLC0415 - see kvcdn.cli

    model, clock = client.model, FirstTokenClock()
    ids = torch.tensor([token_ids], dtype=torch.long, device=model.device)
    given = {} if cache is None else {cache_argument(model.forward): cache}
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=[clock],
            **given,
        )
    return StockAnswer(tuple(int(token) for token in output[0, len(token_ids) :]), clock.at - started)
