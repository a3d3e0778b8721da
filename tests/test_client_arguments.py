"""Arguments of the wrong type or form, as people without a type checker give them: one sentence each, and what to give."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import StoppingCriteria

from kvcdn.client import AsyncClient, Client, Conversation, Prefix
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.streaming import Stop
from kvcdn.errors import KvcdnError, UsageError
from kvcdn.model.tokens import Prompt
from kvcdn.stores.local import LocalStore
from support.published import publish_text, short_blocks
from support.tiny import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("short_blocks")

GREEDY = {"max_new_tokens": 2, "do_sample": False}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    with short_blocks():
        return publish_text(tiny_checkpoint(tmp_path_factory.mktemp("model"), dtype=torch.float32), tokens=150)


class Thing:
    """Something of a type that nothing takes."""

    def __repr__(self) -> str:
        return "a thing"


WRONG: dict[str, list[object]] = {
    "model": ["smollm2-135m", None, Path("/tmp"), Thing()],
    "tokenizer": [None, "smollm2-135m", Thing()],
    "source": [None, 5, b"http://127.0.0.1:8400", [None], [b"/tmp"], [], {}, Thing()],
    "checkpoint": [5, ["smollm2-135m"], b"smollm2-135m", Thing()],
    "adapters": ["adapters/support", ["adapters/support"], 5],
    "trust": [["ed25519:00"], "ed25519:00", True, {}, Thing()],
    "namespace": [5, b"acme", ["acme"], Thing()],
    "token": [5, b"token", ["token"]],
    "ca_file": [5, b"ca.pem", True],
    "audit": ["0.1", None, True, 2, -1, float("nan"), [0.1]],
    "local_store": ["/tmp/kv", Path("/tmp/kv"), 5, True],
    "precision": [None, 5, "INT8", b"int8", ["int8", 5], [], {}],
    "max_kl": ["0.003", True, [0.003], float("nan")],
    "progressive": ["yes", None, 1],
    "mode": ["Fetch", None, 5, ["fetch"], b"fetch"],
    "deadline": ["2", True, 0, -1, [2], float("nan")],
    "prefer": ["cheap", None, 5, ["cheapest"]],
    "prices": [{"usd_per_gb": 0.1}, 5, "cheap"],
    "usage": [5, True, ["ledger"], b"ledger"],
}
"""What each argument of the constructor is not."""


def told(raised, name):
    """Whether somebody learns what was wrong with which argument, in one line, and what to give."""
    error = raised.value
    assert "\n" not in str(error)
    assert len(str(error)) < 250
    assert error.hint or name in str(error)
    return True


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_an_argument_of_another_type_is_told(published, name, value):
    """At once, and not where it is used."""
    loaded = published.loaded
    arguments = {"model": loaded.model, "tokenizer": loaded.tokenizer, "source": StoreSource(published.store), name: value}
    with pytest.raises(KvcdnError) as raised:
        Client(**arguments)
    assert told(raised, name)


def test_every_argument_of_the_constructor_is_tried():
    assert set(inspect.signature(Client.__init__).parameters) - {"self"} == set(WRONG)


@pytest.mark.parametrize(("name", "value"), [(name, WRONG[name][0]) for name in ("mode", "deadline", "prefer", "prices")])
@pytest.mark.parametrize("way", ["ask", "generate", "stream", "stream_answer", "prepare"])
def test_a_wish_of_another_type_is_told(published, way, name, value):
    """For one prompt as well."""
    arguments = (published.text, "Who?") if way in ("ask", "stream_answer") else ("Who?",)
    with published.client() as client, pytest.raises(UsageError) as raised:
        getattr(client, way)(*arguments, **{name: value})
    assert told(raised, name)


NO_TEXTS = [None, 5, b"Who?", ["Who?"], Path("question.txt"), {"role": "user", "content": "Who?"}, Thing()]

NO_PROMPTS = [
    None, 5, b"Who?", ["Who?"], [], Path("prompt.txt"), {"role": "user", "content": "Who?"}, {"messages": []}, Thing(),
    [{"content": "no role"}], [None], [5], torch.tensor([[5]]), np.array([5]), Prompt(()), Prompt((5, "x")), Prompt("abc"),
    Prompt((5, 6), 2), Prompt((5, 6), ("2",)), Prompt(torch.tensor([5, 6])), Prompt(None), Prompt((5, -1)), Prompt((5, 10**9)),
]  # fmt: skip


QUESTIONS = {
    "ask": lambda client, text, value: client.ask(text, value),
    "question": lambda client, text, value: client.question(text, value),
    "stream_answer": lambda client, text, value: client.stream_answer(text, value),
    "prefix": lambda client, text, value: client.prefix(text).ask(value),
    "say": lambda client, text, value: client.conversation(text).say(value),
    "talk": lambda client, text, value: client.conversation(text).stream(value),
}


@pytest.mark.parametrize("value", NO_TEXTS, ids=repr)
@pytest.mark.parametrize("way", QUESTIONS)
def test_what_is_no_question_is_told(published, way, value):
    """It would be put into the prompt as what Python shows of it: None, b'Who?'."""
    with published.client() as client, pytest.raises(UsageError) as raised:
        QUESTIONS[way](client, published.text, value)
    assert told(raised, "question")


@pytest.mark.parametrize("value", NO_PROMPTS, ids=repr)
@pytest.mark.parametrize("way", ["generate", "stream", "prepare", "encode", "prefix", "explain", "generate_batch"])
def test_what_is_no_prompt_is_told(published, way, value):
    """Wherever a prompt is taken."""
    with published.client() as client, pytest.raises(UsageError) as raised:
        getattr(client, way)([value] if way == "generate_batch" else value)
    assert told(raised, "prompt")


NO_OPENINGS = [None, 5, b"text", ["text"], Path("opening.txt"), [None], [5], {"role": "user"}, Thing()]


@pytest.mark.parametrize("value", NO_OPENINGS, ids=repr)
def test_what_is_no_opening_is_told(published, value):
    with published.client() as client, pytest.raises(UsageError) as raised:
        client.conversation(value)
    assert told(raised, "opening")


@pytest.mark.parametrize("value", [None, 5, "Who?", b"Who?", {"a": 1}, [], Thing()], ids=repr)
@pytest.mark.parametrize("way", ["generate_batch", "ask_many"])
def test_what_is_no_list_of_prompts_is_told(published, way, value):
    """A text is a list of its characters to Python alone."""
    with published.client() as client:
        take = client.prefix(published.text).ask_many if way == "ask_many" else client.generate_batch
        with pytest.raises(UsageError) as raised:
            take(value, **GREEDY)
    assert told(raised, "batch")


@pytest.mark.parametrize("value", ["search", {"name": "search"}, 5, Thing()], ids=repr)
@pytest.mark.parametrize("way", ["question", "encode", "explain"])
def test_what_are_no_tools_is_told(published, way, value):
    messages = [{"role": "user", "content": "Who?"}]
    with published.client() as client, pytest.raises(UsageError) as raised:
        getattr(client, way)(*((messages, "Who?") if way == "question" else (messages,)), tools=value)
    assert told(raised, "tools")


@pytest.mark.parametrize("name", ["stopping_criteria", "logits_processor"])
@pytest.mark.parametrize("way", ["generate", "stream", "prefix"])
def test_a_list_that_is_none_is_empty_and_one_that_is_no_list_is_told(published, way, name):
    """As the library takes it."""
    with published.client() as client:

        def run(value):
            if way == "stream":
                return "".join(client.stream("Who?", **{name: value}, **GREEDY))
            if way == "prefix":
                return client.prefix(published.text).ask("Who?", **{name: value}, **GREEDY).text
            return client.generate("Who?", **{name: value}, **GREEDY).text

        assert run([]) == run(None)
        with pytest.raises(UsageError, match=name):
            run(Stop())


def test_paths_are_taken_where_names_are(published, tmp_path):
    """Of a source, several, a checkpoint, an adapter's folder, a certificate, and the local store."""
    folder = Path(published.loaded.model.config._name_or_path)
    for source in (tmp_path, str(tmp_path), [tmp_path], [str(tmp_path)]):
        with Client(published.loaded.model, published.loaded.tokenizer, source, checkpoint=folder) as client:
            assert client.loaded is not None
    with Client.load(folder, tmp_path, local_store=LocalStore(str(tmp_path / "kept"))) as client:
        assert client.loaded is not None
    with pytest.raises(UsageError, match="no number of bytes"):
        LocalStore(tmp_path, "50GB")


