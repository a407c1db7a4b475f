"""Which engines of a model start, come back or stop, so that it has the number wanted: in gateway and simulator."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class State(Enum):
    """Of an engine that may come and go."""

    OFF = "off"
    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"


class Member(NamedTuple):
    """An engine of the model. inside: requests in it. since: instant of its last start."""

    id: str
    state: State
    inside: int = 0
    since: float = 0.0


class Changes(NamedTuple):
    """Ids of engines. undrain: they take work again. start: they are off. stop: drained, or not started at all.

    missing: how many more are wanted than there are.
    """

    undrain: list[str]
    start: list[str]
    stop: list[str]
    missing: int


def changes(engines: Sequence[Member], wanted: int) -> Changes:
    """Return what leads to the number wanted.

    Draining engines come back first, which costs nothing, those with the most inside first: they would cost longest
    anyway. What is still starting stops first, the newest of it, then the engines with the least inside.
    """

    def first_to_stop(one: Member) -> tuple[bool, float]:
        starting = one.state is State.STARTING
        return not starting, -one.since if starting else one.inside

    work = sorted((one for one in engines if one.state in (State.UP, State.STARTING)), key=first_to_stop)
    draining = sorted((one for one in engines if one.state is State.DRAINING), key=lambda one: -one.inside)
    more = max(wanted - len(work), 0)
    back = [one.id for one in draining[:more]]
    start = [one.id for one in engines if one.state is State.OFF][: more - len(back)]
    stop = [one.id for one in work[: max(len(work) - wanted, 0)]]
    return Changes(back, start, stop, more - len(back) - len(start))
