"""Tokens and boundaries: where in a prompt a published text may end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.errors import UsageError
from kvcdn.model.tokens import encode_chat, encode_text
from support.tiny import TEXT, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=100, deadline=None)
@given(start=st.integers(0, 2000), length=st.integers(1, 300), question=st.text(max_size=40))
def test_a_boundary_never_claims_a_token_that_reaches_past_the_document(tokenizer, start, length, question):
    """The tokens before a boundary spell the document, or stop short of its end; they never go beyond."""
    document = TEXT[start : start + length]
    prompt = encode_text(tokenizer, document + question, [len(document)])
    for boundary in prompt.boundaries:
        head = tokenizer.decode(prompt.token_ids[:boundary], clean_up_tokenization_spaces=False)
        assert document.startswith(head)


def test_a_document_alone_and_before_a_question_has_the_same_tokens(tokenizer):
    """What publish names, ask finds."""
    document = TEXT[:2000]
    alone = encode_text(tokenizer, document).token_ids
    prompt = encode_text(tokenizer, document + "\n\nQuestion: what?", [len(document)])
    assert (len(alone),) == prompt.boundaries
    assert alone == prompt.token_ids[: len(alone)]


def test_every_message_of_a_chat_is_a_boundary(tokenizer):
    """A conversation finds what was published of its opening messages."""
    messages = [
        {"role": "system", "content": TEXT[:500]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]
    prompt = encode_chat(tokenizer, [*messages, {"role": "user", "content": "more"}], answer_follows=True)
    heads = [encode_chat(tokenizer, messages[:count], answer_follows=False).token_ids for count in (1, 2, 3)]
    assert [len(head) for head in heads] == list(prompt.boundaries[:3])
    assert all(prompt.token_ids[: len(head)] == head for head in heads)


def test_a_model_without_a_template_says_so(tokenizer, tmp_path):
    """--chat with a base model is a mistake of the user's, not a crash."""
    plain = tiny_tokenizer(tmp_path)
    plain.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        encode_chat(plain, [{"role": "user", "content": "x"}], answer_follows=True)
