"""Conversations: a chat that goes on, of which each turn reads only what the turns before have not read.

The cache holds the tokens of the last prompt and of the model's own answer. The next prompt is the whole chat in the model's
template, which may write the answer otherwise than the model did (white space, dropped thoughts). So tokens are compared, and
the cache is cut back to where they differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcdn.client.answer import Answer
from kvcdn.client.arguments import require_text
from kvcdn.client.explaining.difference import common_length
from kvcdn.client.forms import require_text_or_messages
from kvcdn.client.generation import Generation
from kvcdn.client.loading.report import Refining, Report
from kvcdn.client.prefix import ModelState
from kvcdn.client.rest import completed, reaches
from kvcdn.client.streaming import AnswerStream, stream_answer
from kvcdn.errors import UnsupportedModelError, UsageError
from kvcdn.model.cache import CacheLayer, build_cache
from kvcdn.model.layers import TokenMajorLayer
from kvcdn.model.states import WithStates
from kvcdn.model.tokens import Messages, Prompt, encode_chat

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from kvcdn.client.client import Client


class Conversation:
    """Messages so far, and the cache of their tokens. Turns of one conversation wait for each other; conversations do not."""

    def __init__(self, client: Client, opening: str | Messages) -> None:
        self._client = client
        if opening != ():
            require_text_or_messages(opening, "the opening")
        self._messages = (
            [{"role": "system", "content": opening}] if isinstance(opening, str) else [dict(one) for one in opening]
        )
        self._turn = threading.Lock()
        self._layers: list[CacheLayer] = []
        self._cached: tuple[int, ...] = ()
        self._state: ModelState | None = None
        self._loaded: Report | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of all messages so far, the model's included."""
        return [dict(message) for message in self._messages]

    def say(self, text: str, **options: Any) -> Answer:
        """Adds `text` as the user's message, and the model's answer; `options` as for `Client.generate`, one sequence.

        Raises UsageError; a turn that raises is not part of the conversation.
        """
        return self._say(text, time.perf_counter(), options)

    def stream(self, text: str, **options: Any) -> AnswerStream:
        """As `say`, piece by piece. What was written until the reader leaves is the model's message."""
        started = time.perf_counter()
        self._generation(text, options)  # what cannot be is told here, and not in the thread
        return stream_answer(self._client.tokenizer, options, lambda streamed: self._say(text, started, streamed))

    def close(self) -> None:
        """Lets go of the cache; the next turn loads or computes it again."""
        with self._turn:
            self._layers, self._cached = [], ()

    def _generation(self, text: str, options: dict[str, Any]) -> Generation:
        require_text(text, "what is said")
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = encode_chat(self._client.tokenizer, messages, answer_follows=True)
        generation = Generation(self._client.model, self._client.tokenizer, prompt, options)
        if generation.copies > 1:
            raise UsageError("a conversation goes on with one answer", hint="ask for one beam and one sequence")
        return generation

    def _say(self, text: str, started: float, options: dict[str, Any]) -> Answer:
        with self._turn:
            generation = self._generation(text, options)
            report, cache = self._cache_for(generation.prompt, started)
            # Whatever happens to it now, it is not what was kept.
            self._layers, self._cached = [], ()
            output = generation.run(generation.inputs(cache, report))
            if cache is not None:
                self._keep(cache, output[0].tolist())
            report.seconds["first_token"] = generation.first_token_at - started
            report.seconds["total"] = time.perf_counter() - started
            answer = generation.answer(output, report)
            self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]
            return answer

    def _cache_for(self, prompt: Prompt, started: float) -> tuple[Report, Cache | None]:
        """What earlier turns left, cut back to where the prompt goes on, or what is published, or an empty cache to be kept."""
        client = self._client
        try:
            loaded = client.current()
        except UnsupportedModelError:
            return client.load_cache(prompt, started)
        before, self._state = self._state, ModelState.of(loaded)
        coarse = self._loaded is not None and self._loaded.tokens_coarse > 0
        refined = self._loaded is not None and self._loaded.refinement is Refining.KEPT
        usable = self._state == before and not (coarse and refined) and loaded.reads(len(prompt.token_ids))
        common = min(common_length(prompt.token_ids, self._cached), len(prompt.token_ids) - 1) if usable else 0
        if common and reaches(loaded, self._layers, common):
            report = Report(client.source.url, len(prompt.token_ids), tokens_reused=common, tokens_kept=common)
            report.seconds["tokenize"] = time.perf_counter() - started
            if self._loaded is not None:
                # What was computed behind coarse rows is not exact, either.
                report.precision, report.tokens_coarse = self._loaded.precision, common if coarse else 0
            report.bytes_raw = loaded.identity.layout.needed_bytes(common)
            for layer in self._layers:
                layer.declare(common)
            client.count_kept(report)
            return report, build_cache(loaded.model, self._layers)
        report, cache = client.load_cache(prompt, started)
        self._loaded = report
        return report, build_cache(client.model, completed(loaded, cache, prompt.token_ids, 0))

    def _keep(self, cache: Cache, token_ids: Sequence[int]) -> None:
        """Keeps the cache of `token_ids`, as far as it was read: the last token of an answer was not."""
        if any(isinstance(layer, WithStates) for layer in cache.layers):
            return  # it cannot be cut back to where the next prompt leaves this one
        length = cache.get_seq_length()
        layers: list[CacheLayer] = list(cache.layers)
        if all(layer.get_seq_length() == length for layer in layers if isinstance(layer, TokenMajorLayer)):
            self._layers, self._cached = layers, tuple(token_ids[:length])
