"""What ran in the next iteration before prompts were chunked?

`VllmV0` is vLLM as the five papers measured it: prompts have iterations of their own, and blocks are given as
answers grow (vLLM's paper, 4.3 and 4.5). `Orca` came before: prompts and answers share iterations, and memory
is reserved for the longest answer there may be (Orca's paper, 4.2, Algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.core.engine_spec import KvUse
from headway.memory.budget import KvBudget
from headway.pack.allocation import grant, missing
from headway.pack.baselines.arrival_order import by_coming, fitting, in_prompt, places
from headway.ports import Packer
from headway.types import Ints, Jobs, Step

_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class VllmV0(Packer):
    """vLLM 0.2 to 0.4, `Scheduler._schedule` (SOSP'23, 4.5: first come first served, the last come yields).

    As long as nobody is swapped out and the first waiting prompts fit, whole, into `budget` tokens and the
    free blocks less a `watermark` share of all, the iteration computes only these. Otherwise every running
    request makes one token. There must be a free block for each, one after the other; where there is none
    the last come loses its KV, to be recomputed (`swap`: copied to the host, SOSP'23 4.5). Who was swapped
    out comes back, first come first, in an iteration that preempted nobody.

    Not as it was: a prompt beyond the budget or the watermark was refused there; here it is computed in
    several iterations of prompts, and let in when nobody else is inside.
    """

    max_running: int
    budget: int
    swap: bool = False
    watermark: float = 0.01

    @property
    def kv(self) -> KvUse:
        """Preempted requests are swapped to the host."""
        return KvUse(saves=self.swap)

    def pack(self, jobs: Jobs, ledger: KvBudget, now: float) -> Step:
        """Return a step of prompts only, or of answers only."""
        running, waiting = by_coming(jobs)
        swapped = waiting[jobs.saved[waiting] > 0]
        if not swapped.size:
            order, tokens = self._prompts(jobs, ledger, running, waiting)
            if order.size:
                return self._step(order, tokens)
        return self._answers(jobs, ledger, running, swapped)

    def _prompts(self, jobs: Jobs, ledger: KvBudget, running: Ints, waiting: Ints) -> tuple[Ints, Ints]:
        """Return the prompts for this iteration and their tokens; nobody when none can be computed."""
        begun = running[in_prompt(jobs, running)]
        rest = missing(jobs, begun)
        pledged = int((ledger.blocks_for(jobs.computed[begun] + rest) - jobs.blocks[begun]).sum())
        room = ledger.free - pledged - self._watermark(ledger)
        line = waiting[: places(jobs, ledger, running, self.max_running)]
        want = missing(jobs, line)
        needs = ledger.blocks_for(want)
        spare = self.budget - int(rest.sum())
        count = min(fitting(needs, room), fitting(want, spare))
        if not count and line.size and not begun.size:
            alone = not running.size and needs[0] <= ledger.free
            count = int((needs[0] <= room and want[0] > self.budget) or alone)
        order, tokens = np.concatenate([begun, line[:count]]), np.concatenate([rest, want[:count]])
        return order, np.clip(self.budget - (np.cumsum(tokens) - tokens), 0, tokens)

    def _answers(self, jobs: Jobs, ledger: KvBudget, running: Ints, swapped: Ints) -> Step:
        """Return the step in which everybody inside makes a token, as far as blocks go."""
        needs = ledger.blocks_for(jobs.computed[running] + 1) - jobs.blocks[running]
        keep = self._keep(needs, jobs.blocks[running], ledger.free)
        if keep < running.size:
            stay, go = running[:keep], running[keep:][::-1]
            ones = np.ones(keep, np.int64)
            return self._step(stay, ones, save=go) if self.swap else self._step(stay, ones, evict=go)
        back = swapped[: places(jobs, ledger, running, self.max_running)]
        back = back[: self._back(jobs, ledger, back, ledger.free - int(needs.sum()), not running.size)]
        order = np.concatenate([running, back])
        return self._step(order, np.ones(order.size, np.int64))

    @staticmethod
    def _keep(needs: Ints, holds: Ints, free: int) -> int:
        """Return how many of the running, first come, keep their blocks; the first always does.

        The n first can go on if one block is free at the last one's turn: after those before took what they
        need, and those after gave back what they hold.
        """
        count = needs.size
        given = np.cumsum(holds[::-1])[::-1] - holds  # what those after each one hold
        enough = free + given - (np.cumsum(needs) - needs) >= 1
        return max(int(np.flatnonzero(enough)[-1]) + 1 if enough.any() else 0, min(count, 1))

    def _back(self, jobs: Jobs, ledger: KvBudget, swapped: Ints, free: int, alone: bool) -> int:
        """Return how many of the swapped may come back into `free` blocks."""
        grown = ledger.blocks_for(jobs.saved[swapped] + 1)
        asked = ledger.blocks_for(jobs.saved[swapped]) + 1
        fits = free - (np.cumsum(grown) - grown) - asked >= self._watermark(ledger)
        count = int(fits.argmin()) if not fits.all() else fits.size
        return count or int(alone and grown.size > 0 and grown[0] <= free)

    def _watermark(self, ledger: KvBudget) -> int:
        return int(self.watermark * ledger.total)

    def _step(self, order: Ints, tokens: Ints, evict: Ints = _NOBODY, save: Ints = _NOBODY) -> Step:
        return Step(order, tokens, evict, save, self.max_running, self.budget)


@dataclass(frozen=True, slots=True)
class Orca(Packer):
    """Orca (OSDI'22, Algorithm 1 `Select`): first come first served, iteration by iteration.

    At most `max_running` are chosen. A newcomer is let in, in order of coming, only when the room for its
    prompt and its longest answer can be reserved beside everybody's; so nobody is ever preempted. Prompts are
    whole and share iterations with answers. `longest`: tokens of the longest sequence, which bounds prompt +
    answer. `max_answer`: of an answer where users say so, None = as long as `longest` leaves room.

    Not as it was: an iteration has a token `budget`; a prompt too long for it beside a full batch is computed
    in parts.
    """

    max_running: int
    budget: int
    longest: int = 2048
    max_answer: int | None = None

    def pack(self, jobs: Jobs, ledger: KvBudget, now: float) -> Step:
        """Return everybody inside and who can be let in."""
        running, waiting = by_coming(jobs)
        inside = np.flatnonzero(jobs.running & jobs.live)
        line = waiting[: places(jobs, ledger, running, self.max_running)]
        room = ledger.total - int(self.reserved(jobs, inside, ledger).sum())
        spare = self.budget - int(missing(jobs, running).sum())
        count = fitting(self.reserved(jobs, line, ledger), room)
        want = missing(jobs, line[:count])
        whole = fitting(want, spare)
        if count and not whole and spare > 0 and want[0] > self.budget - self.max_running:
            whole = 1
        order = np.concatenate([running, line[:whole]])
        tokens = grant(jobs, order, self.budget)
        return Step(order, tokens, max_running=self.max_running, token_budget=self.budget)

    def reserved(self, jobs: Jobs, rows: Ints, ledger: KvBudget) -> Ints:
        """Return the blocks reserved for each row, never more than there are.

        A sequence that is longer than it should be has reserved what it has.
        """
        prompt, least = jobs.prompt[rows], jobs.prompt[rows] + jobs.output_tokens[rows]
        most = np.full_like(prompt, self.longest)
        if self.max_answer is not None:
            most = np.minimum(prompt + self.max_answer, most)
        return np.minimum(ledger.blocks_for(np.maximum(most, least)), ledger.total)
