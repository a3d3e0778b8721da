"""Eviction accounting: the cap holds whatever happens, chains leave from their ends, and what is used again stays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.edge.disk import ranking
from kvcdn.edge.disk.eviction import CHARGE_UNIT_BYTES, Eviction, charge
from kvcdn.edge.disk.worth import AGE_BINS, AGE_STARTS, Tally, worths

UNIT = CHARGE_UNIT_BYTES


def _ask(eviction: Eviction, chain: str | list[str], seconds: float = 0.0) -> list[str]:
    """Looks a chain up and fills what is missing, in order; the victims."""
    victims = []
    eviction.visit(list(chain))
    for key in chain:
        if key in eviction:
            eviction.touch(key, seconds)
        else:
            gone = eviction.reserve(UNIT)
            assert gone is not None
            victims += gone
            eviction.commit(key, UNIT, seconds)
    return victims


def test_the_end_of_a_chain_leaves_first() -> None:
    """Blocks at the end are worth nothing without those before them, so these stay to the last."""
    eviction = Eviction(9 * UNIT)
    _ask(eviction, "abcd")
    assert ["d", "c", "b", "a"] == eviction.relieve(9 * UNIT)


def test_a_shared_beginning_outlives_its_branches() -> None:
    """A block stays while one behind it does, whatever the order in which the chains were asked for."""
    eviction = Eviction(9 * UNIT)
    for chain in ("abc", "ade", "abf", "xy"):
        _ask(eviction, chain)
    order = eviction.relieve(99 * UNIT)
    parents = {"b": "a", "c": "b", "d": "a", "e": "d", "f": "b", "y": "x"}
    assert sorted("abcdefxy") == sorted(order)
    assert [] == [child for child, parent in parents.items() if order.index(child) > order.index(parent)]


def test_a_chain_being_fetched_does_not_evict_itself() -> None:
    """The blocks of a lookup that are filled one after the other push others out, not each other."""
    eviction = Eviction(200 * UNIT)
    old = [f"old {number}" for number in range(200)]
    for start in range(0, 200, 20):
        _ask(eviction, old[start : start + 20])
    new = [f"new {number}" for number in range(60)]
    victims = _ask(eviction, new)
    assert (60, set()) == (len(victims), set(victims) & set(new))


def test_ranges_of_one_reader_are_one_use() -> None:
    """A lookup and the reads that follow it within a minute count once, a later read counts again."""
    eviction = Eviction(9 * UNIT)
    uses = lambda: eviction._ranking._nodes["a"].uses  # noqa: E731 - read at each step
    _ask(eviction, "ab", seconds=100.0)
    for seconds in (100.5, 130.0, 160.0):
        eviction.touch("a", seconds)
    assert 1 == uses()
    eviction.touch("a", 161.0)
    assert 2 == uses()
    eviction.visit(["a", "b"])
    for seconds in (500.0, 501.0, 559.0):
        eviction.touch("a", seconds)
    assert 3 == uses()


def test_what_is_used_again_stays_through_a_scan() -> None:
    """Four chains that come back are hits among thousands that do not, where LRU would have none."""
    eviction, hits = Eviction(400 * UNIT), []
    for number in range(120):
        chain = [f"{number % 4}.{place}" for place in range(20)]
        hits.append(all(key in eviction for key in chain))
        for asked in (chain, *([f"once {number} {part} {place}" for place in range(20)] for part in range(9))):
            _ask(eviction, asked, seconds=number * 100.0)
    between = 4 * 10 * 20
    assert between > 400
    assert sum(hits[60:]) > 50, hits


def test_what_is_reserved_is_not_promised_twice() -> None:
    """Two fills cannot both count on the same room."""
    eviction = Eviction(3 * UNIT)
    assert [] == eviction.reserve(2 * UNIT)
    assert None is eviction.reserve(2 * UNIT)
    eviction.release(2 * UNIT)
    assert [] == eviction.reserve(2 * UNIT)


def test_nothing_is_evicted_for_what_cannot_fit() -> None:
    """An object larger than the cache costs nobody a place."""
    eviction = Eviction(2 * UNIT)
    eviction.reserve(UNIT)
    eviction.commit("a", UNIT, 0.0)
    assert None is eviction.reserve(3 * UNIT)
    assert "a" in eviction


def test_sizes_count_in_whole_disk_blocks() -> None:
    """A file takes a block, however small, and one byte more than a block takes two."""
    assert [UNIT, UNIT, UNIT, 2 * UNIT] == [charge(size) for size in (0, 1, UNIT, UNIT + 1)]


def test_a_start_over_the_cap_is_trimmed() -> None:
    """After a restart with a smaller capacity the oldest leave."""
    eviction = Eviction(2 * UNIT)
    eviction.restore([(key, UNIT) for key in "abcd"])
    assert ["a", "b"] == eviction.trim()
    assert 2 * UNIT == eviction.used


def test_relief_frees_what_is_asked_or_all_there_is() -> None:
    """A disk that is full below the cap is relieved of the oldest."""
    eviction = Eviction(9 * UNIT)
    eviction.restore([(key, UNIT) for key in "abc"])
    assert ["a", "b"] == eviction.relieve(UNIT + 1)
    assert ["c"] == eviction.relieve(50 * UNIT)


def test_lookups_that_lie_cannot_keep_anything() -> None:
    """Chains in circles, with repetitions, or turned round: all of it can be evicted."""
    eviction = Eviction(99 * UNIT)
    for chain in ("abc", "cba", "aab", "bca", "ca", "b"):
        _ask(eviction, chain)
    assert sorted("abc") == sorted(eviction.relieve(99 * UNIT))
    assert (0, 0) == (eviction.used, len(eviction))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups of things that never come, and objects that left, are forgotten in the end."""
    monkeypatch.setattr(ranking, "MAX_GHOSTS", 50)
    eviction = Eviction(20 * UNIT)
    for number in range(300):
        eviction.visit([f"{number} {place}" for place in range(9)])
        _ask(eviction, [f"chain {number} {place}" for place in range(3)])
        assert len(eviction._ranking._nodes) <= 20 + 50
        assert len(eviction) <= 20


