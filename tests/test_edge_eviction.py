"""Eviction accounting: the cap holds whatever happens, and the least recently used leave first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcdn.edge.eviction import CHARGE_UNIT_BYTES, LruEviction, charge

UNIT = CHARGE_UNIT_BYTES


def test_the_least_recently_used_leave_first() -> None:
    """Victims come in the order of their last use, and no more of them than needed."""
    eviction = LruEviction(4 * UNIT)
    for key in "abcd":
        assert [] == eviction.reserve(UNIT)
        eviction.commit(key, UNIT)
    eviction.touch("a")
    assert ["b", "c"] == eviction.reserve(2 * UNIT)


def test_what_is_reserved_is_not_promised_twice() -> None:
    """Two fills cannot both count on the same room."""
    eviction = LruEviction(3 * UNIT)
    assert [] == eviction.reserve(2 * UNIT)
    assert None is eviction.reserve(2 * UNIT)
    eviction.release(2 * UNIT)
    assert [] == eviction.reserve(2 * UNIT)


def test_nothing_is_evicted_for_what_cannot_fit() -> None:
    """An object larger than the cache costs nobody a place."""
    eviction = LruEviction(2 * UNIT)
    eviction.reserve(UNIT)
    eviction.commit("a", UNIT)
    assert None is eviction.reserve(3 * UNIT)
    assert "a" in eviction


def test_sizes_count_in_whole_disk_blocks() -> None:
    """A byte takes a block, a block takes a block, and one byte more takes two."""
    assert [0, UNIT, UNIT, 2 * UNIT] == [charge(size) for size in (0, 1, UNIT, UNIT + 1)]


def test_a_start_over_the_cap_is_trimmed() -> None:
    """After a restart with a smaller capacity the oldest leave."""
    eviction = LruEviction(2 * UNIT)
    for key in "abcd":
        eviction.add(key, UNIT)
    assert ["a", "b"] == eviction.trim()
    assert 2 * UNIT == eviction.used


def test_relief_frees_what_is_asked_or_all_there_is() -> None:
    """A disk that is full below the cap is relieved of the oldest."""
    eviction = LruEviction(9 * UNIT)
    for key in "abc":
        eviction.add(key, UNIT)
    assert ["a", "b"] == eviction.relieve(UNIT + 1)
    assert ["c"] == eviction.relieve(50 * UNIT)


@given(
    st.integers(3, 12),
    st.lists(st.tuples(st.sampled_from("rrrrcctxd"), st.integers(0, 9), st.integers(1, 4 * UNIT)), min_size=30, max_size=80),
)
def test_the_cap_holds_under_any_load(blocks: int, steps: list[tuple[str, int, int]]) -> None:
    """A model with plain dicts agrees on every byte, and used plus reserved never exceeds the cap."""
    eviction = LruEviction(blocks * UNIT)
    stored: dict[str, int] = {}
    reserved: list[int] = []
    for action, number, size in steps:
        key = str(number)
        match action:
            case "r":
                victims = eviction.reserve(size)
                fits = sum(map(charge, reserved)) + charge(size) <= blocks * UNIT
                assert fits == (victims is not None)
                if victims is not None:
                    for victim in victims:
                        del stored[victim]
                    reserved.append(size)
            case "c" if reserved:
                stored[key] = reserved.pop()
                eviction.commit(key, stored[key])
            case "t" if key in stored:
                eviction.touch(key)
            case "x" if reserved:
                eviction.release(reserved.pop())
            case "d":
                stored.pop(key, None)
                eviction.remove(key)
        assert sum(map(charge, stored.values())) == eviction.used
        assert sum(map(charge, reserved)) == eviction.reserved
        assert eviction.used + eviction.reserved <= blocks * UNIT
        assert set(stored) == {str(n) for n in range(10) if str(n) in eviction}
