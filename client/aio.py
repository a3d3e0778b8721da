"""The SDK for asyncio: the same client, whose model works in one thread of its own while the event loop goes on.

Whoever cancels, times out or leaves a stream stops the model after the token under way, and what is being fetched at once;
calls that have not begun do not begin. The loop waits for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

from kvcdn.client.answer import Answer, Prepared
from kvcdn.client.client import Client
from kvcdn.client.forms import PromptLike
from kvcdn.client.options import listed
from kvcdn.client.streaming import PieceStreamer, Stop
from kvcdn.errors import UsageError
from kvcdn.model.tokens import Messages

_T = TypeVar("_T")

_END: Any = object()


class AsyncClient:
    """A `Client` for coroutines. Calls run one after the other; `asyncio.timeout` and cancellation end each of them."""

    def __init__(self, client: Client) -> None:
        """Works with `client` from now on, and closes it in the end; nobody else should use its model meanwhile."""
        if not isinstance(client, Client):
            raise UsageError(f"a {type(client).__name__} is no Client", hint="AsyncClient.load(model, source) makes both")
        self._client = client
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvcdn-model")

    @classmethod
    async def load(cls, model: str, source: str, **options: Any) -> Self:
        """As `Client.load`, beside the loop."""
        return cls(await asyncio.to_thread(partial(Client.load, model, source, **options)))

    @property
    def client(self) -> Client:
        """The client itself: for what does no work, such as its tokenizer, and as an argument for `run`."""
        return self._client

    async def close(self) -> None:
        """Closes the client when calls under way have stopped."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ask(self, document: str | Messages, question: str, **options: Any) -> Answer:
        """As `Client.ask`."""
        return await self._stoppable(partial(self._client.ask, document, question), options)

    async def generate(self, prompt: PromptLike, **options: Any) -> Answer:
        """As `Client.generate`."""
        return await self._stoppable(partial(self._client.generate, prompt), options)

    async def prepare(self, prompt: PromptLike, **wishes: Any) -> Prepared:
        """As `Client.prepare`. When it is cancelled, what it fetches is stopped as well."""
        stop = Stop()
        return await self._wait(partial(self._client.prepare, prompt, stop=stop, **wishes), stop)

    async def run(self, work: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """Anything else in the model's thread, such as `client.run(client.client.prefix, document)`; it cannot be stopped."""
        return await self._wait(partial(work, *arguments, **options), Stop())

    async def stream(self, prompt: PromptLike, **options: Any) -> AsyncIterator[str]:
        """As `Client.stream`: `async for piece in client.stream(prompt)`."""
        async for piece in self._pieces(partial(self._client.generate, prompt), options):
            yield piece

    async def stream_answer(self, document: str | Messages, question: str, **options: Any) -> AsyncIterator[str]:
        """As `Client.stream_answer`."""
        async for piece in self._pieces(partial(self._client.ask, document, question), options):
            yield piece

    async def _pieces(self, work: Callable[..., Answer], options: dict[str, Any]) -> AsyncIterator[str]:
        loop, pieces, stop = asyncio.get_running_loop(), asyncio.Queue[Any](), Stop()

        def put(piece: Any) -> None:
            # A loop that has ended while the model went on wants nothing any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def run() -> Answer:
            streamer = PieceStreamer(self._client.tokenizer, put)
            return work(**_stopping(options, stop), streamer=streamer)

        future = loop.run_in_executor(self._thread, run)
        future.add_done_callback(lambda _: put(_END))
        try:
            while (piece := await pieces.get()) is not _END:
                yield piece
            await future
        finally:
            _let_go(future, stop)

    async def _stoppable(self, work: Callable[..., _T], options: dict[str, Any]) -> _T:
        stop = Stop()
        return await self._wait(partial(work, **_stopping(options, stop)), stop)

    async def _wait(self, work: Callable[[], _T], stop: Stop) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        finally:
            _let_go(future, stop)


def _stopping(options: dict[str, Any], stop: Stop) -> dict[str, Any]:
    return {**options, "stopping_criteria": [*listed(options, "stopping_criteria"), stop]}


def _let_go(future: asyncio.Future[Any], stop: Stop) -> None:
    """Stops the work if it goes on, keeps it from beginning if it waits, and drops what it may still raise."""
    if not future.done():
        stop.set()
        future.cancel()
    elif not future.cancelled():
        future.exception()
