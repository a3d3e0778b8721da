"""The SDK: a model, a source of published caches, and prompts that start decoding at once.

    client = Client.load("smollm2-135m", "http://127.0.0.1:8400")
    answer = client.ask(document, "What is this about?")
    print(answer.text, answer.report)

Ids, attention mask and positions are made here, together, since a cache with another mask or other ids is wrong without a
word from the library. A failure of any kind is a miss with a reason, and the model prefills as it would have alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.cache_utils import Cache

from kvcdn.client.fetch import PrefixFetch
from kvcdn.client.match import PublishedPrefix, find_published
from kvcdn.client.report import MissReason, Report
from kvcdn.client.transport import EdgeSource, Source, StoreSource
from kvcdn.errors import KvcdnError, UnsupportedModelError, UsageError
from kvcdn.keyring import load_namespace, load_trust
from kvcdn.keys import Chain, Namespace
from kvcdn.model.cache import GROWTH_TOKENS, build_cache, cache_argument
from kvcdn.model.checkpoint import Checkpoint
from kvcdn.model.load import LoadedModel, bind_model, load_transformers
from kvcdn.model.speed import prefill_speed, remember_prefill
from kvcdn.model.tokens import Messages, Prompt, encode_chat, encode_text
from kvcdn.signing import TrustList
from kvcdn.stores import open_store

PromptLike = str | Messages | Prompt
"""Plain text, chat messages, or tokens with boundaries (`Prompt`)."""


def open_source(url: str, *, endpoint: str | None = None, token: str | None = None) -> Source:
    """A source of blocks: an edge (`http://...`), or an origin read directly (a folder, `s3://...`). Raises UsageError."""
    if url.startswith(("http://", "https://")):
        return EdgeSource(url, token)
    return StoreSource(open_store(url, endpoint=endpoint, token=token))


@dataclass
class Prepared:
    """What generate() takes: [1, n] ids and mask, and a cache of the first `report.tokens_reused` tokens."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    cache: Cache | None
    report: Report
    _argument: str = "past_key_values"

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for `model.generate`. Use them once: decoding grows the cache."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return inputs if self.cache is None else {**inputs, self._argument: self.cache}


@dataclass(frozen=True)
class Answer:
    """What the model wrote, and where its cache came from."""

    text: str
    token_ids: tuple[int, ...]
    report: Report


@dataclass
class _Attempt:
    """One prompt on its way: its tokens, what is published of them, and the fetch, if there is one."""

    prompt: Prompt
    report: Report
    published: PublishedPrefix = field(default_factory=lambda: PublishedPrefix(()))
    fetch: PrefixFetch | None = None
    length: int = 0
    """Leading tokens the cache holds, or will hold."""


