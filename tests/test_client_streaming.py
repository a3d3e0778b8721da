"""Streams: pieces that add up to the answer, from threads that end when the reader leaves or the link fails."""

from __future__ import annotations

import threading

import pytest
import torch

from kvcdn.client import MissReason
from kvcdn.client.generation import Generation
from kvcdn.client.planning.attempt import Attempt
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.client.trust.canary import Canary
from kvcdn.errors import MismatchError, UnavailableError, UsageError
from kvcdn.signing import TrustList
from support.faults import Fault, faulty_link
from support.published import asked, publish_text, short_blocks
from support.tiny import tiny_checkpoint
from support.waiting import until
from support.web import running_web

TOKENS = 2 * 64 + 20
GREEDY = {"max_new_tokens": 12, "do_sample": False}


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    with short_blocks():
        return publish_text(tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=torch.float32), tokens=TOKENS)


def streams():
    return [thread for thread in threading.enumerate() if thread.name == "kvcdn-stream"]


@pytest.mark.parametrize("trusted", [True, False])
def test_pieces_add_up_to_the_answer(published, trusted):
    """From a loaded cache, streamed in or not, and from the model alone."""
    with published.client(trust=published.trust if trusted else TrustList({})) as client:
        expected = client.generate(asked(published), **GREEDY)
        stream = client.stream(asked(published), **GREEDY)
        assert expected.text == "".join(stream)
        assert expected.token_ids == stream.answer.token_ids
        assert (TOKENS if trusted else 0) == stream.answer.report.tokens_reused
        question = client.ask(published.text, "so?", **GREEDY)
        assert question.text == "".join(client.stream_answer(published.text, "so?", **GREEDY))
        # Once more, after the end: nothing is left.
        assert [] == list(stream)
    assert [] == streams()


def test_leaving_stops_the_model(published):
    """After the token under way, however much was asked for; what was written until then is the answer."""
    with published.client() as client:
        stream = client.stream(asked(published), max_new_tokens=4000, eos_token_id=-1, do_sample=False)
        for _ in stream:
            break
        assert [] == streams()
        assert 1 <= len(stream.answer.token_ids) < 4000
        with client.stream(asked(published), max_new_tokens=4000, eos_token_id=-1, do_sample=False) as stream:
            pass
        assert [] == streams()
        # Not even looked at.
        client.stream(asked(published), max_new_tokens=3, do_sample=False).close()


@pytest.mark.parametrize("fault", [{"pass_bytes": 500}, {"pass_bytes": 20_000}, {"pass_bytes": 20_000, "stall": True}])
def test_a_failing_link_does_not_repeat_a_piece(published, fault):
    """The stream begins before everything is here, so that nothing may be written twice."""
    expected = "".join(published.client(trust=TrustList({})).stream(asked(published), **GREEDY))
    with running_web(published.store) as web, faulty_link(web.port) as link:
        link.inject(Fault(when=b"GET /", **fault), times=1000)
        with published.client(EdgeSource(link.url, stall_seconds=0.5)) as client:
            stream = client.stream(asked(published), **GREEDY)
            assert expected == "".join(stream)
            assert stream.answer.report.reason in (None, MissReason.UNAVAILABLE)


def test_a_fetch_that_ends_badly_behind_the_answer_repeats_nothing(published, monkeypatch):
    """The model had all that it needed, and has written: what was left of the fetch does not matter any more."""
    attempts, begin, write = [], Attempt.streaming_cache, Generation.run

    def begins(attempt):
        attempts.append(attempt)
        return begin(attempt)

    def writes(generation, *given):
        output = write(generation, *given)
        for attempt in attempts:
            attempt.fetch._error = UnavailableError("the link is gone")
        return output

    monkeypatch.setattr(Attempt, "streaming_cache", begins)
    monkeypatch.setattr(Generation, "run", writes)
    with published.client() as client:
        stream = client.stream(asked(published), **GREEDY)
        assert "".join(stream) == stream.answer.text
        assert 1 == len(attempts)


@pytest.fixture
def unknown(tmp_path):
    """Published by somebody whom no model has met."""
    return publish_text(tiny_checkpoint(tmp_path, dtype=torch.float32), tokens=TOKENS)


def alone(published):
    ids = torch.tensor([asked(published).token_ids])
    return tuple(
        published.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, ids.shape[1] :].tolist()
    )


def test_the_first_prompt_of_a_model_and_a_publisher_streams_too(unknown, monkeypatch):
    """The canary runs when the model has read the prompt, before it writes: nothing is generated twice."""
    expected = alone(unknown)
    runs, write = [], Generation.run
    monkeypatch.setattr(Generation, "run", lambda *given: runs.append(1) or write(*given))
    with unknown.client(vouched=False) as client:
        stream = client.stream(asked(unknown), **GREEDY)
        assert stream.answer.text == "".join(stream)
        report = stream.answer.report
        assert (expected, TOKENS, None) == (stream.answer.token_ids, report.tokens_reused, report.reason)
        assert 1 == len(runs)
        assert "canary" in report.seconds
        again = client.generate(asked(unknown), **GREEDY)
        assert expected == again.token_ids
        assert "canary" not in again.report.seconds


def test_what_no_canary_would_pass_is_not_written(unknown, monkeypatch):
    """The reader gets one answer, the model's own."""

    def check(*_):
        raise MismatchError("not what this model computes")

    monkeypatch.setattr(Canary, "check", check)
    with unknown.client(vouched=False) as client:
        stream = client.stream(asked(unknown), **GREEDY)
        assert stream.answer.text == "".join(stream)
        report = stream.answer.report
        assert (alone(unknown), 0, MissReason.MISMATCH) == (stream.answer.token_ids, report.tokens_reused, report.reason)


def test_what_cannot_be_is_told_at_once(published):
    """And what fails in the thread is raised to the reader."""
    with published.client() as client:
        with pytest.raises(UsageError, match="token_healing"):
            client.stream(asked(published), token_healing=True)
        with pytest.raises(UsageError, match="streamer already"):
            client.stream(asked(published), streamer=object())
        stream = client.stream(asked(published), max_new_tokens=-3)
        with pytest.raises(ValueError, match="max_new_tokens"):
            list(stream)
        with pytest.raises(ValueError, match="max_new_tokens"):
            _ = stream.answer


def test_a_reader_gets_pieces_while_the_model_writes(published):
    """Not all at the end."""
    written = []

    def waits(_ids, _scores):
        written.append(len(pieces))
        if len(written) == 30:
            until(lambda: pieces)
        return torch.tensor([False])

    pieces: list[str] = []
    with published.client() as client:
        for piece in client.stream(
            asked(published), max_new_tokens=40, do_sample=False, eos_token_id=-1, stopping_criteria=[waits]
        ):
            pieces.append(piece)  # noqa: PERF402 - the model looks at it meanwhile
    assert 40 == len(written)
