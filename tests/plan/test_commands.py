"""Commands other than Send: swaps, warm-ups and rejections, each issued once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from headway.events import InstanceDown, InstanceUp, Returned, Swapped, Tick, Warmed
from headway.policy.core.cluster import Cluster
from headway.policy.core.ranks import ARRIVAL
from headway.policy.plan.ordered import Ordered
from headway.ports import Planner
from headway.types import Instance, Loadable, Plan, Reject, Send, Swap, Warm
from tests.plan.place import Place, ask, instance


@dataclass
class Script(Planner):
    """A planner by arrival whose swaps, warm-ups and rejections the test sets."""

    swap: dict[str, str] = field(default_factory=dict)
    warm: dict[str, str] = field(default_factory=dict)
    reject: list[str] = field(default_factory=list)

    def plan(self, cluster: Cluster, now: float) -> Plan:
        rejected = [id for id in self.reject if id in cluster.backlog]
        order = Ordered(ARRIVAL, displaces=False).plan(cluster, now).send
        send = [one for one in order if one.id not in rejected]
        return Plan(send, swap=self.swap, warm=self.warm, reject=rejected)


def able(id: str, model: str = "m") -> Instance:
    others = tuple(Loadable(name, 10.0, 1.0, 4096) for name in "mn" if name != model)
    return instance(id, 1, model=model, lead=0, loadable=others)


def test_a_swap_is_begun_once_and_ends_with_the_new_model() -> None:
    script = Script()
    place = Place(script, able("e0"))
    place.come(ask("m0"))
    place.come(ask("n0", 1.0, model="n"))
    script.swap = {"e0": "n"}
    assert place.notify(Tick(), 2.0) == [Swap("e0", "n")]
    assert place.core.cluster.instances == {}
    assert place.notify(Tick(), 3.0) == [], "it is on its way"
    place.inside.pop("m0")
    assert place.notify(Returned("m0", 3), 3.0) == []
    assert place.core.queued == 2
    assert place.notify(Swapped(able("e0", "n")), 13.0) == [Send("n0", "e0")]
    assert place.notify(Tick(), 14.0) == [], "it serves that model"


def test_an_instance_that_dies_in_a_swap_is_removed() -> None:
    script = Script({"e0": "n"})
    place = Place(script, able("e0"))
    place.come(ask("n0", model="n"))
    place.notify(InstanceDown("e0"), 1.0)
    assert not place.core.cluster.loading
    script.swap = {}
    assert place.notify(InstanceUp(able("e0", "n")), 2.0) == [Send("n0", "e0")]


def test_weights_are_warmed_one_after_another_and_not_again() -> None:
    script = Script(warm={"e0": "n"})
    place = Place(script, able("e0"))
    assert place.come(ask("n0", model="n")) == [Warm("e0", "n")]
    assert place.notify(Tick(), 1.0) == []
    assert place.notify(Warmed(replace(able("e0"), warm=("n",))), 9.0) == []
    assert place.core.cluster.warming == {}
    assert place.core.cluster.instances["e0"].warm == ("n",)
    assert place.come(ask("m0", 10.0)) == [Send("m0", "e0")], "it served all the time"


def test_a_queued_request_is_refused_and_forgotten() -> None:
    script = Script()
    place = Place(script, able("e0"))
    for i in range(3):
        place.come(ask(f"r{i}", float(i)))
    script.reject = ["r2"]
    assert place.notify(Tick(), 3.0) == [Reject("r2", "saturated", retry_after=1.0)]
    assert place.core.queued == 1
    assert set(place.core.requests) == {"r0", "r1"}


def test_a_plan_that_cannot_be_carried_out_raises() -> None:
    place = Place(Script(swap={"e0": "x"}), able("e0"))
    with pytest.raises(AssertionError, match="cannot load"):
        place.come(ask("r"))
    sent = Place(script := Script(), able("e0"))
    sent.come(ask("r0"))
    script.reject = ["r0"]
    with pytest.raises(AssertionError, match="inside an engine"):
        sent.come(ask("r1", 1.0))
