"""`kvcdn explain` and `kvcdn lint` as a user runs them: verdicts, exit codes, and one clear line for bad input."""

from __future__ import annotations

import json

import pytest
from test_client_samples import MESSAGES, REQUEST

from kvcdn.stores.folder import FolderStore
from support.command import kvcdn
from support.edge_process import running_edge
from support.explained import BASE, checkpoint_with_tools


class Place:
    """A home with a published document, and prompts about it."""

    def __init__(self, folder):
        self.folder, self.model, self.origin = folder, folder / "model", folder / "origin"
        checkpoint_with_tools(self.model)
        self.document = self.write("doc.txt", BASE)
        self.published = self.run("publish", self.document, "--model", self.model, "--origin", self.origin, "--json").json

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    def run(self, *arguments, **options):
        return kvcdn(*arguments, home=self.folder / "home", **options)

    def explain(self, prompt, *more, where=None, **options):
        where = ["--origin", self.origin] if where is None else where
        return self.run("explain", prompt, "--model", self.model, *where, "--json", *more, **options)

    def lint(self, *samples, **options):
        return self.run("lint", *samples, "--model", self.model, "--json", **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("place"))


def causes(ran):
    return [(cause["cause"], cause["certainty"]) for cause in ran.json["causes"]]


def test_a_published_document_is_covered(place):
    """Nothing to explain: 0, with the document's address."""
    ran = place.explain(place.document)
    assert (0, True, []) == (ran.code, ran.json["covered"], ran.json["causes"])
    assert place.published["address"] == ran.json["document"]["address"]
    assert place.published["tokens"] == ran.json["tokens_published"] == ran.json["tokens"]


def test_a_cause_that_is_proved_ends_with_0_and_nothing_published_with_3(place):
    """The exit code tells whether there is an answer."""
    proved = place.explain(place.write("crlf.txt", BASE.replace("\n", "\r\n")))
    assert (0, [("line-endings", "proved")]) == (proved.code, causes(proved))
    assert "\\r\\n" in proved.json["leaves"]["prompt"]["after"]
    assert proved.json["leaves"]["published"]["after"].startswith("\\n")
    unknown = place.explain(place.write("other.txt", "Nobody has published this. " * 300))
    assert (3, [("not-published", "likely")]) == (unknown.code, causes(unknown))


@pytest.mark.parametrize("name", ["address", "beginning", "key", "file"])
def test_a_manifest_can_be_named_in_every_way(place, name):
    """By what `kvcdn ls` shows, and as a file that was kept."""
    address = place.published["address"]
    key = next(info.key for info in FolderStore(place.origin).list("v1/") if info.key.endswith(address))
    against = {"address": address, "beginning": address[:10], "key": key, "file": place.origin / key}[name]
    ran = place.explain(place.write("front.txt", "\n" + BASE), "--against", against)
    assert (0, ("whitespace", "proved")) == (ran.code, causes(ran)[0])
    assert place.published["tokens"] == ran.json["causes"][0]["reaches"]


def test_an_edge_is_asked_and_its_absence_told(place):
    """By names alone, or with a whole address; 5 where nobody answers."""
    spaced = place.write("spaced.txt", " " + BASE)
    with running_edge(str(place.origin), place.folder / "cache") as edge:
        ran = place.explain(spaced, where=["--edge", edge.url])
        assert (0, ("whitespace", "proved")) == (ran.code, causes(ran)[0])
        named = place.explain(spaced, "--against", place.published["address"], where=["--edge", edge.url])
        assert (0, ("whitespace", "proved")) == (named.code, causes(named)[0])
        short = place.explain(spaced, "--against", place.published["address"][:12], where=["--edge", edge.url])
        assert (2, True) == (short.code, "64 digits" in short.err)
    gone = place.explain(spaced, where=["--edge", "http://127.0.0.1:9"])
    assert (5, [("unavailable", "proved")]) == (gone.code, causes(gone))


def test_people_read_both_texts_around_the_first_different_token(place):
    """The same verdict without --json, from a pipe."""
    ran = place.run(
        "explain",
        "-",
        "--model",
        place.model,
        "--origin",
        place.origin,
        "--against",
        place.document,
        stdin=b"On 2026-11-30:\n" + BASE.encode(),
    )
    assert 0 == ran.code, ran.err
    assert "timestamp, proved from token 0" in ran.out
    assert "On 2026-11-30:\\n" in ran.out
    assert "behind the stable part" in ran.out
    for line in ran.out.splitlines():
        assert line.isprintable()


def test_messages_are_compared_with_what_was_published_with_chat(place):
    """A request body is a prompt; the document may have been published either way."""
    request = {"messages": [{"role": "system", "content": BASE}, {"role": "user", "content": "Why?"}]}
    prompt = place.write("request.json", json.dumps(request))
    plain = place.explain(prompt, "--against", place.document)
    assert ("chat-template", "proved") == causes(plain)[0]
    assert 0 == place.run("publish", place.document, "--model", place.model, "--origin", place.folder / "chats", "--chat").code
    where = ["--origin", place.folder / "chats"]
    assert place.explain(prompt, where=where).json["covered"]
    as_text = place.explain(place.document, where=where)
    assert ("chat-template", "proved") == causes(as_text)[0]


