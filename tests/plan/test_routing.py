"""Load balancers bind a request once: round robin, or to the least loaded instance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import InstanceDown, InstanceUp, Returned
from headway.policy.plan.baselines.load_balancing import at_random, least_loaded, round_robin
from headway.policy.plan.request_column import RequestColumn
from headway.types import Backlog, Send
from tests.plan.place import Place, ask, instance

EXAMPLES = settings(max_examples=33)


@EXAMPLES
@given(st.integers(1, 5), st.lists(st.sampled_from("mn"), max_size=40), st.integers(1, 3))
def test_round_robin_deals_each_model_equally(count: int, models: list[str], running: int) -> None:
    """To the instances of its model whatever their free capacity: most requests wait."""
    fleet = [instance(f"{model}{i}", running, model=model) for model in "mn" for i in range(count)]
    place = Place(round_robin(), *fleet)
    for i, model in enumerate(models):
        place.come(ask(f"r{i}", float(i), model=model))
    dealt = dict.fromkeys((one.id for one in fleet), 0)
    now = 100.0
    while place.inside:  # every request ends where it was bound
        id, name = next(iter(place.inside.items()))
        dealt[name] += 1
        assert place.requests[id].model == name[0]
        place.end(id, now)
    assert sum(dealt.values()) == len(models)
    for model in "mn":
        counts = [dealt[f"{model}{i}"] for i in range(count)]
        assert max(counts) - min(counts) <= 1


@EXAMPLES
@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.data())
def test_least_loaded_never_sends_to_a_fuller_one(sizes: list[int], data: st.DataObject) -> None:
    fleet = [instance(f"e{i}", size, lead=100) for i, size in enumerate(sizes)]
    place = Place(least_loaded(), *fleet)
    for i in range(data.draw(st.integers(1, 40))):
        before = {one.id: place.load(one.id) / one.max_running for one in fleet}
        (send,) = place.come(ask(f"r{i}", float(i)))
        assert isinstance(send, Send)
        assert before[send.instance] == min(before.values())
        if place.inside and data.draw(st.booleans()):
            place.end(data.draw(st.sampled_from(sorted(place.inside))), float(i))


@pytest.mark.parametrize("router", [round_robin, least_loaded])
def test_a_bound_request_waits_even_if_another_instance_idles(router: object) -> None:
    place = Place(router(), instance("e0", 1, lead=0), instance("e1", 1, lead=0))  # type: ignore[operator]
    for i in range(4):
        place.come(ask(f"r{i}", float(i)))
    assert place.inside == {"r0": "e0", "r1": "e1"}
    assert place.end("r0", 5.0) == [Send("r2", "e0")]
    assert place.end("r2", 6.0) == [], "r3 is bound to e1"


@pytest.mark.parametrize("router", [round_robin, least_loaded])
def test_requests_of_a_dead_instance_are_bound_again(router: object) -> None:
    place = Place(router(), instance("e0", 1, lead=0), instance("e1", 1, lead=0))  # type: ignore[operator]
    for i in range(4):
        place.come(ask(f"r{i}", float(i)))
    place.notify(InstanceDown("e0"), 5.0)
    place.inside.pop("r0")
    place.notify(Returned("r0"), 5.0)
    for now in range(6, 9):
        place.end(next(iter(place.inside)), float(now))
    assert place.order[2:] == ["r0", "r2", "r3"], "by arrival, all to e1"


def test_requests_bound_at_once_are_spread() -> None:
    place = Place(least_loaded())
    for i in range(6):
        place.come(ask(f"r{i}", float(i)))
    place.core.cluster.instances["e1"] = instance("e1", 6)
    place.notify(InstanceUp(instance("e0", 6)), 7.0)
    assert (place.load("e0"), place.load("e1")) == (3, 3)


def test_a_request_column_does_not_survive_its_row_s_request() -> None:
    backlog, notes = Backlog(capacity=1), RequestColumn()
    row = np.array([backlog.add("old", serial=1)])
    notes.put(backlog, row, 7.0)
    assert notes.get(backlog, row).tolist() == [7.0]
    backlog.remove("old")
    assert backlog.add("new", serial=2) == row[0]
    assert np.isnan(notes.get(backlog, row)).all()
    backlog.add("more", serial=3)  # the table has grown
    assert np.isnan(notes.get(backlog, backlog.rows())).all()


def test_at_random_every_instance_gets_its_share_and_the_seed_says_which() -> None:
    def dealt(seed: int) -> list[str]:
        fleet = [instance(f"e{i}", 300) for i in range(3)]
        place = Place(at_random(seed), *fleet, instance("short", 300, blocks=10))
        for i in range(300):
            place.come(ask(f"r{i}", float(i), prompt=200))
        return [place.inside[f"r{i}"] for i in range(300)]

    counts = {name: dealt(1).count(name) for name in ("e0", "e1", "e2", "short")}
    assert counts["short"] == 0, "it cannot hold them"
    assert all(70 < counts[f"e{i}"] < 130 for i in range(3))
    assert dealt(1) == dealt(1) != dealt(2)


def test_a_long_request_passes_over_the_small_instance() -> None:
    place = Place(round_robin(), instance("small", blocks=10), instance("large"))
    for i in range(3):
        place.come(ask(f"r{i}", float(i), prompt=200))
    assert set(place.inside.values()) == {"large"}


def test_requests_wait_unbound_for_their_first_instance() -> None:
    place = Place(round_robin())
    for i in range(4):
        place.come(ask(f"r{i}", float(i)))
    place.notify(InstanceUp(instance("e0", 1, lead=0)), 5.0)
    assert place.inside == {"r0": "e0"}
