"""Explanations: for every mistake that is made with prompts, its name and the first token that it changes."""

from __future__ import annotations

import json
import shutil
import time
import unicodedata
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.client import Client
from kvcdn.client.explaining.causes import Cause, Certainty
from kvcdn.client.explaining.divergence import find_divergence
from kvcdn.client.explaining.explain import Explainer
from kvcdn.client.explaining.explanation import Explanation
from kvcdn.client.explaining.samples import Conversation
from kvcdn.client.explaining.shelf import Shelf
from kvcdn.client.explaining.surroundings import Surroundings, look_around
from kvcdn.client.explaining.views import Form, Special
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.errors import UsageError
from kvcdn.keyring import create_namespace, load_namespace
from kvcdn.keys import Namespace, PrefixNames, block_key, manifest_key
from kvcdn.model.fingerprint import fingerprint_checkpoint
from kvcdn.model.tokens import spell_text
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.revocation import RevocationList, Revocations
from kvcdn.signing import SigningKey, TrustList
from support.explained import BASE, Stage, checkpoint_with_tools, first_different
from support.library import Library
from support.tiny import TEXT

ACCENTS = "R\u00e9sum\u00e9 of the caf\u00e9:\n" + BASE
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {"type": "object"}}}
    for name in ("alpha", "beta", "gamma")
)
ASKED = {"role": "user", "content": "What is it?"}
SYSTEM = {"role": "system", "content": BASE}


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return Stage.at(checkpoint_with_tools(tmp_path_factory.mktemp("explained")))


@pytest.fixture
def stage(stages):
    return stages.fresh()


def crlf(text):
    return text.replace("\n", "\r\n")


WORDING = {
    "CRLF": (Cause.LINE_ENDINGS, BASE, crlf(BASE)),
    "LF": (Cause.LINE_ENDINGS, crlf(BASE), BASE),
    "a line end in front": (Cause.WHITESPACE, BASE, "\n" + BASE),
    "white space stripped": (Cause.WHITESPACE, " " + BASE, BASE),
    "spaces at the ends of lines": (Cause.WHITESPACE, BASE, BASE.replace("\n", "  \n")),
    "tabs": (Cause.WHITESPACE, "a    b\n" + BASE, "a\tb\n" + BASE),
    "NFD": (Cause.UNICODE, ACCENTS, unicodedata.normalize("NFD", ACCENTS)),
    "NFC": (Cause.UNICODE, unicodedata.normalize("NFD", ACCENTS), ACCENTS),
    "a byte order mark": (Cause.UNICODE, BASE, "\ufeff" + BASE),
    "hard spaces": (Cause.UNICODE, BASE, BASE.replace(" ", "\u00a0", 60)),
    "curly quotes": (Cause.UNICODE, '"Note"\n' + BASE, "\u201cNote\u201d\n" + BASE),
    "a BOS written out": (Cause.BOS, BASE, "<s>" + BASE),
}


@pytest.mark.parametrize("case", WORDING)
def test_a_change_of_wording_is_proved_by_the_names_alone(stage, case):
    """Nothing is known but what the source has: the reading that is published tells the cause and the very token."""
    cause, published, prompt = WORDING[case]
    ids = stage.publish(published)
    found = stage.explain(prompt)
    token = first_different(stage.view(prompt).spell().token_ids, ids)
    assert token < 1024
    assert [(cause, Certainty.PROVED, token)] == [(each.cause, each.certainty, each.token) for each in found.findings[:1]]
    assert (token, True) == (found.departure.token, found.departure.exact)
    assert (0, False) == (found.published, found.covered)
    assert found.findings[0].reaches >= 1024