def test_a_published_request_with_tools_is_answered_and_explained(place):
    """Tools are published in front of the messages; in another order they are another prompt."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("alpha", "beta")]
    body = {"messages": [{"role": "system", "content": BASE}], "tools": tools}
    opening, where = place.write("opening.json", json.dumps(body)), ["--origin", place.folder / "tools"]
    published = place.run("publish", opening, "--model", place.model, *where, "--chat", "--json").json
    ran = place.run(
        "ask", opening, "Why?", "--model", place.model, *where, "--chat", "--mode", "fetch", "--max-tokens", "1", "--json"
    )
    assert published["tokens"] == ran.json["report"]["tokens_reused"]
    turned = place.write("turned.json", json.dumps({**body, "tools": tools[::-1]}))
    for against in ([], ["--against", opening]):
        assert ("tool-order", "proved") == causes(place.explain(turned, *against, where=where))[0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_is_part_of_what_is_asked_for(place):
    """A document of the base model is another revision to a model with an adapter."""
    from support.lora import tiny_adapter

    adapter = tiny_adapter(place.folder / "adapter", place.model)
    ran = place.explain(place.document, "--adapter", adapter)
    assert (0, ("revision", "proved")) == (ran.code, causes(ran)[0])
    assert place.published["tokens"] == ran.json["causes"][0]["reaches"]


BAD = {
    "no file": (3, "missing.txt", None),
    "no text": (2, "bad.txt", b"\xff\xfe\x00bad"),
    "not UTF-8": (2, "latin.txt", b"caf\xe9"),
    "empty": (2, "empty.txt", b" \n"),
    "broken JSON": (2, "broken.json", b'[{"role": "user", "content": '),
    "no messages": (2, "list.json", b"[1, 2]"),
    "a role the template cannot render": (2, "odd.json", b'[{"role": "user", "content": {"a": [1]}, "x": 1}, {"role": 1}]'),
}


@pytest.mark.parametrize("command", ["explain", "lint"])
@pytest.mark.parametrize("case", BAD)
def test_bad_prompts_are_refused_in_one_line(place, case, command):
    """Exit code, message and, with --json, one object; never a traceback."""
    code, name, content = BAD[case]
    path = place.folder / name if content is None else place.write(name, content)
    ran = getattr(place, command)(path)
    assert (code, code) == (ran.code, ran.json["exit_code"])
    assert name in ran.complaint


@pytest.mark.parametrize(
    ("against", "code"),
    [("missing.txt", 3), ("0123456789abcdef", 3), ("v1/" + "0" * 32 + "/manifests/" + "0" * 64, 3), ("bad", 4)],
)
def test_a_bad_document_to_compare_with_is_refused(place, against, code):
    """A file that is not there, an address nobody has, a manifest that is damaged."""
    if against == "bad":
        key = next(info.key for info in FolderStore(place.origin).list("v1/") if "/manifests/" in info.key)
        data = bytearray((place.origin / key).read_bytes())
        data[-1] ^= 1
        against = place.write("damaged.manifest", bytes(data))
    ran = place.explain(place.document, "--against", against)
    assert (code, code) == (ran.code, ran.json["exit_code"])
    assert ran.complaint


def test_a_missing_model_is_not_found(place):
    """As for every command."""
    for words in (["explain", place.document, "--origin", place.origin], ["lint", place.document]):
        ran = place.run(*words, "--model", "./nowhere", "--json")
        assert (3, 3) == (ran.code, ran.json["exit_code"])


def test_lint_names_problems_and_their_price(place):
    """From two texts; --strict makes them fail a build."""
    texts = [place.write(f"agent{n}.txt", f"Run {n}, at 2026-11-30T10:0{n}:00Z\n{BASE}\n\nQuestion: {n}?") for n in (1, 2)]
    ran = place.lint(*texts, "--tokens-per-second", "100", "--usd-per-hour", "3.6")
    assert 0 == ran.code, ran.err
    first, second = ran.json["problems"][:2]
    assert ("counter", "timestamp") == (first["cause"], second["cause"])
    assert ran.json["tokens_shared"] == first["token"]
    assert round(first["tokens_lost"] / 100, 3) == first["seconds_per_call"]
    assert pytest.approx(first["seconds_per_call"]) == first["usd_per_1000_calls"]
    assert 1 == place.lint(*texts, "--strict").code
    for_people = place.run("lint", *texts, "--model", place.model)
    assert "behind it that cannot be reused" in for_people.out


def test_lint_says_how_many_samples_it_looked_at(place):
    """Of very many it compares the first ones."""
    log = place.write("many.jsonl", "\n".join(json.dumps({"prompt": f"Run {number}: go on."}) for number in range(300)))
    ran = place.lint(log)
    assert (101, 300) == (ran.json["samples"], ran.json["samples_given"])
    assert "101 of 300, the first ones," in place.run("lint", log, "--model", place.model).out


def test_lint_reads_logs_of_requests(place):
    """JSONL of chats with tools, one sample a line; texts and chats do not mix."""
    requests = [
        {**REQUEST, "messages": [{"role": "system", "content": f"User: {name}\n{BASE}"}, *MESSAGES[1:]]}
        for name in ("Ann", "Bob")
    ]
    log = place.write("log.jsonl", "\n".join(map(json.dumps, requests)))
    ran = place.lint(log)
    assert (2, "user") == (ran.json["samples"], ran.json["problems"][0]["cause"])
    assert 2 == place.lint(log, place.document).code
