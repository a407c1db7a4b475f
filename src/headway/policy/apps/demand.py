"""The work that a run still has to do: random walks over the rest of its demand graph (Hermes 3.2)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.apps.graph import KEPT, Graph, Record, Unit, Visit
from headway.policy.core.pseudo_random import State, below, seeded
from headway.types import Bools, Floats, Ints

BUCKETS = 10
_THRESHOLD = 0.5  # of Pearson's coefficient (Hermes 5.1)
UNKNOWN = -1  # the bucket of a value that is not known
# The columns that a record may be asked for: of the visit before it, then of its own.
BEFORE_PROMPT, BEFORE_OUTPUT, BEFORE_PARALLEL, PROMPT = range(4)
CONDITIONS = 4


@dataclass(frozen=True, slots=True)
class Correlation:
    """The correlations of one unit.

    masks: which of the five hold: input on input before, input on output before, output on output before,
        output on own input, parallelism on parallelism before.
    edges: per condition, the inner borders of its buckets of equal width, shape (CONDITIONS, BUCKETS - 1).
    buckets: of the unit's records, shape (records, CONDITIONS); `UNKNOWN` where a record has no visit before.
    """

    masks: tuple[bool, bool, bool, bool, bool]
    edges: Floats
    buckets: Ints

    @property
    def used(self) -> Bools:
        """Tell which conditions narrow down the unit's records, shape (CONDITIONS,)."""
        on_input, on_output, out_on_out, own, parallel = self.masks
        return np.array([on_input, on_output or out_on_out, parallel, own])


def correlation_of(records: Sequence[Record]) -> Correlation:
    """Return which correlations the records of a unit show, and their buckets."""
    mine = np.array([(r.visit.prompt, r.visit.output, r.visit.parallel) for r in records], float)
    before = np.array([_before(record) for record in records], float)
    masks = (
        _correlated(before[:, 0], mine[:, 0]),
        _correlated(before[:, 1], mine[:, 0]),
        _correlated(before[:, 1], mine[:, 1]),
        _correlated(mine[:, 0], mine[:, 1]),
        _correlated(before[:, 2], mine[:, 2]),
    )
    columns = np.column_stack([before, mine[:, 0]])
    edges = np.array([_edges(column) for column in columns.T])
    buckets = np.column_stack([bucket(column, edge) for column, edge in zip(columns.T, edges, strict=True)])
    return Correlation(masks, edges, buckets)


def bucket(values: Floats, edges: Floats) -> Ints:
    """Return the bucket of each value; values beyond the records' range fall into the outermost buckets."""
    return np.where(np.isnan(values), UNKNOWN, np.searchsorted(edges, values, side="right")).astype(np.int64)


def _before(record: Record) -> tuple[float, float, float]:
    visit = record.before
    if visit is None or not visit.parallel:
        return (np.nan, np.nan, np.nan)
    return (visit.prompt, visit.output, visit.parallel)


def _correlated(x: Floats, y: Floats) -> bool:
    """Tell whether Pearson's coefficient is above the threshold, where both are known."""
    known = ~(np.isnan(x) | np.isnan(y))
    x, y = x[known], y[known]
    if x.size < BUCKETS or np.ptp(x) == 0 or np.ptp(y) == 0:
        return False
    return bool(np.corrcoef(x, y)[0, 1] > _THRESHOLD)


