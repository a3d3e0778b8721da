"""A prefix: the cache of a document in memory, once, for any number of questions, one after the other or at the same time.

Every question gets layers that show the prefix's tensors and take a copy of a layer when they first write to it; so none can
change what the others see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kvcdn.client.answer import Answer, Prepared
from kvcdn.client.arguments import require_list
from kvcdn.client.batch import Row, run_batch
from kvcdn.client.explaining.difference import common_length
from kvcdn.client.generation import Generation
from kvcdn.client.loading.report import Refining, Report
from kvcdn.client.rest import completed, reaches
from kvcdn.client.streaming import AnswerStream, stream_answer
from kvcdn.digest import Digest
from kvcdn.errors import KvcdnError, MismatchError, UnsupportedModelError, UsageError
from kvcdn.model.cache import CacheLayer, build_cache
from kvcdn.model.tokens import Prompt
from kvcdn.model.weights import sample_weights

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from kvcdn.client.client import Client
    from kvcdn.client.forms import PromptLike
    from kvcdn.model.load import LoadedModel


class Prefix:
    """The cache of `token_ids`. `report` says how much of it was loaded; what was not is computed here, once. Thread-safe.

    For a model whose cache is not supported every question is prefilled as a whole.
    """

    def __init__(self, client: Client, document: PromptLike) -> None:
        """Loads the cache of `document`: a text, opening messages, or tokens. Raises UsageError for an empty one."""
        self._client = client
        self._document = document
        prompt = client.opening(document)
        self.token_ids = prompt.token_ids
        self._prompt = prompt
        self._lock = threading.Lock()
        self._layers: list[CacheLayer] = []
        self._load()

    def _load(self) -> None:
        """Loads the cache, or loads it again."""
        started, client, prompt = time.perf_counter(), self._client, self._prompt
        # One more token, whichever, since a cache leaves at least one of a prompt to the model.
        self.report, cache = client.load_cache(Prompt((*prompt.token_ids, 0), prompt.boundaries), started)
        self.report.tokens_total = len(prompt.token_ids)
        try:
            loaded = client.current()
        except UnsupportedModelError:
            return
        self._state = ModelState.of(loaded)
        if loaded.identity.layout.state_bytes or not loaded.reads(len(prompt.token_ids)):
            # States cannot be cut back to where a question leaves the document: each loads its own. Where rope hangs on the
            # prompt's length, none can.
            return
        self._layers = completed(loaded, cache, prompt.token_ids, len(prompt.token_ids))
        self.report.seconds["total"] = time.perf_counter() - started

    def close(self) -> None:
        """Lets go of the memory, once questions under way have their copies."""
        self._layers = []
        self.token_ids = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- questions ----------------------------------------------------------------------------------------------------------

    def ask(self, question: str, **options: Any) -> Answer:
        """Answers `question` on the document; as `Client.ask`."""
        return self.generate(self._question(question), **options)

    def generate(self, prompt: PromptLike, **options: Any) -> Answer:
        """Continues a prompt that begins as this prefix does; as `Client.generate`."""
        started = time.perf_counter()
        return self._generate(self._client.encode(prompt), started, options)

    def stream(self, prompt: PromptLike, **options: Any) -> AnswerStream:
        """As `generate`, piece by piece."""
        started = time.perf_counter()
        encoded = self._client.encode(prompt)
        Generation(self._client.model, self._client.tokenizer, encoded, options)
        return stream_answer(self._client.tokenizer, options, lambda streamed: self._generate(encoded, started, streamed))

    def stream_answer(self, question: str, **options: Any) -> AnswerStream:
        """As `ask`, piece by piece."""
        return self.stream(self._question(question), **options)

    def ask_many(self, questions: Sequence[str], **options: Any) -> list[Answer]:
        """Answers `questions` in one run of the model, each with a copy of the cache. Raises UsageError as `run_batch`."""
        started = time.perf_counter()
        require_list(questions, "questions", "give a list of questions; ask() takes one")
        rows = []
        for question in questions:
            prompt = self._question(question)
            report, cache = self._session(prompt, started)
            rows.append(Row(prompt, cache, report))
        return run_batch(self._client, rows, started, options)

    def prepare(self, prompt: PromptLike) -> Prepared:
        """Inputs for a generate() of your own; as `Client.prepare`."""
        started = time.perf_counter()
        generation = Generation(self._client.model, self._client.tokenizer, self._client.encode(prompt), {})
        report, cache = self._session(generation.prompt, started)
        if cache is not None:
            self._client.guard(cache, generation.prompt)
        return generation.inputs(cache, report)

    def _question(self, question: str) -> Prompt:
        if isinstance(self._document, Prompt | Mapping):
            raise UsageError("a prefix of tokens has no form for questions", hint="use generate() with a whole prompt")
        return self._client.question(self._document, question)

    def _generate(self, prompt: Prompt, started: float, options: dict[str, Any]) -> Answer:
        generation = Generation(self._client.model, self._client.tokenizer, prompt, options)
        report, cache = self._session(prompt, started)
        output = generation.run(generation.inputs(cache, report))
        report.seconds["first_token"] = generation.first_token_at - started
        report.seconds["total"] = time.perf_counter() - started
        return generation.answer(output, report)

    def _keeps_states(self) -> bool:
        loaded = self._client.loaded
        return bool(self.token_ids) and loaded is not None and loaded.identity.layout.state_bytes > 0

    def _session(self, prompt: Prompt, started: float) -> tuple[Report, Cache | None]:
        """A cache of what `prompt` has in common with the prefix, of its own; None where that is nothing."""
        if not self._layers and self._keeps_states():
            return self._client.load_cache(prompt, started)
        report, cache = self._share(prompt, started)
        self._client.count_kept(report)
        return report, cache

    def _improve(self) -> None:
        """Loads the cache again where it was coarse, and the exact one is on this host now."""
        with self._lock:
            if self._layers and self.report.tokens_coarse and self.report.refinement is Refining.KEPT:
                self._load()

    def _share(self, prompt: Prompt, started: float) -> tuple[Report, Cache | None]:
        self._improve()
        report = Report(self._client.source.url, len(prompt.token_ids))
        report.seconds["tokenize"] = time.perf_counter() - started
        layers = self._layers
        if not layers:
            report.reason, report.detail = self.report.reason, self.report.detail or "the prefix was closed"
            return report, None
        common = min(common_length(prompt.token_ids, self.token_ids), len(prompt.token_ids) - 1)
        try:
            loaded = self._client.current()
            loaded.require_steady(len(prompt.token_ids))
            if ModelState.of(loaded) != self._state:
                raise MismatchError("the model was changed after the prefix was loaded")
            if not common or not reaches(loaded, layers, common):
                raise UsageError(f"the prompt leaves the prefix after {common} tokens, where nothing of it can be used")
        except KvcdnError as error:
            report.miss(error)
            return report, None
        report.tokens_reused = report.tokens_kept = common
        # What was computed behind coarse rows is not exact, either.
        report.precision, report.tokens_coarse = self.report.precision, common if self.report.tokens_coarse else 0
        report.bytes_raw = loaded.identity.layout.needed_bytes(common)
        return report, build_cache(loaded.model, [layer.fork(common) for layer in layers])


@dataclass(frozen=True)
class ModelState:
    """What a cache in memory hangs on besides its tokens: the model with its adapters, and its weights as they are."""

    fingerprint: Digest
    weights: Digest

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self:
        return cls(loaded.identity.fingerprint, sample_weights(loaded.model))