LOADS = {
    "model": [None, 5, b"name", ["name"]],
    "source": WRONG["source"],
    "device": [None, 5, "gpu", b"cpu"],
    "adapters": ["adapters/support", {"support": "adapters"}, None, 5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in LOADS.items() for value in values])
def test_loading_by_name_tells_before_it_loads(tmp_path, name, value):
    """A name for a list of folders would be a folder for each of its letters."""
    with pytest.raises(KvcdnError) as raised:
        Client.load(**{"model": "smollm2-135m-not-here", "source": str(tmp_path), name: value})
    assert told(raised, name)
    assert "smollm2-135m-not-here" not in str(raised.value)


def test_a_client_for_coroutines_is_of_a_client(published):
    with pytest.raises(UsageError, match="no Client"):
        AsyncClient(published.loaded.model)


def test_public_methods_are_those_tried_here():
    """A new one belongs into these tests."""
    public = {
        kind.__name__: {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}
        for kind in (Client, Prefix, Conversation)
    }
    inner = {"close", "load", "opening", "conversation", "load_cache", "guard", "count_kept", "current"}
    tried = {"ask", "question", "stream_answer", "generate", "stream", "prepare", "encode"}
    assert inner | tried | {"prefix", "explain", "generate_batch"} == public["Client"]
    assert {"ask", "ask_many", "close", "generate", "prepare", "stream", "stream_answer"} == public["Prefix"]
    assert {"say", "stream", "close"} == public["Conversation"]
    assert issubclass(Stop, StoppingCriteria)
