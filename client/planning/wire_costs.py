"""Wire costs: what a block weighs on the wire and takes to decode, before it is there; learnt from every fetch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvcdn.client.loading.delivery import layers_to_read, raw_bytes
from kvcdn.client.loading.fetch import PrefixFetch
from kvcdn.keys import COARSE_OF, TRANSFORMED, BlockName, ModelIdentity
from kvcdn.model.remembered import Remembered

USUAL_RATIO = 0.7
"""Stored over raw bytes of bf16 KV, losslessly; measured 0.67 to 0.70. So is what is stored of coarse KV and its refinement."""

USUAL_RATIOS = {"int8": 0.52, "int4": 0.3, "tc-high": 0.29, "tc-medium": 0.16, "tc-low": 0.11, "tc-least": 0.084}
"""The same of lossy precisions (docs/codecs.md)."""

USUAL_DECODING = 200e6
"""Stored bytes a second that one thread verifies, decrypts and decodes, before it was measured here."""

USUAL_TRANSFORMING = 0.4e9
USUAL_REFINING = 0.2e9
"""Raw bytes a second that the transform codec decodes in one thread, and that it and a refinement do (docs/codecs.md)."""

_SAVE_SECONDS = 10.0
"""Least time between two writes to disk."""

_LEAST_BYTES = 1 << 20
"""Less says more of overhead than of speed."""


class WireCosts:
    """Of the blocks of one model."""

    def __init__(self, model: ModelIdentity) -> None:
        self._model = model
        self._key = f"{model.tag} {model.precision}"
        known = Remembered("wire-costs").get(self._key)
        known = known if isinstance(known, dict) else {}
        self.ratio = _sensible(known.get("ratio"), 0.01, 2.0) or USUAL_RATIOS.get(model.precision, USUAL_RATIO)
        self._decoding = _sensible(known.get("decoding"), 1e5, 1e12) or self._usual_decoding(model.precision)

    def _usual_decoding(self, precision: str) -> float:
        raw = USUAL_REFINING if precision in COARSE_OF else USUAL_TRANSFORMING if precision in TRANSFORMED else None
        return USUAL_DECODING if raw is None else self.ratio * raw

    @property
    def segment_bytes(self) -> float:
        """Of one layer of a block, on average."""
        layout = self._model.layout
        return self.ratio * layout.bytes_per_token * layout.block_tokens / len(layout.layers)

    def expected_bytes(self, blocks: Sequence[BlockName], length: int) -> list[float]:
        """Stored bytes of each of `blocks` that a reader of the first `length` tokens asks for."""
        layout = self._model.layout
        needed = [spec.first_needed(length) for spec in layout.layers]
        wanted = [layers_to_read(layout, name, needed, states=name is blocks[-1]) for name in blocks]
        return [self.ratio * raw_bytes(layout, name, layers) for name, layers in zip(blocks, wanted, strict=True)]

    def decoding_rate(self, fetch: PrefixFetch | None) -> float:
        """Stored bytes a second that all fetching threads together decode on this machine's cores."""
        threads = (os.cpu_count() or 1) if fetch is None else min(fetch.threads, os.cpu_count() or 1)
        return (self._measured(fetch) or self._decoding) * threads

    def _measured(self, fetch: PrefixFetch | None) -> float | None:
        if fetch is None or fetch.bytes_fetched < _LEAST_BYTES or not fetch.decoding_seconds:
            return None
        return fetch.bytes_fetched / fetch.decoding_seconds

    def remember(self, fetch: PrefixFetch) -> None:
        """Keeps what `fetch` has shown for the next one."""
        read = [(one, one.header.raw_bytes) for one in fetch.deliveries if one.header and one.received and not one.computed]
        decoding, raw = self._measured(fetch), sum(raw for _, raw in read)
        if decoding is None or not raw:
            return
        ratio = sum(one.size for one, _ in read) / raw
        Remembered("wire-costs").put(self._key, {"ratio": round(ratio, 4), "decoding": round(decoding)}, every_s=_SAVE_SECONDS)


def _sensible(value: Any, least: float, most: float) -> float | None:
    """A number from a file, if it makes sense."""
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    return None
