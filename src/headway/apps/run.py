"""One run of an application, as its requests and reports tell it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from headway.apps.demand import Demand, Draw, Known
from headway.apps.graph import KEPT, LLM, Visit

Key = tuple[str, str, str]  # tenant, application, run


@dataclass(slots=True)
class OpenVisit:
    """A visit that is under way, or that ended last.

    began: instant. inside: requests or units outside the LLM in progress.
    served: a token of it is out, the first at `first_token`, or it is outside the LLM.
    planned: warm-ups for what follows are planned.
    prompt, output: tokens, summed over its requests. expected: output tokens forecast for them.
    seconds: from begin to end, of a visit outside the LLM. outside: it is one, whatever its backend's name.
    """

    unit: str
    backend: str
    began: float
    requests: int = 0
    inside: int = 0
    served: bool = False
    planned: bool = False
    first_token: float = 0.0
    prompt: int = 0
    output: int = 0
    expected: float = 0.0
    seconds: float = 0.0
    outside: bool = False

    @property
    def known(self) -> Known:
        """What is known of the visit's size by now."""
        return Known(self.requests, self.prompt / self.requests) if self.requests else Known()

    @property
    def closed(self) -> Visit:
        """The visit as the graph keeps it."""
        count = self.requests
        if self.outside or not count:
            return Visit(self.unit, self.backend, seconds=self.seconds)
        return Visit(self.unit, LLM, self.prompt / count, self.output / count, count)


@dataclass(slots=True)
class Run:
    """A live run.

    slot: its place in the columns of `Runs`. began: instant of its first request. seen: of the latest sign.
    target: seconds that it may take, None = no deadline.
    requests: ids of its requests in progress.
    visits: its latest visits (as many as a graph keeps) by the order in which they began.
    steps: visits that have begun. visited: how often each unit is among `visits`.
    open: visits in progress, by unit and whether they are outside the LLM.
    draw: its futures from the beginning of its latest visit, None = nothing is known.
    demand: that they are drawn from, None = another source.
    tier, adapter: of its latest request.
    failed: a request of it had no answer, so that it teaches nothing.
    ending: it ends with what is in progress. ended: it is no longer live.
    """

    key: Key
    slot: int
    began: float
    target: float | None = None
    seen: float = 0.0
    requests: set[str] = field(default_factory=set)
    visits: deque[OpenVisit] = field(default_factory=deque)
    open: dict[tuple[str, bool], OpenVisit] = field(default_factory=dict)
    steps: int = 0
    visited: Counter[str] = field(default_factory=Counter)
    draw: Draw | None = None
    demand: Demand | None = None
    tier: str = "default"
    adapter: str | None = None
    failed: bool = False
    ending: bool = False
    ended: bool = False

    @property
    def idle(self) -> bool:
        """Tell whether nothing of it is in progress that Headway knows of."""
        return not self.open

    @property
    def before(self) -> Visit | None:
        """The visit before the latest one; None while it is in progress, as its size is not known."""
        if len(self.visits) < 2 or self.visits[-2].inside:
            return None
        return self.visits[-2].closed

    def visit(self, unit: str, now: float, backend: str | None = None) -> tuple[OpenVisit, bool]:
        """Return the visit of a unit that is in progress, or begin one; tell whether it is new.

        Requests of one unit are parallel requests of one visit while any of them is in progress.
        backend: of a unit outside the LLM, which is a visit of its own beside an LLM unit of that name.
        """
        place = (unit, backend is not None)
        if place in self.open:
            return self.open[place], False
        outside = backend is not None
        visit = self.open[place] = OpenVisit(unit, backend or LLM, now, served=outside, outside=outside)
        if len(self.visits) == KEPT:  # a run that never ends must not grow for ever
            self.visited[self.visits.popleft().unit] -= 1
            self.visited += Counter()  # drops units that are not visited any more
        self.draw = self.demand = None
        self.steps += 1
        self.visits.append(visit)
        self.visited[unit] += 1
        return visit, True

    def leave(self, visit: OpenVisit) -> None:
        """Note that one of a visit's requests has ended."""
        visit.inside -= 1
        if not visit.inside:
            del self.open[visit.unit, visit.outside]

    def visited_before(self) -> Counter[str]:
        """Return how often each unit was visited before the latest visit."""
        counts = self.visited.copy()
        if self.visits:
            counts[self.visits[-1].unit] -= 1
        return counts
