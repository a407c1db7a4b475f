"""Virtual Token Counter: backlogged tenants are served equally; idle tenants accumulate no credit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.events import Failed
from headway.policy.plan.baselines.vtc import VirtualTokenCounter
from headway.types import Request
from tests.plan.place import Place, ask, instance


def cost(request: Request) -> int:
    return request.prompt_tokens + 2 * request.max_tokens


SIZES = st.tuples(st.integers(1, 400), st.integers(1, 200))


@given(st.lists(SIZES, min_size=4, max_size=30), st.integers(1, 6), st.integers(0, 2**31))
def test_two_backlogged_tenants_differ_by_less_than_one_request(
    sizes: list[tuple[int, int]], running: int, seed: int
) -> None:
    """The paper's theorem 4.4 has 2 max(w_p L, w_q M); with lengths known it is the largest request."""
    rng = np.random.default_rng(seed)
    place = Place(VirtualTokenCounter(), instance("e0", running, lead=0))
    place.come(ask("first", 0.0, tenant="c"))  # the engine is not idle when a and b come
    for i in range(running - 1):
        place.come(ask(f"x{i}", 0.0, tenant="c"))
    for i, (prompt, answer) in enumerate(sizes):
        tenant = "ab"[i % 2] if i < 4 else "ab"[int(rng.integers(2))]
        place.come(ask(f"{tenant}{i}", float(i), prompt=prompt, answer=answer, tenant=tenant))
    largest = max(cost(request) for request in place.requests.values())
    served = {"a": 0, "b": 0}
    while {"a", "b"} <= {place.requests[id].tenant for id in place.queued}:
        before = len(place.order)
        place.end(sorted(place.inside)[int(rng.integers(len(place.inside)))], 100.0)
        for id in place.order[before:]:
            if place.requests[id].tenant in served:
                served[place.requests[id].tenant] += cost(place.requests[id])
        assert abs(served["a"] - served["b"]) <= largest


def test_within_a_tenant_first_come_first_served() -> None:
    place = Place(VirtualTokenCounter(), instance("e0", 1, lead=0))
    for i in range(6):
        place.come(ask(f"r{i}", float(i), prompt=100 - i, tenant="ab"[i % 2]))
    while place.inside:
        place.end(next(iter(place.inside)), 10.0)
    for tenant in "ab":
        mine = [id for id in place.order if place.requests[id].tenant == tenant]
        assert mine == sorted(mine)


def test_a_light_tenant_does_not_wait_behind_a_heavy_one() -> None:
    place = Place(VirtualTokenCounter(), instance("e0", 1, lead=0))
    for i in range(20):
        place.come(ask(f"big{i}", float(i), tenant="big"))
    place.come(ask("small", 20.0, tenant="small"))
    place.end("big0", 21.0)  # the newcomer starts at the others' counter: its turn is the next but one
    place.end("big1", 22.0)
    assert "small" in place.inside


def test_the_counter_of_a_tenant_that_was_idle_is_lifted() -> None:
    """Its counter is far behind; without the lift only this tenant would be served until it had caught up."""
    place = Place(VirtualTokenCounter(), instance("e0", 1, lead=0))
    for i in range(10):
        place.come(ask(f"a{i}", float(i), tenant="a"))
    for i in range(8):
        place.end(f"a{i}", 10.0 + i)
    for i in range(10, 16):
        place.come(ask(f"a{i}", 20.0, tenant="a"))
        place.come(ask(f"b{i}", 20.0, tenant="b"))
    before = len(place.order)
    for _ in range(6):
        place.end(next(iter(place.inside)), 30.0)
    tenants = [place.requests[id].tenant for id in place.order[before:]]
    assert tenants.count("b") in {3, 4}


def test_a_request_that_failed_in_the_queue_costs_nothing() -> None:
    planner = VirtualTokenCounter()
    place = Place(planner, instance("e0", 1, lead=0))
    for i in range(3):
        place.come(ask(f"r{i}", 0.0, prompt=50))
    code = place.core.cluster.code("default")
    before = planner.counters(place.core.cluster.backlog, [code])
    place.notify(Failed("r2", "client_gone"), 1.0)
    assert planner.counters(place.core.cluster.backlog, [code]) == before
