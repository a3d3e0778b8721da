"""Workloads: requests with their times, as a trace tells them or as drawn: documents by Zipf's law, arrivals as Poisson's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcdn.economics.checks import number, whole
from kvcdn.errors import UsageError

TRACE_BLOCK_TOKENS = 512
"""Tokens that an id of a trace stands for, as in the traces of the Mooncake project."""

MOST_TOKENS = 1 << 24

MOST_DOCUMENTS = 10_000_000

MOST_REQUESTS = 1e12

_CHUNK = 1 << 16
"""Requests drawn at once."""


class Request(NamedTuple):
    """One prompt: when, how long, and the ids of its blocks. Blocks of equal ids hold the same tokens after the same tokens."""

    time: float
    tokens: int
    chain: Sequence[int]
    covered: int
    """Tokens that the chain holds, from the first on."""
    edge: int
    """Where its reader is."""


@dataclass(frozen=True, kw_only=True)
class Zipf:
    """Questions on documents: the i-th most popular is asked about in proportion to i to the power of minus `exponent`."""

    requests: float
    seconds: float
    documents: int = 10_000
    exponent: float = 0.9
    document_tokens: int = 4096
    question_tokens: int = 32
    block_tokens: int = TRACE_BLOCK_TOKENS

    def __post_init__(self) -> None:
        number("--readers", self.requests, least=1, most=MOST_REQUESTS)
        number("--days", self.seconds, positive=True)
        whole("--documents", self.documents, least=1, most=MOST_DOCUMENTS)
        number("--zipf", self.exponent, most=10)
        whole("--document-tokens", self.document_tokens, least=1, most=MOST_TOKENS)
        whole("--question-tokens", self.question_tokens, least=1, most=MOST_TOKENS)
        whole("--block-tokens", self.block_tokens, least=16, most=MOST_TOKENS)

    @property
    def document_blocks(self) -> int:
        return -(-self.document_tokens // self.block_tokens)

    def popularity(self) -> NDArray[np.float64]:
        """The share of requests that each document has, most popular first."""
        weights = np.arange(1, self.documents + 1, dtype=np.float64) ** -self.exponent
        return np.asarray(weights / weights.sum(), dtype=np.float64)

    def draw(self, requests: int, shares: Sequence[float], seed: int) -> Iterator[Request]:
        """`requests` of them at the workload's rate, in order; edges by `shares`. The same for the same seed."""
        rng = np.random.default_rng(seed)
        documents, edges = np.cumsum(self.popularity()), np.cumsum(np.asarray(shares) / sum(shares))
        blocks, tokens, now = self.document_blocks, self.document_tokens + self.question_tokens, 0.0
        for start in range(0, requests, _CHUNK):
            count = min(_CHUNK, requests - start)
            times = now + np.cumsum(rng.exponential(self.seconds / self.requests, count))
            now = float(times[-1])
            chosen = np.minimum(np.searchsorted(documents, rng.random(count), "right"), self.documents - 1).tolist()
            places = np.minimum(np.searchsorted(edges, rng.random(count), "right"), len(edges) - 1).tolist()
            for time, document, edge in zip(times.tolist(), chosen, places, strict=True):
                yield Request(time, tokens, range(document * blocks, (document + 1) * blocks), self.document_tokens, edge)


def read_requests(lines: Iterable[bytes], what: str, shares: Sequence[float], rate: float, seed: int) -> list[Request]:
    """The requests of a trace's lines, `rate` times as fast. Raises UsageError that names `what` and the line.

    A prompt that continues an earlier one as a whole, as the next turn of a conversation does, comes from the same edge's
    readers; others are drawn by `shares`.
    """
    number("--rate", rate, positive=True)
    rng = np.random.default_rng(seed)
    edges = np.cumsum(np.asarray(shares) / sum(shares))
    place_of: dict[int, int] = {}
    found: list[Request] = []
    for line_number, line in enumerate(lines, 1):
        time, tokens, chain = _parsed(line, f"{what}, line {line_number}")
        if not chain:
            continue
        edge = next((place_of[block] for block in reversed(chain) if block in place_of), -1)
        if edge < 0:
            edge = min(int(np.searchsorted(edges, rng.random(), "right")), len(edges) - 1)
        # Its last whole block: what a next turn begins with. The first alone is but a system prompt.
        whole_blocks = tokens // TRACE_BLOCK_TOKENS
        if whole_blocks > 1:
            place_of[chain[min(whole_blocks, len(chain)) - 1]] = edge
        found.append(Request(time / rate, tokens, chain, tokens, edge))
    if not found:
        raise UsageError(f"{what} holds no request", hint="a trace is JSON lines with timestamp, input_length and hash_ids")
    first = min(request.time for request in found)
    return sorted((request._replace(time=request.time - first) for request in found), key=lambda request: request.time)


def _parsed(line: bytes, where: str) -> tuple[float, int, tuple[int, ...]]:
    """Seconds, tokens, blocks."""
    hint = "a trace is JSON lines with timestamp (ms), input_length and hash_ids"
    try:
        values = json.loads(line)
        stamp, tokens, chain = values["timestamp"], values["input_length"], values["hash_ids"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{where} is not a request", hint=hint) from None
    if type(stamp) not in (int, float) or not 0 <= stamp <= 1e15 or type(tokens) is not int:  # noqa: PLR2004 - 30,000 years
        raise UsageError(f"{where}: timestamp and input_length must be numbers", hint=hint)
    if not isinstance(chain, list) or not all(type(block) is int for block in chain) or len(set(chain)) != len(chain):
        raise UsageError(f"{where}: hash_ids is not an array of different integers", hint=hint)
    if chain and not (len(chain) - 1) * TRACE_BLOCK_TOKENS < tokens <= len(chain) * TRACE_BLOCK_TOKENS:
        raise UsageError(
            f"{where}: {len(chain):,} blocks of {TRACE_BLOCK_TOKENS} tokens do not hold {tokens:,}",
            hint="blocks of other sizes are not read",
        )
    return stamp / 1000, tokens, tuple(chain)
