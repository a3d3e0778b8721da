"""A text published with a tiny model: origin, key, and a client that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcdn import layout
from kvcdn.client import Client
from kvcdn.client.sources.stored import StoreSource
from kvcdn.keys import PRECISIONS
from kvcdn.model.load import LoadedModel, load_model
from kvcdn.model.tokens import Prompt, encode_text
from kvcdn.origin.publishing.publish import Publisher, PublishResult
from kvcdn.signing import SigningKey, TrustList
from kvcdn.store import BlobStore
from kvcdn.stores.memory import MemoryStore
from support.tiny import TEXT

BLOCK = 64
"""Tokens of a short block."""

QUESTION = (17, 4, 250, 9, 33)
"""Behind a document, tokens that it does not go on with."""


@contextmanager
def short_blocks() -> Iterator[None]:
    """Blocks of `BLOCK` tokens, so that a short text has several: the schedule is the format's with this one limit lower."""
    before, layout.MAX_BLOCK_TOKENS = layout.MAX_BLOCK_TOKENS, BLOCK
    try:
        yield
    finally:
        layout.MAX_BLOCK_TOKENS = before


@dataclass
class Published:
    """What a test of the reading side starts from."""

    loaded: LoadedModel
    store: BlobStore
    key: SigningKey
    text: str
    token_ids: tuple[int, ...]
    result: PublishResult

    @property
    def trust(self) -> TrustList:
        """A list of the publisher alone."""
        return TrustList.of(self.key.public)

    def client(self, source: Any = None, *, vouched: bool = True, **options: Any) -> Client:
        """A client of this model that trusts the publisher and reads from the store, or from `source`.

        `vouched` for: model and publisher have met before, so that no canary is due and caches may stream at once. It fetches
        unless told otherwise: whether that pays for so small a model is not what most tests are about.
        """
        options.setdefault("trust", self.trust)
        options.setdefault("mode", "fetch")
        source = StoreSource(self.store) if source is None else source
        client = Client(self.loaded.model, self.loaded.tokenizer, source, **options)
        if vouched and client.loaded is not None:
            client._supply.gate._canary.vouch({(self.key.public, precision) for precision in PRECISIONS})
        return client


def asked(published: Published) -> Prompt:
    """The document and a question."""
    return Prompt((*published.token_ids, *QUESTION), (len(published.token_ids),))


def publish_text(
    checkpoint: Path, *, text: str = TEXT, store: BlobStore | None = None, tokens: int | None = None, device: str = "cpu"
) -> Published:
    """Publishes `text`, or its first `tokens` tokens, with the model in `checkpoint`."""
    loaded = load_model(str(checkpoint), device)
    store, key = store or MemoryStore(), SigningKey.generate()
    if tokens is not None:
        offsets = loaded.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        text = text[: offsets[tokens - 1][1]]
    token_ids = encode_text(loaded.tokenizer, text).token_ids
    result = Publisher(loaded, store, key).publish(token_ids)
    return Published(loaded, store, key, text, token_ids, result)
