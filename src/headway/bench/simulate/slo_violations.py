"""Which requests of a run were late, and by how much?

Every promise of every request at once, as columns: what was promised, what was seen, and the seconds between.
A tpot is missed by its excess over all tokens of the answer, so that it can be compared with a late start.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from headway.errors import ConfigError
from headway.sim.record.run_folder import Run
from headway.sim.run import Outcome
from headway.sim.workload.traffic import Workload
from headway.types import Bools, Floats, Ints

PROMISES = ("ttft", "tpot", "e2e")
_NEAR = 3  # request ids that are suggested
_SPELLED = 2000  # ids that a misspelt one is compared to


@dataclass(frozen=True, slots=True)
class Kept:
    """One promise of one request: seconds promised and seen (inf = never came); late: seconds missed by."""

    promise: str
    promised: float
    seen: float
    late: float

    @property
    def met(self) -> bool:
        return self.seen <= self.promised


def seen(workload: Workload, outcome: Outcome) -> dict[str, Floats]:
    """Return per promise the seconds each request had, inf for what never came; tpot 0 for one token."""
    rest = np.maximum(workload.output - 1, 1)
    tpot = np.where(workload.output > 1, (outcome.end - outcome.first) / rest, 0.0)
    columns = {"ttft": outcome.first - workload.arrival, "tpot": tpot, "e2e": outcome.end - workload.arrival}
    never = np.isnan(outcome.end)
    return {name: np.where(never | np.isnan(column), np.inf, column) for name, column in columns.items()}


def late(workload: Workload, outcome: Outcome) -> dict[str, Floats]:
    """Return per promise the seconds by which each request missed it, 0 where it is kept or not made."""
    times = {"ttft": 1, "tpot": np.maximum(workload.output - 1, 1), "e2e": 1}
    found = {}
    for name, column in seen(workload, outcome).items():
        promised = getattr(workload, name)
        excess = np.where(column > promised, column, 0.0) - np.where(column > promised, promised, 0.0)
        found[name] = np.asarray(excess * times[name], float)
    return found


def promised(workload: Workload) -> Bools:
    """Tell which requests were promised anything."""
    columns = [np.isfinite(getattr(workload, name)) for name in PROMISES]
    return np.asarray(np.any(columns, axis=0))


def of(run: Run, request: int) -> list[Kept]:
    """Return the promises made to one request and what became of them, the worst missed first."""
    columns, excess = seen(run.workload, run.outcome), late(run.workload, run.outcome)
    kept = [
        Kept(name, limit, float(columns[name][request]), float(excess[name][request]))
        for name in PROMISES
        for limit in [float(getattr(run.workload, name)[request])]
        if np.isfinite(limit)
    ]
    return sorted(kept, key=lambda one: -one.late)


def worst(run: Run, count: int) -> Ints:
    """Return the requests that missed a promise by most seconds, at most `count`; the kept are left out."""
    most = np.max(list(late(run.workload, run.outcome).values()), axis=0)
    order = np.argsort(-most, kind="stable")
    return np.asarray(order[most[order] > 0][:count], np.int64)


def find(run: Run, request: str) -> int:
    """Return the row of "r17" or "17". ConfigError for an unknown one, naming ids near it."""
    text, size = request.strip(), len(run.workload)
    digits = text.removeprefix("r")
    if digits.isdecimal() and int(digits) < size:
        return int(digits)
    if not size:
        raise ConfigError(f"There is no request {request!r}: the run has none.", "Explain another run.")
    raise ConfigError(
        f"There is no request {request!r}: the run has r0 to r{size - 1}.",
        f"Did you mean {', '.join(_near(text, digits, size))}? --worst 10 lists those that were most late.",
    )


def _near(text: str, digits: str, size: int) -> list[str]:
    """Return ids like a wrong one: of a number too large its beginning, else by spelling; and the last."""
    if digits.isdecimal():
        fits = [f"r{int(digits[:end])}" for end in range(len(digits), 0, -1) if int(digits[:end]) < size]
        return list(dict.fromkeys([*fits[:1], f"r{size - 1}"]))
    ids = [f"r{i}" for i in range(min(size, _SPELLED))]
    return get_close_matches(text, ids, _NEAR, 0.4) or [f"r{size - 1}"]
