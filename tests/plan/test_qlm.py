"""QLM's planner: what the order of groups makes instances do, and that no request is lost on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.recipes import STUDIED, find
from headway.errors import ConfigError
from headway.events import Failed, InstanceDown, InstanceUp, Learned, Returned, Swapped, Tick, Warmed
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.plan.group_placement import QlmOptions
from headway.policy.plan.qlm import Qlm
from headway.policy.recipes.qlm import variant
from headway.simulate.run import Failure, Simulation
from headway.types import Command, Instance, Loadable, Rerank, Send, Slo, Swap, Warm
from tests.plan.place import Place, ask, instance
from tests.simulate.machines import at as arriving
from tests.simulate.machines import machine, random_traffic, together

VARIANTS = ["qlm", *(name for name in STUDIED if name.startswith("qlm")), "headway"]


def loads(*models: str, cold: float = 10.0, warm: float = 1.0) -> tuple[Loadable, ...]:
    return tuple(Loadable(model, cold, warm, 4096) for model in models)


class Planned(Place):
    """A place whose planner's long computations run at once, as in a simulation."""

    def notify(self, event: object, now: float) -> list[Command]:
        commands = super().notify(event, now)
        work = self.core.deliberate(now)
        if work is not None:
            commands = commands + self.note(self.core.conclude(work(), now))
        return commands


def of(commands: list[Command], kind: type) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def soon(seconds: float = 30.0) -> Slo:
    return Slo(e2e=seconds)


def test_requests_are_pulled_while_there_is_room() -> None:
    place = Planned(Qlm(), instance("e0", running=2, lead=0))
    for i in range(4):
        place.come(ask(f"r{i}", at=i / 100))
    assert sorted(place.inside) == ["r0", "r1"]
    place.end("r0", 1.0)
    assert sorted(place.inside) == ["r1", "r2"]


def test_an_idle_fleet_shares_the_load() -> None:
    place = Planned(Qlm(), instance("e0", running=4), instance("e1", running=4))
    for i in range(4):
        place.come(ask(f"r{i}", at=i / 100))
    assert place.load("e0") == place.load("e1") == 2


def test_an_urgent_group_goes_before_what_runs() -> None:
    place = Planned(Qlm(), instance("e0", running=2, lead=0))
    commands = list[Command]()
    for i in range(4):
        commands += place.come(ask(f"batch{i}", answer=2000, slo=soon(10_000.0)))
    commands += place.come(ask("urgent", at=0.1, answer=20, slo=soon(5.0)))
    assert "urgent" in place.inside, "it is sent although the instance is full, for the packer to evict"
    ranks = dict[str, float]()
    for command in commands:
        ranks |= {command.id: command.rank} if isinstance(command, Send) else {}
        ranks |= command.ranks if isinstance(command, Rerank) else {}
    assert ranks["urgent"] < min(ranks["batch0"], ranks["batch1"])


def test_without_eviction_an_urgent_group_waits() -> None:
    place = Planned(Qlm(QlmOptions(evicts=False)), instance("e0", running=2, lead=0))
    for i in range(2):
        place.come(ask(f"batch{i}", answer=2000, slo=soon(10_000.0)))
    place.come(ask("urgent", at=0.1, answer=20, slo=soon(5.0)))
    assert "urgent" not in place.inside
    place.end("batch0", 1.0)
    assert "urgent" in place.inside


def test_a_model_is_swapped_in_when_what_runs_has_drained() -> None:
    place = Planned(Qlm(), instance("e0", model="m", loadable=loads("n")))
    place.come(ask("r0", slo=soon()))
    commands = place.come(ask("r1", at=0.1, model="n", slo=soon(100.0)))
    assert of(commands, Swap) == []
    assert of(commands, Warm) == [Warm("e0", "n")], "meanwhile its weights come into host memory"
    commands = place.end("r0", 1.0)
    assert of(commands, Swap) == [Swap("e0", "n")]
    place.notify(Swapped(instance("e0", model="n", loadable=loads("m"))), 3.0)
    assert "r1" in place.inside


def test_a_swap_that_takes_long_is_judged_by_the_queue_of_its_moment() -> None:
    place = Place(Qlm(), instance("e0", model="m", loadable=loads("n")))
    place.come(ask("n0", model="n", slo=soon(100.0)))
    assert place.inside == {}, "the plan generator has not answered yet"
    work = place.core.deliberate(1.0)
    assert work is not None
    assert of(place.note(place.core.conclude(work(), 1.0)), Swap) == [Swap("e0", "n")]
    quick = Place(Qlm(), instance("e0", model="m", loadable=loads("n", cold=0.5)))
    assert of(quick.come(ask("n0", model="n", slo=soon(100.0))), Swap) == [Swap("e0", "n")]


