"""Generation: one call of the model's own generate(), from a prompt and a cache to an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.cache_utils import Cache

from kvcdn.client.answer import Answer, Continuation, Prepared
from kvcdn.client.loading.report import Report
from kvcdn.client.options import check_options, listed
from kvcdn.client.streaming import PieceStreamer, Stop
from kvcdn.model.cache import cache_argument
from kvcdn.model.place import device_of
from kvcdn.model.states import StateLayer
from kvcdn.model.tokens import Prompt


class Generation:
    """A call that may be tried again with another cache, as long as `started_writing` is False.

    `first_token_at` is when the first token was there, on the clock of time.perf_counter, and 0 before.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, options: Mapping[str, Any]
    ) -> None:
        """Raises UsageError for options that are not right beside a loaded cache."""
        checked = check_options(options, model, tokenizer)
        criteria, self._processors = listed(options, "stopping_criteria"), listed(options, "logits_processor")
        self.prompt = prompt
        self.copies = checked.copies
        self._model = model
        self._tokenizer = tokenizer
        self._clock = FirstTokenClock()
        self._options = {**checked.options, "stopping_criteria": [*criteria, self._clock]}
        self._streamer = options.get("streamer")
        self._stops = [one for one in criteria if isinstance(one, Stop)]

    @property
    def first_token_at(self) -> float:
        return self._clock.at

    def stopped(self) -> bool:
        """Whether a `Stop` among its criteria was set: nobody waits for the answer any more."""
        return any(one.is_set() for one in self._stops)

    @property
    def may_start_early(self) -> bool:
        """Whether it can be given a cache that is still arriving: if that fails, it must not have written anything."""
        return self.copies == 1 and (self._streamer is None or isinstance(self._streamer, PieceStreamer))

    def run(self, prepared: Prepared, prove: Callable[[], None] | None = None) -> torch.Tensor:
        """Runs generate(); returns [sequences, tokens], the prompt's included. Raises what the cache's layers raise.

        `prove` is called once the model has read the prompt, before anything is written; what it raises is raised here.
        """
        self._clock.reset()
        if isinstance(self._streamer, PieceStreamer):
            self._streamer.begin()
        if prepared.cache is not None and self.copies > 1:
            prepared.cache.batch_repeat_interleave(self.copies)
        options = self._options
        if prove is not None:
            options = options | {"logits_processor": LogitsProcessorList([Proof(prove), *self._processors])}
        with torch.inference_mode():
            output: torch.Tensor = self._model.generate(**prepared.inputs(), **options)
        left_out = prepared.input_ids[:, : prepared.left_out].expand(output.shape[0], -1)
        return torch.cat([left_out, output], dim=1)

    def inputs(self, cache: Cache | None, report: Report) -> Prepared:
        """Ids and mask of the whole prompt beside `cache`."""
        ids = torch.tensor([self.prompt.token_ids], dtype=torch.long, device=device_of(self._model))
        # The library cannot ask a cache of states alone how many tokens it has seen, and would read all of them again.
        uncounted = cache is not None and all(isinstance(layer, StateLayer) for layer in cache.layers)
        left_out = report.tokens_reused if uncounted else 0
        return Prepared(ids, torch.ones_like(ids), cache, report, cache_argument(self._model.forward), left_out)

    def answer(self, output: torch.Tensor, report: Report) -> Answer:
        """What generate() wrote behind the prompt."""
        first, *others = self._continuations(output[:, len(self.prompt.token_ids) :])
        return Answer(first.text, first.token_ids, report, tuple(others))

    def answers(self, written: torch.Tensor, reports: Sequence[Report]) -> list[Answer]:
        """What generate() wrote behind each row's prompt, [rows, tokens]."""
        continuations = self._continuations(written)
        return [Answer(one.text, one.token_ids, report) for one, report in zip(continuations, reports, strict=True)]

    def _continuations(self, written: torch.Tensor) -> list[Continuation]:
        rows = [tuple(row) for row in written.tolist()]
        if len(rows) > 1:
            rows = [self._trimmed(row) for row in rows]
        return [Continuation(self._tokenizer.decode(row, skip_special_tokens=True), row) for row in rows]

    def _trimmed(self, row: tuple[int, ...]) -> tuple[int, ...]:
        """Up to the end of the sequence; behind it are only fillers, so that all rows are of one length."""
        for config in (self._options.get("generation_config"), self._model.generation_config):
            ends = self._options.get("eos_token_id", getattr(config, "eos_token_id", None))
            if ends is not None:
                ends = [ends] if isinstance(ends, int) else list(ends)
                return row[: next((index + 1 for index, token in enumerate(row) if token in ends), len(row))]
        return row


class Proof(LogitsProcessor):  # type: ignore[misc] # transformers is untyped here
    """Changes nothing; calls `prove` before the first token is chosen."""

    def __init__(self, prove: Callable[[], None]) -> None:
        self._prove: Callable[[], None] | None = prove

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the library's
        prove, self._prove = self._prove, None
        if prove is not None:
            prove()
        return scores


class FirstTokenClock(StoppingCriteria):  # type: ignore[misc] # transformers is untyped here
    """Stops nothing; notes when the first token was there. Called by generate() after every token."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002 - the library's
        self.at = self.at or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
