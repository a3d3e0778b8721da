"""A synthetic trace of requests for `kvcdn bench eviction`, where there is no recorded one: documents by Zipf's law."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

SYNTHETIC = "synthetic-zipf"

REQUESTS, DOCUMENTS = 20_000, 2_000

EXPONENT = 0.9
"""Of Zipf's law: what web caches see is between 0.6 and 1."""

_SYSTEM_PROMPTS, _SYSTEM_BLOCKS = 10, 4
"""Documents share beginnings: each has one of these before it."""

_DOCUMENT_BLOCKS = (2, 40)

_QUESTION_BLOCKS = 2
"""At the end of each request, and never seen again."""


def write_trace(path: Path, *, quick: bool = False) -> None:
    """JSON lines with `hash_ids`, the same whenever it is called."""
    chance = random.Random(0)  # noqa: S311 - to be repeated
    ids = itertools.count()
    systems = [[next(ids) for _ in range(_SYSTEM_BLOCKS)] for _ in range(_SYSTEM_PROMPTS)]
    documents = [
        [*chance.choice(systems), *(next(ids) for _ in range(chance.randint(*_DOCUMENT_BLOCKS)))] for _ in range(DOCUMENTS)
    ]
    weights = [1 / rank**EXPONENT for rank in range(1, DOCUMENTS + 1)]
    with path.open("w", encoding="utf-8") as file:
        for document in chance.choices(documents, weights, k=REQUESTS // 20 if quick else REQUESTS):
            file.write(json.dumps({"hash_ids": [*document, *(next(ids) for _ in range(_QUESTION_BLOCKS))]}) + "\n")