def test_a_hopeless_request_of_a_rare_model_does_not_empty_an_instance() -> None:
    """A restart would cost more requests of the frequent model, which go on coming, than it saves."""

    def swaps(frequent: float) -> int:
        times = np.arange(0.0, 40.0, 1 / frequent)
        work = together(arriving(*times.tolist(), model="a", slo=soon(20.0)), arriving(30.0, model="b", slo=soon(5.0)))
        return Simulation(find("qlm"), [machine("e0", "a", "b", cold=10.0)], work, until=40.0).run().swaps

    assert swaps(0.05) == 1
    assert swaps(4.0) == 0


def test_an_idle_instance_swaps_at_once() -> None:
    place = Planned(Qlm(), instance("e0", model="m", loadable=loads("n")))
    assert of(place.come(ask("r0", model="n")), Swap) == [Swap("e0", "n")]


def test_groups_of_one_model_are_served_together() -> None:
    """Alternating models: by deadline alone every request would need a swap."""
    place = Planned(Qlm(), instance("e0", running=1, lead=0, loadable=loads("n")))
    place.come(ask("first", answer=500, slo=soon(1000.0)))
    for i in range(8):
        place.come(ask(f"r{i}", at=0.1 + i / 100, model="mn"[i % 2], slo=soon(1000.0 + 60 * i)))
    order, swaps, now, model = [], 0, 10.0, "m"
    place.end("first", now)
    while len(order) < 8:
        now += 1.0
        commands = place.notify(Tick(), now)
        if not place.inside:
            model = {"m": "n", "n": "m"}[model]
            swaps += 1
            other = {"m": "n", "n": "m"}[model]
            place.notify(Swapped(instance("e0", running=1, lead=0, model=model, loadable=loads(other))), now)
        for id in list(place.inside):
            order.append(id)
            place.end(id, now)
        del commands
    assert sorted(order) == [f"r{i}" for i in range(8)]
    assert swaps <= 2


def test_warm_weights_are_not_warmed_again() -> None:
    place = Planned(Qlm(), instance("e0", loadable=loads("n"), warm=("n",)))
    place.come(ask("r0", slo=soon()))
    assert of(place.come(ask("r1", at=0.1, model="n", slo=soon(100.0))), Warm) == []
    cold = Planned(Qlm(QlmOptions(warms=False)), instance("e0", loadable=loads("n")))
    cold.come(ask("r0", slo=soon()))
    assert of(cold.come(ask("r1", at=0.1, model="n", slo=soon(100.0))), Warm) == []
    cold.notify(Warmed(instance("e0", loadable=loads("n"), warm=("n",))), 0.2)


def test_the_queue_of_a_dead_instance_is_planned_anew() -> None:
    place = Planned(Qlm(), instance("e0", running=1, lead=0), instance("e1", running=1, lead=0))
    for i in range(6):
        place.come(ask(f"r{i}", at=i / 100))
    inside = [id for id, name in place.inside.items() if name == "e0"]
    place.notify(InstanceDown("e0"), 1.0)
    for id in inside:
        place.inside.pop(id)
        place.notify(Returned(id), 1.0)
    for now in range(2, 12):
        for id in list(place.inside):
            assert place.inside[id] == "e1"
            place.end(id, float(now))
    assert place.core.requests == {}


def test_an_instance_that_returns_gets_work_again() -> None:
    place = Planned(Qlm(), instance("e0", running=1, lead=0))
    place.notify(InstanceDown("e0"), 0.0)
    for i in range(3):
        place.come(ask(f"r{i}", at=0.1 + i))
    assert place.inside == {}
    place.notify(InstanceUp(instance("e0", running=2, lead=0)), 5.0)
    assert sorted(place.inside) == ["r0", "r1"]


def test_a_cancelled_request_leaves_its_group() -> None:
    place = Planned(Qlm(), instance("e0", running=1, lead=0))
    for i in range(3):
        place.come(ask(f"r{i}", at=i / 100))
    place.notify(Failed("r1", "cancelled"), 0.5)
    place.end("r0", 1.0)
    assert list(place.inside) == ["r2"]
    planner = place.core.planner
    assert isinstance(planner, Qlm)
    assert planner.gauges["request_groups"] == 0


