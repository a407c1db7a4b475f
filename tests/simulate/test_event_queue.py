"""Timers fire in order of time, ties in order of scheduling; cancelled ones do nothing."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from headway.simulate.event_queue import EventQueue


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_timers_fire_in_order_and_cancelled_ones_only_pass(plan: list[tuple[int, bool]]) -> None:
    queue, fired = EventQueue(), list[tuple[float, int]]()
    for number, (when, cancelled) in enumerate(plan):
        timer = queue.at(float(when), lambda now, number=number: fired.append((now, number)))  # type: ignore[misc]
        if cancelled:
            timer.cancel()
    times = []
    while queue:
        assert queue.next_time >= (times[-1] if times else 0.0)
        times.append(queue.run_next())
    assert queue.next_time == math.inf
    assert times == sorted(float(when) for when, _ in plan)
    kept = [(float(when), number) for number, (when, cancelled) in enumerate(plan) if not cancelled]
    assert fired == sorted(kept)


def test_a_callback_may_schedule_at_its_own_instant() -> None:
    queue, fired = EventQueue(), list[str]()

    def first(now: float) -> None:
        fired.append("first")
        queue.at(now, lambda _: fired.append("third"))

    queue.at(1.0, first)
    queue.at(1.0, lambda _: fired.append("second"))
    while queue:
        queue.run_next()
    assert fired == ["first", "second", "third"]
