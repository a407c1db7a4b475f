"""The order that is kept as requests come and go decides as one that is made anew for every plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Arrived, Event, Failed, Finished, InstanceDown, InstanceUp, Returned, Swapped, Tick
from headway.policy.core.cluster import RowSet
from headway.policy.core.controller import Controller
from headway.policy.core.ranks import ARRIVAL, ATTAINABLE, DUE, PRIORITY
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.plan.ordered import Ordered
from headway.types import Command, Instance, Loadable, Request, Send, Slo
from tests.core.tables import Bits
from tests.plan.reference import Reference

KINDS = {"arrival": ARRIVAL, "priority": PRIORITY, "due": DUE, "attainable": ATTAINABLE}
every_order = pytest.mark.parametrize("displaces", [True, False])
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
OTHER = (Loadable("m1", 1.0, 1.0, 4096),)
FLEET = [
    Instance("small", "m0", 2, 20, 16, 300, lead=1),
    Instance("alike", "m0", 2, 20, 16, 300, lead=0),
    Instance("large", "m0", 4, 60, 16, 900, lead=2, loadable=OTHER),
    Instance("other", "m1", 1, 30, 16, 500, lead=1),
]


class Both:
    """Two controllers that are told the same events; one keeps its order, the other makes it anew."""

    def __init__(self, kind: int, displaces: bool, pull: bool) -> None:
        planners = (Ordered(kind, displaces, pull=pull), Reference(kind, displaces, pull=pull))
        self.cores = [Controller(p, TaskLengths(prior=60), 10_000) for p in planners]
        self.now, self.count = 1000.0, 0
        self.queued: set[str] = set()
        self.inside: dict[str, str] = {}
        self.up: dict[str, Instance] = {}

    def notify(self, event: Event) -> None:
        """Tell both; the commands are the same."""
        ours, wanted = ([*core.on(event, self.now)] for core in self.cores)
        assert ours == wanted, (event, ours, wanted)
        for command in ours:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        assert isinstance(command, Send)
        self.queued.remove(command.id)
        self.inside[command.id] = command.instance

    def act(self, choice: int) -> None:
        """Let the one thing happen that a number stands for."""
        bits = Bits(choice)
        kind = bits.take(16)
        self.now += bits.take(3) * 0.4
        if kind < 7:
            self._arrive(bits)
        elif kind < 12 and self.inside:
            self.end(bits, back=kind == 11)
        elif kind == 12 and self.queued:
            id = sorted(self.queued)[bits.take(len(self.queued))]
            self.queued.remove(id)
            self.notify(Failed(id, "client_gone"))
        elif kind == 13:
            self.turn(FLEET[bits.take(len(FLEET))])
        elif kind == 14 and "large" in self.up:
            self._swap()
        else:
            self.notify(Tick())

    def _arrive(self, bits: Bits) -> None:
        id, self.count = f"q{self.count}", self.count + 1
        slo = Slo(ttft=[None, 0.5, 2.0, 9.0][bits.take(4)], e2e=[None, 5.0][bits.take(2)])
        request = Request(
            id,
            f"m{int(bits.take(4) == 0)}",
            1 + bits.take(500),
            1 + bits.take(500),
            self.now - 0.3 * bits.take(3),
            slo,
            bits.take(3),
            places=[1, 1, 1, 3][bits.take(4)],
        )
        self.queued.add(id)
        self.notify(Arrived(request))

    def end(self, bits: Bits, *, back: bool) -> None:
        id = list(self.inside)[bits.take(len(self.inside))]
        self.inside.pop(id)
        if back:
            self.queued.add(id)
            self.notify(Returned(id))
        else:
            self.notify(Finished(id, 1 + bits.take(90)))

    def turn(self, instance: Instance) -> None:
        """Start an instance, or let it die: what it runs comes back one by one."""
        if instance.id not in self.up:
            self.up[instance.id] = instance
            self.notify(InstanceUp(instance))
            return
        del self.up[instance.id]
        self.notify(InstanceDown(instance.id))
        for id in [id for id, at in self.inside.items() if at == instance.id]:
            del self.inside[id]
            self.queued.add(id)
            self.notify(Returned(id))

    def _swap(self) -> None:
        """The largest instance serves another model, or its first one again."""
        first = self.up["large"].model == "m0"
        wide = Instance("large", "m1", 4, 60, 16, 4096) if first else FLEET[2]
        for id in [id for id, at in self.inside.items() if at == "large"]:
            del self.inside[id]
            self.notify(Failed(id, "gone"))
        self.up["large"] = wide
        self.notify(Swapped(wide))


@every_kind
@every_order
@settings(max_examples=20)
@given(st.lists(st.integers(0, 2**40 - 1), min_size=20, max_size=150), st.booleans())
def test_the_kept_order_decides_as_the_one_made_anew(
    kind: int, displaces: bool, program: list[int], pull: bool
) -> None:
    both = Both(kind, displaces, pull)
    for instance in FLEET[:2]:
        both.turn(instance)
    for choice in program:
        both.act(choice)


@every_kind
def test_a_long_queue_is_worked_off_in_the_same_order(kind: int) -> None:
    both, rng = Both(kind, True, True), np.random.default_rng(1)
    for _ in range(600):
        both.act(int(rng.integers(2**40)) & ~15)  # arrivals only
    for instance in FLEET:
        both.turn(instance)
    while both.inside:
        both.now += 0.1
        both.end(Bits(int(rng.integers(2**40))), back=False)
    assert not both.queued


def test_ranks_go_with_the_sends() -> None:
    core = Controller(Ordered(DUE, ranked=True), TaskLengths(), 10)
    core.on(InstanceUp(FLEET[2]), 0.0)
    commands = core.on(Arrived(Request("a", "m0", 5, 5, 1.0, Slo(ttft=2.5))), 1.0)
    assert commands == [Send("a", "large", 3.5)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20))))
def test_a_row_set_is_a_set(program: list[tuple[bool, int]]) -> None:
    rows, plain = RowSet(), set[int]()
    for adds, row in program:
        if adds and row not in plain:
            rows.add(row)
            plain.add(row)
        elif not adds:
            rows.discard(row)
            plain.discard(row)
        assert sorted(rows.rows.tolist()) == sorted(plain)
        assert len(rows) == len(plain)
        assert (row in rows) == (row in plain)


def test_a_request_for_a_full_instance_takes_no_place_of_another() -> None:
    """Inside "a" an urgent request has displaced a late one, behind which one for "a" alone ranks, but not inside."""
    core, now = Controller(Ordered(DUE), TaskLengths(prior=60), 100), 1000.0
    for name in ("a", "b"):
        core.on(InstanceUp(Instance(name, "m0", 1, 100, 16, 2048, lead=0)), now)

    def come(id: str, due_s: float, *engines: str) -> list[Command]:
        request = Request(id, "m0", 10, 10, now, Slo(ttft=due_s), engines=engines)
        return [*core.on(Arrived(request), now)]

    assert come("late", 50.0, "a") == [Send("late", "a")]
    assert come("fills b", 1.0, "b") == [Send("fills b", "b")]
    assert come("urgent", 2.0, "a") == [Send("urgent", "a")]
    assert not come("bound", 20.0, "a")
    for id in ("free 0", "free 1", "free 2"):
        assert not come(id, 30.0)
    assert [*core.on(Finished("fills b", 5), now)] == [Send("free 0", "b")]


@every_kind
@every_order
@given(st.lists(st.integers(0, 2**20 - 1), min_size=5, max_size=60))
def test_what_waits_for_some_instances_keeps_no_others_waiting(kind: int, displaces: bool, program: list[int]) -> None:
    """All that a planner would send that knows nothing of it, and has planned nothing before, has been sent."""
    core, now, inside = Controller(Ordered(kind, displaces), TaskLengths(prior=60), 100), 1000.0, list[str]()
    for name, window, limit in (("a", 1, 300), ("b", 2, 300), ("c", 1, 900)):
        core.on(InstanceUp(Instance(name, "m0", window, 40, 16, limit, lead=0)), now)
    for count, choice in enumerate(program):
        bits = Bits(choice)
        now += bits.take(3) * 0.4
        if inside and bits.take(3) == 0:
            commands = core.on(Finished(inside.pop(bits.take(len(inside))), 5), now)
        else:
            slo, only = Slo(ttft=[None, 0.5, 2.0, 9.0][bits.take(4)]), [(), ("a",), ("b",), ("a", "c")][bits.take(4)]
            size, priority = 1 + bits.take(300), bits.take(3)
            request = Request(f"q{count}", "m0", size, 10 + bits.take(300), now, slo, priority, engines=only)
            commands = core.on(Arrived(request), now)
        inside += [command.id for command in commands if isinstance(command, Send)]
        cluster = core.cluster.snapshot()
        assert not Ordered(kind, displaces).plan(cluster, now).send
        rows, sent = cluster.backlog.row_of, cluster.backlog.sent
        for id in [id for id, row in rows.items() if row in cluster.only and not sent[row]]:
            cluster.remove(id)
        assert not Ordered(kind, displaces).plan(cluster, now).send
