"""Every kind of cache, from publisher to model: a fetched prefix continues exactly as the model's own would, to the bit."""

from __future__ import annotations

import pytest
import torch

from kvcdn import layout
from kvcdn.model.cache import cache_argument
from kvcdn.model.tokens import Prompt
from support.published import publish_text
from support.stock import continued, stock_cache
from support.tiny import FULL_ATTENTION_KINDS, MORE_FULL_ATTENTION_KINDS, tiny_checkpoint

BLOCK = 64
"""Small blocks, so that a short text has several: the schedule is the format's with this one limit lower."""

TOKENS = 3 * BLOCK + 20
STEPS = 6
QUESTION = (17, 4, 250, 9, 33)

PROMPTS = {
    "the document and a question": (TOKENS, TOKENS, 4),
    "two blocks and something else": (2 * BLOCK + 30, 2 * BLOCK, 2),
    "one block and something else": (BLOCK, BLOCK, 1),
}
"""Leading tokens of the document in the prompt; tokens to be reused; passes that made them."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(layout, "MAX_BLOCK_TOKENS", BLOCK)


@pytest.mark.parametrize("kind", FULL_ATTENTION_KINDS + MORE_FULL_ATTENTION_KINDS)
def test_a_fetched_prefix_continues_to_the_bit(tmp_path, kind):
    """Published, fetched, and continued by a question and several tokens, at several lengths; and streamed to generate()."""
    published = publish_text(tiny_checkpoint(tmp_path, kind, dtype=torch.float32), tokens=TOKENS)
    loaded, ids = published.loaded, published.token_ids
    with published.client() as client:
        for leading, reused, blocks in PROMPTS.values():
            prompt = Prompt((*ids[:leading], *QUESTION), (TOKENS,))
            prepared = client.prepare(prompt)
            assert (reused, None) == (prepared.report.tokens_reused, prepared.report.reason if leading == TOKENS else None)
            ours = continued(loaded, prepared.cache, prompt.token_ids[reused:], STEPS)
            theirs = continued(loaded, stock_cache(loaded, ids, blocks, reused), prompt.token_ids[reused:], STEPS)
            assert all(torch.equal(expected, got) for expected, got in zip(theirs, ours, strict=True))
        # The document itself: its last token is left to the model, so that the caches are cut back by one.
        prepared = client.prepare(Prompt(ids, (TOKENS,)))
        assert TOKENS - 1 == prepared.report.tokens_reused
        ours = continued(loaded, prepared.cache, ids[-1:], STEPS)
        theirs = continued(loaded, stock_cache(loaded, ids, 4, TOKENS - 1), ids[-1:], STEPS)
        assert all(torch.equal(expected, got) for expected, got in zip(theirs, ours, strict=True))
        # Layers that are awaited while generate() runs.
        prompt = Prompt((*ids, *QUESTION), (TOKENS,))
        answer = client.generate(prompt, max_new_tokens=STEPS, do_sample=False)
        whole, stock = torch.tensor([prompt.token_ids]), stock_cache(loaded, ids, 4, TOKENS)
        inputs = {"input_ids": whole, "attention_mask": torch.ones_like(whole), cache_argument(loaded.model.forward): stock}
        expected = loaded.model.generate(**inputs, max_new_tokens=STEPS, do_sample=False)
        assert tuple(expected[0, whole.shape[1] :].tolist()) == answer.token_ids
        assert (TOKENS, None) == (answer.report.tokens_reused, answer.report.reason)
