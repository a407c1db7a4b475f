"""One run of an application, as its requests and reports tell it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from headway.policy.apps.demand import Demand, Draw, Known
from headway.policy.apps.graph import KEPT, LLM, Visit
from headway.prefix import run_number
from headway.types import Request, Slo

Key = tuple[str, str, str]  # tenant, application, run
PLAIN = "plain "  # before the task's name: the application of requests that belong to none
CALL = "call"  # the only unit of such a request, and any unit without a name
_LATE = 1e-3  # seconds left to a request whose run is late already


def place_of(request: Request) -> tuple[Key, str]:
    """Return the run and the unit of a request; a request without a run is one of its own."""
    stage = request.stage
    if stage is None:
        return (request.tenant, f"{PLAIN}{request.task}", request.id), CALL
    return (request.tenant, stage.app, stage.run or request.id), stage.unit or CALL


def number_of(request: Request) -> int:
    """Return the number by which engines know a request's run (`prefix.run_number`), 0 = it belongs to none."""
    return 0 if request.stage is None else run_number(place_of(request)[0])


def within(slo: Slo, target: float | None, began: float, now: float) -> Slo:
    """Return the SLO of a request of a run that began then and may take `target` seconds, None = any time.

    It must be complete when the run must be.
    """
    if target is None:
        return slo
    left = max(began + target - now, _LATE)
    return replace(slo, e2e=left if slo.e2e is None else min(slo.e2e, left))


@dataclass(slots=True)
class OpenVisit:
    """A visit that is under way, or that ended last.

    began: instant. inside: requests in progress; outside the LLM, executions in progress.
    served: a token of it is out, the first at `first_token`, or it is outside the LLM.
    planned: warm-ups for what follows are planned.
    prompt, output: tokens, summed over its requests. expected: output tokens forecast for them.
    seconds: from begin to end, of a visit outside the LLM.
    outside: it is outside the LLM, whatever its backend's name.
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

    slot: its place in the columns of `Runs`, -1 = it has none.
    began: instant of its first request or unit. seen: of its latest sign of life.
    last: at which the latest of its requests and units ended, None = none has.
    target: seconds that it may take, None = no deadline.
    final: it ends as soon as no request of it is in progress.
    requests: ids of its requests in progress.
    visits: the latest ones by the order in which they began, at most `kept`; the last one may be open.
    steps: visits that have begun, all of them.
    open: visits in progress, by unit and whether they are outside the LLM.
    visited: how often each unit was visited, among `visits`.
    draw: its futures from the beginning of its latest visit, None = nothing is known.
    demand: that they are drawn from, None = another source.
    tier, adapter: of its latest request.
    failed: a request of it had no answer. lost: nor had its client left.
    ended: it is no longer live.
    """

    key: Key
    slot: int
    began: float
    target: float | None = None
    seen: float = 0.0
    last: float | None = None
    final: bool = False
    requests: set[str] = field(default_factory=set)
    visits: deque[OpenVisit] = field(default_factory=deque)
    steps: int = 0
    open: dict[tuple[str, bool], OpenVisit] = field(default_factory=dict)
    visited: Counter[str] = field(default_factory=Counter)
    draw: Draw | None = None
    demand: Demand | None = None
    tier: str = "default"
    adapter: str | None = None
    failed: bool = False
    lost: bool = False
    ended: bool = False
    kept: int = KEPT

    @property
    def teaches(self) -> bool:
        """Tell whether its visits are a complete run."""
        return not (self.failed or self.open) and len(self.visits) == self.steps

    @property
    def outside(self) -> int:
        """Executions outside the LLM that are in progress."""
        return sum(visit.inside for visit in self.open.values() if visit.outside)

    @property
    def before(self) -> Visit | None:
        """The visit before the latest one; None while it is in progress, as its size is not known."""
        if len(self.visits) < 2 or self.visits[-2].inside:
            return None
        return self.visits[-2].closed

    # ---- what happens

    def came(self, request: Request, unit: str, expected: float, now: float) -> tuple[OpenVisit, bool]:
        """A request has come: it begins a visit, or widens one that is in progress; tell which (new).

        expected: tokens of its answer.
        """
        stage = request.stage
        if stage is not None and stage.target is not None:
            self.target = stage.target
        self.final |= stage is None or stage.final or not stage.run
        visit, new = self._visit(unit, None, now)
        visit.requests += 1
        visit.inside += 1
        visit.prompt += request.prompt_tokens
        visit.expected += expected
        self.requests.add(request.id)
        self.tier, self.adapter = request.tier, request.adapter
        return visit, new

    def went(self, id: str, visit: OpenVisit, output_tokens: int | None, now: float, *, left: bool = False) -> None:
        """A request has ended; output_tokens None = without an answer, left = because its client had left."""
        self.seen = self.last = now
        self.requests.discard(id)
        self.failed |= output_tokens is None
        self.lost |= output_tokens is None and not left
        visit.output += output_tokens or 0
        self._leave(visit)

    def began_outside(self, unit: str, backend: str, now: float) -> tuple[OpenVisit, bool]:
        """A unit outside the LLM has begun; return its visit and whether it is new."""
        visit, new = self._visit(unit or CALL, backend, now)
        visit.inside += 1
        return visit, new

    def ended_outside(self, unit: str, now: float) -> OpenVisit | None:
        """A unit outside the LLM has ended; return its visit, None = it had not begun."""
        visit = self.open.get((unit or CALL, True))
        if visit is None:
            return None
        self.seen = self.last = now
        self._leave(visit)
        if not visit.inside:
            visit.seconds = now - visit.began
        return visit

    def _visit(self, unit: str, backend: str | None, now: float) -> tuple[OpenVisit, bool]:
        """Return the visit of a unit that is in progress, or begin one; tell whether it is new.

        Requests of one unit are parallel requests of one visit while any of them is in progress.
        backend: of a unit outside the LLM, which is a visit of its own beside an LLM unit of that name.
        """
        self.seen = now
        outside = backend is not None
        place = unit, outside
        if place in self.open:
            return self.open[place], False
        visit = self.open[place] = OpenVisit(unit, backend or LLM, now, served=outside, outside=outside)
        self.steps += 1
        self.draw = self.demand = None
        self.visits.append(visit)
        self.visited[unit] += 1
        if len(self.visits) > self.kept:
            self._forget(self.visits.popleft().unit)
        return visit, True

    def _forget(self, unit: str) -> None:
        self.visited[unit] -= 1
        if not self.visited[unit]:
            del self.visited[unit]

    def _leave(self, visit: OpenVisit) -> None:
        visit.inside -= 1
        if not visit.inside:
            del self.open[visit.unit, visit.outside]

    def visited_before(self) -> Counter[str]:
        """Return how often each unit was visited before the latest visit."""
        counts = self.visited.copy()
        if self.visits:
            counts[self.visits[-1].unit] -= 1
        return counts
