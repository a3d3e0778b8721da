"""The SDK for asyncio: the same answers, beside a loop that goes on, and calls that end when nobody waits for them."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from kvcdn.client import AsyncClient, Client, Stop, StoppedError
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.errors import UsageError
from support.faults import Fault, faulty_link
from support.published import asked, publish_text, short_blocks
from support.tiny import tiny_checkpoint
from support.waiting import WAIT_SECONDS
from support.web import running_web

TOKENS = 2 * 64 + 20
GREEDY = {"max_new_tokens": 6, "do_sample": False}
ENDLESS = {"max_new_tokens": 7000, "do_sample": False, "eos_token_id": -1}


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    with short_blocks():
        return publish_text(tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=torch.float32), tokens=TOKENS)


class Written:
    """Counts the tokens of an answer, as a stopping criterion that never stops it."""

    def __init__(self):
        self.tokens = 0

    def __call__(self, _ids, _scores):
        self.tokens += 1
        return torch.tensor([False])


def endless(written):
    return {**ENDLESS, "stopping_criteria": [written]}


def run(coroutine):
    """The coroutine's result, in bounded time; no warning of things left behind."""
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_SECONDS))


def working():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvcdn-model")]


def test_answers_are_the_clients(published):
    """Each way of asking, and several calls at once, which take their turns."""
    with published.client() as client:
        expected = client.generate(asked(published), **GREEDY)
        answered = client.ask(published.text, "so?", **GREEDY)

    async def main():
        async with AsyncClient(published.client()) as client:
            answers = await asyncio.gather(*(client.generate(asked(published), **GREEDY) for _ in range(3)))
            assert [expected.token_ids] * 3 == [answer.token_ids for answer in answers]
            assert [TOKENS] * 3 == [answer.report.tokens_reused for answer in answers]
            assert answered.token_ids == (await client.ask(published.text, "so?", **GREEDY)).token_ids
            prepared = await client.prepare(asked(published))
            assert TOKENS == prepared.report.tokens_reused
            assert expected.text == "".join([piece async for piece in client.stream(asked(published), **GREEDY)])
            assert answered.text == "".join([piece async for piece in client.stream_answer(published.text, "so?", **GREEDY)])
            prefix = await client.run(client.client.prefix, published.text)
            assert answered.token_ids == (await client.run(prefix.ask, "so?", **GREEDY)).token_ids
            with pytest.raises(UsageError, match="token_healing"):
                await client.generate(asked(published), token_healing=True)
            with pytest.raises(UsageError, match="token_healing"):
                _ = [piece async for piece in client.stream(asked(published), token_healing=True)]

    run(main())
    assert [] == working()


def test_it_loads_beside_the_loop(published):
    """The loop goes on meanwhile."""

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        folder = published.loaded.model.config._name_or_path
        async with await AsyncClient.load(folder, str(folder), trust=published.trust) as client:
            assert isinstance(client.client, Client)
            before = ticks
            await client.generate(asked(published), max_new_tokens=60, do_sample=False)
        ticking.cancel()
        assert before > 0
        assert ticks > before

    run(main())


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_who_cancels_stops_the_model(published, way):
    """At once for the caller, after the token under way for the model; the next call is served."""
    written = Written()

    async def main():
        async with AsyncClient(published.client()) as client:
            if way == "generate":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await client.generate(asked(published), **endless(written))
            else:
                async for _ in client.stream(asked(published), **endless(written)):
                    break
            assert 6 >= len((await client.generate(asked(published), **GREEDY)).token_ids)

    run(main())
    assert written.tokens < ENDLESS["max_new_tokens"]
    assert [] == working()


def test_calls_that_wait_for_their_turn_do_not_begin_when_cancelled(published):
    """And closing stops what goes on."""
    written, never = Written(), Written()

    async def main():
        client = AsyncClient(published.client())
        first = asyncio.create_task(client.generate(asked(published), **endless(written)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(client.generate(asked(published), **endless(never)))
        await asyncio.sleep(0.05)
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await client.close()

    run(main())
    assert written.tokens < ENDLESS["max_new_tokens"]
    assert 0 == never.tokens
    assert [] == working()


@pytest.mark.parametrize("way", ["generate", "prepare", "stream"])
def test_who_cancels_stops_the_fetch(published, way):
    """Of a link that stalls, with an hour's patience."""

    async def main(url):
        # Fetching is asked for, so that nothing is computed instead.
        async with AsyncClient(published.client(EdgeSource(url, stall_seconds=3600.0), mode="fetch")) as client:
            work = all_pieces(client) if way == "stream" else getattr(client, way)(asked(published))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work, 0.5)

    async def all_pieces(client):
        return [piece async for piece in client.stream(asked(published), **GREEDY)]

    with running_web(published.store) as web, faulty_link(web.port) as link:
        link.inject(Fault(when=b"GET /", pass_bytes=20_000, stall=True), times=1000)
        run(main(link.url))
    assert [] == working()


def test_a_stop_that_is_set_ends_a_call_of_the_client_as_well(published):
    """With nothing written; prepare() has nothing to give."""
    stop = Stop()
    stop.set()
    with published.client() as client:
        answer = client.generate(asked(published), stopping_criteria=[stop], **ENDLESS)
        assert 1 >= len(answer.token_ids)
        with pytest.raises(StoppedError):
            client.prepare(asked(published), stop=stop)
