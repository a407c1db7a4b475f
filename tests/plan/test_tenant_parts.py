"""Promises beyond a tenant's part are given up first: a flood costs another tenant next to nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headway.policy.apps.demand import Knowledge
from headway.policy.core.ranks import ATTAINABLE, BEYOND, outer
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.plan.run_order import RunOrder
from headway.policy.plan.tenant_parts import TenantParts
from headway.policy.recipes.registry import find
from headway.ports import Planner
from headway.simulate.run import InstanceSpec, Simulation
from headway.simulate.workload.traffic import Workload, concat, poisson, single
from headway.types import Instance, Send, Slo
from tests.helpers.held import held
from tests.plan.place import Place, ask, instance


def parts_at_rate() -> TenantParts:
    """Return counts of a fleet that serves work of 100 per second to the tenants a and b."""
    parts = TenantParts()
    for i in range(30):
        for tenant in "ab":
            id = f"{tenant}{i}"
            parts.beyond(id, tenant, 10, 20.0, i + 100.0, float(i))
            parts.ended(id, 20, float(i))
    return parts


def test_what_a_tenant_s_part_cannot_reach_in_time_is_beyond() -> None:
    parts = parts_at_rate()
    told = [parts.beyond(f"f{i}", "a", 10, 20.0, 40.0, 30.0) for i in range(20)]
    # Each is 50 of work, and in 10 s a's half of 100 per second gets through ten of them.
    assert told == [False] * 11 + [True] * 9
    assert not parts.beyond("b", "b", 10, 20.0, 40.0, 30.0), "another tenant's flood is not its own"


def test_a_tenant_alone_has_all() -> None:
    parts = parts_at_rate()
    late = 30.0 + 31.0  # b has asked nothing for long
    assert not any(parts.beyond(f"f{i}", "a", 10, 20.0, late + 1.0, late) for i in range(100))


def test_before_anything_was_served_nothing_is_beyond() -> None:
    parts = TenantParts()
    assert not any(parts.beyond(f"{i}", "ab"[i % 2], 10, 1e9, 1.0, 0.0) for i in range(20))


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    parts = parts_at_rate()
    for i in range(1000):
        parts.beyond(f"t{i}", f"tenant{i}", 10, 20.0, 1000.0, 100.0 + i)
        parts.ended(f"t{i}", None, 100.0 + i)
    kept = held(parts)
    assert not {f"t{i}" for i in range(1000)} & kept
    assert len({f"tenant{i}" for i in range(1000)} & kept) < 40


def test_engines_are_told_and_order_the_kept_as_before() -> None:
    assert outer(BEYOND) == 0.0
    assert outer(1e-6) == 1e-6
    planner = RunOrder(ATTAINABLE, ahead=40, knowledge=Knowledge())
    planner.take_turns()
    planner._parts = parts_at_rate()
    at = Place(planner, instance("e0", 1, lead=0))
    sent = [
        one
        for i in range(30)
        for one in at.come(ask(f"a{i}", 30.0, tenant="a", prompt=10, answer=20, slo=Slo(ttft=10.0)))
        if isinstance(one, Send)
    ]
    assert {one.rank for one in sent} == {0.0, BEYOND}


def flood(rate: float) -> Workload:
    """Return 10,000 chats of tenant a at a rate, and 2 requests/s of tenant b with the same SLO."""
    rng, slo = np.random.default_rng(0), Slo(ttft=1.0, tpot=0.1)
    many = np.sort(rng.uniform(10.0, 10.0 + 10_000 / rate, 10_000))
    seconds = float(many[-1])
    few = poisson(2.0, seconds, rng)
    parts = [
        single(
            at,
            rng.integers(50, 400, at.size),
            rng.integers(10, 80, at.size),
            tier="chat",
            tenant=tenant,
            slo=slo,
            max_tokens=80,
        )
        for tenant, at in (("a", many), ("b", few))
    ]
    return concat(*parts).sorted()


@pytest.mark.parametrize("rate", [100.0])
def test_a_flood_of_promises_costs_another_tenant_at_most_a_tenth(rate: float) -> None:
    def turned() -> Planner:
        planner = find("headway").planner()
        planner.take_turns()
        return planner

    load = flood(rate)
    one = Instance("e0", "default", max_running=64, blocks_total=4000, block_size=16, max_model_len=2000)
    spec = InstanceSpec(one, OnlineLatency(), slots=128, budget=1024)
    recipe = replace(find("headway"), planner=turned)
    kept: dict[str, dict[str, float]] = {}
    for name, work in (("both", load), ("alone", load.take(load.tenant == load.tenants.index("b")))):
        out = Simulation(recipe, [spec], work, fast=False).run()
        ttft = out.first - work.arrival
        tpot = (out.end - out.first) / np.maximum(work.output - 1, 1)
        met = (ttft <= work.ttft) & (tpot <= work.tpot)
        mine = {t: met[work.tenant == i] for i, t in enumerate(work.tenants)}
        kept[name] = {t: float(found.mean()) for t, found in mine.items() if found.size}
    assert kept["both"]["a"] < 0.6, "it is a flood"
    assert kept["alone"]["b"] > 0.98
    assert kept["both"]["b"] >= 0.9 * kept["alone"]["b"]