def framings(stage):
    """Published readings and prompts that differ in how text becomes tokens."""
    chat = Conversation((SYSTEM, ASKED))
    plain = stage.view(BASE)
    return {
        "published with BOS": (Cause.BOS, replace(plain, special=Special.BOS), BASE),
        "published as a chat, asked as text": (Cause.CHAT_TEMPLATE, replace(plain, form=Form.SYSTEM), BASE),
        "published as text, asked as a chat": (Cause.CHAT_TEMPLATE, plain, chat),
        "published as text, asked with --chat": (Cause.CHAT_TEMPLATE, plain, replace(plain, form=Form.SYSTEM)),
        "published for users, asked as system": (
            Cause.CHAT_TEMPLATE,
            Conversation(({**SYSTEM, "role": "user"},)),
            chat,
        ),
        "rendered before, with one more BOS": (Cause.BOS, replace(plain, content="<s>" + BASE), BASE),
        "published without tools": (Cause.TOOLS, Conversation((SYSTEM,)), Conversation((SYSTEM, ASKED), TOOLS)),
        "tools in another order": (
            Cause.TOOL_ORDER,
            Conversation((SYSTEM,), TOOLS),
            Conversation((SYSTEM, ASKED), (TOOLS[1], TOOLS[0], TOOLS[2])),
        ),
        "keys of tools in another order": (
            Cause.KEY_ORDER,
            Conversation((SYSTEM,), tuple(json.loads(json.dumps(tool, sort_keys=True)) for tool in TOOLS)),
            Conversation((SYSTEM, ASKED), TOOLS),
        ),
    }


FRAMINGS = (
    "published with BOS", "published as a chat, asked as text", "published as text, asked as a chat",
    "published as text, asked with --chat", "published for users, asked as system", "rendered before, with one more BOS",
    "published without tools", "tools in another order", "keys of tools in another order",
)  # fmt: skip


@pytest.mark.parametrize("way", ["by names", "against it"])
@pytest.mark.parametrize("case", FRAMINGS)
def test_a_change_of_framing_is_proved(stage, case, way):
    """BOS, chat template, roles and tools; by names alone, and compared with the document."""
    cause, published, prompt = framings(stage)[case]
    reading = (
        replace(published, answer_follows=False)
        if not isinstance(published, Conversation)
        else stage.view(published, answer_follows=False)
    )
    ids = stage.publish(reading)
    found = stage.explain(prompt, reading if way == "against it" else None)
    asked = stage.view(prompt) if not hasattr(prompt, "spell") else prompt
    token = first_different(asked.spell().token_ids, ids)
    assert (cause, Certainty.PROVED, token) == (found.findings[0].cause, found.findings[0].certainty, found.findings[0].token)
    assert token == found.departure.token


def test_a_tokenizer_of_other_files_is_proved(stage, tmp_path):
    """The same weights with another tokenizer: another prefix under the same model."""
    other = shutil.copytree(stage.folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text("utf-8"))
    del tokenizer["model"]["merges"][-200:]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    fingerprint_checkpoint(stage.folder)
    theirs = Stage.at(other)
    theirs.store, theirs.key = stage.store, stage.key
    ids = theirs.publish(BASE)
    assert theirs.loaded.identity == replace(stage.loaded.identity, name="other")
    found = stage.explain(BASE)
    assert (Cause.TOKENIZER, Certainty.PROVED) == (found.findings[0].cause, found.findings[0].certainty)
    assert str(other) in found.findings[0].detail
    assert first_different(stage.view(BASE).spell().token_ids, ids) == found.departure.token


# -- what names are made of besides ------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", ["published", "asked"])
def test_another_namespace_is_proved(stage, private):
    """In either direction, where the secret is on this machine."""
    create_namespace("acme")
    acme = load_namespace("acme")
    published, asked = (acme, Namespace.public()) if private == "published" else (Namespace.public(), acme)
    stage.publish(stage.view(BASE, namespace=published, answer_follows=False))
    found = stage.explain(stage.view(BASE, namespace=asked))
    assert (Cause.NAMESPACE, Certainty.PROVED, 0) == (
        found.findings[0].cause,
        found.findings[0].certainty,
        found.findings[0].token,
    )
    assert repr(published.name) in found.findings[0].detail
    assert found.tokens == found.findings[0].reaches


