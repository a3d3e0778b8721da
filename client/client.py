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
from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvcdn.client.answer import Answer, Prepared
from kvcdn.client.arguments import check_arguments, check_wishes, opened_source, require_list, require_source, require_text
from kvcdn.client.batch import Row, run_batch
from kvcdn.client.conversation import Conversation
from kvcdn.client.explaining import samples
from kvcdn.client.explaining.difference import common_length
from kvcdn.client.explaining.explain import Explainer
from kvcdn.client.explaining.explanation import Explanation
from kvcdn.client.explaining.shelf import Shelf
from kvcdn.client.explaining.surroundings import look_around
from kvcdn.client.explaining.views import View
from kvcdn.client.forms import PromptLike, known_tokens, read_prompt, require_parts, require_text_or_messages, require_tools
from kvcdn.client.generation import Generation
from kvcdn.client.guard import Guard, mark
from kvcdn.client.loading.local import LocalPrefixes
from kvcdn.client.loading.report import Report
from kvcdn.client.planning.attempt import Attempt
from kvcdn.client.planning.plan import Aim, Prices
from kvcdn.client.planning.race import StoppedError
from kvcdn.client.planning.refine import Refiner
from kvcdn.client.planning.supply import Supply
from kvcdn.client.prefix import ModelState, Prefix
from kvcdn.client.sources.source import Source
from kvcdn.client.streaming import AnswerStream, Stop, stream_answer
from kvcdn.client.trust.gate import Gate
from kvcdn.client.trust.revoked import Revoked
from kvcdn.client.usage import Usage
from kvcdn.codec import load_codecs
from kvcdn.errors import KvcdnError, UnsupportedModelError, UsageError
from kvcdn.keyring import load_namespace, load_trust
from kvcdn.keys import PRECISION_NATIVE, Namespace, read_precisions, with_refinements
from kvcdn.model.adapters import attach_adapters, unwrapped
from kvcdn.model.checkpoint import Checkpoint
from kvcdn.model.load import LoadedModel, bind_model, load_transformers
from kvcdn.model.speed import remember_prefill
from kvcdn.model.tokens import Messages, Prompt, Tools, encode_chat, encode_text
from kvcdn.signing import TrustList
from kvcdn.stores.local import LocalStore


