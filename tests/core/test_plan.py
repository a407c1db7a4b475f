"""Lines say which requests belong to which instance and in what order; sends carry them out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.core.cluster import Cluster
from headway.policy.core.ranks import ARRIVAL, ATTAINABLE, DUE, PRIORITY
from headway.policy.plan.ordered import Ordered
from headway.types import Backlog, Instance
from tests.core.tables import Bits
from tests.core.world import FLEET, MODELS
from tests.plan.reference import Reference

NOW = 100.0
RANKS = {"arrival": ARRIVAL, "priority": PRIORITY, "due": DUE, "attainable": ATTAINABLE}


def cluster(*instances: Instance) -> Cluster:
    output_tokens = Cluster()
    for instance in instances or (Instance("e0", "m0", 2, 1000, 16, 2048),):
        output_tokens.instances[instance.id] = instance
    return output_tokens


def add(place: Cluster, id: str, *, at: str | None = None, model: str = "m0", **values: float) -> None:
    defaults = {"arrival": NOW, "due": math.inf, "tokens": 16.0, "serial": len(place.backlog)}
    row = place.backlog.add(id, **{**defaults, **values, "model": place.code(model)})
    if at is not None:
        place.send(row, at)
        place.placement.sent(place.backlog, row, at, NOW)


def line(place: Cluster, planner: Ordered, name: str = "e0") -> list[str]:
    """Return the virtual queue that a planner's order makes."""
    return place.backlog.names(Reference(planner.kind, planner.displaces).queues(place, NOW)[name].tolist())


def sent(place: Cluster, planner: Ordered) -> list[tuple[str, str]]:
    return [(send.id, send.instance) for send in planner.plan(place, NOW).send]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Random backlogs over three instances and two models, some requests inside (`World` gives real ones)."""
    place = cluster(*FLEET.values())
    for i, number in enumerate(draw(st.lists(st.integers(0, 2**30 - 1), max_size=30))):
        bits = Bits(number)
        model, inside = MODELS[bits.take(2)], bits.take(3) == 0
        homes = [name for name, instance in FLEET.items() if instance.model == model]
        add(
            place,
            f"r{i}",
            model=model,
            at=homes[bits.take(len(homes))] if inside else None,
            arrival=NOW - bits.take(9),
            due=[math.inf, NOW - 5 + bits.take(10)][bits.take(2)],
            priority=bits.take(3),
            tokens=float(1 + bits.take(600)),
        )
    return place


PLANNERS = st.builds(Ordered, st.sampled_from(list(RANKS.values())), st.booleans())


@settings(max_examples=66)
@given(clusters(), PLANNERS)
def test_a_line_holds_what_is_inside_and_all_that_may_still_come(place: Cluster, planner: Ordered) -> None:
    backlog = place.backlog
    queues = Reference(planner.kind, planner.displaces).queues(place, NOW)
    assert list(queues) == list(place.instances)
    for name, rows in queues.items():
        ours = ~backlog.sent & (backlog.model == place.code(FLEET[name].model))
        inside = backlog.sent & (backlog.instance == place.code(name))
        assert sorted(rows.tolist()) == np.flatnonzero(backlog.live & (ours | inside)).tolist()


@settings(max_examples=66)
@given(clusters(), PLANNERS)
def test_sends_are_distinct_rows_that_are_ours_from_the_head_of_their_line(place: Cluster, planner: Ordered) -> None:
    queues, backlog = Reference(planner.kind, planner.displaces).queues(place, NOW), place.backlog
    out = planner.plan(place, NOW).send
    assert len({send.id for send in out}) == len(out)
    for send in out:
        row = backlog.row_of[send.id]
        assert not backlog.sent[row]
        assert row in queues[send.instance][: FLEET[send.instance].window]


@settings(max_examples=66)
@given(clusters(), st.sampled_from(list(RANKS.values())))
def test_sends_never_exceed_window_and_memory_unless_displacing(place: Cluster, rank: int) -> None:
    planner, backlog = Ordered(rank, displaces=False), place.backlog
    out = planner.plan(place, NOW).send
    for name, instance in FLEET.items():
        inside = backlog.live & backlog.sent & (backlog.instance == place.code(name))
        new = [backlog.row_of[send.id] for send in out if send.instance == name]
        rows = np.concatenate([np.flatnonzero(inside), np.array(new, np.int64)])
        blocks = np.ceil(backlog.tokens[rows] / instance.block_size).sum()
        assert not new or rows.size <= instance.window
        assert not new or rows.size == 1 or blocks <= instance.blocks_total


@settings(max_examples=66)
@given(clusters(), st.sampled_from(list(RANKS)))
def test_lines_are_sorted_by_their_rule(place: Cluster, name: str) -> None:
    rules: dict[str, Callable[[Backlog, int], tuple[float, ...]]] = {
        "arrival": lambda b, r: (b.arrival[r],),
        "priority": lambda b, r: (b.priority[r], b.arrival[r]),
        "due": lambda b, r: (b.due[r], b.arrival[r]),
        "attainable": lambda b, r: (
            2 if math.isinf(b.due[r]) else int(b.due[r] < NOW and not b.sent[r]),
            b.due[r],
            b.arrival[r],
        ),
    }
    rule, backlog = rules[name], place.backlog
    for displaces in (True, False):
        for rows in Reference(RANKS[name], displaces).queues(place, NOW).values():
            keys = [
                (not displaces and not backlog.sent[row], *rule(backlog, row), backlog.serial[row])
                for row in rows.tolist()
            ]
            assert keys == sorted(keys)


def test_equal_arrivals_keep_their_order_even_in_reused_rows() -> None:
    place = cluster()
    for id in ("a", "b", "c"):
        add(place, id)
    place.backlog.remove("a")
    add(place, "d", serial=3)  # reuses a's row
    assert line(place, Ordered(ARRIVAL)) == ["b", "c", "d"]


def test_priority_is_lower_first_then_arrival() -> None:
    place = cluster()
    add(place, "bulk", priority=5, arrival=NOW - 9)
    add(place, "late", priority=0, arrival=NOW)
    add(place, "early", priority=0, arrival=NOW - 1)
    assert line(place, Ordered(PRIORITY)) == ["early", "late", "bulk"]


def test_deadlines_come_first_and_best_effort_last_by_arrival() -> None:
    place = cluster()
    add(place, "free2", arrival=NOW)
    add(place, "free1", arrival=NOW - 1)
    add(place, "soon", due=NOW + 1)
    add(place, "late", due=NOW - 1)
    assert line(place, Ordered(DUE)) == ["late", "soon", "free1", "free2"]


def test_attainable_deadlines_go_before_late_requests_and_those_before_best_effort() -> None:
    place = cluster()
    add(place, "free", arrival=NOW - 99)
    add(place, "late", due=NOW - 1)
    add(place, "soon", due=NOW + 1)
    add(place, "later", due=NOW + 2)
    assert line(place, Ordered(ATTAINABLE)) == ["soon", "later", "late", "free"]


def test_running_requests_are_not_demoted_as_late() -> None:
    """After its first token every request's `due` is past; that does not make it late."""
    place = cluster()
    add(place, "runs", due=NOW - 1, at="e0")
    add(place, "soon", due=NOW + 1)
    assert line(place, Ordered(ATTAINABLE)) == ["runs", "soon"]


