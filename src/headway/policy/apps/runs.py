"""All live runs: the service that each still needs, what it has attained, and its rank (Hermes 3.3).

Service is counted in seconds of a full batch: output tokens at the time that an iteration takes, prompt
tokens at what they cost all answers of the batch together. A rank is computed anew when a visit begins, when
the visit turns out to be larger, and whenever the attained service has passed another bucket of the demand.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headway.events import Event, Failed, Finished, Prewarmed, Returned, RunEnded, Started, UnitBegan, UnitEnded
from headway.policy.apps.demand import BUCKETS, SAMPLES, Costs, Demand, Draw, Knowledge, Known
from headway.policy.apps.gittins import gittins, latest_start, mean_remaining
from headway.policy.apps.graph import LLM, Graph, Visit
from headway.policy.apps.prewarming import Prewarming, PrewarmOptions
from headway.policy.apps.run import Key, OpenVisit, Run, place_of
from headway.types import Floats, Ints, Request

_GUESS = -np.log(1 - (np.arange(SAMPLES) + 0.5) / SAMPLES)  # an exponential distribution of mean 1
_FINEST = 1e-3  # seconds of service after which a rank is computed anew, at least
_NO_DEADLINE = 1e12  # added to the ranks of runs without a deadline or late ones, where deadlines decide

Futures = Callable[[Run, Costs], Draw | None]  # from the beginning of a run's latest visit on


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How runs are ranked.

    rank: "gittins", "mean" (shortest remaining time by the mean) or "slack" (least worst-case slack).
    refine: draw the demand again at every visit, by what the run has shown (Hermes 3.2); otherwise once.
    aging: seconds of rank that a run gains per second since it began, so that none waits for ever: a run with
        rank G is overtaken only by what begins within G / aging seconds after it.
    """

    rank: str = "gittins"
    refine: bool = True
    aging: float = 0.0


