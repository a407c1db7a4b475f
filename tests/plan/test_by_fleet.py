"""A planner for fleets without model swaps, and another from the moment that an instance can load a model."""

from __future__ import annotations

import numpy as np

from headway.events import InstanceUp, Returned
from headway.policy.core import ranks
from headway.policy.plan.by_fleet import ByFleet
from headway.policy.plan.group_placement import QlmOptions
from headway.policy.plan.ordered import Ordered
from headway.policy.plan.qlm import Qlm
from headway.policy.plan.run_order import RunOrder
from headway.policy.recipes.registry import find
from headway.simulate.run import Simulation
from headway.stages import Stage
from headway.types import Command, Instance, Send, Slo, Swap
from tests.plan.place import Place, ask, instance
from tests.plan.test_qlm import Planned, loads, of
from tests.simulate.machines import at, machine, together


def planner() -> ByFleet:
    return ByFleet(Ordered(ranks.ATTAINABLE), lambda: Qlm(QlmOptions(ranks=False)))


def able(id: str, model: str = "m", other: str = "n", running: int = 2) -> Instance:
    return instance(id, running, model=model, lead=0, loadable=loads(other))


def test_a_fleet_that_cannot_load_models_is_planned_as_ever() -> None:
    alone, mine = Place(Ordered(ranks.ATTAINABLE), instance("e0", 2)), Place(planner(), instance("e0", 2))
    for i in range(20):
        request = ask(f"r{i}", i / 10, slo=Slo(e2e=20.0 - i))
        assert alone.come(request) == mine.come(request)
        if i % 3 == 2:
            assert alone.end(alone.order[i // 3], i / 10) == mine.end(mine.order[i // 3], i / 10)
    assert mine.core.planner.thinks is False


def test_a_model_is_loaded_where_an_instance_can() -> None:
    place = Planned(planner(), able("e0"))
    assert place.core.planner.thinks
    assert of(place.come(ask("r0", model="n")), Swap) == [Swap("e0", "n")]


def test_what_is_sent_has_no_rank() -> None:
    place = Planned(planner(), able("e0"))
    for i in range(4):
        sends = of(place.come(ask(f"r{i}", i / 10, slo=Slo(e2e=40.0 - 10 * i))), Send)
        assert all(send.rank == 0 for send in sends)


def test_requests_of_the_planner_before_are_taken_over() -> None:
    place = Planned(planner(), instance("e0", 2, lead=0))
    for i in range(4):
        place.come(ask(f"m{i}", i / 10))
    place.come(ask("n0", 0.5, model="n"))
    assert sorted(place.inside) == ["m0", "m1"]
    commands = place.notify(InstanceUp(able("e1")), 1.0)
    assert {send.id for send in of(commands, Send)} == {"m2", "m3"}, "the new instance helps at once"
    del place.inside["m0"]
    place.notify(Returned("m0"), 1.1)
    assert place.inside["m0"] == "e0", "what comes back is known, and has a place again"
    swaps = list[Command]()
    for now, id in enumerate(("m0", "m1", "m2", "m3"), 2):
        swaps += of(place.end(id, float(now)), Swap)
    assert swaps == [Swap("e1", "n")]
    place.notify(InstanceUp(able("e1", "n", "m")), 20.0)
    assert place.inside == {"n0": "e1"}
    place.end("n0", 21.0)
    assert place.core.requests == {}


def test_a_computation_goes_to_the_planner_that_asked_for_it() -> None:
    """An instance that swaps comes up while what ranks of runs need is compiled."""
    runs = RunOrder(ranks.ATTAINABLE)
    mine = ByFleet(runs, lambda: Qlm(QlmOptions(ranks=False)))
    mine.prepare()
    place = Place(mine, instance("e0", 1, lead=0))
    place.come(ask("r0", stage=Stage("app", "run", "unit")))
    work = place.core.deliberate(1.0)
    assert work is not None
    place.notify(InstanceUp(able("e1")), 1.5)
    place.note(place.core.conclude(work(), 2.0))
    assert len(runs.runs) == 1
    assert mine.thinks, "the planner that swaps is not ready yet"
    work = place.core.deliberate(2.5)
    assert work is not None
    place.note(place.core.conclude(work(), 3.0))
    place.come(ask("n0", 4.0, model="n"))
    work = place.core.deliberate(4.0)
    assert work is not None
    assert of(place.note(place.core.conclude(work(), 4.5)), Swap) == [Swap("e1", "n")]


def test_headway_serves_more_models_than_instances() -> None:
    work = together(*(at(i / 5, model="ab"[i % 2], slo=Slo(e2e=60.0)) for i in range(40)))
    outcome = Simulation(find("headway"), [machine("e0", "a", "b", host=4)], work).run()
    assert np.isfinite(outcome.end).all()
    assert outcome.swaps > 0
