"""The graphs of all applications: apart by tenant, shared, bounded, compiled again as they grow."""

from __future__ import annotations

import pytest

from headway.policy.apps.demand import SHARED, Costs, Knowledge, Known
from headway.policy.apps.graph import LLM, Graph, Visit
from tests.helpers.held import held


def visits(output: float = 10.0) -> list[Visit]:
    return [Visit("u", LLM, 100.0, output, 1)]


def mean(knowledge: Knowledge, tenant: str, app: str = "app") -> float | None:
    """Return the seconds that a run is expected to take, at a second per output token."""
    demand = knowledge.demand(tenant, app)
    draw = None if demand is None else demand.draw("u", {}, None, Known(), Costs(0.0, 1.0, 0.0), 0)
    return None if draw is None else float(draw.total.mean())


def test_nothing_is_known_of_an_application_without_runs() -> None:
    knowledge = Knowledge()
    assert knowledge.demand("t", "app") is None
    knowledge.put("t", Graph("app"))
    assert knowledge.demand("t", "app") is None


def test_one_tenant_does_not_learn_from_another() -> None:
    knowledge = Knowledge()
    knowledge.learn("a", "app", visits(10))
    knowledge.learn("b", "app", visits(20))
    assert (mean(knowledge, "a"), mean(knowledge, "b"), mean(knowledge, "c")) == (10, 20, None)


def test_a_shared_graph_serves_tenants_until_they_have_runs_and_is_where_they_start() -> None:
    shared = Graph("app")
    for _ in range(3):
        shared.learn(visits(10))
    knowledge = Knowledge()
    knowledge.put(SHARED, shared)
    assert mean(knowledge, "a") == 10
    knowledge.learn("a", "app", visits(50))
    assert knowledge.graphs["a", "app"].runs == 4
    assert mean(knowledge, "a") > 10
    assert mean(knowledge, "b") == 10
    assert shared.runs == 3


def test_a_graph_that_is_replaced_is_compiled_again() -> None:
    knowledge = Knowledge()
    knowledge.learn("a", "app", visits(10))
    assert mean(knowledge, "a") == 10
    other = Graph("app")
    other.learn(visits(30))
    knowledge.put("a", other)
    assert mean(knowledge, "a") == 30


def test_knowledge_may_be_fixed() -> None:
    knowledge = Knowledge(learns=False)
    knowledge.learn("a", "app", visits())
    assert knowledge.graphs == {}


def compilations(knowledge: Knowledge, runs: int) -> int:
    seen = set()
    for _ in range(runs):
        knowledge.learn("a", "app", visits())
        seen.add(knowledge.demand("a", "app"))
    return len(seen)


def test_a_graph_is_compiled_again_when_a_twentieth_of_it_is_new() -> None:
    knowledge = Knowledge()
    assert compilations(knowledge, 20) == 20
    assert compilations(knowledge, 980) < 100
    # It keeps a thousand records, so a twentieth of them is fifty runs, however many there were.
    assert compilations(knowledge, 1000) == pytest.approx(20, abs=2)
    assert compilations(knowledge, 1000) == pytest.approx(20, abs=2)


def test_the_graph_used_least_recently_is_forgotten_first() -> None:
    knowledge = Knowledge()
    for i in range(1024):
        knowledge.learn("t", f"app{i}", visits())
        knowledge.demand("t", f"app{i}")
    knowledge.demand("t", "app0")
    knowledge.learn("t", "app1", visits())
    knowledge.learn("t", "new", visits())
    assert {app for _, app in knowledge.graphs} == {f"app{i}" for i in range(1024)} - {"app2"} | {"new"}
    assert "app2" not in held(knowledge)
    assert knowledge.demand("t", "app2") is None
