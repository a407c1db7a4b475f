"""The llm-d-like router: priority bands, deadlines, a saturation gate that sheds sheddable requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.plan.baselines.flow_control import FlowControl
from headway.types import Reject, Request, Slo
from tests.plan.place import Place, ask, instance

SLOS = [Slo(), Slo(ttft=0.5), Slo(ttft=5.0), Slo(e2e=2.0), Slo(e2e=60.0)]


def sheddable(request: Request) -> bool:
    return request.slo.objective == "best_effort" and request.priority > 0


PROGRAM = st.lists(
    st.tuples(st.booleans(), st.sampled_from("mn"), st.sampled_from(SLOS), st.integers(-1, 1), st.integers(1, 900)),
    max_size=50,
)


@settings(max_examples=50)
@given(PROGRAM, st.integers(1, 3), st.integers(0, 3))
def test_sheds_only_sheddable_requests_and_only_when_saturated(
    program: list[tuple[bool, str, Slo, int, int]], running: int, lead: int
) -> None:
    gate = FlowControl()
    fleet = [instance(f"e{i}", running, model="mnm"[i], blocks=100, lead=lead) for i in range(3)]
    place = Place(gate, *fleet)
    for i, (comes, model, slo, priority, prompt) in enumerate(program):
        if comes or not place.inside:
            request = ask(f"r{i}", float(i), prompt=prompt, model=model, slo=slo, priority=priority)
            commands = place.come(request)
        else:
            commands = place.end(sorted(place.inside)[0], float(i))
        full = {one.id: gate.saturated(place.core.cluster, one.id) for one in fleet}
        shut = {model: all(full[one.id] for one in fleet if one.model == model) for model in "mn"}
        for command in commands:
            if isinstance(command, Reject):
                refused = place.requests[command.id]
                assert sheddable(refused)
                assert shut[refused.model]
                assert command.retry_after is not None
        for id in place.queued:
            if id not in place.rejected:
                waiting = place.requests[id]
                assert not (sheddable(waiting) and shut[waiting.model]), "it should have been rejected"


def test_interactive_before_deadline_before_best_effort_and_edf_inside() -> None:
    place = Place(FlowControl(), instance("e0", 1, lead=0))
    place.come(ask("first"))
    slos = {"none": Slo(), "late": Slo(ttft=50.0), "soon": Slo(ttft=20.0), "report": Slo(e2e=1.0)}
    for i, (id, slo) in enumerate(slos.items()):
        place.come(ask(id, 1.0 + i, slo=slo))
    for now in range(10, 14):
        place.end(next(iter(place.inside)), float(now))
    assert place.order == ["first", "soon", "late", "report", "none"]


def test_the_gate_shuts_at_four_fifths_of_the_kv() -> None:
    place = Place(FlowControl(), instance("e0", 100, blocks=10))
    for i in range(9):
        place.come(ask(f"r{i}", float(i), prompt=6, answer=10))  # one block each
    assert len(place.inside) == 8


@pytest.mark.parametrize(
    ("slo", "priority", "shed"),
    [(Slo(), 1, True), (Slo(), 0, False), (Slo(e2e=9.0), 1, False), (Slo(ttft=1.0), 5, False)],
)
def test_which_requests_are_sheddable(slo: Slo, priority: int, shed: bool) -> None:
    place = Place(FlowControl(), instance("e0", 1, lead=0))
    place.come(ask("first"))
    place.come(ask("r", 1.0, slo=slo, priority=priority))
    assert place.rejected == (["r"] if shed else [])
    assert ("r" in place.core.requests) is not shed


def test_nothing_is_shed_while_no_instance_is_up() -> None:
    place = Place(FlowControl())
    place.come(ask("r", priority=5))
    assert place.rejected == []
