"""Rope that hangs on the length of a prompt: up to where it does not a cache is used, behind that none, whoever asks."""

from __future__ import annotations

import pytest
import torch

from kvcdn.client import MissReason
from kvcdn.errors import UnsupportedModelError, UsageError
from kvcdn.model.tokens import Prompt
from support.published import BLOCK, QUESTION, publish_text, short_blocks
from support.stock import continued, stock_cache
from support.tiny import TEXT, tiny_checkpoint

TOKENS = 2 * BLOCK + 20
LIMIT = 180
"""Up to here prompts have the same rope."""

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}

_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [8.0] * 8}

KINDS = {
    "phi3": {"original_max_position_embeddings": LIMIT, "rope_parameters": _LONGROPE | {"partial_rotary_factor": 1.0}},
    "phimoe": {
        "original_max_position_embeddings": LIMIT,
        "num_local_experts": 2,
        "sliding_window": None,
        "rope_parameters": _LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.5, "original_max_position_embeddings": LIMIT},
    },
    "llama": {"rope_parameters": _LONGROPE | {"original_max_position_embeddings": LIMIT, "factor": 4.0}},
    "qwen2": {
        "max_position_embeddings": LIMIT + 1,
        "rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0},
    },
}

pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(scope="module", params=KINDS)
def published(tmp_path_factory, request):
    with short_blocks():
        folder, settings = tmp_path_factory.mktemp("model"), KINDS[request.param]
        return publish_text(tiny_checkpoint(folder, request.param, dtype=torch.float32, strength=3, **settings), tokens=TOKENS)


def prompt_of(published, tokens):
    more = published.loaded.tokenizer(TEXT[5000:])["input_ids"]
    return Prompt((*published.token_ids, *QUESTION, *more)[:tokens], (TOKENS,))


def alone(model, prompt):
    ids = torch.tensor([prompt.token_ids])
    return tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, ids.shape[1] :].tolist())


def test_such_rope_makes_other_keys_in_longer_prompts(published):
    """What these tests are about: a cache of a short prompt continues a long one with other logits."""
    model, ids = published.loaded.model, torch.tensor([prompt_of(published, LIMIT + 20).token_ids])
    with torch.inference_mode():
        once = model(input_ids=ids).logits[0, -1]
    cache = stock_cache(published.loaded, published.token_ids, 3, TOKENS)
    behind = continued(published.loaded, cache, ids[0, TOKENS:].tolist(), 0)[0][0, -1]
    assert (once - behind).norm() > 0.01 * once.norm()


def test_up_to_that_length_a_cache_is_used_and_behind_it_none(published):
    """Whatever was read before: to the bit as the library's own cache, and the model's own answers."""
    model = published.loaded.model
    assert LIMIT == published.loaded.steady_tokens
    with published.client() as client:
        for tokens in (LIMIT - 8, LIMIT + 20, LIMIT - 8, LIMIT, LIMIT + 1, LIMIT):
            prompt = prompt_of(published, tokens)
            answer = client.generate(prompt, **GREEDY)
            used = tokens <= LIMIT
            assert (TOKENS if used else 0) == answer.report.tokens_reused
            assert (None if used else MissReason.UNSUPPORTED_MODEL) == answer.report.reason
            assert alone(model, prompt) == answer.token_ids
            if used:
                rest = prompt.token_ids[TOKENS:]
                ours = continued(published.loaded, client.prepare(prompt).cache, rest, 2)
                theirs = continued(published.loaded, stock_cache(published.loaded, published.token_ids, 3, TOKENS), rest, 2)
                assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_what_is_kept_in_memory_is_used_up_to_there(published):
    """A prefix, a conversation that grows, and a batch with one long row."""
    model = published.loaded.model
    short, long = prompt_of(published, LIMIT - 8), prompt_of(published, LIMIT + 20)
    with published.client() as client:
        with client.prefix(Prompt(published.token_ids, (TOKENS,))) as prefix:
            for prompt, kept in ((short, TOKENS), (long, 0), (short, TOKENS)):
                answer = prefix.generate(prompt, **GREEDY)
                assert (kept, alone(model, prompt)) == (answer.report.tokens_kept, answer.token_ids)
        with client.prefix(long) as prefix:
            answer = prefix.generate(Prompt((*long.token_ids, 7)), **GREEDY)
            assert (0, MissReason.UNSUPPORTED_MODEL) == (answer.report.tokens_kept, answer.report.reason)
        talk = client.conversation([{"role": "system", "content": TEXT[:150]}])
        kept = []
        for text in ("Who?", TEXT[300:420], "And then?"):
            prompt = client.encode([*talk.messages, {"role": "user", "content": text}])
            answer = talk.say(text, **GREEDY)
            assert alone(model, prompt) == answer.token_ids
            kept.append((len(prompt.token_ids) <= LIMIT, answer.report.tokens_kept > 0))
        assert (False, True) not in kept
        answers = client.generate_batch([short, short], **GREEDY)
        assert [(TOKENS, alone(model, short))] * 2 == [(answer.report.tokens_reused, answer.token_ids) for answer in answers]
        answers = client.generate_batch([short, long], **GREEDY)
        assert [0, 0] == [answer.report.tokens_reused for answer in answers]
        pad = len(long.token_ids) - len(short.token_ids)
        ids = torch.tensor([[1] * pad + list(short.token_ids), long.token_ids])
        theirs = model.generate(ids, attention_mask=(torch.arange(ids.shape[1]) >= torch.tensor([[pad], [0]])).long(), **GREEDY)
        assert theirs[:, ids.shape[1] :].tolist() == [list(answer.token_ids) for answer in answers]


def test_a_prepared_cache_is_not_read_on_beyond_it(published):
    """A prompt that was made longer; a long one in between does not make the model another."""
    model = published.loaded.model
    short, long = prompt_of(published, LIMIT - 8), prompt_of(published, LIMIT + 20)
    with published.client() as client:
        inputs = client.prepare(short).inputs()
        alone(model, long)
        output = model.generate(**inputs, **GREEDY)
        assert alone(model, short) == tuple(output[0, len(short.token_ids) :].tolist())
        inputs = client.prepare(short).inputs()
        inputs["input_ids"] = torch.tensor([long.token_ids])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if model.config.model_type.startswith("phi"):
            # Which reads the whole prompt again by itself.
            assert alone(model, long) == tuple(model.generate(**inputs, **GREEDY)[0, len(long.token_ids) :].tolist())
            return
        with pytest.raises(UsageError, match="another rope"):
            model.generate(**inputs, **GREEDY)


def test_longer_documents_are_not_published(published, tmp_path):
    """There would be no name for which of its keys are meant."""
    with pytest.raises(UnsupportedModelError, match="another rope"):
        publish_text(published.loaded._files.folder, tokens=LIMIT + 1)
