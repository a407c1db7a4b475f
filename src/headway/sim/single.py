"""What does one engine do with everything that comes, and how full are its compute and its memory?

One simulated engine with all requests in its own queue, as the papers' schedulers have them: no gateway, so
the packer sees all that waits. Beside the outcome it measures what `run.py` need not know: KV and compute in
use, weighted by time, and the wall time that the packer thought.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from headway.engines.simulated import Ran, SimulatedEngine
from headway.forecast.pace import OnlinePace
from headway.ports import Lengths
from headway.sim.host import Node
from headway.sim.outcome import Outcome
from headway.sim.workload import Workload
from headway.types import Batch


@dataclass(slots=True)
class Gauges:
    """Sums over the iterations that begin before `until`: seconds computed, seconds x KV tokens written,
    seconds x tokens computed, wall seconds of decisions. kv, compute: tokens that stand for full.

    What comes after the last arrival is an engine running empty, which says nothing of its utilization.
    """

    kv: int
    compute: int
    until: float
    busy: float = 0.0
    written: float = 0.0
    forward: float = 0.0
    thinking: float = 0.0

    @property
    def kv_utilization(self) -> float:
        """Return the mean share of the KV that holds a token's keys and values."""
        return self.written / (self.busy * self.kv)

    @property
    def compute_utilization(self) -> float:
        """Return the mean forward size as a share of the one that saturates the device."""
        return self.forward / (self.busy * self.compute)


@dataclass(slots=True)
class Single:
    """A run of `workload` on `engine`. node: whose engine it is, and its pace; learned: the packer's own."""

    engine: SimulatedEngine
    node: Node
    workload: Workload
    lengths: Lengths
    learned: OnlinePace
    gauges: Gauges

    def run(self) -> Outcome:
        """Run to the end of the last request."""
        arrivals, out = self.workload.arrival.tolist(), Outcome.of(len(self.workload))
        now, i = 0.0, 0
        while i < len(arrivals) or self.engine.busy:
            if not self.engine.busy:
                now = max(now, arrivals[i])
            while i < len(arrivals) and arrivals[i] <= now:
                self._add(i)
                i += 1
            now = self._iterate(now, out)
        return out

    def _add(self, i: int) -> None:
        request = self.workload.request(i)
        left = self.lengths.forecast(request).mean
        self.engine.add(
            request.id, request.prompt_tokens, int(self.workload.output[i]), arrival=request.arrival,
            slo=request.slo, priority=request.priority, left=left,
        )  # fmt: skip

    def _iterate(self, now: float, out: Outcome) -> float:
        """Run one iteration; return when it ends."""
        began = time.perf_counter()
        ran = self.engine.schedule(now)
        thought = time.perf_counter() - began
        assert ran.rows.size, "an engine with work computes"
        batch = self.engine.batch(ran)
        seconds = self.node.pace.seconds(batch)
        self.learned.learn(batch, seconds)
        seconds += ran.copied * self.node.copy_seconds if ran.copied else 0.0
        if now < self.gauges.until:
            self._measure(ran, seconds, thought)
        out.iterations += 1
        out.busy += seconds
        out.preempted += ran.preempted
        out.paused += ran.paused.size
        self._end(ran, now + seconds, out)
        return now + seconds

    def _measure(self, ran: Ran, seconds: float, thought: float) -> None:
        jobs, gauges = self.engine.jobs, self.gauges
        tokens = int(ran.tokens.sum())
        written = int(jobs.computed[jobs.live & jobs.running].sum()) + tokens
        gauges.busy += seconds
        gauges.thinking += thought
        gauges.written += seconds * written
        gauges.forward += seconds * min(tokens, gauges.compute)

    def _end(self, ran: Ran, now: float, out: Outcome) -> None:
        done = self.engine.complete(ran, now)
        for id, first, evictions in zip(done.ids, done.first.tolist(), done.evictions.tolist(), strict=True):
            index = int(id[1:])
            out.first[index], out.end[index], out.evictions[index] = first, now, evictions


def promised(workload: Workload, node: Node, scale: float) -> Workload:
    """Return the workload, each whole answer promised in `scale` x the seconds it takes on an idle engine.

    (EcoServe 4.1's SLO scale, with t_p and t_g taken from the pace: prefill alone, and one decode a token at
    the context in the middle of the answer.)
    """
    alone = [
        node.pace.seconds(Batch(0, 0, p, p * p // 2)) + o * node.pace.seconds(Batch(1, p + o // 2, 0))
        for p, o in zip(workload.prompt.tolist(), workload.output.tolist(), strict=True)
    ]
    never = np.full(len(workload), np.inf)
    return replace(workload, ttft=never, tpot=never, e2e=scale * np.array(alone))
