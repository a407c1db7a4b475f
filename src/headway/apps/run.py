"""One run of an application, as its requests and reports tell it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headway.apps.demand import Draw, Known
from headway.apps.graph import LLM, Visit

Key = tuple[str, str, str]  # tenant, application, run


@dataclass(slots=True)
class OpenVisit:
    """A visit that is under way, or that ended last.

    began: instant. inside: requests in progress, 1 while a unit outside the LLM runs.
    served: a token of it is out, the first at `first_token`, or it is outside the LLM.
    planned: warm-ups for what follows are planned.
    prompt, output: tokens, summed over its requests. expected: output tokens forecast for them.
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

    @property
    def known(self) -> Known:
        """What is known of the visit's size by now."""
        return Known(self.requests, self.prompt / self.requests) if self.requests else Known()

    @property
    def closed(self) -> Visit:
        """The visit as the graph keeps it."""
        count = self.requests
        if self.backend != LLM or not count:
            return Visit(self.unit, self.backend, seconds=self.seconds)
        return Visit(self.unit, LLM, self.prompt / count, self.output / count, count)


@dataclass(slots=True)
class Run:
    """A live run.

    slot: its place in the columns of `Runs`. began: instant of its first request.
    target: seconds that it may take, None = no deadline.
    requests: ids of its requests in progress.
    visits: all of its visits by the order in which they began; the last one may be open.
    open: visits in progress, by unit.
    draw: its futures from the beginning of its latest visit, None = nothing is known.
    tier, adapter: of its latest request.
    failed: a request of it had no answer, so that it teaches nothing. ended: it is no longer live.
    """

    key: Key
    slot: int
    began: float
    target: float | None = None
    seen: float = 0.0
    requests: set[str] = field(default_factory=set)
    visits: list[OpenVisit] = field(default_factory=list)
    open: dict[str, OpenVisit] = field(default_factory=dict)
    visited: Counter[str] = field(default_factory=Counter)
    draw: Draw | None = None
    tier: str = "default"
    adapter: str | None = None
    failed: bool = False
    ended: bool = False

    @property
    def idle(self) -> bool:
        """Tell whether nothing of it is in progress that Headway knows of."""
        return not self.open

    @property
    def before(self) -> Visit | None:
        """The visit before the latest one."""
        return self.visits[-2].closed if len(self.visits) > 1 else None

    def visit(self, unit: str, backend: str, now: float) -> tuple[OpenVisit, bool]:
        """Return the visit of a unit that is in progress, or begin one; tell whether it is new.

        Requests of one unit are parallel requests of one visit while any of them is in progress.
        """
        if unit in self.open:
            return self.open[unit], False
        visit = self.open[unit] = OpenVisit(unit, backend, now, served=backend != LLM)
        self.draw = None
        self.visits.append(visit)
        self.visited[unit] += 1
        return visit, True

    def leave(self, visit: OpenVisit) -> None:
        """Note that one of a visit's requests has ended."""
        visit.inside -= 1
        if visit.inside <= 0:
            self.open.pop(visit.unit, None)

    def visited_before(self) -> Counter[str]:
        """Return how often each unit was visited before the latest visit."""
        counts = self.visited.copy()
        if self.visits:
            counts[self.visits[-1].unit] -= 1
        return counts
