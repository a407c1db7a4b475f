"""What runs in the next iteration, so that each next token comes before it is late?

Jobs with a promise run by least slack: the time until their next token is due, less the time it takes to
make it (BROS 4.2). Best-effort jobs fill what is left, and how much prompt an iteration computes follows
from the smallest slack among the answers in progress, by the learned pace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.forecast.pace import OnlinePace
from headway.memory.ledger import Ledger
from headway.pack.room import arrange, missing
from headway.types import Batch, Floats, Ints, Jobs, Step

_GRAIN = 32  # tokens; prompts are sized in steps of this


@dataclass(slots=True)
class Slack:
    """Least slack first, prompt chunks sized by the pace.

    budget: most tokens of an iteration. min_chunk: prompt tokens computed in any iteration, so that nobody
    starves. max_step: seconds no iteration with prompts should exceed, so that an arrival is seen in time.
    """

    max_running: int
    budget: int
    pace: OnlinePace
    min_chunk: int = 64
    max_step: float = 0.5

    def pack(self, jobs: Jobs, ledger: Ledger, now: float) -> Step:
        """Return the step: on time by least slack, then the late, then best effort by arrival.

        Slack alone pauses but never evicts: who waits has ever less of it, so two equals would take each
        other's KV in turn and recompute their prompts for ever. Among equals what holds KV goes on.
        """
        rows = jobs.rows()
        rows = rows[~jobs.held[rows]]
        slack = self._slack(jobs, rows, now)
        by_class = (_hope(jobs, rows, slack), jobs.urgency[rows])
        order = np.lexsort((jobs.serial[rows], slack, *by_class))
        chunk = self._chunk(jobs, rows[order], slack[order])
        step = arrange(jobs, rows[order], ledger, self.max_running, self.budget, chunk)
        if step.evict.size:
            order = np.lexsort((jobs.serial[rows], slack, ~jobs.running[rows], *by_class))
            step = arrange(jobs, rows[order], ledger, self.max_running, self.budget, chunk)
        return step

    def _slack(self, jobs: Jobs, rows: Ints, now: float) -> Floats:
        """Return seconds each row can still wait before its next token (or its whole answer) is late."""
        want = missing(jobs, rows)
        work = self.pace.prefill_seconds(want.astype(float))
        by_answer = jobs.arrival[rows] + jobs.e2e[rows] - now - work - jobs.left[rows] * self._token()
        return np.asarray(np.minimum(jobs.due(rows) - now - work, by_answer), float)

    def _token(self) -> float:
        """Seconds per token of one answer in a full batch."""
        return self.pace.seconds(Batch(self.max_running, self.max_running * 512, 0))

    def _chunk(self, jobs: Jobs, ranked: Ints, slack: Floats) -> int:
        """Return the prompt tokens for this iteration: as many as the answers in progress can wait for."""
        head = ranked[: self.max_running]
        decodes = head[jobs.running[head] & (missing(jobs, head) == 1)]
        limit = self._limit(jobs, head, slack[: self.max_running])
        context = int(jobs.computed[decodes].sum())

        def fits(prompt: int) -> bool:
            shape = Batch(decodes.size, context, prompt, prompt * prompt // 2)
            return self.pace.seconds(shape) <= limit

        low, high = self.min_chunk, max(self.budget - int(decodes.size), self.min_chunk)
        if fits(high):
            return high
        while high - low > _GRAIN:  # the pace grows with the prompt, so halving finds the largest that fits
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _limit(self, jobs: Jobs, head: Ints, slack: Floats) -> float:
        """Return the seconds this iteration may take.

        Answers in progress must not fall behind. Slack they have gained is spent only for a first token
        that has a promise, not for best-effort prompts, so that it is there when somebody arrives.
        """
        promised = np.isfinite(slack)
        answering = promised & (jobs.made[head] > 0)
        if not answering.any():
            return self.max_step
        # One that is late already catches up at half its pace; to stop all prompts for it would not save it.
        late = slack[answering] < 0
        wait = np.where(late, jobs.tpot[head][answering] / 2, slack[answering])
        limit = min(float(wait.min()), self.max_step)
        if not (promised & (jobs.made[head] == 0)).any():
            limit = min(limit, float(jobs.tpot[head][answering].min()))
        return limit


def _hope(jobs: Jobs, rows: Ints, slack: Floats) -> Ints:
    """Return 0 for rows that can be on time, 1 for first tokens already lost, 2 for best effort."""
    lost = (slack < 0) & (jobs.made[rows] == 0)
    return np.where(np.isinf(slack), 2, np.where(lost, 1, 0))
