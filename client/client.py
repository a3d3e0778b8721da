"""The SDK: a model, a source of published caches, and prompts that start decoding at once.

    client = Client.load("smollm2-135m", "http://127.0.0.1:8400")
    answer = client.ask(document, "What is this about?")
    print(answer.text, answer.report)

Ids, attention mask and positions are made here, together, since a cache with another mask or other ids is wrong without a
word from the library. A failure of any kind is a miss with a reason, and the model prefills as it would have alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvcdn.client.attempt import Attempt
from kvcdn.client.gate import Gate
from kvcdn.client.generation import FirstTokenClock, refuse_what_we_own
from kvcdn.client.plan import Aim, Prices
from kvcdn.client.report import Report
from kvcdn.client.sources import open_source
from kvcdn.client.supply import Supply
from kvcdn.client.transport import Source
from kvcdn.errors import KvcdnError, UnsupportedModelError, UsageError
from kvcdn.keyring import load_namespace, load_trust
from kvcdn.keys import Namespace
from kvcdn.model.adapters import attach_adapters, unwrapped
from kvcdn.model.cache import cache_argument
from kvcdn.model.checkpoint import Checkpoint
from kvcdn.model.load import LoadedModel, bind_model, load_transformers
from kvcdn.model.speed import remember_prefill
from kvcdn.model.tokens import Messages, Prompt, encode_chat, encode_text
from kvcdn.signing import TrustList

PromptLike = str | Messages | Prompt
"""Plain text, chat messages, or tokens with boundaries (`Prompt`)."""


@dataclass
class Prepared:
    """What generate() takes: [1, n] ids and mask, and a cache of the prompt's beginning.

    It holds the first `report.tokens_reused + report.tokens_computed` tokens.
    """

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


class Client:
    """Loads published caches into one model. Thread-safe as far as the model is; prompts do not share state."""

    def __init__(  # noqa: PLR0913 - by name
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        source: str | Source,
        *,
        checkpoint: str | Checkpoint | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        trust: TrustList | None = None,
        namespace: str | Namespace | None = None,
        token: str | None = None,
        audit: float = 0.0,
        mode: str = "auto",
        deadline: float | None = None,
        prefer: str = "fastest",
        prices: Prices | None = None,
    ) -> None:
        """Binds a loaded model, which may be a model of peft, to its checkpoint and opens `source`.

        `checkpoint` names the files `model` was loaded from, where the model does not know; `adapters` the folder of each LoRA
        adapter by its name in the model; `trust` and `namespace` default to the user's trust list and the public namespace;
        `audit` is the probability with which one block of a prompt is recomputed. `mode` is auto, fetch, compute or both;
        `deadline` is in seconds from the question to the first token; `prefer` is fastest, or cheapest at these `prices`: each
        can be given for a single prompt as well. Raises UsageError; an unsupported model is no error, but a miss.
        """
        if not 0 <= audit <= 1:
            raise UsageError(f"audit is a probability, 0 to 1, not {audit}")
        self.model = model = unwrapped(model)
        self.tokenizer = tokenizer
        self.source = open_source(source, token=token) if isinstance(source, str) else source
        self.trust = load_trust() if trust is None else trust
        self._audit = audit
        self.namespace = namespace if isinstance(namespace, Namespace) else load_namespace(namespace)
        self._aim = Aim.of(mode, deadline, prefer, prices)
        self._cache_argument = cache_argument(model.forward)
        self.loaded: LoadedModel | None = None
        self._unsupported: UnsupportedModelError | None = None
        try:
            folders = {name: Path(folder) for name, folder in (adapters or {}).items()}
            self.loaded = bind_model(model, tokenizer, checkpoint, folders)
            self._supply = self._supply_for(self.loaded)
        except UnsupportedModelError as error:
            self._unsupported = error

    @classmethod
    def load(
        cls,
        model: str,
        source: str | Source,
        *,
        device: str = "cpu",
        adapters: Sequence[str | Path] = (),
        **options: Any,
    ) -> Self:
        """Loads the model `model` (folder, hub id or alias) and opens `source`; `options` as for the constructor.

        `adapters` are folders of LoRA adapters, active together in this order.
        """
        transformer, tokenizer, checkpoint = load_transformers(model, device)
        names = attach_adapters(transformer, [Path(folder) for folder in adapters])
        return cls(transformer, tokenizer, source, checkpoint=checkpoint, adapters=names, **options)

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

        But for `mode`, `deadline`, `prefer` and `prices`, which are the constructor's, for this prompt. The model starts before
        everything has arrived. Raises UsageError for several beams or sequences, whose caches differ.
        """
        started = time.perf_counter()
        return self._generate(self.encode(prompt), started, options)

    def prepare(self, prompt: PromptLike, **wishes: Any) -> Prepared:
        """Inputs for your own call of `model.generate`, complete and verified when this returns.

        `wishes` are those of `generate` that are not the model's.
        """
        started = time.perf_counter()
        aim = self._aim.changed_by(wishes)
        if wishes:
            raise UsageError(f"prepare() takes no {min(wishes)}", hint="mode, deadline, prefer and prices")
        encoded = self.encode(prompt)
        report, attempt = self._attempt(encoded, started, aim)
        cache = None if attempt is None else attempt.admitted_cache(audit=self._supply.gate.draw())
        return self._prepared(encoded, report, cache)

    def _generate(self, prompt: Prompt, started: float, options: dict[str, Any]) -> Answer:
        aim = self._aim.changed_by(options)
        refuse_what_we_own(options, self.model)
        report, attempt = self._attempt(prompt, started, aim)
        clock = FirstTokenClock()
        options = {**options, "stopping_criteria": [*options.get("stopping_criteria", ()), clock]}
        try:
            with torch.inference_mode():
                output = self._run(prompt, report, attempt, clock, options)
        finally:
            if attempt is not None:
                attempt.close()
        report.seconds["first_token"] = clock.at - started
        report.seconds["total"] = time.perf_counter() - started
        if aim.deadline_s is not None:
            report.plan["deadline"] = {"seconds": aim.deadline_s, "met": report.seconds["first_token"] <= aim.deadline_s}
        new = tuple(int(token) for token in output[0, len(prompt.token_ids) :])
        return Answer(self.tokenizer.decode(new, skip_special_tokens=True), new, report)

    def _run(
        self, prompt: Prompt, report: Report, attempt: Attempt | None, clock: FirstTokenClock, options: dict[str, Any]
    ) -> torch.Tensor:
        """Generates while the cache is still arriving; where it does not arrive, again from what did, or from nothing."""
        audit = attempt is not None and self._supply.gate.draw()
        if attempt is not None and attempt.fetch is not None and "streamer" not in options and not audit:
            try:
                if attempt.vouched_for():
                    streaming = self._prepared(prompt, report, attempt.streaming_cache())
                    output: torch.Tensor = self.model.generate(**streaming.inputs(), **options)
                    attempt.record()
                    # By now every header is known, also of blocks that the first layer did not need.
                    if attempt.vouched_for():
                        return output
            except KvcdnError:
                # Nothing was written yet: the first forward pass waits for every layer. `admitted_cache` meets the same error.
                pass
            clock.reset()
        cache = None if attempt is None else attempt.admitted_cache(audit=audit)
        started = time.perf_counter()
        output = self.model.generate(**self._prepared(prompt, report, cache).inputs(), **options)
        if cache is None and self.loaded is not None:
            remember_prefill(self.loaded, len(prompt.token_ids), clock.at - started)
        return output

    def _attempt(self, prompt: Prompt, started: float, aim: Aim) -> tuple[Report, Attempt | None]:
        """The report of a prompt that was begun at `started`, and the attempt, where the model is supported."""
        report = Report(self.source.url, len(prompt.token_ids))
        report.seconds["tokenize"] = time.perf_counter() - started
        try:
            loaded = self.current()
        except UnsupportedModelError as error:
            report.miss(error)
            return report, None
        return report, Attempt(loaded, self._supply, prompt, report, aim)

    def current(self) -> LoadedModel:
        """The model, bound to the adapters it applies now. Raises UnsupportedModelError."""
        if self.loaded is None:
            raise self._unsupported or UnsupportedModelError("the model is not supported")
        loaded = self.loaded.current()
        if loaded is not self.loaded:
            self.loaded, self._supply = loaded, self._supply_for(loaded)
        return loaded

    def _supply_for(self, loaded: LoadedModel) -> Supply:
        return Supply(self.source, Gate(loaded, self.trust, self._audit), self.namespace)

    def _prepared(self, prompt: Prompt, report: Report, cache: Cache | None) -> Prepared:
        ids = torch.tensor([prompt.token_ids], dtype=torch.long, device=self.model.device)
        return Prepared(ids, torch.ones_like(ids), cache, report, self._cache_argument)
