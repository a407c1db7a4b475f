"""Which engines start, come back or stop for the number wanted."""

from __future__ import annotations

from headway.policy.scale.scaler import Member, State, changes

UP, STARTING, DRAINING, OFF = State.UP, State.STARTING, State.DRAINING, State.OFF


def test_draining_engines_come_back_before_others_start() -> None:
    fleet = [Member("off", OFF), Member("few", DRAINING, 1), Member("many", DRAINING, 9), Member("up", UP, 3)]
    assert changes(fleet, 2) == (["many"], [], [], 0)
    assert changes(fleet, 6) == (["many", "few"], ["off"], [], 2)


def test_what_is_starting_stops_first_then_the_engine_with_the_least_inside() -> None:
    fleet = [Member("old", STARTING, 0, 5.0), Member("new", STARTING, 0, 9.0), Member("a", UP, 7), Member("b", UP, 2)]
    assert [changes(fleet, wanted).stop for wanted in (3, 2, 1, 0)] == [
        ["new"],
        ["new", "old"],
        ["new", "old", "b"],
        ["new", "old", "b", "a"],
    ]
    assert changes(fleet, 4) == ([], [], [], 0)