_STEPS = st.lists(
    st.tuples(st.sampled_from("rrrrccctvvxd"), st.lists(st.integers(0, 11), min_size=1, max_size=6), st.integers(1, 4 * UNIT)),
    min_size=30,
    max_size=80,
)


class Model:
    """What must be true of an eviction, in plain dicts; and a twin that is told the same."""

    def __init__(self, capacity: int) -> None:
        self.pair = Eviction(capacity), Eviction(capacity)
        self.capacity = capacity
        self.stored: dict[str, int] = {}
        self.reserved: list[int] = []

    def step(self, action: str, chain: list[str], size: int, seconds: float) -> None:
        key = chain[0]
        match action:
            case "r":
                self.reserve(size)
            case "c" if self.reserved:
                self.stored[key] = size = self.reserved.pop()
                self.both(lambda one: one.commit(key, size, seconds))
            case "t" if key in self.stored:
                self.both(lambda one: one.touch(key, seconds))
            case "v":
                self.both(lambda one: one.visit(chain))
            case "x" if self.reserved:
                size = self.reserved.pop()
                self.both(lambda one: one.release(size))
            case "d":
                self.stored.pop(key, None)
                self.both(lambda one: one.remove(key))

    def both(self, act: Callable[[Eviction], object]) -> object:
        first, second = (act(one) for one in self.pair)
        assert first == second
        return first

    def reserve(self, size: int) -> None:
        victims = self.both(lambda one: one.reserve(size))
        fits = sum(map(charge, self.reserved)) + charge(size) <= self.capacity
        assert fits == (victims is not None)
        if isinstance(victims, list):
            for victim in victims:
                del self.stored[victim]
            self.reserved.append(size)

    def check(self) -> None:
        eviction = self.pair[0]
        assert sum(map(charge, self.stored.values())) == eviction.used
        assert sum(map(charge, self.reserved)) == eviction.reserved
        assert eviction.used + eviction.reserved <= self.capacity
        assert set(self.stored) == {str(n) for n in range(12) if str(n) in eviction}
        assert len(self.stored) == len(eviction)


