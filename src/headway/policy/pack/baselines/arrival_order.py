"""Baselines that take requests by arrival: Orca, SplitFuse, Sarathi-Serve, MultiRes, TGI, vLLM V0, round robin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.policy.core.engine_spec import KvUse
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate, free_to_run, grant, missing
from headway.ports import Packer
from headway.types import Bools, Floats, Ints, Jobs, Step

_NONE = np.empty(0, np.int64)


def by_arrival(jobs: Jobs) -> tuple[Ints, Ints]:
    """Return the rows that hold a slot and those that wait, by urgency and arrival; held rows in neither."""
    rows = _ordered(jobs)
    running = jobs.running[rows]
    return rows[running], rows[~running]


def _ordered(jobs: Jobs) -> Ints:
    rows = free_to_run(jobs)
    return np.asarray(rows[np.lexsort((jobs.serial[rows], jobs.urgency[rows]))])


def in_prompt(jobs: Jobs, rows: Ints) -> Bools:
    """Tell which running rows still compute their prompt, or recompute what they had."""
    return np.asarray((jobs.output_tokens[rows] == 0) | (missing(jobs, rows) > 1), np.bool_)


def free_slots(jobs: Jobs, kv_budget: KvBudget, running: Ints, max_running: int) -> int:
    """Return how many rows may be admitted beside `running`; rows that control holds keep their slots."""
    holders = int(np.count_nonzero(jobs.running & jobs.live))
    return max(min(max_running - running.size, kv_budget.slots - holders), 0)


def fitting(needs: Ints, room: int) -> int:
    """Return how many of `needs`, from the first on, fit into `room` together."""
    return int(np.searchsorted(np.cumsum(needs), room, "right"))


@dataclass(frozen=True, slots=True)
class Orca(Packer):
    """Orca's `Select` (OSDI'22, 4.2, Algorithm 1): first come, first served, iteration by iteration.

    At most `max_running` are chosen. A request is admitted, by arrival, only when the KV for its prompt and
    its longest answer can be reserved beside all others'; so none is ever preempted. Prompts are whole and
    share iterations with answers.

    longest: tokens of the longest sequence that the model takes, which bounds prompt + answer.
    max_answer: tokens of an answer where users say so, None = as many as `longest` leaves room for.

    Unlike there, an iteration has a token `budget`; a prompt too long for it beside a full batch is computed
    in parts.
    """

    max_running: int
    budget: int
    longest: int
    max_answer: int | None = None

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the running requests and those that can be admitted."""
        running, waiting = by_arrival(jobs)
        running = running[: self.max_running]
        inside = np.flatnonzero(jobs.running & jobs.live)
        admitted = waiting[: free_slots(jobs, kv_budget, running, self.max_running)]
        room = kv_budget.total - int(self.reserved(jobs, inside, kv_budget).sum())
        spare = self.budget - int(missing(jobs, running).sum())
        count = fitting(self.reserved(jobs, admitted, kv_budget), room)
        want = missing(jobs, admitted[:count])
        whole = fitting(want, spare)
        if count and not whole and spare > 0 and want[0] > self.budget - self.max_running:
            whole = 1
        order = np.concatenate([running, admitted[:whole]])
        tokens = grant(jobs, order, self.budget)
        return Step(order, tokens, max_running=self.max_running, token_budget=self.budget)

    def reserved(self, jobs: Jobs, rows: Ints, kv_budget: KvBudget) -> Ints:
        """Return the blocks reserved for each row, never more than there are.

        A sequence that is longer than it should be has reserved what it has.
        """
        prompt, least = jobs.prompt[rows], jobs.prompt[rows] + jobs.output_tokens[rows]
        most = np.full_like(prompt, self.longest)
        if self.max_answer is not None:
            most = np.minimum(prompt + self.max_answer, most)
        return np.minimum(kv_budget.blocks_for(np.maximum(most, least)), kv_budget.total)