@pytest.mark.parametrize(("displaces", "head"), [(True, "alarm"), (False, "bulk")])
def test_only_a_displacing_line_puts_newcomers_before_what_runs(displaces: bool, head: str) -> None:
    place = cluster()
    add(place, "bulk", priority=5, at="e0")
    add(place, "alarm", priority=0)
    assert line(place, Ordered(PRIORITY, displaces))[0] == head


def test_the_most_urgent_are_sent_first_and_only_the_window() -> None:
    place = cluster()
    for i in range(9):
        add(place, f"r{i}", priority=9 - i)
    assert [id for id, _ in sent(place, Ordered(PRIORITY))] == ["r8", "r7", "r6", "r5"]


def test_what_stands_in_several_lines_goes_to_the_least_loaded() -> None:
    place = cluster(FLEET["e0"], FLEET["e1"])
    add(place, "old", at="e1", arrival=NOW - 9)
    add(place, "new")
    assert sent(place, Ordered(ARRIVAL)) == [("new", "e0")]


def test_what_is_sent_at_once_is_spread() -> None:
    place = cluster(*(replace(FLEET["e1"], id=id) for id in ("a", "b")))
    for i in range(4):
        add(place, f"r{i}")
    assert sent(place, Ordered(ARRIVAL)) == [("r0", "a"), ("r1", "b"), ("r2", "a"), ("r3", "b")]


def test_what_was_inside_a_dead_instance_stands_in_no_line() -> None:
    place = cluster()
    add(place, "lost", at="gone")
    add(place, "r")
    assert line(place, Ordered(ARRIVAL)) == ["r"]


def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones() -> None:
    """It would starve otherwise: blocks become free for it only while no other request overtakes it."""
    place = cluster(Instance("e0", "m0", 4, 10, 16, 2048))
    add(place, "runs", at="e0", arrival=NOW - 9, tokens=64.0)
    add(place, "large", arrival=NOW - 1, tokens=128.0)
    add(place, "small", arrival=NOW)
    assert sent(place, Ordered(ARRIVAL)) == []