class Client:
    """Loads published caches into one model. Thread-safe as far as the model is; prompts do not share state."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        source: str | Source,
        *,
        checkpoint: str | Checkpoint | None = None,
        trust: TrustList | None = None,
        namespace: str | Namespace | None = None,
        token: str | None = None,
    ) -> None:
        """Binds a loaded model to its checkpoint and opens `source`.

        `checkpoint` names the files `model` was loaded from, where the model does not know; `trust` and `namespace` default
        to the user's trust list and the public namespace. Raises UsageError; an unsupported model is no error, but a miss.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.source = open_source(source, token=token) if isinstance(source, str) else source
        self.trust = load_trust() if trust is None else trust
        self.namespace = namespace if isinstance(namespace, Namespace) else load_namespace(namespace)
        self._cache_argument = cache_argument(model.forward)
        self.loaded: LoadedModel | None = None
        self._unsupported: UnsupportedModelError | None = None
        try:
            self.loaded = bind_model(model, tokenizer, checkpoint)
        except UnsupportedModelError as error:
            self._unsupported = error

    @classmethod
    def load(cls, model: str, source: str | Source, *, device: str = "cpu", **options: Any) -> Self:
        """Loads the model `model` (folder, hub id or alias) and opens `source`; `options` as for the constructor."""
        transformer, tokenizer, checkpoint = load_transformers(model, device)
        return cls(transformer, tokenizer, source, checkpoint=checkpoint, **options)

    def close(self) -> None:
        """Closes idle connections."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- prompts ----------------------------------------------------------------------------------------------------------

    def question(self, document: str | Messages, question: str) -> Prompt:
        """The prompt of a question on a document: plain text, or the opening messages of a chat."""
        if isinstance(document, str):
            text = f"{document}\n\nQuestion: {question}\nAnswer:"
            return encode_text(self.tokenizer, text, [len(document)])
        return encode_chat(self.tokenizer, [*document, {"role": "user", "content": question}], answer_follows=True)

    def encode(self, prompt: PromptLike) -> Prompt:
        """Tokenises a prompt as `generate` does."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        return encode_chat(self.tokenizer, prompt, answer_follows=True)

    # -- answers ----------------------------------------------------------------------------------------------------------

    def ask(self, document: str | Messages, question: str, **options: Any) -> Answer:
        """Answers `question` on `document`; `options` as for `generate`."""
        started = time.perf_counter()
        return self._generate(self.question(document, question), started, options)

    def generate(self, prompt: PromptLike, **options: Any) -> Answer:
        """Continues `prompt` from its longest published prefix; `options` go to the model's own generate.

        The model starts before everything has arrived. Raises UsageError for several beams or sequences, whose caches differ.
        """
        started = time.perf_counter()
        return self._generate(self.encode(prompt), started, options)

    def prepare(self, prompt: PromptLike) -> Prepared:
        """Inputs for your own call of `model.generate`, complete and verified when this returns."""
        attempt = self._start(self.encode(prompt), time.perf_counter())
        return self._prepared(attempt, self._complete_cache(attempt))

    def _generate(self, prompt: Prompt, started: float, options: dict[str, Any]) -> Answer:
        _refuse_what_we_own(options, self.model)
        attempt = self._start(prompt, started)
        clock = FirstTokenClock()
        options = {**options, "stopping_criteria": [*options.get("stopping_criteria", ()), clock]}
        try:
            with torch.inference_mode():
                output = self._run(attempt, clock, options)
        finally:
            if attempt.fetch is not None:
                attempt.fetch.close()
        attempt.report.seconds["first_token"] = clock.at - started
        attempt.report.seconds["total"] = time.perf_counter() - started
        new = tuple(int(token) for token in output[0, len(prompt.token_ids) :])
        return Answer(self.tokenizer.decode(new, skip_special_tokens=True), new, attempt.report)

    def _run(self, attempt: _Attempt, clock: FirstTokenClock, options: dict[str, Any]) -> torch.Tensor:
        """Generates while the cache is still arriving; where it does not arrive, again from what did, or from nothing."""
        if attempt.fetch is not None and "streamer" not in options:
            try:
                attempt.fetch.wait_until_overlap_pays()
                streaming = build_cache(self.model, attempt.fetch.layers)
                output: torch.Tensor = self.model.generate(**self._prepared(attempt, streaming).inputs(), **options)
                self._record(attempt)
                return output
            except KvcdnError:
                # Nothing was written yet: the first forward pass waits for every layer. `_complete_cache` meets the same error.
                clock.reset()
        cache = self._complete_cache(attempt)
        started = time.perf_counter()
        output = self.model.generate(**self._prepared(attempt, cache).inputs(), **options)
        if cache is None and self.loaded is not None:
            remember_prefill(self.loaded, len(attempt.prompt.token_ids), clock.at - started)
        return output

    # -- one prompt's cache -----------------------------------------------------------------------------------------------

    def _start(self, prompt: Prompt, started: float) -> _Attempt:
        """Looks the prompt up and starts fetching what is published of it."""
        attempt = _Attempt(prompt, Report(self.source.url, len(prompt.token_ids)))
        seconds = attempt.report.seconds
        seconds["tokenize"] = time.perf_counter() - started
        if self.loaded is None:
            attempt.report.miss(self._unsupported or UnsupportedModelError("the model is not supported"))
            return attempt
        started = time.perf_counter()
        try:
            attempt.published = find_published(
                self.source, Chain(self.loaded.identity, self.namespace, prompt.token_ids), prompt.boundaries
            )
        except KvcdnError as error:
            attempt.report.miss(error)
        seconds["match"] = time.perf_counter() - started
        # At least one token must be left for the model to read: its logits begin the answer.
        attempt.length = min(attempt.published.tokens, len(prompt.token_ids) - 1)
        if attempt.length > 0:
            attempt.fetch = self._start_fetch(self.loaded, attempt)
        self._explain_short_match(attempt)
        return attempt

    def _start_fetch(self, loaded: LoadedModel, attempt: _Attempt) -> PrefixFetch:
        return PrefixFetch(
            self.source,
            loaded.identity,
            attempt.published.blocks,
            length=attempt.length,
            capacity=len(attempt.prompt.token_ids) + GROWTH_TOKENS,
            device=self.model.device,
            trust=self.trust,
        )

    def _explain_short_match(self, attempt: _Attempt) -> None:
        # The first boundary is the end of the document, or of a chat's opening message.
        report, offered = attempt.report, min(attempt.prompt.boundaries, default=1)
        if report.reason is None and attempt.published.tokens < offered:
            report.reason = MissReason.NOT_PUBLISHED
            report.detail = (
                f"only the first {attempt.published.tokens:,} tokens are published at {self.source.url} for this model"
                if attempt.published.tokens
                else f"no prefix of this prompt is published at {self.source.url} for this model and namespace"
            )

    def _complete_cache(self, attempt: _Attempt) -> Cache | None:
        """The whole cache, or what arrived of it, or None; records in the report which, and why."""
        fetch = attempt.fetch
        if fetch is None:
            return None
        try:
            fetch.wait()
        except KvcdnError as error:
            attempt.report.miss(error)
            usable = fetch.salvage()
            attempt.published = PublishedPrefix(attempt.published.blocks[:usable])
            attempt.length = min(attempt.published.tokens, attempt.length)
        self._record(attempt)
        if not attempt.length:
            return None
        for layer in fetch.layers:
            layer.declare(attempt.length)
        return build_cache(self.model, fetch.layers)

    def _record(self, attempt: _Attempt) -> None:
        fetch, report = attempt.fetch, attempt.report
        if fetch is None or self.loaded is None:
            return
        fetch.close()
        report.tokens_reused = attempt.length
        report.blocks_reused = len(attempt.published.blocks)
        report.bytes_fetched = fetch.bytes_fetched
        report.bytes_raw = self.loaded.identity.layout.needed_bytes(attempt.length)
        report.seconds["fetch"] = fetch.seconds
        speed = prefill_speed(self.loaded)
        if speed:
            report.seconds_saved = attempt.length / speed - report.seconds["match"] - fetch.seconds

    def _prepared(self, attempt: _Attempt, cache: Cache | None) -> Prepared:
        ids = torch.tensor([attempt.prompt.token_ids], dtype=torch.long, device=self.model.device)
        return Prepared(ids, torch.ones_like(ids), cache, attempt.report, self._cache_argument)


class FirstTokenClock(StoppingCriteria):  # type: ignore[misc] # transformers is untyped here
    """Stops nothing; notes when the first token was there. Called by generate() after every token."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002 - the library's
        self.at = self.at or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


_OWNED = (
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache",
    "cache_implementation",
)


def _refuse_what_we_own(options: dict[str, Any], model: PreTrainedModel) -> None:
    """Raises UsageError for options that would make a loaded cache silently wrong."""
    for name in _OWNED:
        if name in options:
            raise UsageError(f"{name} is made by the client", hint="use prepare() and call model.generate yourself")
    config = options.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name) or getattr(config, name, None) or 1) > 1:
            raise UsageError(
                f"{name} above 1 needs one cache per sequence, which is not supported yet", hint="ask once per answer"
            )
