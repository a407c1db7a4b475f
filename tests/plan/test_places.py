"""A request counts as all its answers (prompts times n): in its tenant's turns, in windows, in the queue."""

from __future__ import annotations

import pytest

from headway.events import Arrived, Finished, InstanceUp, Returned
from headway.policy.core.controller import Controller
from headway.policy.core.ranks import ARRIVAL
from headway.policy.core.shares import QueueShares
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.plan.ordered import Ordered
from headway.policy.plan.qlm import Qlm
from headway.ports import Planner
from tests.plan.place import Place, ask, instance
from tests.plan.test_tenant_turns import drain, place


def test_a_tenant_pays_for_all_answers_of_a_request() -> None:
    at = place()
    at.come(ask("a0", tenant="a", places=4))
    at.come(ask("a1", tenant="a"))
    for i in range(4):
        at.come(ask(f"b{i}", 1.0, tenant="b"))
    assert drain(at) == ["a0", "b0", "b1", "b2", "a1", "b3"]


@pytest.mark.parametrize("planner", [Ordered(ARRIVAL, displaces=False), Qlm()])
def test_an_instance_has_the_places_of_its_batch(planner: Planner) -> None:
    at = Place(planner, instance("e0", 4, lead=0))
    at.come(ask("a", places=3))
    at.come(ask("b", 1.0, places=3))
    at.come(ask("c", 2.0))
    assert at.order == ["a", "b"], "b has one place at once"
    at.end("b", 3.0)
    assert at.order == ["a", "b", "c"]


def test_of_two_instances_the_one_with_more_free_places_is_next() -> None:
    at = Place(Ordered(ARRIVAL, displaces=False), instance("e0"), instance("e1"))
    at.come(ask("a", places=3))
    for i in range(3):
        at.come(ask(f"b{i}", 1.0 + i))
    assert at.inside == {"a": "e0", "b0": "e1", "b1": "e1", "b2": "e1"}


def test_the_queue_and_a_tenant_s_share_of_it_are_counted_in_places() -> None:
    core = Controller(Ordered(ARRIVAL), TaskLengths(), 20, QueueShares(0.5, 1.0))
    core.on(Arrived(ask("a0", tenant="a", places=8)), 0.0)
    assert core.admit(ask("a1", tenant="a", places=8), 0.0) is None, "something of its share is left"
    core.on(Arrived(ask("a1", tenant="a", places=8)), 0.0)
    refused = core.admit(ask("a2", tenant="a"), 0.0)
    assert refused is not None
    assert refused.limit == ("server.tenant_share", 16, 10, None)
    core.on(Arrived(ask("b0", tenant="b", places=8)), 0.0)
    refused = core.admit(ask("c0", tenant="c"), 0.0)
    assert refused is not None
    assert refused.reason == "queue_full"
    assert core.queued == 3
    core.on(InstanceUp(instance("e0", 8, lead=0)), 0.0)
    assert core.queued == 2
    assert core.admit(ask("c0", tenant="c"), 0.0) is None
    core.on(Returned("a0"), 0.0)
    core.on(Finished("a0", 80), 1.0)
    assert core.admit(ask("a2", tenant="a"), 1.0) is None


def test_the_mean_of_its_answers_teaches_how_long_one_is() -> None:
    lengths = TaskLengths(prior=60)
    core = Controller(Ordered(ARRIVAL), lengths)
    core.on(Arrived(ask("a", places=4, answer=500)), 0.0)
    core.on(Finished("a", 400), 1.0)
    assert lengths.forecast(ask("b", answer=500)).mean == 100.0
