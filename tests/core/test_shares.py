"""A tenant's share of the queue: the stated limits hold, and a place stays free for whoever has none."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.events import Finished
from headway.policy.core.shares import Group, QueueShares, Waiting, fair_parts
from headway.types import Request
from tests.core.world import FLEET, World, controller

NAMES = st.sampled_from("abcd")
TIERS = st.sampled_from(["chat", "batch"])
ARRIVALS = st.lists(st.tuples(NAMES, TIERS), max_size=120)
SHARES = st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0])


def request(id: str, **more: object) -> Request:
    fields = {"model": "m0", "prompt_tokens": 10, "max_tokens": 20, "arrival": 0.0}
    return Request(id=id, **(fields | more))  # type: ignore[arg-type]


def flood(shares: QueueShares, limit: int, inside: int, asked: list[Group]) -> Counter[Group]:
    """Return what gets in of these requests, one after the other; nothing ends."""
    held = Counter[Group]()
    for tenant, tier in asked:
        total, none = held.total(), Counter[Group]()
        within = min(total, inside)
        if total - within >= limit:
            continue
        if shares.exceeded(tenant, tier, Waiting(limit, within, none)) is None:
            shares.came(tenant, tier)
            held[tenant, tier] += 1
    return held


@given(counts=st.dictionaries(NAMES, st.integers(0, 20)), places=st.integers(-1, 60))
def test_places_in_engines_are_given_out_evenly(counts: dict[str, int], places: int) -> None:
    parts = fair_parts(counts, places)
    assert sum(parts.values()) == min(max(places, 0), sum(counts.values()))
    assert all(0 <= parts[name] <= counts[name] for name in counts)
    short = [parts[name] for name in counts if parts[name] < counts[name]]
    assert all(part <= least + 1 for least in short for part in parts.values()), "none gets more"


@given(ARRIVALS, st.integers(1, 30), st.integers(0, 10), SHARES, SHARES)
def test_no_tenant_and_no_class_has_more_than_its_share(
    asked: list[Group], limit: int, inside: int, tenant_share: float, class_share: float
) -> None:
    held = flood(QueueShares(tenant_share, class_share), limit, inside, asked)
    for tenant in {name for name, _ in held}:
        mine = sum(count for (name, _), count in held.items() if name == tenant)
        assert mine <= inside + tenant_share * limit + 1
        for tier in ("chat", "batch"):
            assert held[tenant, tier] <= inside + class_share * tenant_share * limit + 1


@given(ARRIVALS, st.integers(1, 30), st.integers(0, 10), SHARES, TIERS)
def test_a_tenant_with_nothing_waiting_gets_in_while_a_place_is_free(
    asked: list[Group], limit: int, inside: int, share: float, tier: str
) -> None:
    shares = QueueShares(share, share)
    held = flood(shares, limit, inside, asked)
    within = min(held.total(), inside)
    if held.total() - within < limit:
        assert shares.exceeded("new", tier, Waiting(limit, within, {})) is None
    if share <= 0.5 and limit > 5:
        assert held.total() - within < limit, "four tenants leave a place"


@given(ARRIVALS, st.integers(1, 30), st.integers(0, 10), SHARES, SHARES, st.integers(1, 9))
def test_the_short_cut_says_what_the_full_account_says(
    asked: list[Group], limit: int, inside: int, tenant_share: float, class_share: float, most: int
) -> None:
    shares = QueueShares(tenant_share, class_share)
    held = flood(shares, limit, inside, asked)
    queue = Waiting(limit, min(held.total(), inside), {("a", "chat"): 1}, most)
    for tier in ("chat", None):
        if shares._surely_fits("a", tier, queue):
            assert shares._exceeded("a", tier, queue) is None


@given(ARRIVALS, st.integers(1, 30))
def test_one_tenant_without_shares_may_take_all(asked: list[Group], limit: int) -> None:
    held = flood(QueueShares(), limit, 0, [("a", tier) for _, tier in asked])
    assert held.total() == min(len(asked), limit)


@given(ARRIVALS)
def test_what_has_ended_does_not_count(asked: list[Group]) -> None:
    shares = QueueShares(0.5, 0.75)
    held = flood(shares, 20, 0, asked)
    for (tenant, tier), count in held.items():
        for _ in range(count):
            shares.left(tenant, tier)
    assert flood(shares, 20, 0, asked) == held


@pytest.mark.parametrize(("floods", "each"), [(1, 50), (2, 34), (3, 25)])
def test_tenants_that_flood_share_what_one_place_more_would_split(floods: int, each: int) -> None:
    asked = [(f"t{i % floods}", "x") for i in range(1000)]
    held = flood(QueueShares(0.5, 1.0), 100, 0, asked)
    assert all(abs(count - each) <= 1 for count in held.values())
    assert held.total() < 100


def test_the_limit_is_named() -> None:
    shares = QueueShares(0.5, 0.5)
    for tier in ("batch", "batch", "chat", "chat"):
        shares.came("a", tier)
    assert shares.exceeded("a", "batch", Waiting(8, 0, {})) == ("server.tenant_share", 4, 4, None)
    assert shares.exceeded("a", "batch", Waiting(9, 0, {})) == ("server.class_share", 2, 2, "batch")
    assert shares.exceeded("a", None, Waiting(9, 0, {})) is None, "it may be of another class"
    assert shares.exceeded("a", "chat", Waiting(100, 0, {}, 4)) == ("keys.max_queued", 4, 4, None)
    assert shares.exceeded("a", "chat", Waiting(100, 1, {}, 4)) is None, "one is inside an engine"


# ---- the controller


def several(max_queued: int) -> World:
    core = controller("vllm", max_queued)
    core.shares = QueueShares(0.5, 1.0)
    return World(core)


def test_a_flood_leaves_room_for_others_and_is_told_so() -> None:
    around = several(10)
    for i in range(5):
        one = request(f"a{i}", tenant="a")
        assert around.core.admit(one, around.now) is None
        around.arrive(one)
    refusal = around.core.admit(request("a5", tenant="a"), around.now)
    assert refusal is not None
    assert (refusal.id, refusal.reason, refusal.retry_after) == ("a5", "tenant_queue_full", 1.0)
    assert refusal.limit == ("server.tenant_share", 5, 5, None)
    assert around.core.admit(request("b0", tenant="b"), around.now) is None
    around.end("a0", Finished("a0", 1))
    assert around.core.admit(request("a5", tenant="a"), around.now) is None


def test_what_is_being_stored_counts() -> None:
    around = several(10)
    assert around.core.admit(request("a", tenant="a"), around.now, {("a", "default"): 4}) is None
    assert around.core.admit(request("a", tenant="a"), around.now, {("a", "default"): 5}) is not None
    full = around.core.admit(request("b", tenant="b"), around.now, {("a", "default"): 10})
    assert full is not None
    assert full.reason == "queue_full"


def test_what_runs_does_not_count() -> None:
    around = several(2)
    around.start("e0")
    for i in range(FLEET["e0"].window):
        one = request(f"a{i}", tenant="a")
        assert around.core.admit(one, around.now) is None
        around.arrive(one)
    assert around.core.admit(request("a", tenant="a"), around.now) is None