def test_a_long_request_waits_for_the_instance_that_holds_it() -> None:
    small = Instance("small", "m", 4, 10_000, 16, 512)
    place = Planned(Qlm(), small, instance("large", running=1, lead=0))
    place.come(ask("r0", prompt=2000))
    place.come(ask("r1", prompt=2000, at=0.1))
    assert place.inside == {"r0": "large"}
    place.end("r0", 1.0)
    assert place.inside == {"r1": "large"}


def test_shortage_is_signalled() -> None:
    place = Planned(Qlm(), instance("e0", running=1, lead=0))
    for i in range(40):
        place.come(ask(f"r{i}", at=i / 100, answer=1000, slo=soon(60.0)))
    place.notify(Tick(), 5.0)
    planner = place.core.planner
    assert isinstance(planner, Qlm)
    assert planner.gauges["short_requests"] > 30
    assert planner.gauges["short_seconds"] > 60


def test_what_is_overdue_inside_goes_behind_what_can_be_in_time() -> None:
    place = Planned(Qlm(), instance("e0", running=2, lead=0))
    place.come(ask("late", answer=3000, slo=soon(5.0)))
    place.come(ask("slow", answer=3000, slo=soon(10_000.0)))
    commands = place.come(ask("quick", at=6.0, answer=50, slo=soon(30.0)))
    (rerank,) = of(commands, Rerank)
    assert isinstance(rerank, Rerank)
    assert set(rerank.ranks) == {"late"}
    sends = {send.id: send.rank for send in of(commands, Send) if isinstance(send, Send)}
    assert sends["quick"] < 10_000.0 < rerank.ranks["late"]


def test_an_answer_that_streams_goes_on_after_its_first_token_was_due() -> None:
    place = Planned(Qlm(), instance("e0", running=2, lead=0))
    place.come(ask("streams", answer=3000, slo=Slo(ttft=1.0)))
    place.come(ask("late", answer=3000, slo=soon(5.0)))
    (rerank,) = of(place.come(ask("next", at=6.0, slo=soon(30.0))), Rerank)
    assert isinstance(rerank, Rerank)
    assert set(rerank.ranks) == {"late"}


def test_what_is_overdue_waits_behind_what_can_be_in_time() -> None:
    place = Planned(Qlm(), instance("e0", running=1, lead=0))
    place.come(ask("runs", answer=100, slo=soon(1.0)))
    for i in range(3):
        place.come(ask(f"late{i}", at=0.01 + i / 100, answer=100, slo=soon(2.0)))
    place.come(ask("next", at=0.1, answer=100, slo=soon(100.0)))
    for now in range(5, 10):
        place.end(place.order[-1], float(now))
    assert place.order == ["runs", "next", "late0", "late1", "late2"]


def test_a_stream_that_was_interrupted_is_not_overdue() -> None:
    place = Planned(Qlm(), instance("e0", running=1, lead=0))
    place.come(ask("streams", answer=3000, slo=Slo(ttft=1.0)))
    place.come(ask("waits", at=0.1, answer=100, slo=soon(100.0)))
    place.inside.clear()
    place.notify(InstanceDown("e0"), 5.0)
    place.notify(Returned("streams", 20), 5.0)
    place.notify(InstanceUp(instance("e0", running=1, lead=0)), 6.0)
    assert list(place.inside) == ["streams"]


def test_what_was_placed_without_the_planner_does_not_stop_it() -> None:
    """As overflow engines and a new leader place requests."""
    place = Planned(Qlm(), instance("e0", running=1, lead=0))
    for i in range(3):
        place.come(ask(f"r{i}", at=i / 100, slo=soon(30.0 + 20 * i)))
    place.core.place("r1", "e0", 0.5)
    place.end("r0", 1.0)
    assert place.order == ["r0", "r2"]
    place.notify(Returned("r1"), 1.5)
    place.end("r2", 2.0)
    assert place.order == ["r0", "r2", "r1"]