class Client:
    """Loads published caches into one model. Thread-safe as far as the model is; prompts do not share state."""

    def __init__(  # noqa: PLR0913 - by name
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        source: str | Path | Sequence[str | Path] | Source,
        *,
        checkpoint: str | Path | Checkpoint | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        trust: TrustList | None = None,
        namespace: str | Namespace | None = None,
        token: str | None = None,
        ca_file: str | Path | None = None,
        audit: float = 0.0,
        local_store: LocalStore | Literal["configured"] | None = "configured",
        precision: str | Sequence[str] = PRECISION_NATIVE,
        max_kl: float | None = None,
        progressive: bool = False,
        mode: str = "auto",
        deadline: float | None = None,
        prefer: str = "fastest",
        prices: Prices | None = None,
        usage: Usage | str | Path | None = "configured",
    ) -> None:
        """Binds a loaded model, which may be a model of peft, to its checkpoint and opens `source`, see `open_source`.

        `checkpoint` names the files `model` was loaded from, where the model does not know; `adapters` the folder of each LoRA
        adapter by its name in the model; `trust` and `namespace` default to the user's trust list and the public namespace;
        `token` and `ca_file` are for edges; `audit` is the probability with which one block of a prompt is recomputed. In
        `local_store` what was fetched is kept for other prompts and processes of this host: by default in the user's own,
        unless the environment says otherwise (`LocalStore.configured`). `precision` lists what is accepted, most wanted first,
        by default exact KV only; lossy KV whose certificate says that its mean next-token divergence is above `max_kl` nats is
        a miss. `progressive` clients begin on exact KV, or on accepted lossy KV where that is there much sooner, and bring the
        exact KV to the local store behind the answer. `mode` is auto, fetch, compute or both; `deadline` is in seconds from the
        question to the first token; `prefer` is fastest, or cheapest at these `prices`: each can be given for a single prompt
        as well. `usage` is a ledger to count prompts in, or its path; by default that of KVCDN_USAGE, or none. Raises
        UsageError; an unsupported model is no error, but a miss.
        """
        require_parts(model, tokenizer)
        check_arguments(checkpoint=checkpoint, adapters=adapters, trust=trust, namespace=namespace, token=token)
        check_arguments(ca_file=ca_file, audit=audit, local_store=local_store, precision=precision, max_kl=max_kl)
        check_arguments(progressive=progressive, mode=mode, deadline=deadline, prefer=prefer, prices=prices, usage=usage)
        self.model = model = unwrapped(model)
        self.tokenizer = tokenizer
        self.source = opened_source(source, token, ca_file)
        self.trust = load_trust() if trust is None else trust
        self._audit = audit
        self.precisions = with_refinements(read_precisions(precision)) if progressive else read_precisions(precision)
        self.max_kl = max_kl
        self.namespace = namespace if isinstance(namespace, Namespace) else load_namespace(namespace)
        store = LocalStore.configured() if local_store == "configured" else local_store
        self._local = None if store is None else LocalPrefixes(store)
        self.refiner = Refiner.of(self._local) if progressive else None
        self._aim = Aim.of(mode, deadline, prefer, prices)
        self._usage = Usage.of(usage)
        self._own_usage = not isinstance(usage, Usage)
        self._guard: Guard | None = None
        self.loaded: LoadedModel | None = None
        self._unsupported: UnsupportedModelError | None = None
        try:
            folders = {name: Path(folder) for name, folder in (adapters or {}).items()}
            self.loaded = bind_model(model, tokenizer, checkpoint, folders)
            self._supply = self._supply_for(self.loaded)
            load_codecs()
        except UnsupportedModelError as error:
            self._unsupported = error

    @classmethod
    def load(
        cls,
        model: str | Path,
        source: str | Path | Sequence[str | Path] | Source,
        *,
        device: str = "cpu",
        adapters: Sequence[str | Path] = (),
        **options: Any,
    ) -> Self:
        """Loads the model `model` (folder, hub id or alias) and opens `source`. `options` are the constructor's.

        `adapters` are folders of LoRA adapters, active together in this order. Raises UsageError, and what `load_model` raises.
        """
        require_list(adapters, "adapters", "give a list of folders: adapters=['adapters/support']")
        check_arguments(name=model, device=device)
        require_source(source)
        transformer, tokenizer, checkpoint = load_transformers(str(model), device)
        names = attach_adapters(transformer, [Path(folder) for folder in adapters])
        return cls(transformer, tokenizer, source, checkpoint=checkpoint, adapters=names, **options)

    def close(self) -> None:
        """Closes idle connections, waits until what was fetched is kept, gives up refining, forgets prepared caches."""
        if self.refiner is not None:
            self.refiner.close()
        self.source.close()
        if self._local is not None:
            self._local.close()
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        if self._usage is not None:
            self._usage.close() if self._own_usage else self._usage.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- prompts ----------------------------------------------------------------------------------------------------------

    def question(self, document: str | Messages, question: str, *, tools: Tools | None = None) -> Prompt:
        """The prompt of a question on a document: plain text, or the opening messages of a chat, which may have `tools`."""
        require_text_or_messages(document, "the document")
        require_text(question, "the question")
        require_tools(tools)
        if isinstance(document, str):
            text = f"{document}\n\nQuestion: {question}\nAnswer:"
            return encode_text(self.tokenizer, text, [len(document)])
        messages = [*document, {"role": "user", "content": question}]
        return encode_chat(self.tokenizer, messages, answer_follows=True, tools=tools)

    def opening(self, document: PromptLike) -> Prompt:
        """The tokens of `document` as prompts about it begin: what `question` has before the question."""
        if isinstance(document, Prompt | Mapping):
            prompt = self.encode(document)
            return Prompt(prompt.token_ids, (*prompt.boundaries, len(prompt.token_ids)))
        prompt = self.question(document, "")
        if isinstance(document, str):
            if not document or not prompt.boundaries:
                raise UsageError("an empty document has no prefix")
            return Prompt(prompt.token_ids[: min(prompt.boundaries)], prompt.boundaries[:1])
        own = encode_chat(self.tokenizer, document, answer_follows=False).token_ids
        end = common_length(prompt.token_ids, own)
        return Prompt(prompt.token_ids[:end], prompt.boundaries)

    def encode(self, prompt: PromptLike, *, tools: Tools | None = None) -> Prompt:
        """Tokenises a prompt as `generate` does; messages may have `tools`.

        Raises UsageError for what is no prompt, and for tensors whose mask or positions say something else.
        """
        return read_prompt(self.tokenizer, prompt, tools, known_tokens(self.model))

    def explain(self, prompt: str | Messages, *, tools: Tools | None = None) -> Explanation:
        """Says at which token `prompt` leaves what is published, and why. Raises KvcdnError for what cannot be tokenised."""
        require_text_or_messages(prompt, "the prompt")
        require_tools(tools)
        identity = self.current().identity
        content = prompt if isinstance(prompt, str) else samples.Conversation(tuple(prompt), tuple(tools or ()))
        view = View(content, self.tokenizer, identity, self.namespace, answer_follows=True)
        shelf, gate = Shelf(self.source), self._supply.gate
        view = shelf.preferred(view, self.precisions)
        around, revocations = look_around(view.identity, shelf), gate.revoked.current()
        return Explainer(shelf, gate.trust, around, self.max_kl, revocations).explain(view)

    # -- answers ----------------------------------------------------------------------------------------------------------

    def stream(self, prompt: PromptLike, **options: Any) -> AnswerStream:
        """As `generate`, piece by piece: iterate over it for text; leaving early stops the model."""
        started = time.perf_counter()
        return self._stream(self.encode(prompt), started, options)

    def stream_answer(self, document: str | Messages, question: str, **options: Any) -> AnswerStream:
        """As `ask`, piece by piece."""
        started = time.perf_counter()
        return self._stream(self.question(document, question), started, options)

    def _stream(self, prompt: Prompt, started: float, options: dict[str, Any]) -> AnswerStream:
        plain = dict(options)
        check_wishes(plain)
        self._aim.changed_by(plain)
        Generation(self.model, self.tokenizer, prompt, plain)  # what cannot be is told here, and not in the thread
        return stream_answer(self.tokenizer, options, lambda streamed: self._generate(prompt, started, streamed))

    def ask(self, document: str | Messages, question: str, **options: Any) -> Answer:
        """Answers `question` on `document`; `options` as for `generate`."""
        started = time.perf_counter()
        return self._generate(self.question(document, question), started, options)

    def generate(self, prompt: PromptLike, **options: Any) -> Answer:
        """Continues `prompt` from its longest published prefix; `options` go to the model's own generate.

        But for `mode`, `deadline`, `prefer` and `prices`, which are the constructor's, for this prompt. The model starts before
        everything has arrived. Raises UsageError for options that would not be right beside a loaded cache
        (`kvcdn.client.options`).
        """
        started = time.perf_counter()
        return self._generate(self.encode(prompt), started, options)

    # -- several on one cache -----------------------------------------------------------------------------------------------

    def prefix(self, document: PromptLike) -> Prefix:
        """Loads the cache of `document` once, or computes it where it cannot be loaded, for any number of questions."""
        return Prefix(self, document)

    def conversation(self, opening: str | Messages = ()) -> Conversation:
        """A chat that goes on: each turn reads only what is new. `opening` are its first messages, or its system message."""
        return Conversation(self, opening)

    def generate_batch(self, prompts: Sequence[PromptLike], **options: Any) -> list[Answer]:
        """As `generate` for each of `prompts`, in one run of the model. Raises UsageError as `run_batch`."""
        started = time.perf_counter()
        rows, attempts = list[Row](), list[Attempt | None]()
        require_list(prompts, "a batch", "give a list of prompts; generate() takes one")
        for prompt in [self.encode(prompt) for prompt in prompts]:
            report, attempt = self._attempt(prompt, started, self._aim)
            attempts.append(attempt)
            rows.append(Row(prompt, self._admitted(attempt), report))
        try:
            return run_batch(self, rows, started, options)
        finally:
            # What is common to all rows may be less than what each has loaded.
            for row, attempt in zip(rows, attempts, strict=True):
                self._count(row.report, attempt)

    # -- the way of one prompt ----------------------------------------------------------------------------------------------

    def prepare(self, prompt: PromptLike, *, stop: Stop | None = None, **wishes: Any) -> Prepared:
        """Inputs for your own call of `model.generate`, complete and verified when this returns.

        `wishes` are those of `generate` that are not the model's. Passes of the model beside their cache are compared with the
        prompt until the client is closed: other ids, masks or positions raise UsageError. Raises StoppedError once `stop` is
        set from another thread.
        """
        check_wishes(wishes)
        started, aim = time.perf_counter(), self._aim.changed_by(wishes)
        if wishes:
            raise UsageError(f"prepare() takes no {min(wishes)}", hint="mode, deadline, prefer and prices")
        generation = Generation(self.model, self.tokenizer, self.encode(prompt), {})
        report, cache = self.load_cache(generation.prompt, started, aim, stop)
        if cache is not None:
            self.guard(cache, generation.prompt)
        return generation.inputs(cache, report)

    def load_cache(
        self, prompt: Prompt, started: float, aim: Aim | None = None, stop: Stop | None = None
    ) -> tuple[Report, Cache | None]:
        """The complete cache of `prompt`'s longest published prefix, checked, and the report of a prompt begun at `started`."""
        report, attempt = self._attempt(prompt, started, aim or self._aim)
        if attempt is not None and stop is not None:
            attempt.stop_when(stop.is_set)
        try:
            cache = self._admitted(attempt)
            if attempt is not None:
                attempt.refine()
            return report, cache
        finally:
            self._count(report, attempt)

    def _admitted(self, attempt: Attempt | None) -> Cache | None:
        return None if attempt is None else attempt.admitted_cache(audit=self._supply.gate.draw())

    def guard(self, cache: Cache, prompt: Prompt) -> None:
        """Compares passes beside `cache` with `prompt` and the model as it is now, until the client is closed."""
        loaded = self.current()
        mark(cache, prompt.token_ids, ModelState.of(loaded))
        self._guard = self._guard or Guard(self.model, lambda: ModelState.of(self.current()), loaded.steady_tokens)

    def _generate(self, prompt: Prompt, started: float, options: dict[str, Any]) -> Answer:
        check_wishes(options)
        aim = self._aim.changed_by(options)
        generation = Generation(self.model, self.tokenizer, prompt, options)
        report, attempt = self._attempt(prompt, started, aim)
        try:
            if attempt is not None:
                attempt.stop_when(generation.stopped)
            output = self._run(generation, report, attempt)
            if attempt is not None:
                attempt.refine()
        except StoppedError:
            return Answer("", (), report)
        finally:
            if attempt is not None:
                attempt.close()
            self._count(report, attempt)
        report.seconds["first_token"] = generation.first_token_at - started
        report.seconds["total"] = time.perf_counter() - started
        if aim.deadline_s is not None:
            report.plan["deadline"] = {"seconds": aim.deadline_s, "met": report.seconds["first_token"] <= aim.deadline_s}
        return generation.answer(output, report)

    def _run(self, generation: Generation, report: Report, attempt: Attempt | None) -> torch.Tensor:
        """Generates while the cache is still arriving; where it does not arrive, again from what did, or from nothing."""
        audit = attempt is not None and self._supply.gate.draw()
        if attempt is not None and attempt.fetch is not None and generation.may_start_early and not audit:
            try:
                output = generation.run(generation.inputs(attempt.streaming_cache(), report), attempt.prove)
                attempt.record()
                attempt.keep()
            except KvcdnError:
                # Nothing was written yet: the first forward pass waits for every layer. `admitted_cache` meets the same error.
                pass
            else:
                return output
        cache = None if attempt is None else attempt.admitted_cache(audit=audit)
        started = time.perf_counter()
        output = generation.run(generation.inputs(cache, report))
        if self.loaded is not None and generation.copies == 1:
            behind = 0 if attempt is None or cache is None else attempt.length
            took = generation.first_token_at - started
            remember_prefill(self.loaded, len(generation.prompt.token_ids), took, behind=behind)
        return output

    def _attempt(self, prompt: Prompt, started: float, aim: Aim) -> tuple[Report, Attempt | None]:
        """The report of a prompt that was begun at `started`, and the attempt, where the model is supported."""
        report = Report(self.source.url, len(prompt.token_ids))
        report.seconds["tokenize"] = time.perf_counter() - started
        tally = None if self._usage is None else self._usage.begin(report)
        try:
            loaded = self.current()
            loaded.require_steady(len(prompt.token_ids))
        except UnsupportedModelError as error:
            report.miss(error)
            return report, None
        return report, Attempt(loaded, self._supply, prompt, report, aim, tally=tally)

    def count_kept(self, report: Report) -> None:
        """Counts a prompt that had its cache from memory, or none."""
        if self._usage is not None:
            self._usage.begin(report)
            self._count(report, None)

    def _count(self, report: Report, attempt: Attempt | None) -> None:
        if self._usage is not None:
            self._usage.end(report, attempt, None if self.loaded is None else self.loaded.identity.tag)

    def current(self) -> LoadedModel:
        """The model, bound to the adapters it applies now. Raises UnsupportedModelError."""
        if self.loaded is None:
            raise self._unsupported or UnsupportedModelError("the model is not supported")
        loaded = self.loaded.current()
        if loaded is not self.loaded:
            self.loaded, self._supply = loaded, self._supply_for(loaded)
        return loaded

    def _supply_for(self, loaded: LoadedModel) -> Supply:
        gate = Gate(loaded, self.trust, self._audit, Revoked(self.trust, self.source))
        return Supply(self.source, gate, self.namespace, self.precisions, self.max_kl, self._local, self.refiner)