class Runs:
    """The live runs, and one column per number that a rank is computed from.

    options: of the ranks. knowledge: the applications' graphs.
    costs: seconds of service per token, set by the planner.
    futures: draws what a run has ahead of it, in place of `knowledge` (an oracle).
    prewarming: the warm-ups that are planned.
    most: live runs, beside those with requests in progress; the most silent one ends when another begins.

    Attributes:
        closed: called with each run that has ended, None = nothing is.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        options: RankOptions,
        futures: Futures | None = None,
        prewarming: Prewarming | None = None,
        *,
        most: int = 65_536,
    ) -> None:
        self.knowledge, self.options, self._most = knowledge, options, most
        self.prewarming = Prewarming(PrewarmOptions()) if prewarming is None else prewarming
        self.costs = Costs(1e-4, 0.03, 1e-4)
        self._futures = futures or self._drawn
        self._runs: dict[Key, Run] = {}
        self._quiet: OrderedDict[Key, Run] = OrderedDict()  # without requests in progress, the latest last
        self._of: dict[str, tuple[Run, OpenVisit, Request]] = {}  # by id of a request in progress
        self._first_token: dict[str, float] = {}
        self._dirty: dict[Key, None] = {}
        self._free: list[int] = []
        self._by_slot: dict[int, Run] = {}
        self._samples: Floats = np.empty((0, SAMPLES))
        self._paths: Floats = np.empty((0, SAMPLES))
        self._width, self._hopeless = np.empty(0), np.empty(0)
        self._done, self._since, self._due = np.empty(0), np.empty(0), np.empty(0)
        self._mark, self._aged, self.rank = np.empty(0), np.empty(0), np.empty(0)
        self._active: Ints = np.empty(0, np.int64)
        self._origin = math.nan
        self.closed: Callable[[Run], None] | None = None

    def __len__(self) -> int:
        return len(self._runs)

    def run_of(self, id: str) -> Run:
        """Return the run of a request in progress."""
        return self._of[id][0]

    # ---- what happens

    def note(self, event: Event, now: float) -> None:
        """Take note of whatever happens to a request or a unit that has arrived."""
        match event:
            case Started(id):
                self.started(id, now)
            case Returned(id):
                self.returned(id, now)
            case Finished(id, output_tokens):
                self.ended(id, output_tokens, now)
            case Failed(id):
                self.ended(id, None, now)
            case UnitBegan(tenant, stage, backend):
                self.unit_began((tenant, stage.app, stage.run), stage.unit, backend, now)
            case UnitEnded(tenant, stage):
                self.unit_ended((tenant, stage.app, stage.run), stage.unit, now)
            case RunEnded(tenant, app, run):
                self.end((tenant, app, run))
            case Prewarmed(resource, seconds):
                self.prewarming.learn(resource, seconds)

    def arrived(self, request: Request, expected: float, now: float) -> None:
        """A request has come: it begins a visit, or widens one that is in progress.

        expected: tokens of its answer, for applications of which nothing is known.
        """
        key, unit = place_of(request)
        run = self._runs.get(key) or self._begin(key, now)
        visit, new = run.came(request, unit, expected, now)
        if run.target is not None:
            self._due[run.slot] = run.began + run.target
        self._of[request.id] = (run, visit, request)
        self._entered(run, new, now)

    def started(self, id: str, now: float) -> None:
        """The first token of a request is out: from now on it attains service as time passes."""
        if id in self._of and id not in self._first_token:
            run, visit, request = self._of[id]
            if not visit.served:
                visit.served, visit.first_token = True, now
            self._look_ahead(run, now)
            self._first_token[id] = now
            self._done[run.slot] += request.prompt_tokens * self.costs.delay
            self._active[run.slot] += 1
            self._since[run.slot] += now

    def returned(self, id: str, now: float) -> None:
        """A request came back from its engine: what it was served is lost, until it starts again."""
        if id in self._first_token:
            run, visit, request = self._of[id]
            self._stop(run, visit, id, -request.prompt_tokens * self.costs.delay, now)

    def ended(self, id: str, output_tokens: int | None, now: float) -> None:
        """A request has ended; output_tokens None = without an answer."""
        if id not in self._of:
            return
        run, visit, request = self._of.pop(id)
        served = (output_tokens or 0) * self.costs.output
        if id not in self._first_token:
            served += request.prompt_tokens * self.costs.delay
        self._stop(run, visit, id, served, now)
        run.went(id, visit, output_tokens, now)
        if not visit.inside and visit.served:
            path = visit.output / visit.requests * self.costs.output
            self.prewarming.learn_pace(now - visit.first_token, path)
        self._left(run)

    def unit_began(self, key: Key, unit: str, backend: str, now: float) -> None:
        """A unit outside the LLM has begun; without a run it says nothing."""
        if not key[2]:
            return
        run = self._runs.get(key) or self._begin(key, now)
        _, new = run.began_outside(unit, backend, now)
        self._entered(run, new, now)
        if new:
            self._active[run.slot] += 1
            self._since[run.slot] += now

    def unit_ended(self, key: Key, unit: str, now: float) -> None:
        """A unit outside the LLM has ended; one that has not begun is ignored."""
        run = self._runs.get(key)
        visit = None if run is None else run.ended_outside(unit, now)
        if run is None or visit is None:
            return
        if not visit.inside:
            self._active[run.slot] -= 1
            self._since[run.slot] -= visit.began
            self._done[run.slot] += visit.seconds
        self._left(run)

    def end(self, key: Key) -> None:
        """A run has ended: its graph learns from it. With requests in progress it ends with the last one."""
        run = self._runs.get(key)
        if run is not None:
            run.final = True
            self._left(run)

    def rest(self, key: Key, now: float) -> float | None:
        """Return the expected seconds of service that a live run still needs, None = nothing is known."""
        run = self._runs.get(key)
        if run is None or self.knowledge.demand(key[0], key[1]) is None:
            return None
        if key in self._dirty:
            self._draw(run)
        attained = float(self._attained(now)[run.slot])
        ahead = self._samples[run.slot][self._samples[run.slot] > attained]
        return float(ahead.mean()) - attained if ahead.size else attained

    # ---- ranks

    def refresh(self, now: float) -> list[Run]:
        """Bring all ranks up to date; return the runs whose rank has changed."""
        for key in self._dirty:
            self._draw(self._runs[key])
            self._look_ahead(self._runs[key], now)
        attained = self._attained(now)
        passed = np.flatnonzero((attained >= self._mark) | (now > self._hopeless))
        dirty = [self._runs[key].slot for key in self._dirty]
        rows = np.union1d(passed, np.array(dirty, np.int64))
        if not rows.size:
            return []
        before = self.rank[rows].copy()
        self._set_ranks(rows, attained, now)
        self._dirty.clear()
        return [self._by_slot[row] for row in rows[self.rank[rows] != before].tolist()]

    def _attained(self, now: float) -> Floats:
        return np.asarray(self._done + self._active * now - self._since)

    def _set_ranks(self, rows: Ints, attained: Floats, now: float) -> None:
        width = np.maximum(self._samples[rows, -1] / BUCKETS, _FINEST)
        self._mark[rows] = (np.floor(attained[rows] / width) + 1) * width
        self.rank[rows] = self._ranks(rows, attained, now) + self._aged[rows]

    def _ranks(self, rows: Ints, attained: Floats, now: float) -> Floats:
        if self.options.rank == "mean":
            return mean_remaining(self._samples, attained, rows)
        index = gittins(self._samples, attained, rows)
        if self.options.rank == "gittins":
            return index
        on_path = attained / self._width
        start = latest_start(self._paths, on_path, self._due, now, rows)
        best = np.maximum(self._paths[rows, 0] - on_path[rows], 0.0)
        self._hopeless[rows] = np.where(np.isfinite(start), self._due[rows] - best, math.inf)
        return np.where(np.isfinite(start), start - self._origin, _NO_DEADLINE + index)

    # ---- runs and their slots

    def _begin(self, key: Key, now: float) -> Run:
        self._bound()
        if not self._free:
            self._grow()
        slot = self._free.pop()
        if math.isnan(self._origin):
            self._origin = now
        run = self._runs[key] = self._by_slot[slot] = Run(key, slot, now)
        self._aged[slot] = self.options.aging * (now - self._origin)
        return run

    def _bound(self) -> None:
        """End the most silent run when there are too many; a host says when one was silent for too long."""
        if len(self._runs) >= self._most and self._quiet:
            self._close(next(iter(self._quiet.values())), teaches=False)

    def _entered(self, run: Run, new: bool, now: float) -> None:
        """A visit has begun, or is wider than was known: the rest of the run is estimated anew."""
        if new and (self.options.refine or run.steps == 1):
            self._dirty[run.key] = None
            # What it has attained counts from here on, also while units before this one go on.
            self._done[run.slot] = self._since[run.slot] - self._active[run.slot] * now
        elif self.options.refine:
            self._dirty[run.key] = None
        self._settle(run)

    def _left(self, run: Run) -> None:
        """A part of a visit has ended, and with it maybe the run."""
        self._settle(run)
        if run.final and not run.requests:
            self._close(run, teaches=run.teaches)

    def _settle(self, run: Run) -> None:
        """Keep the order of runs without requests in progress, after a sign of life."""
        self._quiet.pop(run.key, None)
        if not run.requests:
            self._quiet[run.key] = run

    def _close(self, run: Run, *, teaches: bool) -> None:
        """Forget a run without requests in progress, and free its slot."""
        slot, run.ended = run.slot, True
        for table in (self._runs, self._quiet, self._dirty):
            table.pop(run.key, None)
        if self.closed is not None:
            self.closed(run)
        if teaches:
            self.knowledge.learn(run.key[0], run.key[1], [visit.closed for visit in run.visits])
        del self._by_slot[slot]
        self._clear(slot)
        self._free.append(slot)

    def _clear(self, slots: int | slice) -> None:
        """Let these slots be without a run."""
        for column in (self.rank, self._mark, self._hopeless, self._due):
            column[slots] = math.inf
        self._done[slots] = self._since[slots] = 0.0
        self._active[slots], self._width[slots] = 0, 1.0

    def _stop(self, run: Run, visit: OpenVisit, id: str, served: float, now: float) -> None:
        """Let a request attain nothing more as time passes, but what it was served in the end.

        Of a request of an earlier visit, only the time since the latest one began counts.
        """
        earlier = self.options.refine and visit is not run.visits[-1]
        first = self._first_token.pop(id, None)
        if first is not None:
            self._active[run.slot] -= 1
            self._since[run.slot] -= first
        since = now - first if first is not None else 0.0
        self._done[run.slot] += since if earlier else served

    def _draw(self, run: Run) -> None:
        """Draw what a run has ahead of it, from the beginning of its latest visit."""
        draw, visit, slot = self._futures(run, self.costs), run.visits[-1], run.slot
        run.draw = draw
        self._width[slot] = max(visit.requests, 1)
        if draw is None:
            mean = visit.prompt * self.costs.delay + visit.expected * self.costs.output
            self._samples[slot] = max(mean, 1e-3) * _GUESS
            self._paths[slot] = self._samples[slot] / self._width[slot]
        else:
            self._samples[slot], self._paths[slot] = np.sort(draw.total), np.sort(draw.path)

    def _look_ahead(self, run: Run, now: float) -> None:
        """Plan what to warm for the units after the latest visit, once that is served."""
        visit = run.visits[-1]
        if run.draw is not None and run.demand is not None and visit.served and not visit.planned:
            visit.planned = True
            self.prewarming.begin(run, run.draw, run.demand, now)

    def _drawn(self, run: Run, costs: Costs) -> Draw | None:
        """Draw from the application's graph, as far as it is known."""
        tenant, app, _ = run.key
        demand = run.demand = self.knowledge.demand(tenant, app)
        if demand is None or not run.visits:
            return None
        visit, seed = run.visits[-1], run.slot
        if not self.options.refine:
            return demand.draw(visit.unit, {}, None, Known(), costs, seed)
        return demand.draw(visit.unit, run.visited_before(), run.before, visit.known, costs, seed)

    def _grow(self) -> None:
        old = self.rank.size
        size = max(2 * old, 64)
        for name in ("_done", "_since", "_due", "_mark", "_aged", "_width", "_hopeless", "rank", "_active"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(size - old, column.dtype)]))
        self._clear(slice(old, size))
        more = np.zeros((size - old, SAMPLES))
        self._samples = np.concatenate([self._samples, more])
        self._paths = np.concatenate([self._paths, more])
        self._free.extend(range(size - 1, old - 1, -1))


def prepare() -> None:
    """Compile it; that takes seconds, which the first run's request would wait otherwise."""
    graph = Graph("")
    graph.learn([Visit("", LLM, 1.0, 1.0, 1)])
    Demand(graph).draw("", {}, None, Known(), Costs(1.0, 1.0, 1.0), 0)
    samples, one, row = np.ones((1, SAMPLES)), np.ones(1), np.zeros(1, np.int64)
    gittins(samples, one, row)
    mean_remaining(samples, one, row)
    latest_start(samples, one, one, 0.0, row)
