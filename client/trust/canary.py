"""The canary: a few tokens of a fetched prefix, recomputed before a model and a publisher meet for the first time.

Signatures tell who made a cache, not that this model would have made the same. The canary sees what they cannot: weights that
were changed after loading, another rope, layouts mixed up, another fine-tune under this name, a publisher who publishes
something else. It costs two short passes, once: what it found is remembered for the model as it is in memory, the
publisher, and the software, by other processes too; a weight that changes asks for another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvcdn import __version__
from kvcdn.block import BlockHeader
from kvcdn.digest import Digest
from kvcdn.errors import MismatchError
from kvcdn.keys import EXACT_TOKENS
from kvcdn.model.load import LoadedModel
from kvcdn.model.recompute import Span, compare_span, earliest_start
from kvcdn.model.remembered import Remembered
from kvcdn.model.weights import runs_foreign_code, sample_weights
from kvcdn.signing import PublicKey

HEAD_TOKENS = 16
"""Recomputed at the beginning of the first fetched block: enough for a quantile, and not yet a prefill."""

TAIL_TOKENS = 8
"""Recomputed at the end of the prefix, where positions are large and small differences of rope have grown."""

Headers = Mapping[int, BlockHeader]
"""Of the blocks that were fetched, by index in the prefix."""

Maker = tuple[PublicKey, str]
"""Who made a block, and in which precision: what a lossy one is allowed to be off says nothing of exact ones."""


def makers(headers: Headers) -> set[Maker]:
    """Who made the blocks of `headers`."""
    return {(header.publisher, header.precision) for header in headers.values()}


class Canary:
    """What is known of one model in memory and its publishers. Thread-safe as far as the model is."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._passed: set[str] = set()
        self._failed: dict[tuple[Digest, PublicKey], str] = {}

    def due(self, by: set[Maker]) -> bool:
        """Whether caches of any of these makers have not been tried with this model as it is now.

        Code of no known library may do something else the next time, so that beside it each is tried.
        """
        return runs_foreign_code(self._loaded.model) or not all(self._known(key) for key in self._keys(by))

    def failures(self) -> dict[PublicKey, str]:
        """Publishers whose caches were not this model's as it is now, each with what was found."""
        if not self._failed:
            return {}
        weights = sample_weights(self._loaded.model)
        return {publisher: reason for (of, publisher), reason in self._failed.items() if of == weights}

    def check(self, layers: Sequence[Any], headers: Headers, token_ids: Sequence[int], length: int) -> None:
        """Recomputes some of the first `length` tokens, which `layers` hold, and remembers the outcome. Raises MismatchError.

        Where windows leave nothing that can be recomputed, nothing is found and nothing remembered.
        """
        checked = False
        for header, span in self._spans(layers, headers, length):
            found = compare_span(self._loaded, layers, token_ids, span, header.precision)
            if found.excess:
                reason = f"{span} are not what this model computes from this text ({found.excess})"
                self._failed[sample_weights(self._loaded.model), header.publisher] = reason
                raise MismatchError(
                    f"block {header.address} by {header.publisher.text}: {reason}",
                    hint="either the model in memory is not what its files say, or the publisher's was not: kvcdn verify tells",
                )
            checked = True
        if checked:
            self.vouch(makers(headers))

    def vouch(self, by: set[Maker]) -> None:
        """Remembers that caches of these makers are this model's as it is now."""
        for key in self._keys(by):
            self._passed.add(key)
            Remembered("canary").put(key, True)

    def _spans(self, layers: Sequence[Any], headers: Headers, length: int) -> Iterator[tuple[BlockHeader, Span]]:
        """What to recompute: the head of each publisher's first block, and the tail of the prefix."""
        specs = self._loaded.identity.layout.layers
        seen: set[Maker] = set()
        end = 0
        for _, header in sorted(headers.items()):
            if (header.publisher, header.precision) not in seen and header.start < length:
                start = earliest_start(layers, header.start, specs)
                last = min(header.start + header.tokens, length)
                if header.certificate is not None:
                    # Lossy, but for its first tokens (FORMAT.md 2.5): what is behind them cannot be told from loss.
                    last = min(last, EXACT_TOKENS) if start == 0 else 0
                if start is not None and start < last:
                    seen.add((header.publisher, header.precision))
                    end = min(start + HEAD_TOKENS, last)
                    yield header, Span(start, end)
        tail = headers[max(headers)] if headers else None
        if tail is not None and tail.certificate is None:
            last = min(tail.start + tail.tokens, length)
            start = earliest_start(layers, max(last - TAIL_TOKENS, tail.start, end), specs)
            if start is not None and start < last:
                yield tail, Span(start, last)

    def _known(self, key: str) -> bool:
        if key not in self._passed and Remembered("canary").get(key) is True:
            self._passed.add(key)
        return key in self._passed

    def _keys(self, by: set[Maker]) -> list[str]:
        """What is remembered of each maker hangs on the model, its weights as they are, and the software."""
        producer = json.dumps(asdict(self._loaded.producer), sort_keys=True)
        stack = f"{self._loaded.identity.tag} {sample_weights(self._loaded.model)} kvcdn={__version__} {producer}"
        return [f"{publisher} {precision} {stack}" for publisher, precision in by]
