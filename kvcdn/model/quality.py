"""Quality: how far a model that reads a lossy KV is from one that reads the exact KV, on the document itself.

The first tokens of the document are taken from the KV under test, its tail is read by the model: what the model expects at
every position of the tail is compared with what it expects on the exact KV. Beside it stands the same for an exact KV that
was computed in shorter passes: two exact KVs differ by rounding, and nobody can ask a lossy one for less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from kvcdn.certificate import MICRO, NANO, Certificate
from kvcdn.errors import UnsupportedModelError, UsageError
from kvcdn.model.cache import beside, build_cache, make_layer, output_cache
from kvcdn.model.load import LoadedModel
from kvcdn.model.place import device_of, layer_devices
from kvcdn.model.prefill import ScheduledPrefill

Kv = Sequence[Sequence[torch.Tensor]]
"""The KV of a prefix: for every layer its tensors [tokens, heads, dim]."""

CONTINUATION_TOKENS = 256
"""Positions over which distributions are compared: the mean divergence over fewer depends on which they are."""

_PIECE_TOKENS = 32
"""Positions compared at a time: of a large vocabulary, all at once would be several times the KV."""

GREEDY_TOKENS = 32

LEAST_TOKENS = 16
"""A shorter document has no tail to measure on."""


@dataclass(frozen=True)
class Divergence:
    """KL(exact || other) of next-token distributions in nats, by position, and whether the most likely tokens are equal."""

    by_position: torch.Tensor
    same_top: torch.Tensor

    @property
    def mean(self) -> float:
        return float(self.by_position.mean())

    @property
    def p99(self) -> float:
        return float(torch.quantile(self.by_position, 0.99))

    @property
    def top1(self) -> float:
        return float(self.same_top.float().mean())


def tail_tokens(total: int) -> int:
    """The tokens of the tail of a document of `total` tokens, along which it is measured (FORMAT.md 5.1)."""
    return min(CONTINUATION_TOKENS, total // 2)


class Judge:
    """Compares KVs of one document with its exact KV. The exact side is computed once."""

    def __init__(self, loaded: LoadedModel, token_ids: Sequence[int], exact: Kv, *, continuation: int | None = None) -> None:
        """`exact` holds at least all of `token_ids` but its tail. Raises UsageError for a document too short to measure on."""
        if len(token_ids) < LEAST_TOKENS:
            raise UsageError(
                f"a document of {len(token_ids)} tokens is too short to measure a lossy precision on",
                hint="publish it in native precision",
            )
        self._loaded = loaded
        self._ids = tuple(token_ids)
        self.continuation = continuation or tail_tokens(len(token_ids))
        self._head = len(token_ids) - self.continuation
        self._exact = self._read_tail(exact)
        self._greedy = self._continue(exact)
        self.recompute = self.divergence(self._other_schedule()).mean

    def divergence(self, kv: Kv) -> Divergence:
        """How far expectations on `kv` are from the exact ones, along the tail."""
        return self._compare(self._read_tail(kv))

    def _compare(self, other: torch.Tensor) -> Divergence:
        found = [
            ((exact.exp() * (exact - read)).sum(-1).clamp_min(0), exact.argmax(-1) == read.argmax(-1))
            for exact, read in zip(torch.split(self._exact, _PIECE_TOKENS), torch.split(other, _PIECE_TOKENS), strict=True)
        ]
        return Divergence(torch.cat([by_position for by_position, _ in found]), torch.cat([same for _, same in found]))

    def certify(self, kv: Kv) -> Certificate:
        """The certificate of `kv`. Raises UnsupportedModelError where there is nothing to be measured."""
        other = self._read_tail(kv)
        found = self._compare(other)
        greedy = self._continue(kv)
        equal = next((index for index, pair in enumerate(zip(greedy, self._greedy, strict=True)) if pair[0] != pair[1]), None)
        divergences = (found.mean, found.p99, self.recompute)
        fractions = (self._perplexity(other), self._perplexity(self._exact), found.top1)
        if not torch.isfinite(torch.tensor([*divergences, *fractions])).all():
            raise UnsupportedModelError(f"{self._loaded.identity.name} gives no finite expectations on this document")
        kl, p99, recompute = (round(number * NANO) for number in divergences)
        perplexity, perplexity_exact, top1 = (round(number * MICRO) for number in fractions)
        return Certificate(
            continuation=self.continuation,
            greedy_equal=GREEDY_TOKENS if equal is None else equal,
            greedy_total=GREEDY_TOKENS,
            kl_mean=kl,
            kl_p99=p99,
            kl_recompute=recompute,
            perplexity=perplexity,
            perplexity_exact=perplexity_exact,
            top1=top1,
        )

    def _read_tail(self, kv: Kv) -> torch.Tensor:
        """Log-probabilities [continuation, vocabulary] of what follows each token of the tail, float32 on the CPU."""
        cache = cache_of(self._loaded, kv, self._head)
        return self._run(self._ids[self._head :], cache)[0].cpu()

    def _run(self, token_ids: Sequence[int], cache: Cache) -> tuple[torch.Tensor, Cache]:
        model = self._loaded.model
        with torch.inference_mode():
            tokens = torch.tensor([list(token_ids)], dtype=torch.long, device=device_of(model))
            output = model(input_ids=tokens, use_cache=True, **beside(model.forward, cache, tokens))
            return output.logits[0].float().log_softmax(-1), output_cache(output)

    def _continue(self, kv: Kv) -> list[int]:
        """The most likely tokens behind the document, one after another."""
        # The last token is read by the model, so that there are expectations of what follows it.
        cache = cache_of(self._loaded, kv, len(self._ids) - 1, GREEDY_TOKENS)
        token, found = self._ids[-1], []
        for _ in range(GREEDY_TOKENS):
            expected, cache = self._run([token], cache)
            token = int(expected[-1].argmax())
            found.append(token)
        return found

    def _perplexity(self, expected: torch.Tensor) -> float:
        following = torch.tensor(self._ids[self._head + 1 :])
        return float(torch.exp(-expected[:-1].gather(1, following[:, None]).mean()))

    def _other_schedule(self) -> Kv:
        """The exact KV of all but the tail, computed in passes of some half the length: equal but for rounding.

        Passes of exactly half the length are the same to the bit on processors whose matrix units take rows in tiles.
        """
        layout = self._loaded.identity.layout
        prefill = ScheduledPrefill(self._loaded.model, layout, self._head)
        shorter = max(min(layout.block_tokens, self._head) // 2 - 1, 1)
        for _ in prefill.run(self._ids[: self._head], pass_tokens=shorter):
            pass
        return prefill.rows(self._head)


def cache_of(loaded: LoadedModel, kv: Kv, tokens: int, room: int = 0) -> Cache:
    """A cache that holds copies of the first `tokens` rows of `kv`, with room for `room` more and the tail."""
    layers = []
    layout = loaded.identity.layout
    for spec, device, tensors in zip(layout.layers, layer_devices(loaded.model, layout), kv, strict=True):
        layer = make_layer(spec, tokens + room + CONTINUATION_TOKENS, tokens, device)
        with torch.inference_mode():
            for place, tensor in zip(layer.rows(0, tokens), tensors, strict=True):
                place.copy_(tensor[:tokens])
        layers.append(layer)
    return build_cache(loaded.model, layers)
