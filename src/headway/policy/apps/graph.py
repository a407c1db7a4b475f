"""Probabilistic demand graphs: what the units of an application took in earlier runs (Hermes 3.2).

A unit is a node: an LLM call with one purpose (or several in parallel), or a step outside the LLM. The graph
keeps raw records of its visits instead of a fitted distribution, the latest 1,000 per unit, and with each
record the visit before it and the unit that came next, so that correlations and branches are in the data.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from headway.errors import ConfigError

LLM = "llm"
END = ""  # the name of the unit after the last one
KEPT = 1000  # records per unit (Hermes 3.2)
_UNITS = 256  # per graph; the one that was visited longest ago is forgotten first
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Visit:
    """One execution of a unit.

    backend: "llm", or what serves the unit outside the LLM (a container image, a model, a tool).
    prompt, output: tokens per request, the mean over parallel requests.
    parallel: requests of the visit, 0 outside the LLM.
    seconds: of the visit outside the LLM, 0 for an LLM unit.
    """

    unit: str
    backend: str = LLM
    prompt: float = 0.0
    output: float = 0.0
    parallel: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """A visit as the graph keeps it.

    ordinal: how often the run had visited the unit before, at most `KEPT`.
    before: the visit before it in the run, if any. after: the unit that came next, `END` = none.
    """

    visit: Visit
    ordinal: int
    before: Visit | None
    after: str


@dataclass(slots=True)
class Unit:
    """A node of the graph: its latest records, the oldest first. latest: number of runs at the last one."""

    name: str
    latest: int = 0
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def backend(self) -> str:
        """What served the unit last."""
        return self.records[-1].visit.backend

    @property
    def next_units(self) -> dict[str, float]:
        """The units that came next -> their share of the visits, the most frequent first; `END` is one."""
        counts = Counter(record.after for record in self.records)
        return {name: count / len(self.records) for name, count in counts.most_common()}


@dataclass(slots=True)
class Graph:
    """The demand graph of one application.

    units: by name. starts: first units of the latest runs. runs: how many it has learned from.
    """

    app: str
    units: dict[str, Unit] = field(default_factory=dict)
    starts: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    runs: int = 0

    @property
    def first_units(self) -> dict[str, float]:
        """The units that runs began with -> their share, the most frequent first."""
        return {name: count / len(self.starts) for name, count in Counter(self.starts).most_common()}

    def learn(self, visits: Sequence[Visit]) -> None:
        """Learn from a complete run: its visits in the order in which they began."""
        if not visits:
            return
        self.runs += 1
        self.starts.append(visits[0].unit)
        seen: Counter[str] = Counter()
        for i, visit in enumerate(visits):
            before = visits[i - 1] if i else None
            after = visits[i + 1].unit if i + 1 < len(visits) else END
            unit = self.units.setdefault(visit.unit, Unit(visit.unit))
            unit.latest = self.runs
            unit.records.append(Record(visit, min(seen[visit.unit], KEPT), before, after))
            seen[visit.unit] += 1
        while len(self.units) > _UNITS:
            del self.units[min(self.units, key=lambda name: self.units[name].latest)]

    def copy(self) -> Graph:
        """Return a graph that learns on its own from here on; records, which never change, are shared."""
        units = {name: Unit(name, unit.latest, unit.records.copy()) for name, unit in self.units.items()}
        return Graph(self.app, units, self.starts.copy(), self.runs)

    def renamed(self, app: str, units: Mapping[str, str]) -> Graph:
        """Return the same graph for another application; units that are not named keep their names."""
        names = {name: units.get(name, name) for name in self.units}
        graph = Graph(app, runs=self.runs)
        graph.starts.extend(names[name] for name in self.starts if name in names)
        for name, unit in self.units.items():
            records = [replace(record, after=names.get(record.after, END)) for record in unit.records]
            graph.units.setdefault(names[name], Unit(names[name], unit.latest)).records.extend(records)
        return graph

    def to_json(self) -> dict[str, Any]:
        """Return the graph as JSON values (`from_json` reads them); an edge to a forgotten unit is an end."""
        known = self.units.keys()
        units = {name: [_packed(r, known) for r in unit.records] for name, unit in self.units.items()}
        starts = [name for name in self.starts if name in known]
        return {"version": _VERSION, "app": self.app, "runs": self.runs, "starts": starts, "units": units}


def from_json(text: str, source: str) -> Graph:
    """Return the graph that a file holds. ConfigError, naming `source`, for anything else."""
    try:
        values = json.loads(text)
        if values["version"] != _VERSION:
            raise ValueError(f"version {values['version']!r}, not {_VERSION}")
        graph = Graph(str(values["app"]), runs=int(values["runs"]))
        graph.starts.extend(str(name) for name in values["starts"])
        for name, records in values["units"].items():
            unit = Unit(name, graph.runs)
            unit.records.extend(_unpacked(name, *record) for record in records)
            if unit.records:
                graph.units[name] = unit
        _check(graph)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{source} holds no demand graph: {type(error).__name__}: {error}.",
            "Export it again (`headway apps export`), or delete the file: the graph is learned anew.",
        ) from error
    return graph


def _packed(record: Record, known: Set[str]) -> list[Any]:
    """Return a record as a list, without the names of its fields: a file has thousands."""
    before = None if record.before is None else list(asdict(record.before).values())
    after = record.after if record.after in known else END
    return [*list(asdict(record.visit).values())[1:], record.ordinal, before, after]


def _unpacked(
    unit: str,
    backend: str,
    prompt: float,
    output: float,
    parallel: int,
    seconds: float,
    ordinal: int,
    before: list[Any] | None,
    after: str,
) -> Record:
    visit = _checked(Visit(unit, backend, prompt, output, parallel, seconds))
    if before is not None and len(before) != len(fields(Visit)):
        raise ValueError(f"unit {unit!r} has a visit before it of {len(before)} fields")
    if not 0 <= ordinal <= KEPT:
        raise ValueError(f"unit {unit!r} has a visit number {ordinal}")
    return Record(visit, int(ordinal), None if before is None else _checked(Visit(*before)), str(after))


def _checked(visit: Visit) -> Visit:
    numbers = (visit.prompt, visit.output, visit.parallel, visit.seconds)
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError(f"unit {visit.unit!r} has a visit of {numbers}")
    if not (isinstance(visit.unit, str) and visit.unit and isinstance(visit.backend, str)):
        raise TypeError(f"unit {visit.unit!r} with backend {visit.backend!r}")
    if visit.parallel != int(visit.parallel):
        raise ValueError(f"unit {visit.unit!r} has {visit.parallel} parallel requests")
    return visit


def _check(graph: Graph) -> None:
    """Refuse a graph with edges to units that it does not have."""
    known = {END, *graph.units}
    named = {*graph.starts, *(record.after for unit in graph.units.values() for record in unit.records)}
    if named - known:
        raise ValueError(f"no unit is called {sorted(named - known)[0]!r}")
