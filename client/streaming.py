"""Streaming: an answer piece by piece, while the model goes on writing in a thread of its own; who leaves, stops it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, TextStreamer

from kvcdn.client.answer import Answer
from kvcdn.client.options import listed
from kvcdn.errors import UsageError

_END: Any = object()


class PieceStreamer(TextStreamer):  # type: ignore[misc] # transformers is untyped here
    """Hands whole words to `put`; `begin` makes it ready for a call of generate(), the first or another."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, put: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._put = put

    def begin(self) -> None:
        """Expects a prompt next, which is not an answer's."""
        self.next_tokens_are_prompt = True
        self.token_cache: list[int] = []
        self.print_len = 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the library's
        """Takes the next piece."""
        if text:
            self._put(text)


class Stop(StoppingCriteria):  # type: ignore[misc] # transformers is untyped here
    """Ends generation after the token under way, once `set`."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def set(self) -> None:
        self._asked.set()

    def is_set(self) -> bool:
        return self._asked.is_set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002 - the library's
        return torch.full((input_ids.shape[0],), self._asked.is_set(), dtype=torch.bool, device=input_ids.device)


def stream_answer(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], answer: Callable[[dict[str, Any]], Answer]
) -> AnswerStream:
    """The answer that `answer` gives to `options`, as a stream. Raises UsageError."""
    if "streamer" in options:
        raise UsageError("a stream is a streamer already", hint="use generate() with a streamer of your own")

    def run(streamer: PieceStreamer, stop: Stop) -> Answer:
        criteria = [*listed(options, "stopping_criteria"), stop]
        return answer({**options, "streamer": streamer, "stopping_criteria": criteria})

    return AnswerStream(tokenizer, run)


class AnswerStream:
    """Iterate over it for the pieces of an answer; `answer` has the whole, with its report, when they have ended.

    Leaving early (`close`, the end of a `with` block, or letting go of it) stops the model after the token under way; what was
    written until then is the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, run: Callable[[PieceStreamer, Stop], Answer]) -> None:
        self._pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = Stop()
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        streamer = PieceStreamer(tokenizer, self._pieces.put)
        self._thread = threading.Thread(target=self._work, args=(run, streamer), name="kvcdn-stream", daemon=True)
        self._thread.start()

    def _work(self, run: Callable[[PieceStreamer, Stop], Answer], streamer: PieceStreamer) -> None:
        try:
            self._answer = run(streamer, self._stop)
        except BaseException as error:  # noqa: BLE001 - raised again where the pieces are taken
            self._error = error
        finally:
            self._pieces.put(_END)

    @property
    def answer(self) -> Answer:
        """The whole answer; waits for its end. Raises what the model raised."""
        self._thread.join()
        if self._answer is None:
            raise self._error or RuntimeError("the model ended without an answer")
        return self._answer

    def __iter__(self) -> Iterator[str]:
        try:
            while (piece := self._pieces.get()) is not _END:
                yield piece
            self._pieces.put(_END)
            if self._error is not None:
                raise self._error
        finally:
            self.close()

    def close(self) -> None:
        """Stops the model, and returns when it has stopped."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
