"""The relation of cache to prompt: what the library would compute without a word, and wrongly, is told before it is used."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcdn.client import Client
from kvcdn.client.tensors import read_prompts
from kvcdn.errors import UsageError
from kvcdn.model.cache import cache_argument
from kvcdn.model.tokens import Prompt
from support.published import BLOCK, QUESTION, asked, publish_text, short_blocks
from support.tiny import tiny_checkpoint

TOKENS = 2 * 64 + 20
GREEDY = {"max_new_tokens": 4, "do_sample": False}


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    with short_blocks():
        return publish_text(tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=torch.float32), tokens=TOKENS)


def other_ids(inputs):
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, -1] += 1


def other_ids_before(inputs):
    """Of which the library would only take the end, so that they could be anything: the question is shifted by one."""
    inputs["input_ids"] = inputs["input_ids"][:, 1:]
    inputs["attention_mask"] = inputs["attention_mask"][:, 1:]


def an_early_token(inputs):
    """Which the library leaves out without a look, as the cache is there for it."""
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, 5] += 1


def an_early_token_in_chunks(inputs):
    an_early_token(inputs)
    inputs["prefill_chunk_size"] = 2


def a_hole(inputs):
    inputs["attention_mask"][0, 40] = 0


def left_padding(inputs):
    inputs["input_ids"] = torch.cat([torch.ones(1, 3, dtype=torch.long), inputs["input_ids"]], 1)
    inputs["attention_mask"] = torch.cat([torch.zeros(1, 3, dtype=torch.long), inputs["attention_mask"]], 1)


def shifted_positions(inputs):
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None] + 1


def a_shorter_prompt(inputs):
    inputs["input_ids"] = inputs["input_ids"][:, :100]
    inputs["attention_mask"] = inputs["attention_mask"][:, :100]


def only_the_question(inputs):
    inputs["input_ids"] = inputs["input_ids"][:, -5:]
    inputs["attention_mask"] = inputs["attention_mask"][:, -5:]


def embeddings(inputs):
    inputs["inputs_embeds"] = torch.zeros(1, inputs["input_ids"].shape[1], 64)


WRONG = [
    other_ids, other_ids_before, an_early_token, an_early_token_in_chunks, a_hole,
    left_padding, shifted_positions, a_shorter_prompt, embeddings,
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_generate_beside_a_prepared_cache_is_watched(published, change):
    """Inputs that do not belong to the cache raise before the model has run."""
    with published.client() as client:
        inputs = client.prepare(asked(published)).inputs()
        change(inputs)
        with pytest.raises(UsageError, match="the model was given"):
            published.loaded.model.generate(**inputs, **GREEDY)


@pytest.mark.parametrize("change", [other_ids, a_hole, shifted_positions], ids=lambda change: change.__name__)
def test_so_is_forward(published, change):
    """One's own decoding loop as well."""
    with published.client() as client:
        inputs = client.prepare(asked(published)).inputs()
        inputs["input_ids"] = inputs["input_ids"][:, TOKENS:]
        change(inputs)
        if "position_ids" in inputs:
            inputs["position_ids"] += TOKENS
        with pytest.raises(UsageError):
            published.loaded.model(**inputs)


def two_rows(inputs):
    for name in ("input_ids", "attention_mask"):
        inputs[name] = inputs[name].repeat(2, 1)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v32", "qwen3_next"])
def test_several_rows_beside_a_cache_of_one_are_refused(tmp_path, kind):
    """Only the first would be kept. With as many copies of the cache they are right."""
    published = publish_text(tiny_checkpoint(tmp_path, kind, dtype=torch.float32), tokens=TOKENS)
    model, error = published.loaded.model, RuntimeError if kind == "qwen3_next" else UsageError
    with published.client() as client:
        for more in ({"num_return_sequences": 3, "do_sample": True}, {"num_beams": 2}):
            with pytest.raises(error):
                model.generate(**client.prepare(asked(published)).inputs(), **{**GREEDY, **more})
        inputs = client.prepare(asked(published)).inputs()
        two_rows(inputs)
        with pytest.raises(error):
            model.generate(**inputs, **GREEDY)
        prepared = client.prepare(asked(published))
        one = model.generate(**prepared.inputs(), **GREEDY)[0].tolist()
        prepared = client.prepare(asked(published))
        prepared.cache.batch_repeat_interleave(2)
        inputs = prepared.inputs()
        two_rows(inputs)
        assert [one, one] == model.generate(**inputs, **GREEDY).tolist()