def _edges(column: Floats) -> Floats:
    known = column[~np.isnan(column)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    return np.linspace(low, high, BUCKETS + 1)[1:-1]


SAMPLES = 128  # walks per estimate
_ENOUGH = 20  # records of a unit to draw from, of like ordinals where there are not as many of one
_TRIES = 32  # records drawn at random in search of one that fits
_LONGEST = 1000  # visits of one walk: a graph may have a loop that is never left
_NOTHING = (np.nan, np.nan, np.nan)


class Costs(NamedTuple):
    """What tokens cost in a full batch, in seconds (the latency profile's).

    prompt: of the request itself, per prompt token. output: the same per output token.
    delay: that a prompt token costs all answers of the batch together, as each waits for it. An answer shares
        its iterations with the others; a prompt makes them longer.
    """

    prompt: float
    output: float
    delay: float


class Known(NamedTuple):
    """What is known of a run's current visit: its requests so far, and their mean prompt; 0 = nothing."""

    parallel: int = 0
    prompt: float = 0.0


class Draw(NamedTuple):
    """Equally likely futures of a run, aligned, shape (SAMPLES,).

    total: seconds of service from the beginning of the current visit to the end of the run: what all of its
        requests take, prompts at what they cost the batch.
    path: the seconds that the run takes when it waits for nothing: one request of each visit, as parallel
        ones are served at the same time.
    visit: the path of the current visit alone.
    after: index in `Demand.units` of the unit after it, -1 = the run ends.
    """

    total: Floats
    path: Floats
    visit: Floats
    after: Ints


class _Tables(NamedTuple):
    """A graph as arrays. Records are grouped by unit and sorted by ordinal.

    prompt, output, parallel, seconds, after: of the records; after = the index of a unit, -1 = none.
    buckets: shape (records, CONDITIONS). used, edges: of the units, as in `Correlation`.
    begin, end: of the records to draw from, by unit and ordinal; the last ordinal is for all beyond it.
    """

    prompt: Floats
    output: Floats
    parallel: Ints
    seconds: Floats
    after: Ints
    buckets: Ints
    used: Bools
    edges: Floats
    begin: Ints
    end: Ints


class Demand:
    """The compiled view of a graph as it is now.

    units: names of its units. backends: of its units. runs: of the graph when this was made.
    """

    def __init__(self, graph: Graph) -> None:
        self.units = list(graph.units)
        self.backends = {name: unit.backend for name, unit in graph.units.items()}
        self.runs = graph.runs
        self._index = {name: i for i, name in enumerate(self.units)}
        self._tables = _tables(list(graph.units.values()), self._index)

    def draw(
        self, unit: str, visited: Mapping[str, int], before: Visit | None, known: Known, costs: Costs, seed: int
    ) -> Draw | None:
        """Draw futures of a run that is at the beginning of a visit; None for a unit that is not known.

        visited: how often it has visited each unit before. before: its visit before this one.
        """
        if unit not in self._index:
            return None
        counts = np.array([visited.get(name, 0) for name in self.units])
        values = _NOTHING
        if before is not None and before.parallel:
            values = (before.prompt, before.output, float(before.parallel))
        total, path, first = np.empty((3, SAMPLES))
        draw = Draw(total, path, first, np.empty(SAMPLES, np.int64))
        at = self._index[unit]
        _walk(self._tables, at, counts, np.array(values), known, costs, seeded(seed), draw)
        return draw


def _tables(units: list[Unit], index: Mapping[str, int]) -> _Tables:
    records = [sorted(unit.records, key=lambda record: record.ordinal) for unit in units]
    correlations = [correlation_of(some) for some in records]
    flat = [record for some in records for record in some]
    columns = [(r.visit.prompt, r.visit.output, r.visit.parallel, r.visit.seconds) for r in flat]
    prompt, output, parallel, seconds = np.array(columns, float).reshape(-1, 4).T.copy()
    begin, end = _spans(records)
    return _Tables(
        prompt,
        output,
        parallel.astype(np.int64),
        seconds,
        np.array([index.get(record.after, -1) for record in flat], np.int64),
        np.concatenate([one.buckets for one in correlations] or [np.empty((0, CONDITIONS), np.int64)]),
        *_conditions(correlations),
        begin,
        end,
    )


def _conditions(correlations: list[Correlation]) -> tuple[Bools, Floats]:
    return np.array([one.used for one in correlations]), np.array([one.edges for one in correlations])


def _spans(records: list[list[Record]]) -> tuple[Ints, Ints]:
    """Return which records to draw from by unit and ordinal: of that ordinal, or around it."""
    most = max((some[-1].ordinal for some in records), default=0)
    begin = np.zeros((len(records), most + 2), np.int64)
    end, offset = begin.copy(), 0
    for i, some in enumerate(records):
        ordinals = np.array([record.ordinal for record in some])
        low, high = np.searchsorted(ordinals, [np.arange(most + 2), np.arange(1, most + 3)])
        more = (np.maximum(_ENOUGH - (high - low), 0) + 1) // 2
        begin[i] = offset + np.clip(low - more, 0, max(len(some) - _ENOUGH, 0))
        end[i] = offset + np.clip(high + more, min(_ENOUGH, len(some)), len(some))
        offset += len(some)
    return begin, end


@compiled
def _pick(tables: _Tables, unit: int, ordinal: int, want: Ints, state: State) -> int:
    """Return a record of a unit whose buckets are the wanted ones; any, if there is none like that."""
    last = tables.begin.shape[1] - 1
    begin, end = tables.begin[unit, min(ordinal, last)], tables.end[unit, min(ordinal, last)]
    start, record = -1, -1
    for tried in range(_TRIES + end - begin):
        if tried < _TRIES:  # all records that fit are equally likely
            record = int(begin + below(state, end - begin))
            start = record if tried == 0 else start
        else:  # few fit: the next one
            record = record + 1 if record + 1 < end else begin
        fits = True
        for c in range(want.size):
            fits &= want[c] == UNKNOWN or tables.buckets[record, c] == want[c]
        if fits:
            return record
    return start


@compiled
def _bucket(edges: Floats, value: float) -> int:
    return UNKNOWN if np.isnan(value) else int(np.searchsorted(edges, value, side="right"))


@compiled
def _walk(
    tables: _Tables, first: int, visited: Ints, before: Floats, known: Known, costs: Costs, state: State, draw: Draw
) -> None:
    want = np.empty(CONDITIONS, np.int64)
    for i in range(draw.total.size):
        unit, values, counts, total, path = first, before.copy(), visited.copy(), 0.0, 0.0
        for step in range(_LONGEST):
            for c in range(CONDITIONS - 1):
                asked = tables.used[unit, c]
                want[c] = _bucket(tables.edges[unit, c], values[c]) if asked else UNKNOWN
            want[CONDITIONS - 1] = UNKNOWN
            if step == 0 and known.parallel and tables.used[unit, CONDITIONS - 1]:
                want[CONDITIONS - 1] = _bucket(tables.edges[unit, CONDITIONS - 1], known.prompt)
            record = _pick(tables, unit, counts[unit], want, state)
            prompt, parallel = tables.prompt[record], tables.parallel[record]
            if step == 0 and known.parallel:
                prompt, parallel = known.prompt, known.parallel
            prompts, answer = parallel * prompt, tables.output[record] * costs.output
            total += prompts * costs.delay + parallel * answer + tables.seconds[record]
            path += prompts * costs.prompt + answer + tables.seconds[record]
            if step == 0:
                draw.visit[i], draw.after[i] = path, tables.after[record]
            counts[unit] += 1
            values[:] = np.nan
            if parallel:
                values[0], values[1], values[2] = prompt, tables.output[record], parallel
            unit = tables.after[record]
            if unit < 0:
                break
        draw.total[i], draw.path[i] = total, path


SHARED = ""  # the tenant of graphs that were imported: they serve every tenant without runs of its own


_KEPT = 1024  # graphs


_GROWN = 20  # a compiled graph is used until this share (1/20) of the runs that it knows is new


class Knowledge:
    """Graphs by tenant and application: what one tenant's runs teach is not used for another's.

    learns: runs that end teach their graph.
    """

    def __init__(self, *, learns: bool = True) -> None:
        self.learns = learns
        self._graphs: OrderedDict[tuple[str, str], Graph] = OrderedDict()
        self._compiled: dict[tuple[str, str], Demand] = {}

    @property
    def graphs(self) -> dict[tuple[str, str], Graph]:
        """The graphs by (tenant, application)."""
        return dict(self._graphs)

    def put(self, tenant: str, graph: Graph) -> None:
        """Add or replace a graph."""
        self._graphs[tenant, graph.app] = graph
        self._compiled.pop((tenant, graph.app), None)
        self._forget()

    def learn(self, tenant: str, app: str, visits: Sequence[Visit]) -> None:
        """Learn from a complete run; the first one of a tenant starts from the shared graph, if any."""
        if not self.learns:
            return
        graph = self._graphs.get((tenant, app))
        if graph is None:
            shared = self._graphs.get((SHARED, app))
            graph = Graph(app) if shared is None else shared.copy()
            self._graphs[tenant, app] = graph
        graph.learn(visits)
        self._graphs.move_to_end((tenant, app))
        self._forget()

    def demand(self, tenant: str, app: str) -> Demand | None:
        """Return the compiled graph of an application, None = nothing is known of it."""
        key = (tenant, app) if (tenant, app) in self._graphs else (SHARED, app)
        graph = self._graphs.get(key)
        if graph is None or not graph.units:
            return None
        self._graphs.move_to_end(key)
        compiled = self._compiled.get(key)
        if compiled is None or graph.runs > compiled.runs + min(compiled.runs, KEPT) // _GROWN:
            compiled = self._compiled[key] = Demand(graph)
        return compiled

    def _forget(self) -> None:
        """Forget the least used graph of the tenant that has most: no tenant pushes out another's."""
        while len(self._graphs) > _KEPT:
            ((most, _),) = Counter(tenant for tenant, _ in self._graphs).most_common(1)
            key = next(key for key in self._graphs if key[0] == most)
            del self._graphs[key]
            self._compiled.pop(key, None)