def test_another_dtype_is_proved(stage):
    """A model loaded in float32 finds nothing of what was published in bfloat16."""
    stage.in_dtype(torch.float32).publish(BASE)
    found = stage.explain(BASE)
    assert (Cause.LAYOUT, Certainty.PROVED) == (found.findings[0].cause, found.findings[0].certainty)
    assert "float32" in found.findings[0].detail


def test_another_precision_is_proved(stage):
    """Each has names of its own; a reader who accepts both has no problem."""
    stage.publish(BASE)
    coarse = replace(stage.loaded.identity, precision="int8")
    shelf = Shelf(StoreSource(stage.store))
    assert stage.explain(shelf.preferred(stage.view(BASE), ("int8", "native"))).covered
    assert coarse == shelf.preferred(stage.view(BASE), ("int8",)).identity
    found = stage.explain(replace(stage.view(BASE), identity=coarse))
    assert (Cause.PRECISION, Certainty.PROVED, 0) == (
        found.findings[0].cause,
        found.findings[0].certainty,
        found.findings[0].token,
    )


@pytest.mark.parametrize("way", ["listed", "remembered", "against its manifest"])
def test_another_revision_is_proved(stage, tmp_path, way):
    """Known from an origin's list, from another checkpoint on this machine, or from the manifest itself."""
    other = Stage.at(checkpoint_with_tools(tmp_path / stage.folder.name, seed=1, rms_norm_eps=1e-5))
    other.store, other.key = stage.store, stage.key
    other.publish(BASE)
    manifest = stage.manifests()[0]
    around = (
        None
        if way == "remembered"
        else Surroundings(identities=Shelf(None, [manifest]).identities() if way == "listed" else ())
    )
    found = stage.explain(BASE, manifest if way == "against its manifest" else None, around=around)
    assert (Cause.REVISION, Certainty.PROVED, 0) == (
        found.findings[0].cause,
        found.findings[0].certainty,
        found.findings[0].token,
    )
    assert "another revision" in found.findings[0].detail
    if way == "remembered":
        assert "rms_norm_eps" in found.findings[0].detail
    assert found.tokens == found.findings[0].reaches


# -- several at once ---------------------------------------------------------------------------------------------------


def test_the_first_of_two_causes_is_named_first(stage):
    """Line ends from the first line on, and a date in the second block: the one hides the other."""
    text = TEXT[:8000]
    place = spell_text(stage.loaded.tokenizer, text).character(1500)
    dated = text[:place] + " 2026-11-30 " + text[place:]
    stage.publish(text)
    found = stage.explain(crlf(dated))
    assert [Cause.LINE_ENDINGS] == [each.cause for each in found.findings if each.certainty is Certainty.PROVED]
    assert 1024 == found.findings[0].reaches
    compared = stage.explain(dated, text)
    ids = [spell_text(stage.loaded.tokenizer, each).token_ids for each in (dated, text)]
    assert first_different(*ids) == compared.departure.token == compared.findings[0].token
    assert (1024, Certainty.PROVED) == (compared.published, compared.findings[0].certainty)


def test_two_mistakes_that_only_together_hide_a_document_are_both_proved(stage):
    """Line ends and a namespace: neither alone reaches anything."""
    create_namespace("acme")
    stage.publish(stage.view(BASE, namespace=load_namespace("acme"), answer_follows=False))
    found = stage.explain(crlf(BASE))
    proved = [each for each in found.findings if each.certainty is Certainty.PROVED]
    assert {Cause.NAMESPACE, Cause.LINE_ENDINGS} == {each.cause for each in proved}
    assert sorted(each.token for each in proved) == [each.token for each in proved]
    assert found.proved


@pytest.mark.parametrize("published", ["Today is 2026-11-28.\n", ""])
@pytest.mark.parametrize("chat", [False, True])
def test_a_date_of_another_day_is_proved(stage, published, chat):
    """What was published on an earlier day, or without the line, is found by trying."""

    def content(line):
        return Conversation(({"role": "system", "content": line + BASE}, ASKED)) if chat else line + BASE

    document = Conversation(content(published).messages[:1]) if chat else content(published)
    ids = stage.publish(document)
    prompt = content("Today is 2026-11-30.\n")
    found = stage.explain(prompt)
    token = first_different(stage.view(prompt).spell().token_ids, ids)
    assert (Cause.TIMESTAMP, Certainty.PROVED, token) == (
        found.findings[0].cause,
        found.findings[0].certainty,
        found.findings[0].token,
    )
    assert found.findings[0].reaches >= len(ids)


