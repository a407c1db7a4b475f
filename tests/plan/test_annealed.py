"""The planner of SLO-aware scheduling: assignment by memory, an annealed queue per instance, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Failed, InstanceDown, InstanceUp, Learned, Returned, Tick
from headway.policy.core.cluster import Cluster
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.plan.annealed import Annealed, Assignment
from headway.types import Batch, Instance, Send, Slo
from tests.plan.place import Place, ask, instance

SLOS = (Slo(), Slo(e2e=30.0), Slo(ttft=10.0, tpot=0.05), Slo(e2e=2.0))


# ---- instance assignment


def test_requests_go_round_while_they_are_alike() -> None:
    places = Assignment()
    places.follow([instance("a"), instance("b"), instance("c")])
    assert [places.take(100, ["a", "b", "c"]) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_the_instance_with_the_most_memory_left_is_next() -> None:
    places = Assignment()
    places.follow([instance("small", blocks=100), instance("large", blocks=200)])
    taken = [places.take(360, ["small", "large"]) for _ in range(6)]  # 1,440 and 2,880 tokens of 0.9
    assert taken == ["large", "large", "large", "large", "small", "large"]


def test_a_new_round_begins_when_no_instance_has_enough() -> None:
    places = Assignment()
    places.follow([instance("a", blocks=100), instance("b", blocks=100)])
    assert [places.take(1000, ["a", "b"]) for _ in range(4)] == ["a", "b", "a", "b"]
    assert places.take(1e9, ["a", "b"]) == "a", "what fits nowhere still gets an instance"


def test_memory_comes_back_with_the_end_of_a_request() -> None:
    places = Assignment()
    places.follow([instance("a", blocks=100), instance("b", blocks=100)])
    assert [places.take(400, ["a", "b"]), places.take(300, ["a", "b"])] == ["a", "b"]
    places.give_back(400, "a")
    places.give_back(400, "gone")
    assert places.take(100, ["a", "b"]) == "a"


# ---- nothing is lost

Program = list[tuple[int, int, int]]
program: st.SearchStrategy[Program] = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 300)), max_size=60
)


@pytest.mark.parametrize("options", [{}, {"pull": False}, {"batches": True}], ids=["queue", "inside", "batches"])
@given(program, st.integers(1, 4))
@settings(max_examples=20)
def test_no_request_is_lost_or_sent_twice(options: dict[str, bool], steps: Program, most: int) -> None:
    """Two models, unlike instances, instances that die and come back, clients that leave."""
    fleet = [instance("m0", 2), instance("m1", 3, blocks=40), instance("n0", 1, model="n", lead=0)]
    place, up = Place(Annealed(most, **options), *fleet), {one.id: one for one in fleet}
    for now, (what, which, size) in enumerate(steps, start=1):
        if what <= 4:
            model, slo = "mn"[which % 2], SLOS[which]
            place.come(ask(f"r{now}", float(now), model=model, answer=size, slo=slo))
        elif what <= 6 and place.inside:
            place.end(sorted(place.inside)[size % len(place.inside)], float(now))
        elif what == 7 and place.queued:
            id = place.queued[size % len(place.queued)]
            place.notify(Failed(id, "the client left"), float(now))
        else:
            _die_or_return(place, fleet[which % 3], up, float(now))
        _check(place)
    for one in fleet:
        if one.id not in up:
            place.notify(InstanceUp(one), 1000.0)
    for now in range(2000, 2000 + 10 * len(steps)):
        if not place.inside:
            break
        place.end(sorted(place.inside)[0], float(now))
    assert not place.core.requests


def _die_or_return(place: Place, one: Instance, up: dict[str, Instance], now: float) -> None:
    if one.id not in up:
        up[one.id] = one
        place.notify(InstanceUp(one), now)
        return
    del up[one.id]
    place.notify(InstanceDown(one.id), now)
    for id in [id for id, name in place.inside.items() if name == one.id]:
        place.inside.pop(id)
        place.notify(Returned(id), now)


def _check(place: Place) -> None:
    """The controller refuses a request that is sent twice; here: where it went, and that nobody idles."""
    cluster = place.core.cluster
    for id, name in place.inside.items():
        assert cluster.instances[name].model == place.requests[id].model
    for name, one in cluster.instances.items():
        if not place.load(name):
            waiting = [id for id in place.queued if place.requests[id].model == one.model]
            others = [other for other in cluster.instances.values() if other.model == one.model]
            assert not waiting or len(others) > 1, "the only instance of a model idles while requests wait"


# ---- the order of a queue


def filled(planner: Annealed, **slos: Slo) -> Place:
    """One instance with one slot, which is taken; the requests named come together, each of 200 tokens."""
    place = Place(planner, instance("e0", 1, lead=0))
    place.come(ask("first", 0.0))
    for id, slo in slos.items():
        place.come(ask(id, 1.0, answer=200, slo=slo))
    return place


def served(place: Place, now: float = 2.0) -> list[str]:
    while place.inside:
        place.end(next(iter(place.inside)), now)
    return place.order[1:]


def test_a_queue_is_served_in_the_order_that_meets_most() -> None:
    """A request takes about 3.4 s by the published law; the one that is due first cannot be met."""
    place = filled(Annealed(), late=Slo(e2e=1.5), loose=Slo(e2e=60.0), tight=Slo(e2e=5.0))
    assert served(place)[0] == "tight"


def test_what_has_no_slo_goes_behind_by_arrival() -> None:
    place = filled(Annealed(), b1=Slo(), b2=Slo(), chat=Slo(ttft=10.0, tpot=0.05), code=Slo(e2e=30.0))
    assert served(place)[2:] == ["b1", "b2"]


def test_the_rank_follows_the_order_in_which_requests_are_sent() -> None:
    place = Place(Annealed(), instance("e0", 2, lead=1), instance("e1", 2, lead=1))
    sent = [c for i in range(9) for c in place.come(ask(f"r{i}", float(i), slo=SLOS[1 + i % 3]))]
    while place.inside:
        sent += place.end(next(iter(place.inside)), 20.0)
    ranks = [command.rank for command in sent if isinstance(command, Send)]
    assert len(ranks) == 9
    assert ranks == sorted(set(ranks))


def test_without_pull_the_packer_decides() -> None:
    place = Place(Annealed(pull=False), instance("e0", 1, lead=0))
    sent = [c for i in range(4) for c in place.come(ask(f"r{i}", float(i)))]
    assert [(c.id, c.rank) for c in sent if isinstance(c, Send)] == [(f"r{i}", 0.0) for i in range(4)]


def test_with_batches_an_engine_gets_one_when_the_one_before_has_ended() -> None:
    """Four requests in two batches: when one of a batch ends, its place stays empty until the other has ended, too."""
    place = Place(Annealed(batches=True), instance("e0", 2, lead=0))
    place.come(ask("first", 0.0))
    for i in range(4):
        place.come(ask(f"r{i}", 1.0, answer=200, slo=Slo(e2e=500.0)))
    assert list(place.inside) == ["first"], "nothing joins a batch under way"
    inside = []
    while place.inside:
        inside.append(len(place.inside))
        place.end(next(iter(place.inside)), 2.0)
    assert inside == [1, 2, 1, 2, 1]


def test_with_batches_their_size_is_annealed() -> None:
    """Both meet their SLO alone, one after the other; in one batch the tight one would be late."""
    place = Place(Annealed(batches=True), _with_latency(2, lambda batch: 0.1 if batch.decodes > 1 else 0.01))
    place.come(ask("first", 0.0))
    for id, slo in {"tight": Slo(ttft=50.0, tpot=0.02), "loose": Slo(e2e=60.0)}.items():
        place.come(ask(id, 1.0, answer=200, slo=slo))
    place.end("first", 1.0)
    assert len(place.inside) == 1


def test_the_latency_of_an_instance_decides_what_can_be_met() -> None:
    """By the published law neither is in time and the shorter goes first; this engine is fast enough."""
    fast = Place(Annealed(), _with_latency(1, lambda batch: 1e-3))
    slow = Place(Annealed(), _with_latency(1, None))
    for place in (fast, slow):
        place.come(ask("first", 0.0))
        place.come(ask("long", 1.0, answer=800, slo=Slo(e2e=1.2)))
        place.come(ask("short", 1.0, answer=600, slo=Slo(e2e=3.0)))
        place.end("first", 1.0)
    assert fast.order[1] == "long"
    assert slow.order[1] == "short"


def test_what_an_engine_has_learned_replaces_the_published_law() -> None:
    latency = OnlineLatency()
    latency.theta[:] = [1e-3, 0, 0, 0, 0]
    place = Place(Annealed(), _with_latency(1, None))
    place.notify(Learned("e0", latency.theta), 0.0)
    place.come(ask("first", 0.0))
    place.come(ask("long", 1.0, answer=800, slo=Slo(e2e=1.2)))
    place.come(ask("short", 1.0, answer=600, slo=Slo(e2e=3.0)))
    place.end("first", 1.0)
    assert place.order[1] == "long"


def _with_latency(running: int, latency: object) -> Instance:
    return instance("e0", running, lead=0, latency=latency)


def test_a_head_that_is_full_takes_what_is_due_earlier() -> None:
    """Only `most` requests are annealed; an urgent arrival is among them, however long the queue is."""
    place = filled(Annealed(most=2), **{f"r{i}": Slo(e2e=1000.0 + i) for i in range(20)})
    place.come(ask("urgent", 1.5, answer=10, slo=Slo(e2e=5.0)))
    place.end("first", 2.0)
    assert place.order[1] == "urgent"


def test_what_is_late_does_not_keep_out_what_can_be_in_time() -> None:
    """The head holds two: those whose deadline has passed leave it while others wait for a place there."""
    slos = {f"late{i}": Slo(e2e=2.0) for i in range(5)} | {f"r{i}": Slo(e2e=50.0) for i in range(3)}
    place = filled(Annealed(most=2), **slos)
    place.core.on(Tick(), 9.0)
    order = served(place, 10.0)
    assert sorted(order[:2]) == ["r0", "r1"], "afterwards the head has room for late ones, too"
    assert len(order) == 8


def test_a_planner_that_is_new_to_a_cluster_binds_what_waits() -> None:
    place = filled(Annealed(), a=Slo(e2e=9.0), b=Slo())
    cluster: Cluster = place.core.cluster
    rows = np.array([cluster.backlog.row_of["a"]])
    sent = Annealed(pull=False).plan(cluster, 5.0).send
    assert {send.id for send in sent} == {"a", "b"}
    assert rows.size == 1


def test_latency_is_sampled_once_for_a_fleet() -> None:
    asked: list[Batch] = []

    def latency(batch: Batch) -> float:
        asked.append(batch)
        return 0.01

    place = Place(Annealed(), _with_latency(1, latency))
    for i in range(8):
        place.come(ask(f"r{i}", float(i), slo=Slo(e2e=50.0)))
    place.end("r0", 9.0)
    first = len(asked)
    place.end(next(iter(place.inside)), 10.0)
    assert len(asked) == first > 0
