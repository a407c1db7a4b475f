"""Caches in front of a slower store, and what their policies keep and load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.simulate.cache_policy import Cache, Lru, Policy, Prewarmed, WaitingQueue

NAMES = "abcdefgh"
POLICIES: tuple[Policy, ...] = (Lru(), WaitingQueue(), Prewarmed())


def stored(policy: Policy, capacity: float = 3.0, rate: float = 1.0) -> Cache:
    """A cache with nothing in it, and names of size 1 in the store."""
    cache = Cache(policy, capacity, rate)
    cache.stored = dict.fromkeys(NAMES, 1.0)
    return cache


@given(st.data(), st.sampled_from(POLICIES))
def test_what_is_held_stays_and_nothing_exceeds_the_capacity(data: st.DataObject, policy: Policy) -> None:
    cache, now, held = Cache(policy, 10.0, 0.5), 0.0, list[str]()
    name = st.sampled_from(NAMES)
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.3, 2.0]))
        one = data.draw(name)
        match data.draw(st.sampled_from(["put", "take", "release", "follow", "warm", "load", "drop"])):
            case "put":
                assert cache.put(one, data.draw(st.integers(1, 6)), now) == cache.resident(one, now) or held
            case "take" if cache.resident(one, now):
                cache.take(one, now)
                held.append(one)
            case "release" if held:
                cache.release(held.pop())
            case "follow":
                cache.follow(data.draw(st.lists(name)), now)
            case "warm":
                assert cache.warm(one, now, now + 3) >= 0
            case "load" if one in cache.stored:
                seconds = cache.load(one, now)
                assert seconds is None or cache.resident(one, now + seconds + 1e-9)
            case "drop" if one not in held:
                cache.drop(one)
                assert not cache.resident(one, now)
        assert cache.size == pytest.approx(sum(item.size for item in cache.items.values()))
        assert cache.size <= cache.capacity
        assert all(cache.resident(one, now) for one in held)
        assert set(cache.items) <= set(cache.stored)
    cache.close()
    assert 0 <= cache.wasted <= cache.loaded


def test_the_least_recently_used_leaves_first() -> None:
    cache = stored(Lru())
    for name in "abc":
        cache.put(name, 1.0, 0.0)
    cache.take("a", 1.0)
    cache.release("a")
    cache.put("d", 1.0, 2.0)
    assert set(cache.items) == {"c", "a", "d"}


def test_lru_loads_nothing_ahead() -> None:
    cache = stored(Lru())
    cache.follow("abc", 0.0)
    assert not cache.items
    assert cache.load("a", 0.0) == 1.0
    assert not cache.resident("a", 0.9)
    assert cache.resident("a", 1.0)
    assert cache.loaded == 0


def test_the_queue_is_loaded_one_after_another_as_far_as_it_fits() -> None:
    cache = stored(WaitingQueue())
    for second in range(5):
        cache.follow("abcd", float(second))
    assert set(cache.items) == {"a", "b", "c"}
    assert [cache.items[name].ready for name in "abc"] == [1.0, 2.0, 3.0]
    assert cache.loaded == 3


def test_what_waits_is_kept_and_what_is_wanted_no_more_leaves_unused() -> None:
    cache = stored(WaitingQueue(), 2.0, 0.0)
    cache.follow("ab", 0.0)
    assert not cache.put("c", 1.0, 1.0), "what is computed is not kept in place of what waits"
    assert set(cache.items) == {"a", "b"}
    cache.follow("bd", 2.0)
    assert set(cache.items) == {"b", "d"}
    assert cache.wasted == 1


def test_only_prewarming_keeps_what_is_expected_until_it_is_not() -> None:
    for policy, left in ((WaitingQueue(), {"b", "c"}), (Prewarmed(), {"a", "c"})):
        cache = stored(policy, 2.0, 0.0)
        cache.put("a", 1.0, 0.0)
        assert cache.warm("a", 0.0, 10.0) == 0
        cache.put("b", 1.0, 1.0)
        cache.follow("c", 2.0)
        assert set(cache.items) == left
    assert cache.warm("d", 11.0, 20.0) == 0  # it is loaded at once, at this rate
    assert "a" not in cache.items


def test_what_waits_and_what_is_expected_do_not_displace_each_other_ahead() -> None:
    cache = stored(Prewarmed(), 1.0, 0.0)
    cache.warm("a", 0.0, 10.0)
    cache.follow("b", 1.0)
    assert set(cache.items) == {"a"}
    cache.follow("b", 11.0)
    assert set(cache.items) == {"b"}
    cache.warm("a", 12.0, 20.0)
    assert set(cache.items) == {"b"}
    cache.follow("", 13.0)
    assert set(cache.items) == {"a"}
    assert cache.load("b", 14.0) == 0
    assert set(cache.items) == {"b"}, "what starts displaces what is expected"


def test_a_load_that_is_overtaken_by_the_computation_is_wasted() -> None:
    cache = stored(WaitingQueue())
    cache.follow("a", 0.0)
    cache.put("a", 1.5, 0.5)
    assert cache.resident("a", 0.5)
    assert cache.wasted == 1


@pytest.mark.parametrize(("capacity", "rate"), [(0.0, 1.0), (1.0, -1.0), (1.0, float("inf"))])
def test_a_cache_without_room_or_speed_is_refused(capacity: float, rate: float) -> None:
    with pytest.raises(ConfigError, match="cannot be simulated"):
        Cache(Lru(), capacity, rate)
