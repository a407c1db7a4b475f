"""SLO violations of a run: which requests missed ttft, tpot, e2e or itl, and by how many seconds.

A tpot violation is the excess per token times the tokens of the output, so that it compares with a late first
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from headway.errors import ConfigError
from headway.simulate.record.run_folder import Run
from headway.simulate.run import Outcome
from headway.simulate.workload.traffic import Workload
from headway.types import Bools, Floats, Ints

PROMISES = ("ttft", "tpot", "e2e", "itl")
_NEAR = 3  # most request ids to suggest
_COMPARED = 2000  # most ids to compare with a misspelt one


@dataclass(frozen=True, slots=True)
class SloResult:
    """One SLO metric of one request, in seconds.

    promise: one of PROMISES
    promised: limit
    seen: measured value, inf if it was never reached
    late: seconds by which the request missed the limit
    """

    promise: str
    promised: float
    seen: float
    late: float

    @property
    def met(self) -> bool:
        return self.seen <= self.promised


def seen(workload: Workload, outcome: Outcome) -> dict[str, Floats]:
    """Return each metric of each request in seconds; inf if it was never reached, tpot and itl 0 for one token."""
    rest = np.maximum(workload.output - 1, 1)
    tpot = np.where(workload.output > 1, (outcome.end - outcome.first) / rest, 0.0)
    columns = {
        "ttft": outcome.first - workload.arrival,
        "tpot": tpot,
        "e2e": outcome.end - workload.arrival,
        "itl": outcome.gap,
    }
    never = np.isnan(outcome.end)
    return {name: np.where(never | np.isnan(column), np.inf, column) for name, column in columns.items()}


def judged(workload: Workload, outcome: Outcome) -> dict[str, Floats]:
    """Return the values to compare with the targets: as `seen`, but with pace "line" the tpot counts from its start."""
    columns = seen(workload, outcome)
    line = (workload.line == 1) & (columns["ttft"] < workload.ttft)
    rest = np.maximum(workload.output - 1, 1)
    from_due = np.maximum(columns["e2e"] - np.where(line, workload.ttft, 0.0), 0.0) / rest
    return columns | {"tpot": np.where(line & (workload.output > 1), from_due, columns["tpot"])}


def met(workload: Workload, outcome: Outcome) -> Bools:
    """Tell which requests met all of their targets."""
    within = [column <= getattr(workload, name) for name, column in judged(workload, outcome).items()]
    return np.asarray(np.all(within, axis=0))


def late(workload: Workload, outcome: Outcome) -> dict[str, Floats]:
    """Return the seconds by which each request missed each metric, 0 if it met it or has no limit."""
    times = {"ttft": 1, "tpot": np.maximum(workload.output - 1, 1), "e2e": 1, "itl": 1}
    found = {}
    for name, column in judged(workload, outcome).items():
        promised = getattr(workload, name)
        excess = np.where(column > promised, column, 0.0) - np.where(column > promised, promised, 0.0)
        found[name] = np.asarray(excess * times[name], float)
    return found


def of(run: Run, request: int) -> list[SloResult]:
    """Return the SLO metrics of one request, the largest violation first."""
    columns, excess = judged(run.workload, run.outcome), late(run.workload, run.outcome)
    kept = [
        SloResult(name, limit, float(columns[name][request]), float(excess[name][request]))
        for name in PROMISES
        for limit in [float(getattr(run.workload, name)[request])]
        if np.isfinite(limit)
    ]
    return sorted(kept, key=lambda one: -one.late)


def worst(run: Run, count: int) -> Ints:
    """Return up to `count` requests that missed their SLO, the largest violation first."""
    most = np.max(list(late(run.workload, run.outcome).values()), axis=0)
    order = np.argsort(-most, kind="stable")
    return np.asarray(order[most[order] > 0][:count], np.int64)


def find(run: Run, request: str) -> int:
    """Return the row of request "r17" or "17", or of an id of the run. ConfigError for an unknown id."""
    if run.workload.ids:
        return _named(run.workload, request.strip())
    text, size = request.strip(), len(run.workload)
    digits = text.removeprefix("r")
    if digits.isdecimal() and int(digits) < size:
        return int(digits)
    if not size:
        raise ConfigError(f"There is no request {request!r}: the run has none.", "Explain another run.")
    raise ConfigError(
        f"There is no request {request!r}: the run has r0 to r{size - 1}.",
        f"Did you mean {', '.join(_near(text, digits, size))}? --worst 10 lists the largest violations.",
    )


def _named(workload: Workload, id: str) -> int:
    """Return the row of a request by its id. ConfigError, with similar ids, if it is unknown."""
    try:
        return workload.row_of(id)
    except KeyError:
        near = get_close_matches(id, workload.ids[-_COMPARED:], _NEAR, 0.4) or [workload.ids[-1]]
        raise ConfigError(
            f"Request {id!r} is not among these {len(workload)}: it may not have ended yet, or be too old.",
            f"Did you mean {', '.join(near)}? --worst 10 lists the largest violations.",
        ) from None


def _near(text: str, digits: str, size: int) -> list[str]:
    """Return valid ids similar to an unknown one: a prefix of a number that is too large, else by spelling."""
    if digits.isdecimal():
        fits = [f"r{int(digits[:end])}" for end in range(len(digits), 0, -1) if int(digits[:end]) < size]
        return list(dict.fromkeys([*fits[:1], f"r{size - 1}"]))
    ids = [f"r{i}" for i in range(min(size, _COMPARED))]
    return get_close_matches(text, ids, _NEAR, 0.4) or [f"r{size - 1}"]