@dataclass(frozen=True, slots=True)
class Chunked(Packer):
    """Dynamic SplitFuse of DeepSpeed-FastGen (arXiv 2401.08671, 3) and Sarathi-Serve (OSDI'24, Algorithm 3).

    Both fill `budget` tokens in the same order: every answer in progress, prompts begun before, then new
    prompts by arrival as far as their KV fits, the last one cut where the budget ends. They differ in
    the budget: FastGen takes what saturates the GPU, Sarathi-Serve what the promised time between tokens
    allows (512 in most of its evaluation). EcoServe (2.1, 4) fills FastGen to the forward size that saturates
    the GPU. Where blocks run out the last to arrive yield (`allocation.py`).
    """

    max_running: int
    budget: int

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step that fills the budget."""
        running, waiting = by_arrival(jobs)
        begun = in_prompt(jobs, running)
        ranked = np.concatenate([running[~begun], running[begun], waiting[: self.max_running]])
        return allocate(jobs, ranked, kv_budget, self.max_running, self.budget)


@dataclass(frozen=True, slots=True)
class MultiRes(Packer):
    """EcoServe's comparator (2.1), which fills both the compute and the memory of each iteration.

    The nearest demand is first, iteration by iteration.
    No running request is displaced. Free tokens: the `budget` less what those inside compute; free KV: all
    blocks less what is allocated. KV is allocated for prompt + forecast answer at once (exact allocation),
    and the distance is Euclid's (2.1). We assume what the paper leaves open: each demand counts as a share
    of the whole resource, a prompt that does not fit beside a full batch is cut to the free tokens, and where
    an answer outgrows its allocation the last to arrive is swapped to the host (vLLM's rule) and comes back
    before any new request.
    """

    max_running: int
    budget: int

    @property
    def kv(self) -> KvUse:
        """Preempted requests are swapped to the host."""
        return KvUse(saves=True)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the running, the swapped, and the new requests that fill the batch best."""
        running, waiting = by_arrival(jobs)
        swapped = jobs.saved[waiting] > 0
        old = np.concatenate([running, waiting[swapped]])
        new = self._nearest(jobs, kv_budget, old, waiting[~swapped])
        step = allocate(jobs, np.concatenate([old, new]), kv_budget, self.max_running, self.budget)
        return Step(step.order, step.tokens, save=step.evict, max_running=self.max_running, token_budget=self.budget)

    def _nearest(self, jobs: Jobs, kv_budget: KvBudget, old: Ints, waiting: Ints) -> Ints:
        """Return the waiting rows to admit beside `old`, in the order of choice."""
        whole = np.array([self.budget, kv_budget.total], float)
        inside = np.union1d(old, np.flatnonzero(jobs.running & jobs.live))
        free = whole - self._demand(jobs, kv_budget, inside).sum(0)
        if not old.size:
            free = whole
        demand, chosen = self._demand(jobs, kv_budget, waiting), np.zeros(waiting.size, np.bool_)
        order: list[int] = []
        urgency, long = jobs.urgency[waiting], missing(jobs, waiting) > self.budget - self.max_running
        for _ in range(free_slots(jobs, kv_budget, old, self.max_running)):
            demand[long, 0] = np.minimum(demand[long, 0], max(free[0], 1.0))
            fits = ~chosen & (demand <= free).all(1)
            if not fits.any():
                break
            apart = np.square((free - demand) / whole).sum(1)
            first = fits & (urgency == urgency[fits].min())
            pick = int(np.where(first, apart, np.inf).argmin())
            free, chosen[pick] = free - demand[pick], True
            order.append(pick)
        return waiting[np.array(order, np.int64)]

    def _demand(self, jobs: Jobs, kv_budget: KvBudget, rows: Ints) -> Floats:
        """Return (rows, 2): tokens in this iteration, and blocks for the prompt with the whole answer."""
        tokens = np.minimum(missing(jobs, rows), self.budget)
        length = np.ceil(jobs.prompt[rows] + jobs.output_tokens[rows] + jobs.tokens_left[rows]).astype(np.int64)
        blocks = np.clip(kv_budget.blocks_for(length), jobs.blocks[rows], kv_budget.total)
        return np.stack([tokens, blocks], 1).astype(float)


@dataclass(slots=True)
class Tgi(Packer):
    """TGI's router, as its releases 1.4 and 2.0 have it (`batching_task` and `State::next_batch`).

    BROS (1, 7.1) says that TGI schedules first come, first served, and nothing more. New requests are taken
    by arrival as far as their prompts fit into `budget` tokens, and prompt and whole answer into the KV that
    is not held for others; so none is preempted. Their prompts are one iteration, in which the others pause.
    Before the next prompts comes at least one iteration of answers; and with answers in progress, prompts
    come only if they are at least `waiting_served_ratio` times as many, or `max_waiting_tokens` iterations
    after the last ones.

    TGI knows the longest answer of a request (`max_new_tokens`); here it is the forecast one. In the paper's
    tests it is the true length, as models must generate a given number of tokens (7.1). An answer that
    outgrows it takes free KV; where there is none the last to arrive is computed again.

    Unlike there, a prompt beyond the budget is not refused, but computed in several iterations.

    waiting_served_ratio, max_waiting_tokens: the launcher's defaults (release 2.0).
    since: iterations of answers since the last prompts.
    """

    max_running: int
    budget: int
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    since: int = 0

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return a step of prompts only, or of answers only."""
        running, waiting = by_arrival(jobs)
        running = running[: self.max_running]
        prompts = running[in_prompt(jobs, running)]
        if not prompts.size and (self.since or not running.size):
            prompts = self._next_batch(jobs, kv_budget, running, waiting)
        if prompts.size:
            self.since = 0
            tokens = grant(jobs, prompts, self.budget)
            return Step(prompts, tokens, max_running=self.max_running, token_budget=self.budget)
        self.since += 1
        return allocate(jobs, running, kv_budget, self.max_running, self.budget)

    def _next_batch(self, jobs: Jobs, kv_budget: KvBudget, running: Ints, waiting: Ints) -> Ints:
        """Return the waiting rows whose prompts are next; none when they are too few."""
        inside = np.flatnonzero(jobs.running & jobs.live)
        room = kv_budget.total - int(self.reserved(jobs, inside, kv_budget).sum())
        admitted = waiting[: free_slots(jobs, kv_budget, running, self.max_running)]
        count = fitting(self.reserved(jobs, admitted, kv_budget), room)
        want = missing(jobs, admitted[:count])
        whole = fitting(want, self.budget)
        if count and not whole:
            whole = 1  # longer than the whole budget
        waited = self.since + 1 >= self.max_waiting_tokens
        least = 0 if waited else int(self.waiting_served_ratio * running.size)
        return admitted[: whole if whole >= least else 0]

    def reserved(self, jobs: Jobs, rows: Ints, kv_budget: KvBudget) -> Ints:
        """Return the blocks held for each row's prompt and whole answer: what it has at least."""
        tokens = np.ceil(jobs.prompt[rows] + jobs.output_tokens[rows] + jobs.tokens_left[rows])
        blocks = kv_budget.blocks_for(tokens.astype(np.int64))
        return np.asarray(np.clip(blocks, jobs.blocks[rows], kv_budget.total), np.int64)


@dataclass(frozen=True, slots=True)
class VllmV0(Packer):
    """vLLM 0.2 to 0.4, `Scheduler._schedule` (SOSP'23, 4.3, 4.5): first come, first served, the last to arrive yields.

    As long as no request is swapped out and the first waiting prompts fit, whole, into `budget` tokens and
    the free blocks less a `watermark` share of all, the iteration computes only these. Otherwise every
    running request makes one token. There must be a free block for each, one after the other; where there is
    none the last to arrive loses its KV, to be recomputed (`swap`: copied to the host, 4.5). Swapped requests
    come back, by arrival, in an iteration that preempted none.

    Unlike there, a prompt beyond the budget or the watermark is not refused: it is computed in several
    iterations of prompts, and admitted when no other request is inside.
    """

    max_running: int
    budget: int
    swap: bool = False
    watermark: float = 0.01

    @property
    def kv(self) -> KvUse:
        """Preempted requests are swapped to the host."""
        return KvUse(saves=self.swap)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return a step of prompts only, or of answers only."""
        running, waiting = by_arrival(jobs)
        running = running[: self.max_running]
        swapped = waiting[jobs.saved[waiting] > 0]
        if not swapped.size:
            order, tokens = self._prompts(jobs, kv_budget, running, waiting)
            if order.size:
                return self._step(order, tokens)
        return self._answers(jobs, kv_budget, running, swapped)

    def _prompts(self, jobs: Jobs, kv_budget: KvBudget, running: Ints, waiting: Ints) -> tuple[Ints, Ints]:
        """Return the prompts for this iteration and their tokens; empty when none can be computed."""
        begun = running[in_prompt(jobs, running)]
        rest = missing(jobs, begun)
        pledged = int((kv_budget.blocks_for(jobs.computed[begun] + rest) - jobs.blocks[begun]).sum())
        room = kv_budget.free - pledged - self._watermark(kv_budget)
        admitted = waiting[: free_slots(jobs, kv_budget, running, self.max_running)]
        want = missing(jobs, admitted)
        # Of what a prefix cache has, only the blocks that others hold need none that is free.
        needs = kv_budget.blocks_for(jobs.computed[admitted] + want) - jobs.blocks[admitted]
        spare = self.budget - int(rest.sum())
        count = min(fitting(needs, room), fitting(want, spare))
        if not count and admitted.size and not begun.size:
            alone = not running.size and needs[0] <= kv_budget.free
            count = int((needs[0] <= room and want[0] > self.budget) or alone)
        order, tokens = np.concatenate([begun, admitted[:count]]), np.concatenate([rest, want[:count]])
        return order, np.clip(self.budget - (np.cumsum(tokens) - tokens), 0, tokens)

    def _answers(self, jobs: Jobs, kv_budget: KvBudget, running: Ints, swapped: Ints) -> Step:
        """Return the step in which every running row makes a token, as far as blocks go."""
        needs = kv_budget.blocks_for(jobs.computed[running] + 1) - jobs.blocks[running]
        keep = self._keep(needs, jobs.blocks[running], kv_budget.free)
        if keep < running.size:
            stay, go = running[:keep], running[keep:][::-1]
            ones = np.ones(keep, np.int64)
            return self._step(stay, ones, save=go) if self.swap else self._step(stay, ones, evict=go)
        back = swapped[: free_slots(jobs, kv_budget, running, self.max_running)]
        back = back[: self._back(jobs, kv_budget, back, kv_budget.free - int(needs.sum()), not running.size)]
        order = np.concatenate([running, back])
        return self._step(order, np.ones(order.size, np.int64))

    @staticmethod
    def _keep(needs: Ints, holds: Ints, free: int) -> int:
        """Return how many of the running keep their blocks, by arrival; the first always does.

        The n first can go on if one block is free at the last one's turn: after those before took what they
        need, and those after gave back what they hold.
        """
        count = needs.size
        given = np.cumsum(holds[::-1])[::-1] - holds  # what those after each one hold
        enough = free + given - (np.cumsum(needs) - needs) >= 1
        return max(int(np.flatnonzero(enough)[-1]) + 1 if enough.any() else 0, min(count, 1))

    def _back(self, jobs: Jobs, kv_budget: KvBudget, swapped: Ints, free: int, alone: bool) -> int:
        """Return how many of the swapped may come back into `free` blocks."""
        grown = kv_budget.blocks_for(jobs.saved[swapped] + 1)
        asked = kv_budget.blocks_for(jobs.saved[swapped]) + 1
        fits = free - (np.cumsum(grown) - grown) - asked >= self._watermark(kv_budget)
        count = int(fits.argmin()) if not fits.all() else fits.size
        return count or int(alone and grown.size > 0 and grown[0] <= free)

    def _watermark(self, kv_budget: KvBudget) -> int:
        return int(self.watermark * kv_budget.total)

    def _step(self, order: Ints, tokens: Ints, evict: Ints = _NONE, save: Ints = _NONE) -> Step:
        return Step(order, tokens, evict, save, self.max_running, self.budget)


@dataclass(slots=True)
class RoundRobin(Packer):
    """Round robin over two queues by iterations, the simple way to share one engine (BROS 2.2, 7.1).

    Requests with a promise and those without stand in queues of their own, each first come, first served.
    The two have every other iteration; one that has nothing to run leaves its turn to the other. Requests
    that pause keep their KV until neither queue has room to go on: then the last of the other queue lose it.
    The paper does not say what becomes of it.

    promised_next: whose turn is next.
    """

    max_running: int
    budget: int
    promised_next: bool = True

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the iteration of the queue whose turn it is, or of the other one."""
        rows = _ordered(jobs)
        promised = _promised(jobs, rows)
        for turn in (self.promised_next, not self.promised_next):
            step = allocate(jobs, rows[promised == turn], kv_budget, self.max_running, self.budget)
            if step.order.size:
                self.promised_next = not turn
                return step
        first = rows[np.argsort(promised != self.promised_next, kind="stable")]
        return allocate(jobs, first, kv_budget, self.max_running, self.budget)


def _promised(jobs: Jobs, rows: Ints) -> Bools:
    return np.asarray(np.isfinite(np.minimum(np.minimum(jobs.ttft[rows], jobs.tpot[rows]), jobs.e2e[rows])))