def test_a_cache_that_has_read_on_remembers_what(published):
    """Continuing behind an answer is right with this answer, and refused with another in its place; so is using it twice."""
    model, more = published.loaded.model, torch.tensor([[5, 6, 7]])
    with published.client() as client:
        inputs = client.prepare(asked(published)).inputs()
        ids = torch.cat([model.generate(**inputs, **GREEDY), more], 1)
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        went_on = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert alone.tolist() == model.generate(**went_on, **GREEDY).tolist()
        inputs = client.prepare(asked(published)).inputs()
        ids = torch.cat([model.generate(**inputs, **GREEDY), more], 1)
        ids[0, -6] += 1
        went_on = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with pytest.raises(UsageError, match="other tokens"):
            model.generate(**went_on, **GREEDY)
        inputs = client.prepare(asked(published)).inputs()
        model.generate(**inputs, **GREEDY)
        with pytest.raises(UsageError, match="the model was given other"):
            model.generate(**inputs, **GREEDY)


def test_a_cache_by_its_place_is_watched_too(published):
    """forward() takes its arguments in order."""
    body = published.loaded.model.model
    names = list(inspect.signature(body.forward).parameters)
    with published.client() as client:
        prepared = client.prepare(asked(published))
        ids = prepared.input_ids[:, TOKENS:] + 1
        given = {"input_ids": ids, cache_argument(body.forward): prepared.cache}
        with pytest.raises(UsageError, match="other tokens"):
            body(*[given.get(name) for name in names[: names.index(cache_argument(body.forward)) + 1]])


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v32", "qwen3_next"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copied", "pickled"])
def test_a_copy_of_a_prepared_cache_is_one(tmp_path, kind, way):
    """Each goes on by itself, and each is watched."""
    published = publish_text(tiny_checkpoint(tmp_path, kind, dtype=torch.float32), tokens=TOKENS)
    model = published.loaded.model
    with published.client() as client:
        prepared = client.prepare(asked(published))
        other = replace(prepared, cache=way(prepared.cache))
        first = model.generate(**prepared.inputs(), **GREEDY)
        assert first.tolist() == model.generate(**other.inputs(), **GREEDY).tolist()
        other = replace(prepared, cache=way(client.prepare(asked(published)).cache))
        inputs = other.inputs()
        an_early_token(inputs)
        with pytest.raises(UsageError, match="other tokens"):
            model.generate(**inputs, **GREEDY)


def test_a_copied_model_has_a_guard_of_its_own(published):
    """What is put around a model's method is not bound to another model."""
    with published.client() as client:
        client.prepare(asked(published))
        twin = copy.deepcopy(published.loaded.model)
    assert twin is twin.prepare_inputs_for_generation.__self__
    assert "prepare_inputs_for_generation" not in vars(published.loaded.model)


def test_a_window_is_not_cut_back_behind_what_was_loaded(tmp_path):
    """It says so, and the shorter prefix can be loaded."""
    published = publish_text(tiny_checkpoint(tmp_path, "gemma3_text", dtype=torch.float32), tokens=TOKENS)
    with published.client() as client:
        prepared = client.prepare(asked(published))
        with pytest.raises(UsageError, match="cannot be cut back to 48"):
            prepared.cache.crop(-100)


def test_right_inputs_pass_in_each_form(published):
    """The whole prompt; the rest of it below a mask of all; chunks; beams; forward. And again once the client is closed."""
    prompt, model = asked(published), published.loaded.model
    ids = torch.tensor([prompt.token_ids])
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, ids.shape[1] :].tolist()
    with published.client() as client:
        assert alone == model.generate(**client.prepare(prompt).inputs(), **GREEDY)[0, ids.shape[1] :].tolist()
        inputs = client.prepare(prompt).inputs()
        inputs["input_ids"] = inputs["input_ids"][:, TOKENS:]
        assert alone == model.generate(**inputs, **GREEDY)[0, len(QUESTION) :].tolist()
        inputs = client.prepare(prompt).inputs()
        assert alone == model.generate(**inputs, **GREEDY, prefill_chunk_size=2)[0, ids.shape[1] :].tolist()
        prepared = client.prepare(prompt)
        prepared.cache.batch_repeat_interleave(2)
        model.generate(**prepared.inputs(), **GREEDY, num_beams=2)
        prepared = client.prepare(prompt)
        model(input_ids=ids[:, TOKENS:], **{cache_argument(model.forward): prepared.cache})
        late = client.prepare(prompt)
    # Closed: nobody watches any more, and no hook is left behind.
    a_hole(inputs := late.inputs())
    model.generate(**inputs, **GREEDY)
    assert not model.model._forward_pre_hooks


