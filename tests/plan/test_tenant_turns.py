"""Best effort in turns of its tenants: a flood holds up no other tenant; one alone sees no difference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.events import Failed, Finished, Started
from headway.policy.apps.demand import Knowledge
from headway.policy.core.ranks import ATTAINABLE
from headway.policy.plan.by_fleet import ByFleet
from headway.policy.plan.qlm import Qlm
from headway.policy.plan.run_order import RunOrder
from headway.policy.plan.tenant_turns import TenantTurns
from headway.policy.recipes.registry import find
from headway.types import Send, Slo
from tests.plan.place import Place, ask, instance


def place(*, fair: bool = True, ahead: int | None = None) -> Place:
    planner = ByFleet(RunOrder(ATTAINABLE, ahead=ahead, knowledge=Knowledge()), Qlm)
    if fair:
        planner.take_turns()
    return Place(planner, instance("e0", 1, lead=0))


def drain(at: Place, now: float = 100.0) -> list[str]:
    """End what is inside, one at a time, until all is done; return the order in which requests were sent."""
    while at.inside:
        id = next(iter(at.inside))
        at.notify(Started(id), now)
        at.end(id, now)
    return at.order


def test_tenants_alternate_however_many_requests_one_has() -> None:
    at = place()
    for i in range(6):
        at.come(ask(f"a{i}", tenant="a"))
    for i in range(3):
        at.come(ask(f"b{i}", 1.0, tenant="b"))
    assert drain(at) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


def test_a_tenant_that_was_away_saves_up_nothing() -> None:
    at = place()
    for i in range(9):
        at.come(ask(f"a{i}", tenant="a"))
    for i in range(5):
        at.notify(Started(f"a{i}"), 1.0)
        at.end(f"a{i}", 1.0)
    for i in range(3):
        at.come(ask(f"b{i}", 2.0, tenant="b"))
    assert drain(at)[5:10] == ["a5", "b0", "b1", "a6", "b2"], "it begins where service is, at a4"


def test_what_answers_cost_is_charged() -> None:
    at = place()
    for i in range(3):
        at.come(ask(f"a{i}", tenant="a", answer=10))
        at.come(ask(f"b{i}", tenant="b", answer=35))
    assert drain(at) == ["a0", "b0", "a1", "a2", "b1", "b2"]


def test_promises_go_before_any_turn() -> None:
    at = place()
    at.come(ask("a0", tenant="a"))
    at.come(ask("b0", 1.0, tenant="b"))
    at.come(ask("a1", 2.0, tenant="a", slo=Slo(ttft=1000.0)))
    assert drain(at) == ["a0", "a1", "b0"]


def test_engines_are_told_the_turn() -> None:
    at = place(ahead=10)
    ranks = {}
    for tenant in "aab":
        commands = at.come(ask(f"{tenant}{len(ranks)}", tenant=tenant))
        ranks |= {one.id: one.rank for one in commands if isinstance(one, Send)}
    assert ranks["a0"] == ranks["b2"] < ranks["a1"], "what waits inside is ordered, too"
    assert min(ranks.values()) > 0.0, "best effort stays behind promises"


ASKED = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12)


@given(ASKED)
def test_a_single_tenant_is_served_as_it_comes(asked: list[tuple[int, int]]) -> None:
    alone, plain = place(), place(fair=False)
    for at in (alone, plain):
        for i, (prompt, answer) in enumerate(asked):
            at.come(ask(f"r{i}", float(i), prompt=prompt, answer=answer))
    assert drain(alone) == drain(plain)


@given(
    costs=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9), st.integers(1, 9)), max_size=60),
    short=st.booleans(),
)
def test_service_of_tenants_that_wait_stays_close(costs: list[tuple[str, int, int]], short: bool) -> None:
    """While both wait, their service differs by two of the largest requests at most (VTC, theorem 4.4)."""
    turns, waiting = TenantTurns(), dict[str, list[tuple[float, str, int]]](a=[], b=[])
    for i, (tenant, prompt, answer) in enumerate(costs):
        turn = turns.take(f"r{i}", tenant, prompt, float(answer))
        waiting[tenant].append((turn, f"r{i}", prompt + 2 * answer))
    served = dict.fromkeys("ab", 0)
    while all(waiting.values()):
        tenant = min("ab", key=lambda name: waiting[name][0])
        _, id, cost = waiting[tenant].pop(0)
        turns.began(id)
        turns.ended(id, None if short else 1)
        served[tenant] += cost
        assert abs(served["a"] - served["b"]) <= 2 * 27


def test_an_answer_shorter_than_expected_is_given_back() -> None:
    turns = TenantTurns()
    turns.take("r0", "a", 10, 100.0)
    turns.ended("r0", 5)
    assert turns.take("r1", "a", 10, 1.0) == 20.0
    turns.ended("unknown", 5)


def test_other_recipes_take_no_turns() -> None:
    planner = find("vllm").planner()
    planner.take_turns()
    at = Place(planner, instance("e0", 1, lead=0))
    for i, tenant in enumerate("aaab"):
        at.come(ask(f"{tenant}{i}", float(i), tenant=tenant))
    at.notify(Failed("a1", "gone"), 5.0)
    assert isinstance(at.notify(Finished("a0", 1), 5.0)[0], Send)
    assert at.order[-1] == "a2"