@given(st.integers(3, 12), _STEPS)
@settings(deadline=None, max_examples=25)
def test_the_cap_holds_under_any_load(blocks: int, steps: list[tuple[str, list[int], int]]) -> None:
    """A model with plain dicts agrees on every byte, used plus reserved never exceeds the cap, and a twin does the same."""
    model = Model(blocks * UNIT)
    for number, (action, chain, size) in enumerate(steps):
        model.step(action, [str(member) for member in chain], size, number * 25.0)
        model.check()
    assert sorted(model.stored) == sorted(model.pair[0].relieve(blocks * UNIT))


@given(st.integers(4, 40), st.lists(st.integers(0, 10**6), min_size=20, max_size=120))
@settings(deadline=None, max_examples=25)
def test_no_block_leaves_before_those_behind_it(capacity: int, seeds: list[int]) -> None:
    """In a tree of chains that are asked for from their beginning, what is stored is closed towards the roots."""
    eviction = Eviction(capacity * UNIT)
    for number, seed in enumerate(seeds):
        turns = [str(seed % 3), *(str(seed % 7 % (depth + 2)) for depth in range(3))]
        path = ["/".join(turns[:end]) for end in range(1, 5)]
        _ask(eviction, path, seconds=number * 30.0)
        nodes = eviction._ranking._nodes
        stored = [node for node in nodes.values() if node.size]
        assert [] == [node.key for node in stored if node.parent is not None and not node.parent.size]
        assert {node.key: sum(kid.parent is node for kid in stored) for node in stored} == {
            node.key: node.kids for node in stored
        }


def test_counts_agree_with_a_recount() -> None:
    """After a long mixed load every shelf's count and exposure are what its cohorts say, and nobody is on two shelves."""
    eviction = Eviction(150 * UNIT)
    for number in range(2000):
        _ask(eviction, [f"{number % 37}.{place}" for place in range(number % 11 + 1)], seconds=number * 7.0)
        _ask(eviction, [f"once {number}"], seconds=number * 7.0)
    inner = eviction._ranking
    shelves = [shelf for kind in inner._shelves.values() for shelf in kind]
    cohorts = [cohort for shelf in shelves for cohort in shelf.cohorts]
    assert len(cohorts) == len(set(cohorts))
    assert sum(cohort.count for cohort in cohorts) == sum(shelf.count for shelf in shelves) == len(inner._nodes)
    for shelf in shelves:
        assert sum(cohort.count * cohort.used for cohort in shelf.cohorts) == shelf.used
        assert [cohort.used for cohort in shelf.cohorts] == sorted(cohort.used for cohort in shelf.cohorts)
        assert all(cohort.shelf is shelf for cohort in shelf.cohorts)
        assert all(inner._clock - cohort.used >= AGE_STARTS[shelf.age] for cohort in shelf.cohorts)


def _tally(uses: dict[int, float], exposure: dict[int, float]) -> Tally:
    return Tally([uses.get(age, 0.0) for age in range(AGE_BINS)], [exposure.get(age, 0.0) for age in range(AGE_BINS)])


def test_worth_falls_with_age_where_reuse_does() -> None:
    """Counts of a falling rate give a falling worth, near the rate itself."""
    exposure = dict.fromkeys(range(8), 1e8)
    found = worths({"kind": _tally({age: 1e6 / 2**age for age in range(8)}, exposure)})["kind"]
    assert found[:8] == sorted(found[:8], reverse=True)
    assert found[3] == pytest.approx(1e6 / 2**3 / 1e8, rel=0.02)
    assert found[7:] == [found[7]] * (AGE_BINS - 7)


def test_worth_looks_ahead_to_readers_who_come_back() -> None:
    """Where nobody comes back at once and many do later, an object is worth more the nearer that time is."""
    found = worths({"kind": _tally({5: 50_000.0}, {age: 1e9 if age == 5 else 2e8 for age in range(8)})})["kind"]
    assert found[:6] == sorted(found[:6])
    assert found[5] > 2 * found[0] > 0
    assert found[6] < found[5] / 10


def test_worth_of_what_was_never_seen_is_that_of_all() -> None:
    """A kind without counts is worth what all are, and nothing is worth nothing or infinitely much."""
    found = worths({"seen": _tally({0: 1000.0}, {0: 1e6}), "new": _tally({}, {})})
    assert found["new"][0] == pytest.approx(found["seen"][0], rel=0.01)
    assert all(0 < worth < math.inf for kind in worths({"new": _tally({}, {})}).values() for worth in kind)
