"""The requests of a simulation: one numpy column per field, so that 100,000 requests cost no Python loop.

`make` distributes arrivals (from `arrivals.py`, whose functions are exported here too, or from a recorded
trace) over classes of traffic and draws their lengths (`lengths.py`) with a seeded generator: the same seed
gives the same columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.prefix import Prefix
from headway.simulate.workload import lengths as sizes
from headway.simulate.workload.arrivals import burst, diurnal, gamma, poisson, positive, recorded, rescale, spread
from headway.simulate.workload.traces import Lengths, Trace
from headway.stages import Stage
from headway.types import Bools, Floats, Ints, Request, Slo


def column(name: str, values: Any, n: int, real: bool) -> NDArray[Any]:
    """Return values as a read-only column; ConfigError for another shape or broken numbers.

    real: of real numbers, otherwise of whole ones.
    """
    found = np.asarray(values)
    if found.shape != (n,):
        raise ConfigError(f"Column {name} has shape {found.shape}.", f"All columns need one value for each of {n}.")
    if not real and found.dtype.kind not in "iu" and n:
        raise ConfigError(f"Column {name} holds {found.dtype}.", "Give whole numbers.")
    found = found.astype(float if real else np.int64, copy=False).view()
    found.flags.writeable = False
    return found


def refuse_times(times: Floats) -> None:
    """Refuse arrivals that are not instants of a simulation."""
    refuse(~(np.isfinite(times) & (times >= 0)), "arrival", times, "0 s or later")


def refuse(bad: Bools, name: str, column: NDArray[Any], needed: str) -> None:
    """Raise ConfigError for the first bad value of a column; needed: what each must be."""
    if bad.any():
        row = int(np.argmax(bad))
        raise ConfigError(f"Request {row} has {name} {column[row]}.", f"It must be {needed}.")


__all__ = [
    "Trace",
    "TrafficClass",
    "Workload",
    "burst",
    "concat",
    "diurnal",
    "gamma",
    "make",
    "poisson",
    "recorded",
    "rescale",
    "single",
    "spread",
]

_STAGE = {"app": "apps", "run": "runs", "unit": "units"}
# Column of codes -> its names
_CODES = {"tier": "tiers", "model": "models", "tenant": "tenants", **_STAGE, "prefix": "prefixes"}
_OPTIONAL = {*_STAGE, "prefix", "drop", "soft", "line"}  # columns of zeros where they are not given
_TOKENS = ("prompt", "output", "max_tokens")
_TARGETS = ("ttft", "tpot", "e2e", "itl")
_REALS = {"arrival", *_TARGETS, "weight", "soft", "share"}


def _no_reals() -> Floats:
    return np.empty(0)


def _no_codes() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Workload:
    """The requests of one run as read-only columns of equal length n; row i is request i.

    Raises ConfigError, naming the first bad request, for columns that do not keep to this.

    arrival: seconds from the start, 0 or more.
    prompt: tokens, 1 or more.
    output: tokens that the answer will have, 1 or more; only the simulated engine reads them.
    max_tokens: tokens that the user allows, `output` or more.
    ttft, tpot, e2e, itl: SLO targets in seconds, inf = none; itl may be left out.
    priority: lower is more urgent.
    tier, model, tenant: codes, the indices of their names in `tiers`, `models` and `tenants`.
    app, run, unit: codes of the request's `Stage`; the run "" = the request belongs to no application.
    ids: the requests' ids, () = "r0", "r1", ...
    drop: 1 = refuse the request as soon as it cannot be on time; left out, none is.
    line: 1 = the tpot counts from when the first token is due (`Slo.line`); left out, none does.
    weight: of each SLO, left out = 1. share: of its class that is promised, left out or 1 = all.
    soft: soft targets, left out or 0 = none is stated (`Slo`).
    prefix: codes of the request's `Prefix`, which prefix caches know it by; None = it has one of its own.
    """

    arrival: Floats
    prompt: Ints
    output: Ints
    max_tokens: Ints
    ttft: Floats
    tpot: Floats
    e2e: Floats
    priority: Ints
    tier: Ints
    model: Ints
    tenant: Ints
    tiers: tuple[str, ...] = ("default",)
    models: tuple[str, ...] = ("default",)
    tenants: tuple[str, ...] = ("default",)
    app: Ints = field(default_factory=_no_codes)
    run: Ints = field(default_factory=_no_codes)
    unit: Ints = field(default_factory=_no_codes)
    apps: tuple[str, ...] = ("",)
    runs: tuple[str, ...] = ("",)
    units: tuple[str, ...] = ("",)
    ids: tuple[str, ...] = ()
    drop: Ints = field(default_factory=_no_codes)
    weight: Floats = field(default_factory=_no_reals)
    soft: Floats = field(default_factory=_no_reals)
    line: Ints = field(default_factory=_no_codes)
    itl: Floats = field(default_factory=_no_reals)
    share: Floats = field(default_factory=_no_reals)
    prefix: Ints = field(default_factory=_no_codes)
    prefixes: tuple[Prefix | None, ...] = (None,)

    def __post_init__(self) -> None:
        n = len(self.arrival)
        for name, value in ("weight", 1.0), ("itl", np.inf), ("share", 1.0):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.full(n, value))
        for name in _COLUMNS:
            values = getattr(self, name)
            given = name not in _OPTIONAL or len(values)
            object.__setattr__(self, name, column(name, values if given else np.zeros(n, np.int64), n, name in _REALS))
        object.__setattr__(self, "ids", tuple(self.ids))
        _check_ids(self.ids, n)
        refuse_times(self.arrival)
        for name in _TOKENS:
            refuse(getattr(self, name) < 1, name, getattr(self, name), "1 token or more")
        refuse(self.max_tokens < self.output, "max_tokens", self.max_tokens, "at least its output")
        for name in _TARGETS:
            refuse(~(getattr(self, name) > 0), name, getattr(self, name), "seconds above 0, or inf for none")
        refuse(~(self.weight > 0), "weight", self.weight, "above 0")
        refuse(~((self.share > 0) & (self.share <= 1)), "share", self.share, "above 0 and at most 1")
        refuse(~(self.soft >= 0), "soft", self.soft, "seconds above 0, or 0 for none")
        for name, table in _CODES.items():
            codes, known = getattr(self, name), len(getattr(self, table))
            refuse((codes < 0) | (codes >= known), name, codes, f"a code below {known}, one of {table}")
        self._check_prefixes()

    def _check_prefixes(self) -> None:
        tokens = np.array([0 if prefix is None else prefix.tokens for prefix in self.prefixes])[self.prefix]
        whole = np.array([prefix is not None and prefix.answer for prefix in self.prefixes])[self.prefix]
        bad = (self.prompt < tokens) | (whole & (self.prompt > tokens))
        refuse(bad, "prompt", self.prompt, "at least as long as its prefix, and equal where the answer is in it")

    def __len__(self) -> int:
        return int(self.arrival.size)

    @property
    def promised(self) -> Bools:
        """Tell which requests have an SLO."""
        return np.asarray(np.isfinite(np.min([getattr(self, name) for name in _TARGETS], axis=0)))

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {id: row for row, id in enumerate(self.ids or map(_default_id, range(len(self))))}

    def row_of(self, id: str) -> int:
        """Return the row of a request. KeyError for an id that is not in this workload."""
        return self._rows[id]

    def request(self, i: int) -> Request:
        """Return row i as the controller gets it, with the tier as its task."""
        i = range(len(self))[i]
        return Request(
            id=self.ids[i] if self.ids else _default_id(i),
            model=self.models[self.model[i]],
            prompt_tokens=int(self.prompt[i]),
            max_tokens=int(self.max_tokens[i]),
            arrival=float(self.arrival[i]),
            slo=Slo(
                _target(self.ttft[i]),
                _target(self.tpot[i]),
                _target(self.e2e[i]),
                float(self.weight[i]),
                float(self.soft[i]) or None,
                bool(self.line[i]),
                _target(self.itl[i]),
                float(self.share[i]) if self.share[i] < 1.0 else None,
            ),
            priority=int(self.priority[i]),
            tenant=self.tenants[self.tenant[i]],
            task=self.tiers[self.tier[i]],
            tier=self.tiers[self.tier[i]],
            stage=self._stage(i),
            drop=bool(self.drop[i]),
            prefix=self.prefixes[self.prefix[i]],
        )

    def _stage(self, i: int) -> Stage | None:
        run = self.runs[self.run[i]]
        return Stage(self.apps[self.app[i]], run, self.units[self.unit[i]]) if run else None

    def take(self, rows: Ints | Bools | slice) -> Workload:
        """Return these rows in this order (indices, a mask or a slice); default ids count from 0 again."""
        ids = tuple(self.ids[i] for i in np.arange(len(self))[rows].tolist()) if self.ids else ()
        return replace(self, ids=ids, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    def between(self, start: float, end: float) -> Workload:
        """Return the requests that arrive in [start, end) seconds; their times stay."""
        return self.take((self.arrival >= start) & (self.arrival < end))

    def sorted(self) -> Workload:
        """Return the requests by arrival; those of one instant keep their order."""
        return self.take(np.argsort(self.arrival, kind="stable"))


_COLUMNS = tuple(entry.name for entry in fields(Workload) if entry.name not in {*_CODES.values(), "ids"})


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """One class of traffic. Two classes may have one name (a tier on two models).

    Raises ConfigError for impossible values.

    share: of the requests, relative to the other classes' shares.
    lengths: a name or a file as `lengths.draw` takes, lengths read before, or None = as the trace has them, with its
        prefixes.
    slo_scale: factor of the SLO's targets.
    max_tokens: cuts answers; None = the longest answer drawn for the class, which reveals no answer's length.
    tenants: equally likely.
    requests_per_run: above 1, the requests are the units of application runs of the app `name`.
    concurrent_runs: runs that take their requests in turn; the next ones begin when these are complete.
    drop: refuse a request as soon as it cannot be on time.
    """

    name: str
    share: float = 1.0
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    lengths: str | Path | Lengths | None = "sharegpt"
    model: str = "default"
    slo_scale: float = 1.0
    max_tokens: int | None = None
    tenants: tuple[str, ...] = ("default",)
    requests_per_run: int = 1
    concurrent_runs: int = 8
    drop: bool = False

    def __post_init__(self) -> None:
        positive(f"share of class {self.name}", self.share)
        positive(f"slo_scale of class {self.name}", self.slo_scale)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"Class {self.name} has max_tokens {self.max_tokens}.", "Give 1 or more.")
        if not self.tenants:
            raise ConfigError(f"Class {self.name} has no tenants.", "Give at least one name.")
        if self.requests_per_run < 1 or self.concurrent_runs < 1:
            raise ConfigError(f"Class {self.name} has runs of no requests.", "Give 1 or more of both.")
        if self.drop and self.slo.ttft is None and self.slo.e2e is None:
            raise ConfigError(
                f"Class {self.name} drops requests that cannot be late.", "Give its SLO a ttft or an e2e."
            )


def make(classes: Sequence[TrafficClass], arrivals: Floats | Trace, rng: np.random.Generator) -> Workload:
    """Distribute arrivals (sorted seconds, or a trace) over the classes; the same seed, the same columns.

    Each request's class is drawn on its own. Raises ConfigError for no classes, unsorted arrivals, a class
    without lengths where no trace records them, or lengths that cannot be used.
    """
    if not classes:
        raise ConfigError("A workload of no classes asks nothing.", "Give at least one class.")
    trace = arrivals if isinstance(arrivals, Trace) else None
    times = _sorted_times(arrivals.at if isinstance(arrivals, Trace) else arrivals)
    shares = np.array([traffic.share for traffic in classes], float)
    which = rng.choice(len(classes), times.size, p=shares / shares.sum())
    rows = [np.flatnonzero(which == number) for number in range(len(classes))]
    parts = [_part(traffic, times, trace, mine, rng) for traffic, mine in zip(classes, rows, strict=True)]
    parts = [_with_runs(part, traffic, i) for i, (part, traffic) in enumerate(zip(parts, classes, strict=True))]
    # Back into the order of arrival: of requests at one instant none is first because of its class.
    return concat(*parts).take(np.argsort(np.concatenate(rows)))


def single(
    arrival: Floats,
    prompt: Ints | int,
    output: Ints | int,
    *,
    slo: Slo | None = None,
    priority: int = 0,
    tier: str = "default",
    model: str = "default",
    tenant: str = "default",
    max_tokens: Ints | int | None = None,
    drop: bool = False,
) -> Workload:
    """Return a workload of one class from its columns; a number applies to all rows.

    max_tokens None = exactly the output. Raises ConfigError as `Workload`.
    """
    n, targets = len(arrival), slo or Slo()
    seconds = {name: np.full(n, _or_never(getattr(targets, name))) for name in _TARGETS}
    allowed = output if max_tokens is None else max_tokens
    tokens = {"prompt": prompt, "output": output, "max_tokens": allowed}
    codes = {name: np.zeros(n, np.int64) for name in _CODES}
    columns = {name: _spread_out(value, n) for name, value in tokens.items()} | codes
    return _built(
        {
            "arrival": arrival,
            "priority": np.full(n, priority),
            "drop": np.full(n, int(drop)),
            "line": np.full(n, int(targets.line)),
            "weight": np.full(n, targets.weight),
            "soft": np.full(n, targets.soft or 0.0),
            "share": np.full(n, targets.share or 1.0),
        }
        | columns
        | seconds,
        {"tiers": (tier,), "models": (model,), "tenants": (tenant,)},
    )


def concat(*parts: Workload) -> Workload:
    """Return the rows of all parts one after another, their names merged; not sorted (`Workload.sorted`)."""
    if not parts:
        raise ConfigError("There are no workloads to join.", "Give at least one.")
    names = {
        table: tuple(dict.fromkeys(chain.from_iterable(getattr(part, table) for part in parts)))
        for table in _CODES.values()
    }
    columns = {name: np.concatenate([_recoded(part, name, names) for part in parts]) for name in _COLUMNS}
    if not any(part.ids for part in parts):
        return _built(columns, names)
    return replace(_built(columns, names), ids=tuple(part.request(i).id for part in parts for i in range(len(part))))


def _part(traffic: TrafficClass, times: Floats, trace: Trace | None, rows: Ints, rng: np.random.Generator) -> Workload:
    """Return the requests of one class, which come at times[rows]."""
    prompt, output = _drawn(traffic, trace, rows, rng)
    limit = traffic.max_tokens or int(output.max(initial=1))
    part = single(
        times[rows],
        prompt,
        np.minimum(output, limit),
        slo=_scaled(traffic.slo, traffic.slo_scale),
        priority=traffic.priority,
        tier=traffic.name,
        model=traffic.model,
        max_tokens=limit,
        drop=traffic.drop,
    )
    if trace is not None and trace.prefixes and traffic.lengths is None:
        prefixes = tuple(trace.prefixes[row] for row in rows.tolist())
        part = replace(part, prefix=np.arange(rows.size), prefixes=prefixes or (None,))
    tenants = tuple(dict.fromkeys(traffic.tenants))
    return replace(part, tenant=rng.integers(0, len(tenants), rows.size), tenants=tenants)


def _with_runs(part: Workload, traffic: TrafficClass, number: int) -> Workload:
    """Return the requests of class `number` as the units of application runs, if the class has any.

    Open-loop traffic: a unit arrives when the class's next request does, whether or not the one before it
    has ended.
    """
    units, together = traffic.requests_per_run, traffic.concurrent_runs
    if units == 1 or not len(part):
        return part
    round_, place = np.divmod(np.arange(len(part)), units * together)
    run, unit = round_ * together + place % together, place // together
    names = tuple(f"{number}.{i}" for i in range(int(run.max()) + 1))
    steps = tuple(f"step{i}" for i in range(units))
    return replace(part, run=run, unit=unit, apps=(traffic.name,), runs=names, units=steps)


def _drawn(traffic: TrafficClass, trace: Trace | None, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    if isinstance(traffic.lengths, Lengths):
        return sizes.resample(traffic.lengths, rows.size, rng)
    if traffic.lengths is not None:
        return sizes.draw(traffic.lengths, rows.size, rng)
    if trace is None:
        raise ConfigError(
            f"Class {traffic.name} has no lengths, and no trace records them.",
            f"Give lengths ({', '.join(sizes.names())} or a file), or a trace as arrivals.",
        )
    # As in `lengths.draw`: a prompt has a first token and an empty answer an end token.
    return np.maximum(trace.prompt_tokens[rows], 1), np.maximum(trace.output_tokens[rows], 1)


def _scaled(slo: Slo, scale: float) -> Slo:
    targets = {name: getattr(slo, name) for name in _TARGETS}
    return replace(slo, **{name: each and each * scale for name, each in targets.items()})


def _built(columns: dict[str, NDArray[Any]], names: dict[str, tuple[str, ...]]) -> Workload:
    return Workload(**columns, **names)  # type: ignore[arg-type]  # two types of keyword, checked by Workload


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _default_id(row: int) -> str:
    return f"r{row}"


def _check_ids(ids: tuple[str, ...], n: int) -> None:
    if ids and (len(ids) != n or len(set(ids)) != n):
        raise ConfigError(f"{n} requests have {len(set(ids))} different ids.", "Give each an id of its own.")


def _target(seconds: float) -> float | None:
    return None if math.isinf(seconds) else float(seconds)


def _sorted_times(times: Floats) -> Floats:
    refuse_times(times)  # here, where their places are still those of the caller
    back = np.flatnonzero(np.diff(times) < 0)
    if back.size:
        row = int(back[0]) + 1
        raise ConfigError(
            f"Arrival {row} is earlier ({times[row]:g} s) than the one before it ({times[row - 1]:g} s).",
            "Sort the arrivals.",
        )
    return times


def _spread_out(value: Ints | int, n: int) -> Ints:
    return np.full(n, value) if isinstance(value, int) else value


def _recoded(part: Workload, name: str, names: dict[str, tuple[str, ...]]) -> NDArray[Any]:
    """Return a column, its codes changed to indices into the merged names."""
    column: NDArray[Any] = getattr(part, name)
    if name not in _CODES:
        return column
    table = _CODES[name]
    position = {word: code for code, word in enumerate(names[table])}
    code = np.array([position[word] for word in getattr(part, table)], np.int64)
    return np.asarray(code[column])
