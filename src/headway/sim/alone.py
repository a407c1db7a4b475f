"""What if one engine holds the whole queue itself, as in the papers?

The loop of one engine without a planner before it: requests go in as they arrive, iterations follow each
other. An engine that copies KV (`engines/two_ended.py`) says itself how long an iteration takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headway.engines.simulated import Ran, SimulatedEngine
from headway.engines.two_ended import Swapping
from headway.forecast.pace import OnlinePace
from headway.ports import Pace
from headway.sim.workload import Workload
from headway.types import Floats, Ints, Slo


@dataclass(slots=True)
class Run:
    """What became of each request, by index; NaN = it did not come.

    busy: seconds of all iterations; waited: those of them that only copied. copied, dropped: tokens. batch:
    rows in each iteration.
    """

    first: Floats
    end: Floats
    evictions: Ints
    iterations: int = 0
    busy: float = 0.0
    copied: int = 0
    waited: float = 0.0
    dropped: int = 0
    batch: list[int] = field(default_factory=list)


def run(engine: SimulatedEngine, pace: Pace, learned: OnlinePace, workload: Workload, until: float) -> Run:
    """Run the workload (sorted by arrival) until everything has ended or `until` seconds have passed.

    learned: the pace that the packer goes by; it learns from every iteration.
    """
    never, size = np.full(len(workload), np.nan), len(workload)
    out, now, i = Run(never, never.copy(), np.zeros(size, np.int64)), 0.0, 0
    arrivals = workload.arrival.tolist()
    while now < until and (i < size or engine.busy):
        if not engine.busy:
            now = max(now, arrivals[i])
        while i < size and arrivals[i] <= now:
            _enter(engine, workload, i)
            i += 1
        ran = engine.schedule(now)
        if not ran.rows.size:  # whoever is inside waits for nothing that time brings, except an arrival
            assert i < size, "requests wait for ever"
            now = arrivals[i]
            continue
        now += _account(engine, pace, learned, ran, out)
        done = engine.complete(ran, now)
        rows = [int(id[1:]) for id in done.ids]
        out.first[rows], out.end[rows], out.evictions[rows] = done.first, now, done.evictions
    return out


def _account(engine: SimulatedEngine, pace: Pace, learned: OnlinePace, ran: Ran, out: Run) -> float:
    """Return the seconds of an iteration, and add it to the sums."""
    batch = engine.batch(ran)
    execution = pace.seconds(batch)
    learned.learn(batch, execution)
    seconds = engine.seconds(ran, execution) if isinstance(engine, Swapping) else execution
    out.iterations += 1
    out.busy += seconds
    out.waited += seconds - execution
    out.copied += ran.copied
    out.dropped += getattr(engine, "dropped", 0)
    out.batch.append(int(ran.rows.size))
    return seconds


def _enter(engine: SimulatedEngine, workload: Workload, i: int) -> None:
    promise = (workload.ttft[i], workload.tpot[i], workload.e2e[i])
    slo = Slo(*(None if np.isinf(limit) else float(limit) for limit in promise))
    engine.add(
        f"r{i}", int(workload.prompt[i]), int(workload.output[i]), arrival=float(workload.arrival[i]),
        slo=slo, priority=int(workload.priority[i]),
    )  # fmt: skip