def test_tensors_of_a_tokenizer_are_a_prompt(published):
    """With padding on the left, or none, of one row or several."""
    tokenizer, ids = published.loaded.tokenizer, list(published.token_ids)
    with published.client() as client:
        answer = client.generate(tokenizer(published.text + "\n\nand", return_tensors="pt"), **GREEDY)
        assert 2 * BLOCK == answer.report.tokens_reused
        padded = {"input_ids": torch.tensor([[1, 1, *ids]]), "attention_mask": torch.tensor([[0, 0, *[1] * TOKENS]])}
        assert Prompt(published.token_ids) == client.encode(padded)
    rows = read_prompts({"input_ids": [[1, 5, 6], [7, 8, 9]], "attention_mask": [[0, 1, 1], [1, 1, 1]]})
    assert [Prompt((5, 6)), Prompt((7, 8, 9))] == rows
    counted = {
        "input_ids": [[1, 5, 6]],
        "attention_mask": [[0, 1, 1]],
        "position_ids": [[0, 0, 1]],
        "token_type_ids": [[0, 0, 0]],
    }
    assert [Prompt((5, 6))] == read_prompts(counted)


IDS = {"input_ids": [[5, 6, 7, 8]]}

UNCLEAR = {
    "a hole": IDS | {"attention_mask": [[1, 0, 1, 1]]},
    "padding on the right": IDS | {"attention_mask": [[1, 1, 1, 0]]},
    "padding on both sides": IDS | {"attention_mask": [[0, 1, 1, 0]]},
    "weights in the mask": IDS | {"attention_mask": [[1.0, 0.5, 1.0, 1.0]]},
    "two in the mask": IDS | {"attention_mask": [[1, 2, 1, 1]]},
    "a mask of another length": IDS | {"attention_mask": [[1, 1, 1]]},
    "a causal mask": IDS | {"attention_mask": torch.ones(1, 1, 4, 4)},
    "positions from 1": IDS | {"position_ids": [[1, 2, 3, 4]]},
    "positions that restart": IDS | {"position_ids": [[0, 1, 0, 1]]},
    "segments": IDS | {"token_type_ids": [[0, 0, 1, 1]]},
    "an image": IDS | {"pixel_values": torch.zeros(1, 3, 2, 2)},
    "embeddings": {"inputs_embeds": torch.zeros(1, 4, 64)},
    "no ids": {},
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_tensors_that_say_something_else_are_refused(published, case):
    """A cache would be at other positions than the prompt, or of something that no name covers."""
    with published.client() as client, pytest.raises(UsageError):
        client.generate(UNCLEAR[case], **GREEDY)


def test_several_rows_are_not_one_prompt(published):
    with published.client() as client, pytest.raises(UsageError, match="2 rows"):
        client.generate({"input_ids": [[5, 6], [7, 8]]}, **GREEDY)


MISTAKES = {
    "a path": (lambda client, _: client.ask(Path("handbook.txt"), "Who?"), "read_text"),
    "bytes": (lambda client, _: client.ask(b"text", "Who?"), "decode"),
    "a tensor": (lambda client, _: client.generate(torch.tensor([[5, 6]])), "input_ids"),
    "a list of tokens": (lambda client, _: client.generate([5, 6]), "Prompt"),
    "a list of prompts": (lambda client, _: client.generate(["one", "two"]), "generate_batch"),
    "a prompt for a batch": (lambda client, _: client.generate_batch("one"), "takes one"),
    "nothing": (lambda client, _: client.generate(None), "a Prompt"),
    "an empty text": (lambda client, _: client.generate(""), ""),
    "an empty document": (lambda client, _: client.prefix(""), ""),
    "a message": (lambda client, _: client.generate({"role": "user", "content": "Who?"}), "the list of messages"),
    "a token that is none": (lambda client, _: client.generate({"input_ids": [[5, 99_999]]}), ""),
    "an option of other libraries": (lambda client, _: client.generate("Who?", max_tokens=3), "max_new_tokens"),
    "a name for a model": (lambda client, _: Client("smollm2-135m", client.tokenizer, "/tmp"), "Client.load"),
    "a wrapped model": (lambda client, model: Client(torch.nn.DataParallel(model), client.tokenizer, "/tmp"), "wrapper.module"),
    "model and tokenizer exchanged": (lambda client, model: Client(client.tokenizer, model, "/tmp"), "Client.load"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usual_mistake_is_told_with_what_to_do_instead(published, mistake):
    """And never a stack trace from within a library."""
    make, hint = MISTAKES[mistake]
    with published.client() as client, pytest.raises(UsageError) as raised:
        make(client, published.loaded.model)
    assert hint in raised.value.hint
