"""A rank set by the planner decides the order inside the simulated engine; a rerank changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from headway.policy.core.controller import Controller
from headway.policy.core.ranks import PRIORITY
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.registry import find
from headway.simulate.instance import SimulatedInstance
from headway.simulate.loop import Loop
from headway.simulate.workload.traffic import single
from headway.types import Command, Rerank, Send
from tests.simulate.machines import machine

Ranks = Mapping[str, float]
# r0 runs first; r1, r2 and r3 arrive while it does; at 1.6 s an event of no other consequence.
WORKLOAD = single(np.array([0.0, 0.1, 0.2, 0.3, 1.6]), 10, np.array([3, 1, 1, 1, 1]))


class Ranking(Controller):
    """Gives every request a rank as it is sent, and may rerank at any event."""

    ranks: Ranks
    rerank: Callable[[float], Ranks]

    def decide(self, now: float) -> list[Command]:
        commands: list[Command] = [
            replace(command, rank=self.ranks.get(command.id, 0.0)) if isinstance(command, Send) else command
            for command in super().decide(now)
        ]
        ranks = self.rerank(now)
        return [*commands, Rerank("e0", ranks)] if ranks else commands


def order(ranks: Ranks, rerank: Callable[[float], Ranks] = lambda now: {}, overhead: float = 0.0) -> list[int]:
    """Return the requests in the order of their first tokens, one running at a time."""
    recipe = find("priority")
    controller = Ranking(Ordered(PRIORITY, pull=False), TaskLengths())
    controller.ranks, controller.rerank = ranks, rerank
    spec = replace(machine("e0", each=1.0, running=1), request_overhead=overhead)
    loop = Loop(WORKLOAD, controller, [SimulatedInstance(spec, recipe)], plan_seconds=lambda queued: 0.0, tick=1.0)
    return [int(row) for row in np.argsort(loop.run(None, np.inf).first)]


def test_without_ranks_the_packer_orders_by_arrival() -> None:
    assert order({}) == [0, 1, 2, 3, 4]


def test_the_rank_that_is_sent_orders_the_engine() -> None:
    assert order({"r0": -1.0, "r1": 3.0, "r2": 2.0, "r3": 1.0, "r4": 9.0}) == [0, 3, 2, 1, 4]


@pytest.mark.parametrize("instant", [0.3, 1.6])
def test_a_rerank_changes_the_order(instant: float) -> None:
    """At 0.3 s the requests are submitted, at 1.6 s they are inside."""
    ranks = {"r0": -1.0, "r1": 3.0, "r2": 2.0, "r3": 1.0, "r4": 9.0}
    assert order(ranks, lambda now: {"r1": 0.0, "r9": -5.0} if now == instant else {}) == [0, 1, 3, 2, 4]


def test_a_rerank_never_overtakes_the_request() -> None:
    """It is decided as r3 is sent, and both take 0.25 s to the engine."""
    ranks = {"r0": -2.0, "r4": 9.0}
    assert order(ranks, lambda now: {"r3": -1.0} if now == 0.3 else {}, 0.25) == [0, 3, 1, 2, 4]


@pytest.mark.parametrize(("name", "own"), [("vllm", True), ("headway", False)])
def test_the_controller_knows_which_engines_keep_vllm_s_own_order(name: str, own: bool) -> None:
    assert SimulatedInstance(machine("e0"), find(name)).instance().own_order is own
