"""The race: whatever the plan turns to, and whenever, the tensors are the published ones, and nothing is left behind."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcdn import layout
from kvcdn.client import MissReason
from kvcdn.client.loading import fetch as fetch_module
from kvcdn.client.loading.fetch import PrefixFetch
from kvcdn.client.network.link import LinkEstimate
from kvcdn.client.planning import race
from kvcdn.client.planning.pace import Pace
from kvcdn.client.planning.plan import Decision, Mode, decide
from kvcdn.errors import MismatchError
from kvcdn.keys import Namespace, PrefixNames, block_key
from kvcdn.model import speed
from kvcdn.model.place import all_on
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.model.remembered import Remembered
from kvcdn.model.speed import Pass, prefill_speeds, remember_passes
from kvcdn.model.tokens import Prompt
from kvcdn.signing import TrustList
from kvcdn.stores.memory import MemoryStore
from support.link import SlowLink
from support.published import BLOCK, QUESTION, publish_text, short_blocks
from support.stock import continued, stock_cache
from support.tiny import tiny_checkpoint
from support.waiting import until

TOKENS = 4 * BLOCK + 20
SLOW = 1e4
"""Times that a model takes where a fetch is not to look slow beside it, however long a busy machine holds it up."""

GREEDY = {"max_new_tokens": 4, "do_sample": False}

KINDS = ("llama", "gemma3n_text", "mistral-window", "deepseek_v3", "gpt_oss", "deepseek_v32")
"""Full attention; windows with shared layers; windows only; latents; windows in some layers and sinks; indexer keys."""


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(autouse=True)
def _speeds_of_its_own(monkeypatch, tmp_path):
    """What a test says of a model's speed is all that is known of it."""
    monkeypatch.setattr(speed, "Remembered", lambda name: Remembered(f"{tmp_path}/{name}"))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A published text of each kind, made when first asked for."""
    made = {}

    def publish(kind):
        if kind not in made:
            with pytest.MonkeyPatch.context() as aside:
                # What a publisher measures is not the test's that happens to be the first.
                aside.setattr(speed, "Remembered", Remembered)
                made[kind] = publish_text(
                    tiny_checkpoint(tmp_path_factory.mktemp("model"), kind, dtype=torch.float32), tokens=TOKENS
                )
            blocks = ScheduledPrefill(made[kind].loaded.model, made[kind].loaded.identity.layout, TOKENS)
            made[kind].blocks = list(blocks.run(made[kind].token_ids))
        return made[kind]

    with short_blocks():
        yield publish


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """No thread outlives its prompt."""
    yield
    until(lambda: not [one.name for one in threading.enumerate() if one.name.startswith("kvcdn-fetch")])


def asked(of):
    return Prompt((*of.token_ids, *QUESTION), (TOKENS,))


def reference_rows(of, passes):
    """The rows of every layer where those of `passes` are computed, one after the other, and the others are published."""
    prefill = ScheduledPrefill(of.loaded.model, of.loaded.identity.layout, TOKENS)
    for block in of.blocks:
        for number, tensors in enumerate(block.layers):
            for place, tensor in zip(prefill.restore(number, block.start, block.end), tensors, strict=True):
                place.copy_(tensor)
    for start, end in passes:
        prefill.run_one(of.token_ids[start:end], start, lambda layer: None)
    return prefill.rows(TOKENS)


def assert_same_bits(of, prepared):
    """Every row that a model reads behind the prefix is the published one, or what the passes computed here compute."""
    report = prepared.report
    length = report.tokens_reused + report.tokens_computed
    assert (prepared.cache is None) == (length == 0)
    expected = reference_rows(of, report.plan["passes"]) if report.plan else []
    for number, spec in enumerate(of.loaded.identity.layout.layers):
        if prepared.cache is None or not spec.tensors:
            continue
        first = spec.first_needed(length)
        rows = prepared.cache.layers[number].rows(first, length)
        for place, tensor in enumerate(rows):
            assert torch.equal(expected[number][place][first:length], tensor.cpu())
    return length


def script(monkeypatch, modes, link=None, per_decision=0):
    """Makes the plan a list of modes, one a decision; the last one stays. `link` lets so many bytes through at each."""
    monkeypatch.setattr(race, "TICK_SECONDS", 0.0)
    left = list(modes)

    def scripted(work, aim, progress):
        decided = decide(work, aim, progress)
        if link is not None:
            link.let_through(per_decision)
        mode = left.pop(0) if len(left) > 1 else left[0]
        return Decision(mode, decided.expected, "scripted")

    monkeypatch.setattr(race, "decide", scripted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["fetch", "both", "compute"])
def test_every_mode_gives_the_published_bits(published, kind, mode):
    """Forced, on a link on which both sides have a part; and the model goes on as without kvcdn."""
    of = published(kind)
    link = SlowLink(of.store)
    with of.client(link) as client:
        if mode == "both":
            link.hold(of.result.stored_bytes // 3)
        prepared = client.prepare(asked(of), mode=mode)
    assert assert_same_bits(of, prepared) == (0 if mode == "compute" else TOKENS)
    assert {"fetch": 0, "compute": 0}.get(mode, prepared.report.tokens_computed) == prepared.report.tokens_computed
    assert prepared.report.plan["mode"] == mode
    assert (prepared.report.reason is MissReason.PLANNED) == (mode == "compute" or prepared.report.tokens_computed > 0)
    if prepared.cache is not None:
        theirs = stock_cache(of.loaded, of.token_ids, 5, TOKENS)
        pairs = zip(*(continued(of.loaded, cache, QUESTION, 3) for cache in (theirs, prepared.cache)), strict=True)
        # What was computed in fewer passes than the publisher's differs by rounding; an indexer may choose other tokens for it.
        same = torch.equal if mode == "fetch" else partial(torch.allclose, rtol=1e-4, atol=1e-5)
        assert all(same(expected, got) for expected, got in pairs) or (kind, mode) == ("deepseek_v32", "both")
    assert link.readers == 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_turn_at_any_moment_gives_the_published_bits(published, kind, data):
    """Modes change between any two layers and any two bytes; the link stalls, dies, or lets a few through a time."""
    of = published(kind)
    modes = data.draw(st.lists(st.sampled_from([Mode.FETCH, Mode.BOTH, Mode.BOTH]), min_size=1, max_size=40))
    last = data.draw(st.sampled_from([Mode.BOTH, Mode.BOTH, Mode.COMPUTE]))
    until = data.draw(st.one_of(st.none(), st.integers(0, of.result.stored_bytes)))
    link = SlowLink(of.store, until=until, dies=data.draw(st.booleans()))
    link.hold()
    with pytest.MonkeyPatch.context() as patch, of.client(link, mode="auto") as client:
        script(patch, [*modes, last], link, data.draw(st.integers(0, of.result.stored_bytes // 4)))
        stream = data.draw(st.booleans())
        if stream:
            answer = client.generate(asked(of), **GREEDY)
            assert answer.report.tokens_reused + answer.report.tokens_computed in (*range(0, TOKENS, BLOCK), TOKENS)
            assert answer.token_ids == expected_answer(of)
        else:
            assert_same_bits(of, client.prepare(asked(of)))
    assert link.readers == 0


def expected_answer(of):
    if not hasattr(of, "answer"):
        ids = torch.tensor([asked(of).token_ids])
        with torch.inference_mode():
            output = of.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        of.answer = tuple(output[0, ids.shape[1] :].tolist())
    return of.answer


@pytest.mark.parametrize("kind", ["llama", "gemma3n_text"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("dies", [True, False])
def test_a_link_that_ends_costs_no_answer(published, kind, share, dies):
    """By itself the plan turns to computing, from an error and from silence, at every stage of the way."""
    of = published(kind)
    remember_passes(of.loaded, [Pass(0, BLOCK, 0.2)])
    link = SlowLink(of.store, bytes_per_s=of.result.stored_bytes / 0.5, until=int(share * of.result.stored_bytes), dies=dies)
    with of.client(link, mode="auto") as client:
        prepared = client.prepare(asked(of))
    assert_same_bits(of, prepared)
    # Computing may be through, or begin anew, before the link's end is seen.
    reasons = {MissReason.PLANNED} | ({MissReason.UNAVAILABLE} if dies else set())
    # The windows' share may be here before the link ends.
    assert prepared.report.reason in ({None} if prepared.report.tokens_reused == TOKENS else reasons)
    assert link.readers == 0


def test_a_known_fast_link_is_fetched_from_and_a_slow_one_is_not(published):
    """The first decision comes of what is remembered."""
    of = published("llama")
    remember_passes(of.loaded, [Pass(0, BLOCK, 1.0), Pass(BLOCK, 2 * BLOCK, 1.2)])
    for rate, mode in ((1e9, "fetch"), (of.result.stored_bytes / 5, "both"), (10.0, "compute")):
        link = SlowLink(of.store, known=LinkEstimate(0.001, rate, 8))
        with of.client(link, mode="auto") as client:
            report = client.prepare(asked(of)).report
        assert mode == report.plan["mode"]
        assert report.plan["why"]
        if mode == "fetch":  # nothing was computed yet, of which the speed would be remembered as well
            assert report.plan["expected"]["compute"] == pytest.approx(4 * 1.1 + 0.4, rel=0.4)


def test_a_short_prefix_that_makes_the_rest_slower_is_left_unused(published):
    """As was measured here; who says how it is to be had gets it."""
    of = published("llama")
    prompt = Prompt((*of.token_ids, *of.token_ids), (TOKENS,))
    remember_passes(of.loaded, [Pass(0, 2 * TOKENS, 1.0 * SLOW)], sort="prompts")
    for rest, reused, why in ((1.3 * SLOW, 0, "reads all"), (0.9 * SLOW, TOKENS, "")):
        remember_passes(of.loaded, [Pass(TOKENS, 2 * TOKENS, rest)], sort="rests")
        with of.client(SlowLink(of.store, known=LinkEstimate(0.001, 1e9, 8)), mode="auto") as client:
            report = client.prepare(prompt).report
        assert (reused, True) == (report.tokens_reused, why in (report.detail or ""))
        assert (report.reason is MissReason.PLANNED) == bool(why)
    with of.client(SlowLink(of.store), mode="fetch") as client:
        assert client.prepare(prompt).report.tokens_reused == TOKENS


def test_what_came_of_a_dead_link_is_dropped_where_reading_anew_is_sooner(published):
    """A block that is here makes what is left slower to read than everything."""
    of = published("llama")
    remember_passes(of.loaded, [Pass(0, BLOCK, 9.0 * SLOW), Pass(BLOCK, 2 * BLOCK, 9.0 * SLOW)])
    remember_passes(of.loaded, [Pass(0, TOKENS + len(QUESTION), 1.0 * SLOW)], sort="prompts")
    remember_passes(of.loaded, [Pass(2 * BLOCK, TOKENS, 2.0 * SLOW)], sort="rests")
    link = SlowLink(of.store, until=of.result.stored_bytes * 3 // 4, dies=True, known=LinkEstimate(0.001, 1e9, 8))
    with of.client(link, mode="auto") as client:
        report = client.prepare(asked(of)).report
    assert (0, MissReason.UNAVAILABLE) == (report.tokens_reused + report.tokens_computed, report.reason)
    assert link.readers == 0


@pytest.mark.parametrize(
    ("blocks", "reused", "passes"), [(1, 0, []), (3, 3 * BLOCK, [[3 * BLOCK, TOKENS]])], ids=["early", "late"]
)
def test_what_came_of_a_dead_link_counts_as_it_does_where_only_prompts_were_measured(
    published, monkeypatch, blocks, reused, passes
):
    """Behind a prefix a token takes longer: a little of it is not worth that, and what is left is read in one pass."""
    monkeypatch.setattr(fetch_module, "MAX_THREADS", 1)
    of = published("llama")
    remember_passes(of.loaded, [Pass(0, TOKENS + len(QUESTION), 1.0 * SLOW)], sort="prompts")
    names = PrefixNames.of(of.loaded.identity, Namespace.public(), of.token_ids).blocks
    sizes = [of.store.stat(block_key(of.loaded.identity.tag, name.address)).size for name in names]
    link = SlowLink(of.store, until=sum(sizes[:blocks]), dies=True, known=LinkEstimate(0.001, 1e9, 8))
    with of.client(link, mode="auto") as client:
        prepared = client.prepare(asked(of))
    report = prepared.report
    assert (reused, passes, MissReason.UNAVAILABLE) == (report.tokens_reused, report.plan["passes"], report.reason)
    assert (TOKENS if reused else 0) == assert_same_bits(of, prepared)
    assert link.readers == 0


@pytest.mark.parametrize("until", [0, 1000, None])
def test_states_are_fetched_whole_or_not_at_all(published, monkeypatch, until):
    """Where a fetch of states fails or is slower than the model, the model prefills by itself."""
    monkeypatch.setattr(layout, "CHECKPOINT_BLOCKS", 2)
    of = published("qwen3_next")
    # So slow a model waits for any link that lives; the other does not wait long for one that does not.
    remember_passes(of.loaded, [Pass(0, BLOCK, 20.0 * SLOW if until is None else 0.2)])
    for dies in (True, False):
        link = SlowLink(of.store, until=until, dies=dies)
        with of.client(link, mode="auto") as client:
            answer = client.generate(asked(of), **GREEDY)
        assert (0 if until is not None else answer.report.tokens_reused, 0) == (
            answer.report.tokens_reused,
            answer.report.tokens_computed,
        )
        assert (until is None) == (answer.report.reason is None)
        assert len(answer.token_ids) > 0


def test_a_link_that_turns_out_fast_ends_computing_within_a_layer(published):
    """A pass that was begun for an unknown link is cut, and nothing of it is used."""
    of = published("llama")
    link = SlowLink(of.store)
    link.hold()
    with pytest.MonkeyPatch.context() as patch, of.client(link, mode="auto") as client:
        script(patch, [Mode.BOTH, Mode.BOTH, Mode.BOTH, Mode.FETCH], link, of.result.stored_bytes // 8 + 1)
        prepared = client.prepare(asked(of))
    assert (TOKENS, TOKENS, 0) == (
        assert_same_bits(of, prepared),
        prepared.report.tokens_reused,
        prepared.report.tokens_computed,
    )
    assert [one["mode"] for one in prepared.report.plan["switches"]] == ["fetch"]


def noted_fetches(monkeypatch):
    """The fetches that races begin from now on."""
    fetches = []

    class Noted(PrefixFetch):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            fetches.append(self)

    monkeypatch.setattr(race, "PrefixFetch", Noted)
    return fetches


def test_what_has_arrived_is_not_computed_for_a_link_that_died_since(published, monkeypatch):
    """All blocks but the first two come while a pass over all runs, and then nothing: it ends, and these are computed."""
    monkeypatch.setattr(fetch_module, "MAX_THREADS", 1)  # whole blocks come one by one, from the right
    of, fetches, came = published("llama"), noted_fetches(monkeypatch), []
    names = PrefixNames.of(of.loaded.identity, Namespace.public(), of.token_ids).blocks
    remember_passes(of.loaded, [Pass(name.start, name.end, name.tokens * 0.01) for name in names])
    sizes = [of.store.stat(block_key(of.loaded.identity.tag, name.address)).size for name in names]
    link = SlowLink(of.store)
    link.hold()

    def scripted(work, aim, progress):
        decided = decide(work, aim, progress)
        if progress.at_stake_s and not came:  # at the first layer of the first pass
            link.let_through(sum(sizes[2:]))
            until(lambda: all(one.arrived for one in fetches[0].deliveries[2:]))
            came.append(True)
        return Decision(Mode.BOTH, decided.expected, "scripted")

    monkeypatch.setattr(race, "TICK_SECONDS", 0.0)
    monkeypatch.setattr(race, "decide", scripted)
    with of.client(link, mode="auto") as client:
        prepared = client.prepare(asked(of))
    assert TOKENS == assert_same_bits(of, prepared)
    # In one pass, or, where some of them may still be met, in one a block.
    assert (0, 2 * BLOCK) == (prepared.report.plan["passes"][0][0], prepared.report.plan["passes"][-1][1])
    assert 2 * BLOCK == prepared.report.tokens_computed


def test_a_link_that_dies_early_ends_a_pass_for_one_over_all(published, monkeypatch):
    """Be it sooner over by a little only: what is computed behind those blocks takes longer by itself."""
    of, fetches, expected = published("llama"), noted_fetches(monkeypatch), []
    names = PrefixNames.of(of.loaded.identity, Namespace.public(), of.token_ids).blocks
    remember_passes(of.loaded, [Pass(0, TOKENS, TOKENS * SLOW)], sort="prompts")
    remember_passes(of.loaded, [Pass(name.start, name.end, 1.04 * name.tokens * SLOW) for name in names])
    link = SlowLink(of.store, until=0, dies=True, known=LinkEstimate(0.001, of.result.stored_bytes / (TOKENS * SLOW), 8))
    link.hold()

    def dying(work, aim, progress):
        decided = decide(work, aim, progress)
        if progress.at_stake_s and not expected:  # at the first layer of the first pass
            expected.append(decided.expected.computed_blocks)
            link.let_through(of.result.stored_bytes)
            until(lambda: fetches[0].error is not None)
            return replace(decided, expected=replace(decided.expected, fetch=math.inf))
        return decided

    monkeypatch.setattr(race, "TICK_SECONDS", 0.0)
    monkeypatch.setattr(race, "decide", dying)
    with of.client(link, mode="auto") as client:
        prepared = client.prepare(asked(of))
    assert 0 < expected[0] < len(names)
    assert [[0, TOKENS]] == prepared.report.plan["passes"]
    assert TOKENS == assert_same_bits(of, prepared)


@pytest.mark.parametrize(("tokens", "passes"), [(32, [64, 64, 64, 20]), (128, [128, 84]), (192, [212])])
def test_what_a_dead_link_leaves_is_computed_in_passes_of_one_length(published, monkeypatch, tokens, passes):
    """Behind a prefix, and no small rest is left for a pass of its own."""
    monkeypatch.setattr(race, "_DEAD_LINK_TOKENS", tokens)
    monkeypatch.setattr(Pace, "speeds", lambda self, now: self._before)
    monkeypatch.setattr(fetch_module, "MAX_THREADS", 1)
    of = published("llama")
    names = PrefixNames.of(of.loaded.identity, Namespace.public(), of.token_ids).blocks
    # Behind a prefix as fast as from the front: what is there is used.
    remember_passes(of.loaded, [Pass(name.start, name.end, name.tokens * SLOW) for name in names])
    size = of.store.stat(block_key(of.loaded.identity.tag, names[0].address)).size
    link = SlowLink(of.store, until=size, dies=True, known=LinkEstimate(0.001, 1e9, 8))
    with of.client(link, mode="auto") as client:
        prepared = client.prepare(asked(of))
    assert TOKENS == assert_same_bits(of, prepared)
    assert passes == [end - start for start, end in prepared.report.plan["passes"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("damaged", [0, 2, 4])
def test_a_corrupt_block_is_computed_where_it_is_missing(published, monkeypatch, damaged, stream):
    """A slow model computes it and nothing else: what comes before it is waited for, and so is what comes behind it."""
    # One thread reads from the left, and much of what is behind the gap is still to come when that is computed.
    monkeypatch.setattr(fetch_module, "MAX_THREADS", 1)
    # That a tiny model turns out to be fast would have it compute what is on its way, too.
    monkeypatch.setattr(Pace, "speeds", lambda self, now: self._before)
    of = published("llama")
    names = PrefixNames.of(of.loaded.identity, Namespace.public(), of.token_ids).blocks
    gap = names[damaged]
    store = MemoryStore()
    for info in of.store.list("v1/"):
        data = bytearray(of.store.read(info.key))
        data[-1] ^= info.key == block_key(of.loaded.identity.tag, gap.address)
        store.create(info.key, [bytes(data)])
    remember_passes(of.loaded, [Pass(name.start, name.end, name.tokens * SLOW) for name in names])
    remember_passes(of.loaded, [Pass(0, TOKENS + len(QUESTION), TOKENS * SLOW)], sort="prompts")
    link = SlowLink(store, bytes_per_s=of.result.stored_bytes / 0.5, known=LinkEstimate(0.001, 1e8, 8))
    with of.client(link, mode="auto") as client:
        if stream:
            answer = client.generate(asked(of), **GREEDY)
            report = answer.report
            assert expected_answer(of) == answer.token_ids
        else:
            prepared = client.prepare(asked(of))
            report = prepared.report
            assert TOKENS == assert_same_bits(of, prepared)
    assert [[gap.start, gap.end]] == report.plan["passes"]
    assert (TOKENS - gap.tokens, MissReason.CORRUPT, "fetch") == (report.tokens_reused, report.reason, report.plan["mode"])
    assert link.readers == 0


def test_an_error_of_the_model_is_raised_as_it_is(published, monkeypatch):
    """What goes wrong in computing is not hidden behind a miss, and the threads of the fetch end."""
    of = published("llama")
    link = SlowLink(of.store)
    link.hold(1000)

    def fail(self, token_ids, start):
        raise MemoryError("no room")

    monkeypatch.setattr(ScheduledPrefill, "_pass", fail)
    with of.client(link) as client, pytest.raises(MemoryError, match="no room"):
        client.prepare(asked(of), mode="both")
    with of.client(link) as client, pytest.raises(MemoryError, match="no room"):
        client.generate(asked(of), mode="both", **GREEDY)


def test_a_model_that_cannot_be_gone_on_with_here_gets_no_cache(published, monkeypatch):
    """A typed failure of the computing side is a miss, and the model answers by itself."""
    of = published("llama")
    link = SlowLink(of.store)
    link.hold(1000)
    wanted = expected_answer(of)

    def fail(self, token_ids, start):
        raise MismatchError("it was changed after loading")

    monkeypatch.setattr(ScheduledPrefill, "_pass", fail)
    with of.client(link) as client:
        answer = client.generate(asked(of), mode="both", **GREEDY)
    assert (wanted, MissReason.MISMATCH, 0) == (answer.token_ids, answer.report.reason, answer.report.tokens_reused)


def test_several_prompts_at_once_race_on_one_model(published):
    """Each with its own layers and its own link."""
    of = published("llama")

    def one(number):
        link = SlowLink(of.store, bytes_per_s=of.result.stored_bytes * (number + 1))
        with of.client(link) as client:
            return client.prepare(asked(of), mode="both")

    with ThreadPoolExecutor(4) as pool:
        for prepared in pool.map(one, range(4)):
            assert TOKENS == assert_same_bits(of, prepared)


def test_speeds_are_remembered_from_what_was_computed(published):
    """The first race on a machine measures it for the next."""
    of = published("llama")
    link = SlowLink(of.store)
    link.hold()
    with of.client(link) as client:
        client.prepare(asked(of), mode="both")
    found = prefill_speeds(of.loaded).blocks
    assert found.seconds(0, BLOCK) > 0


def fetching(of, link, **options):
    """A fetch of the whole text."""
    identity = of.loaded.identity
    names = PrefixNames.of(identity, Namespace.public(), of.token_ids).blocks
    trust = TrustList.of(of.key.public)
    where = {"length": TOKENS, "capacity": TOKENS, "devices": all_on("cpu", identity.layout), "trust": trust}
    return PrefixFetch(link, identity, names, **where, **options)


def test_whole_blocks_come_first_and_layers_last(published, monkeypatch):
    """A source that dies half-way leaves blocks to go on behind, and not the first layers of all."""
    monkeypatch.setattr(fetch_module, "MAX_THREADS", 1)
    of = published("llama")
    link = SlowLink(of.store)
    names = PrefixNames.of(of.loaded.identity, Namespace.public(), of.token_ids).blocks
    sizes = [of.store.stat(block_key(of.loaded.identity.tag, name.address)).size for name in names]
    link.hold(sum(sizes[:3]))
    fetch = fetching(of, link)
    until(lambda: fetch.usable() == 3)
    assert [0, 0] == [one.received for one in fetch.deliveries[3:]]
    link.let_through(sizes[3])
    until(lambda: fetch.deliveries[4].header is not None)
    assert not fetch.deliveries[3].complete
    fetch.close()


def test_beside_a_computation_on_a_slow_link_blocks_come_one_by_one(published):
    """The last is whole before the one before it has begun, though there are threads for both."""
    of = published("llama")
    link = SlowLink(of.store)
    names = PrefixNames.of(of.loaded.identity, Namespace.public(), of.token_ids).blocks
    sizes = [of.store.stat(block_key(of.loaded.identity.tag, name.address)).size for name in names]
    link.hold(sizes[4] - 1)
    fetch = fetching(of, link, beside=True, alone=True)
    assert fetch.threads > 1
    until(lambda: fetch.deliveries[4].header is not None)
    assert [0, 0, 0, 0] == [one.steps for one in fetch.deliveries[:4]]
    link.let_through(sizes[3])
    until(lambda: fetch.deliveries[4].complete and fetch.deliveries[3].header is not None)
    assert [0, 0, 0] == [one.steps for one in fetch.deliveries[:3]]
    fetch.turn_right()
    until(lambda: fetch.deliveries[2].steps)
    link.let_through(sum(sizes))
    fetch.wait()
    fetch.close()


def test_a_slow_link_is_one_on_which_a_block_takes_long(published, monkeypatch):
    """Where a block takes a moment two come at once beside a computation, where it takes seconds one."""
    of = published("llama")
    asked_for = []
    begin = PrefixFetch.__init__

    def note(self, *args, **options):
        asked_for.append(options["alone"])
        begin(self, *args, **options)

    monkeypatch.setattr(PrefixFetch, "__init__", note)
    for bytes_per_s in (1e3, 1e9):
        with of.client(SlowLink(of.store, known=LinkEstimate(0.001, bytes_per_s, 8))) as client:
            assert TOKENS == assert_same_bits(of, client.prepare(asked(of), mode="both"))
    assert [True, False] == asked_for


@pytest.mark.parametrize(("spent", "stolen", "factor"), [(1.5, 0.0, 3.0), (1.5, 1.0, 1.0), (1.5, 1.4, 1.0), (0.25, 0.0, 0.5)])
def test_what_a_fetch_takes_from_a_pass_is_not_its_pace(published, spent, stolen, factor):
    """Half of a pass is done: its time counts, less what the fetch beside it decoded, but as no faster than remembered."""
    of = published("llama")
    names = PrefixNames.of(of.loaded.identity, Namespace.public(), of.token_ids).blocks
    remember_passes(of.loaded, [Pass(name.start, name.end, 1.0) for name in names])
    pace = Pace(of.loaded, names)
    running = pace.begin(0, 1)
    running.layer, running.stolen_s = len(of.loaded.identity.layout.layers) / 2, stolen
    alone, seen = prefill_speeds(of.loaded).blocks, pace.speeds(running.since + spent).blocks
    assert pytest.approx(factor * alone.seconds(0, BLOCK)) == seen.seconds(0, BLOCK)


@pytest.mark.parametrize(("done", "count", "sooner"), [(0.0, 3, True), (0.0, 4, False), (0.5, 1, True), (0.5, 2, False)])
def test_a_shorter_pass_is_sooner_over_while_the_long_one_is_not_far_on(published, done, count, sooner):
    """Of a pass over four blocks and a third, of whose layers a part is done, some blocks had better be computed alone."""
    of = published("llama")
    names = PrefixNames.of(of.loaded.identity, Namespace.public(), of.token_ids).blocks
    remember_passes(of.loaded, [Pass(name.start, name.end, 0.01 * name.tokens) for name in names])
    pace = Pace(of.loaded, names)
    running = pace.begin(0, 5)
    running.layer = done * len(of.loaded.identity.layout.layers)
    assert sooner is pace.sooner_over(running.since + 1.0, count)