@given(st.integers(0, 1000))
@settings(max_examples=5, deadline=None)
def test_on_one_model_as_many_are_in_time_as_by_deadline(seed: int) -> None:
    """Also under overload: half of the requests are urgent, the others have minutes."""
    rng = np.random.default_rng(seed)
    at, urgent = np.sort(rng.uniform(0, 20, 60)), rng.random(60) < 0.5
    work = together(
        *(
            arriving(float(when), output=int(rng.integers(5, 40)), slo=soon(6.0 if quick else 60.0))
            for when, quick in zip(at, urgent, strict=True)
        )
    )
    kept = {}
    for name in ("qlm", "edf"):
        outcome = Simulation(find(name), [machine("e0", "default"), machine("e1", "default")], work).run()
        kept[name] = int(np.count_nonzero(outcome.end - work.arrival <= work.e2e))
    assert kept["qlm"] >= kept["edf"] - 2


def test_what_an_engine_has_learned_is_planned_by() -> None:
    place, learned = Planned(Qlm(), instance("e0")), OnlineLatency()
    place.notify(Learned("e0", learned.theta), 0.0)
    place.come(ask("r0", slo=soon()))
    planner = place.core.planner
    assert isinstance(planner, Qlm)
    estimate = planner.completion(place.core.cluster, "r0", 0.1)
    assert estimate is not None
    assert 0 < estimate.mean < 60
    assert planner.completion(place.core.cluster, "unknown", 0.1) is None


def test_estimates_grow_along_the_queue() -> None:
    place = Planned(Qlm(), instance("e0", running=1, lead=0))
    for i in range(10):
        place.come(ask(f"r{i}", at=i / 1000, answer=100, slo=soon(1000.0)))
    planner = place.core.planner
    assert isinstance(planner, Qlm)
    means = [planner.completion(place.core.cluster, f"r{i}", 0.1) for i in range(10)]
    values = [one.mean for one in means if one is not None]
    assert len(values) == 10
    assert values == sorted(values)
    assert values[-1] > 5 * values[0]


# ---- whole runs


def nodes(seed: int, models: tuple[str, ...]) -> list:  # type: ignore[type-arg]
    rng = np.random.default_rng(seed)
    out = []
    for k in range(int(rng.integers(1, 4))):
        order = [str(model) for model in rng.permutation(models)]
        out.append(
            machine(
                f"e{k}",
                *(order if k == 0 or rng.random() < 0.7 else order[:1]),
                running=int(rng.integers(1, 6)),
                each=float(rng.uniform(0.01, 0.2)),
                host=int(rng.integers(0, 4)),
                blocks=int(rng.integers(20, 200)),
            )
        )
    return out


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 100_000), st.sampled_from(VARIANTS), st.integers(1, 3), st.booleans())
def test_every_request_ends(seed: int, recipe: str, models: int, thinks: bool) -> None:
    names, rng = ("a", "b", "c")[:models], np.random.default_rng(seed)
    traffic = random_traffic(seed, names, int(rng.integers(5, 60)), float(rng.uniform(1, 40)))
    traffic = replace(
        traffic,
        e2e=rng.choice([5.0, 30.0, np.inf], len(traffic)),
        ttft=np.where(rng.random(len(traffic)) < 0.3, 2.0, np.inf),
    )
    fleet = [replace(one, instance=replace(one.instance, max_model_len=310)) for one in nodes(seed, names)]
    failures = [Failure("e0", float(rng.uniform(0, 30)), 10.0)] if seed % 2 else []
    seconds = 0.4 if thinks else 0.0
    outcome = Simulation(find(recipe), fleet, traffic, plan_seconds=lambda n: seconds, failures=failures).run()
    assert np.isfinite(outcome.end).all()
    assert (outcome.evictions >= 0).all()


def test_qlm_swaps_less_than_its_order_by_deadline() -> None:
    times = np.arange(0.0, 40.0, 0.5)
    load = together(
        arriving(*times.tolist(), model="a", slo=Slo(e2e=60.0)),
        arriving(*(times + 0.2).tolist(), model="b", slo=Slo(e2e=61.0)),
    )
    fleet = [machine("e0", "a", "b", host=4, each=0.1)]
    swaps = {name: Simulation(find(name), fleet, load).run().swaps for name in ("qlm", "qlm-by-deadline")}
    assert swaps["qlm"] < swaps["qlm-by-deadline"]


def test_a_model_that_no_instance_has_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="no instance serves or can load"):
        Simulation(find("qlm"), [machine("e0", "a")], arriving(0.0, model="z")).run()


def test_groups_of_another_size() -> None:
    planner = variant("qlm-16", "groups of another size", QlmOptions(delta=16)).planner()
    assert isinstance(planner, Qlm)
    assert planner.options.delta == 16