def test_what_differs_within_a_block_is_suspected(stage):
    """Nothing is proved, but a date stands where the names end."""
    stage.publish(BASE)
    found = stage.explain("Today, on 2026-11-30, all is well.  And tomorrow? " + BASE)
    assert (Cause.TIMESTAMP, Certainty.LIKELY) == (found.findings[0].cause, found.findings[0].certainty)
    assert "2026-11-30" in found.findings[0].detail
    assert Cause.NOT_PUBLISHED is found.findings[-1].cause
    assert (0, False) == (found.departure.token, found.departure.exact)


# -- against a document ------------------------------------------------------------------------------------------------

AGAINST = {
    "a date": (Cause.TIMESTAMP, "Today is 2026-11-30.\n", "Today is 2026-11-29.\n"),
    "a UUID": (Cause.IDENTIFIER, "Run 0b8e4e1c-1f5d-4f0e-9a53-2f3c8a1c9d10\n", "Run 7c9e6679-7425-40de-944b-e07fc1f90ae7\n"),
    "a user": (Cause.USER, "User: Alice\n", "User: Bob\n"),
    "a list": (Cause.LIST_ORDER, "Cities: Rome, Oslo, Bern\n", "Cities: Bern, Rome, Oslo\n"),
    "capitals": (Cause.CASE, "USE THE API\n", "use the api\n"),
    "words": (Cause.TEXT, "Be brief.\n", "Take your time.\n"),
}


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("case", AGAINST)
def test_compared_with_a_document_the_difference_is_shown(stage, case, published):
    """Both texts around the first different token; proved where the document is published, likely where it is not."""
    cause, ours, theirs = AGAINST[case]
    start = 100 if published else 2000
    prompt, document = (BASE[:start] + "\n" + each + BASE[start:] for each in (ours, theirs))
    if published:
        stage.publish(document)
    found = stage.explain(prompt, document)
    ids = [stage.view(each).spell().token_ids for each in (prompt, document)]
    named = next(each for each in found.findings if each.cause is cause)
    assert first_different(*ids) == named.token == found.departure.token
    assert (Certainty.PROVED if published else Certainty.LIKELY) is named.certainty
    assert found.departure.ours.before[-20:] == found.departure.theirs.before[-20:]
    assert found.departure.ours.after != found.departure.theirs.after
    assert published != (Cause.NOT_PUBLISHED in [each.cause for each in found.findings])


