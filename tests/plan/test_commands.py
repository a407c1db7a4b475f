"""What follows from a plan beyond sending: swaps, warm-ups and refusals, each begun once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from headway.core.cluster import Cluster
from headway.plan.ordered import Ordered, by_arrival
from headway.ports import Planner
from headway.types import (
    Instance,
    InstanceDown,
    InstanceUp,
    Loadable,
    Plan,
    Reject,
    Returned,
    Send,
    Swap,
    Swapped,
    Tick,
    Warm,
    Warmed,
)
from tests.plan.place import Place, ask, instance


@dataclass
class Script(Planner):
    """Orders by arrival and says what the test wants said."""

    swap: dict[str, str] = field(default_factory=dict)
    warm: dict[str, str] = field(default_factory=dict)
    reject: list[str] = field(default_factory=list)

    def plan(self, cluster: Cluster, now: float) -> Plan:
        rows = [cluster.backlog.row_of[id] for id in self.reject if id in cluster.backlog]
        lines = Ordered(by_arrival, displaces=False).plan(cluster, now).lines
        return Plan(lines, self.swap, self.warm, np.array(rows, np.int64))


def able(id: str, model: str = "m") -> Instance:
    others = tuple(Loadable(name, 10.0, 1.0, 4096) for name in "mn" if name != model)
    return instance(id, 1, model=model, lead=0, loadable=others)


def test_a_swap_is_begun_once_and_ends_with_the_new_model() -> None:
    script = Script()
    place = Place(script, able("e0"))
    place.come(ask("m0"))
    place.come(ask("n0", 1.0, model="n"))
    script.swap = {"e0": "n"}
    assert place.tell(Tick(), 2.0) == [Swap("e0", "n")]
    assert place.core.cluster.instances == {}
    assert place.tell(Tick(), 3.0) == [], "it is on its way"
    place.inside.pop("m0")
    assert place.tell(Returned("m0", 3), 3.0) == []
    assert place.core.queued == 2
    assert place.tell(Swapped(able("e0", "n")), 13.0) == [Send("n0", "e0")]
    assert place.tell(Tick(), 14.0) == [], "it serves that model"


def test_an_instance_that_dies_in_a_swap_is_gone() -> None:
    script = Script({"e0": "n"})
    place = Place(script, able("e0"))
    place.come(ask("n0", model="n"))
    place.tell(InstanceDown("e0"), 1.0)
    assert not place.core.cluster.loading
    script.swap = {}
    assert place.tell(InstanceUp(able("e0", "n")), 2.0) == [Send("n0", "e0")]


def test_weights_are_warmed_one_after_another_and_not_again() -> None:
    script = Script(warm={"e0": "n"})
    place = Place(script, able("e0"))
    assert place.come(ask("n0", model="n")) == [Warm("e0", "n")]
    assert place.tell(Tick(), 1.0) == []
    assert place.tell(Warmed(replace(able("e0"), warm=("n",))), 9.0) == []
    assert place.core.cluster.warming == {}
    assert place.core.cluster.instances["e0"].warm == ("n",)
    assert place.come(ask("m0", 10.0)) == [Send("m0", "e0")], "it served all the time"


def test_a_queued_request_is_refused_and_forgotten() -> None:
    script = Script()
    place = Place(script, able("e0"))
    for i in range(3):
        place.come(ask(f"r{i}", float(i)))
    script.reject = ["r2"]
    assert place.tell(Tick(), 3.0) == [Reject("r2", "saturated", retry_after=1.0)]
    assert place.core.queued == 1
    assert set(place.core.requests) == {"r0", "r1"}


def test_a_planner_may_not_ask_for_the_impossible() -> None:
    place = Place(Script(swap={"e0": "x"}), able("e0"))
    with pytest.raises(AssertionError, match="cannot load"):
        place.come(ask("r"))
    sent = Place(script := Script(), able("e0"))
    sent.come(ask("r0"))
    script.reject = ["r0"]
    with pytest.raises(AssertionError, match="inside an engine"):
        sent.come(ask("r1", 1.0))