def test_a_token_that_merges_across_the_documents_end_is_named(stage):
    """The document's last characters and what follows are one token in the prompt."""
    document = BASE[:2000].rstrip() + "\nThe licens"
    stage.publish(document)
    found = stage.explain(document + "ee may ask.", document)
    assert Cause.MERGED_TOKEN is found.findings[0].cause
    assert (
        first_different(*[stage.view(text).spell().token_ids for text in (document + "ee may ask.", document)])
        == found.departure.token
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_divergence_is_the_first_different_token_wherever_the_edit_is(stages, data):
    """Any edit at any place: replaced, removed or inserted characters."""
    tokenizer = stages.loaded.tokenizer
    text = TEXT[: data.draw(st.integers(1, 1500))]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 40, len(text))))
    edited = text[:start] + data.draw(st.text(max_size=12)) + text[end:]
    ours, theirs = (spell_text(tokenizer, each) for each in (edited, text))
    found = find_divergence(ours, theirs, 64)
    index = first_different(ours.token_ids, theirs.token_ids)
    if index == min(len(ours.token_ids), len(theirs.token_ids)):
        assert found is None
    else:
        assert (index, index // 64) == (found.token, found.block)
        assert ours.text[: found.character].endswith(found.ours.before)
        assert found.detail


# -- what lies at the source -------------------------------------------------------------------------------------------


def test_a_published_prompt_is_covered(stage):
    """The document itself, and a question on it."""
    ids = stage.publish(BASE)
    for prompt in (BASE, BASE + "\n\nQuestion: why?\nAnswer:"):
        found = stage.explain(prompt)
        assert (len(ids), True, len(ids)) == (found.published, found.covered, found.document.tokens)
    assert [Cause.DOCUMENT_END] == [each.cause for each in found.findings]
    assert (len(ids), True) == (found.departure.token, found.departure.exact)


@pytest.mark.parametrize("listed", [True, False])
def test_a_document_whose_end_the_prompt_does_not_know_is_proved(stage, listed):
    """The last block is found at a boundary only; from a manifest, or by looking at the ends of lines."""
    ids = stage.publish(BASE)
    found = stage.explain(BASE + "\n\nIn short:", listed=listed)
    assert (len(ids), True) == (found.departure.token, found.departure.exact)
    assert (Cause.BOUNDARY, 1024, len(ids)) == (found.findings[0].cause, found.findings[0].token, found.findings[0].reaches)


@pytest.mark.parametrize("more", ["\n", " ", "\n\nIn short:"])
def test_so_it_is_compared_with_that_document(stage, more):
    """Which the prompt begins with, to the last token: a line end behind it is enough."""
    ids = stage.publish(BASE)
    found = stage.explain(BASE + more, BASE)
    assert (1024, False) == (found.published, found.covered)
    assert (Cause.BOUNDARY, Certainty.PROVED) == (found.findings[0].cause, found.findings[0].certainty)
    assert (len(ids), len(ids)) == (found.findings[0].reaches, found.departure.token)


@pytest.mark.parametrize("parts", [1, 3])
def test_contents_that_are_lists_of_parts_are_proved(stage, parts):
    """Requests may have either; templates that know no parts write them as Python does."""
    stage.publish(stage.view(Conversation((SYSTEM,)), answer_follows=False))
    step = len(BASE) // parts + 1
    texts = [{"type": "text", "text": BASE[start : start + step]} for start in range(0, len(BASE), step)]
    found = stage.explain(Conversation(({"role": "system", "content": texts}, ASKED)))
    assert (Cause.CHAT_TEMPLATE, Certainty.PROVED) == (found.findings[0].cause, found.findings[0].certainty)
    assert "lists of parts" in found.findings[0].detail
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    found = stage.explain(Conversation(({"role": "system", "content": [*texts, image]}, ASKED)))
    assert Certainty.LIKELY is found.findings[0].certainty


def test_an_expired_document_without_blocks_is_proved_from_its_manifest(stage):
    """Kept in a file, or not collected yet; without an expiry date it is incomplete."""
    expired = [int(time.time()) - 86400, None]
    for expires, cause in zip(expired, (Cause.EXPIRED, Cause.INCOMPLETE), strict=True):
        fresh = stage.fresh()
        ids = fresh.publish(BASE, expires=expires)
        manifest = fresh.manifests()[0]
        fresh.store.delete(block_key(manifest.tag, manifest.blocks[0].address))
        fresh.store.delete(block_key(manifest.tag, manifest.blocks[1].address))
        found = fresh.explain(BASE, listed=True)
        assert (cause, Certainty.PROVED, len(ids)) == (
            found.findings[0].cause,
            found.findings[0].certainty,
            found.findings[0].reaches,
        )
        against = fresh.explain(BASE, manifest)
        assert cause is against.findings[0].cause


def test_a_manifest_of_another_text_shares_what_it_shares(stage):
    """By its addresses: the blocks before the difference are the prompt's own."""
    text = TEXT[:8000]
    stage.publish(text)
    manifest = stage.manifests()[0]
    changed = text[:6500] + "X" + text[6500:]
    found = stage.explain(changed, manifest)
    assert (1024, Cause.TEXT, Certainty.LIKELY) == (found.published, found.findings[0].cause, found.findings[0].certainty)
    assert (1024, 1) == (found.departure.token, found.departure.block)
    nothing = stage.explain("Z" + text, manifest)
    assert (0, Cause.TEXT) == (nothing.published, nothing.findings[0].cause)


def test_an_untrusted_publisher_is_proved(stage):
    """From the block's header, and from the manifest."""
    stage.publish(BASE)
    for against in (None, stage.manifests()[0]):
        found = stage.explain(BASE, against, trust=TrustList.of(SigningKey.generate().public))
        assert (Cause.UNTRUSTED, Certainty.PROVED, 0) == (
            found.findings[0].cause,
            found.findings[0].certainty,
            found.findings[0].token,
        )
        assert stage.key.public.text in found.findings[0].detail
        assert 0 == found.published


@pytest.mark.parametrize("block", [0, 1])
def test_a_damaged_block_is_proved(stage, block):
    """Tokens before it are published, those from it on are not."""
    ids = stage.publish(BASE)
    name = PrefixNames.of(stage.loaded.identity, Namespace.public(), ids).blocks[block]
    key = block_key(stage.loaded.identity.tag, name.address)
    data = bytearray(stage.store.read(key))
    data[40] ^= 1
    stage.store.delete(key)
    stage.store.create(key, [bytes(data)])
    found = stage.explain(BASE)
    assert (Cause.CORRUPT, name.start, name.start) == (found.findings[0].cause, found.findings[0].token, found.published)


class Boaster(StoreSource):
    """A source that claims to have every block but some."""

    def __init__(self, store, but=()):
        super().__init__(store)
        self.but = but

    def match(self, tag, addresses):
        return next((index for index, address in enumerate(addresses) if address in self.but), len(addresses))


@pytest.mark.parametrize("all_but_this", [False, True])
def test_a_source_that_claims_what_it_has_not_proves_nothing(stage, all_but_this):
    """What a match says is believed only where the block can be read."""
    names = PrefixNames.of(stage.loaded.identity, Namespace.public(), stage.view(BASE).spell().token_ids)
    found = stage.explain(BASE, source=Boaster(stage.store, {name.address for name in names.blocks} if all_but_this else ()))
    assert (0, False) == (found.published, found.covered)
    assert {Cause.NOT_PUBLISHED} == {each.cause for each in found.findings if each.certainty is Certainty.PROVED}


class Counting(StoreSource):
    """A source that counts the blocks of which something is read."""

    opened = 0

    def open(self, key, *, ranged):
        self.opened += 1
        return super().open(key, ranged=ranged)


@pytest.mark.parametrize("good", [0, 1, 23, 38, 40])
def test_few_headers_of_a_long_prompt_are_read_and_the_first_bad_block_is_found(stage, good):
    """The blocks behind the bad one are by the same publisher: as after a change of keys."""
    library = Library(stage.store)
    other = Library(stage.store, model=library.model)
    if good:
        library.publish(tuple(range(1, good + 1)))
    other.publish(tuple(range(1, 41)))
    length, source = library.model.layout.block_tokens, Counting(stage.store)
    names = library.names(tuple(range(1, 41))).blocks
    view = replace(stage.view("x"), identity=library.model)
    explanation = Explanation("", library.model, "public", 40 * length)
    published = Explainer(Shelf(source), TrustList.of(library.key.public))._trusted(explanation, view, names)
    assert good * length == published
    assert ([Cause.UNTRUSTED] if good < 40 else []) == [each.cause for each in explanation.findings]
    assert source.opened <= 8 + 5 + 1


def test_a_damaged_manifest_beside_sound_blocks_is_no_cause(stage):
    """Clients do not read it."""
    ids = stage.publish(BASE)
    key = manifest_key(stage.loaded.identity.tag, stage.manifests()[0].address)
    stage.store.delete(key)
    stage.store.create(key, [b"damaged"])
    found = stage.explain(BASE)
    assert (len(ids), True, []) == (found.published, found.covered, found.findings)


def test_a_source_that_is_down_is_the_cause(stage):
    """Nothing else can be told."""
    found = stage.explain(BASE, source=EdgeSource("http://127.0.0.1:9"))
    assert (Cause.UNAVAILABLE, Certainty.PROVED) == (found.findings[0].cause, found.findings[0].certainty)


def test_a_lossy_cache_that_is_not_good_enough_is_named(stage):
    """By its certificate, which the block's header carries."""
    coarse = replace(stage.view(BASE), identity=replace(stage.loaded.identity, precision="int4"))
    ids = coarse.spell().token_ids
    Publisher(stage.loaded, stage.store, stage.key).publish(ids, precision="int4")
    shelf = Shelf(StoreSource(stage.store))
    trust = TrustList.of(stage.key.public)
    assert Explainer(shelf, trust).explain(coarse).covered
    found = Explainer(shelf, trust, max_kl=0.0).explain(coarse)
    assert (Cause.QUALITY, Certainty.PROVED, 0) == (found.findings[0].cause, found.findings[0].certainty, found.published)


@pytest.mark.parametrize("what", ["addresses", "publishers", "models"])
def test_what_is_revoked_is_named_and_so_is_by_whom(stage, what):
    """A block in the middle ends what is published before it; a publisher, or a model, leaves nothing."""
    ids, view = stage.publish(BASE), stage.view(BASE)
    blocks = view.chain(view.spell()).prefix(len(ids)).blocks
    middle = blocks[len(blocks) // 2]
    revoked = {"addresses": middle.address, "publishers": stage.key.public, "models": view.identity.tag}[what]
    signer = SigningKey.generate().public
    now = int(time.time())
    taken_back = Revocations({signer: RevocationList(1, now, now + 60, **{what: frozenset({revoked})})})
    found = Explainer(Shelf(StoreSource(stage.store)), TrustList.of(stage.key.public), revocations=taken_back).explain(view)
    assert (Cause.REVOKED, Certainty.PROVED) == (found.findings[0].cause, found.findings[0].certainty)
    assert signer.text in found.findings[0].detail
    assert (middle.start if what == "addresses" else 0, False) == (found.published, found.covered)


def test_a_prompt_shorter_than_a_block_is_likely_too_short(stage):
    """It has no whole block that could be found."""
    stage.publish(BASE)
    found = stage.explain(BASE[:1000])
    assert (Cause.SHORT, Certainty.LIKELY) == (found.findings[0].cause, found.findings[0].certainty)


def test_nothing_published_is_likely_just_that(stage):
    """An empty origin."""
    found = stage.explain("word " * 2000)
    assert [(Cause.NOT_PUBLISHED, Certainty.LIKELY)] == [(each.cause, each.certainty) for each in found.findings]
    assert not found.proved


def test_the_sdk_explains_what_it_would_not_find(stage):
    """`Client.explain` with the client's own model, source and trust."""
    stage.publish(stage.view(Conversation((SYSTEM,)), answer_follows=False))
    client = Client(stage.loaded.model, stage.loaded.tokenizer, StoreSource(stage.store), trust=TrustList.of(stage.key.public))
    assert client.explain([SYSTEM, ASKED]).covered
    found = client.explain(BASE)
    assert (Cause.CHAT_TEMPLATE, Certainty.PROVED) == (found.findings[0].cause, found.findings[0].certainty)


def test_an_empty_prompt_is_refused(stage):
    """There is nothing to explain."""
    with pytest.raises(UsageError):
        stage.explain("")


def test_surroundings_are_what_this_user_has(stage):
    """Namespaces by name, and no model twice."""
    create_namespace("acme")
    around = look_around(stage.loaded.identity, Shelf(StoreSource(stage.store)), stage.folder)
    assert ["public", "acme"] == [space.name for space in around.namespaces]
    assert stage.loaded.identity.fingerprint not in [identity.fingerprint for identity in around.identities]
    stage.publish(BASE)
    assert manifest_key(stage.loaded.identity.tag, stage.manifests()[0].address) in [
        info.key for info in stage.store.list("v1/")
    ]
