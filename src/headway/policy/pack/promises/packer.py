"""The default packer: as many promises as can be kept, best effort with all that is left.

No paper has this policy; it takes from several. In each iteration:

1. Outlook (`outlook.py`): by the learned latency and its length forecast each request is kept, hopeful
   (`HOPE`: on time only if its answer is short), far (`FAR`: its deadline is far away), best effort, or lost:
   it cannot be on time any more. SLO-aware scheduling (4.2) forecasts so; it never gives up a request.
2. Selection (`selection.py`): under overload the largest set of requests that can still be on time (Moore and
   Hodgson 1968) over time, KV and slots; a kept prompt is admitted when it and the answers in progress have
   KV, also to grow the more requests are lost. For one that finds none, answers far ahead of their tpot
   pause, with their KV in the host pool; where it finds no slot they take turns. While more
   arrives than can be served on time, the largest requests are given up first (`demand.py`).
3. Iteration (`iteration.py`): kept answers, kept prompts in chunks as far as those are ahead of their tpot
   (slack, BROS 4.2) or fall behind for a first token that would be late, the shortest first where the others have
   the time; then, within a tighter bound, best effort and lost requests, the one that is due first before the
   others, and far deadlines last.

Lost requests are served late, not refused: with best effort, earliest due first (`selection.py`), so that nothing
waits for ever. Streams that have begun go on (docs/policy.md). KV is never lent; that of what gives way is
copied to the host where there is a pool and that costs less than to compute it again (QLM 5), else evicted
(docs/decisions.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from headway.compiled import compiled
from headway.policy.core.engine_spec import EngineSpec, KvUse, PackerParams, PromisesConfig
from headway.policy.core.feasibility import Pace
from headway.policy.core.ranks import outer
from headway.policy.core.sorting import ordered
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.preemption_cost import are_swapped
from headway.policy.pack import kernels
from headway.policy.pack.kernels import CompiledStep, Rows
from headway.policy.pack.promises.demand import give_up_large, no_demand
from headway.policy.pack.promises.iteration import compose, defer, make_way, seconds_allowed, take_turns, usual_seconds
from headway.policy.pack.promises.outlook import (
    ANSWER,
    FAR,
    HOPE,
    LOST,
    OTHER,
    STREAM,
    WAITS,
    Outlook,
    any_plain,
    growth_of,
    in_pace,
    in_progress,
    in_sight,
    is_over,
    is_silent,
    outlook_of,
    pace_of,
    pressure_of,
    size_of,
    under_pressure,
)
from headway.policy.pack.promises.selection import queue_of, select
from headway.ports import Packer
from headway.types import Floats, Ints, Jobs, Step

_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class Promises(Packer):
    """The packer of recipe `headway`.

    spec: of the engine.
    keep: the policy's numbers.
    min_chunk: least prompt tokens of an iteration with a new kept prompt, while no kept answer has a tpot.
    max_step: least seconds of a usual iteration (`usual_seconds`).
    swaps: KV of a row that yields goes to the host where that costs less than to compute it again (QLM 5).
    demand: account of what arrives (`demand.no_demand`).
    """

    spec: EngineSpec
    keep: PromisesConfig = field(default_factory=PromisesConfig)
    min_chunk: int = 64
    max_step: float = 0.2
    swaps: bool = True
    demand: Floats = field(default_factory=no_demand, init=False, repr=False, compare=False)

    @property
    def params(self) -> PackerParams:
        """The parameters of this packer for compiled loops."""
        spec = self.spec
        return PackerParams(
            kernels.PROMISES,
            spec.max_running,
            spec.token_budget,
            self.min_chunk,
            self.max_step,
            self.keep,
            int(spec.host_tokens or 0) if self.kv.saves else 0,
            spec.copy_seconds,
            spec.max_gap_s,
            self.keep.lost,
            demand=self.demand,
            taught=spec.latency.taught,
        )

    @property
    def kv(self) -> KvUse:
        """KV is copied to the host where there is a pool of stated size."""
        able = bool(self.spec.host_tokens) and math.isfinite(self.spec.copy_seconds)
        return KvUse(saves=self.swaps and able, overlaps_copies=True)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step; rows that control holds are left alone."""
        spec, latency = self.spec, self.spec.latency
        rows = in_sight(self.keep, jobs.data, jobs.rows(), now)
        step = pack(self.params, jobs.data, rows, kv_budget, now, latency.theta, latency.slow[0])
        evict, save = step.evict, _NONE
        if evict.size and self.kv.saves:
            saves = are_swapped(jobs.computed[evict], latency.theta, spec.copy_seconds)
            evict, save = evict[~saves], evict[saves]
        return Step(step.order, step.caps, evict, save, max_running=spec.max_running, token_budget=spec.token_budget)


@compiled
def pack(
    params: PackerParams, jobs: Rows, rows: Ints, kv: KvBudget, now: float, theta: Floats, slow: float
) -> CompiledStep:
    """Return the step; rows: of the engine, as `in_sight` returns them, in any order; slow: `OnlineLatency`'s."""
    rows, others = kernels.without_held(jobs, rows)
    all_promised = not any_plain(jobs, rows)
    calm = under_pressure(params, 0.0, all_promised, slow)
    inside = np.flatnonzero(jobs["running"][rows])
    every = in_progress(params.keep, jobs, rows[inside], now)
    pace = pace_of(jobs, every, theta)
    answers = in_pace(params, jobs, every, now, theta, pace)
    if answers.pace.size < every.size:
        pace = pace_of(jobs, answers.pace, theta)
    outlook = outlooks_of(calm, jobs, rows, now, theta, pace, answers.lost)
    pressure = pressure_of(params.keep, jobs, outlook, now, theta)
    if pressure > 0.0:
        params = under_pressure(params, pressure, all_promised, slow)
        _revise(params, jobs, outlook, now, theta, pace, answers.lost)
    else:
        params = calm
    give_up_large(params, jobs, outlook, kv, now, theta)
    usual = usual_seconds(params, jobs, rows[inside], theta)
    _let_streams_go_on(params, jobs, outlook, inside, kv, now, usual)
    kept = kept_of(jobs, outlook, theta, pace)
    limits = seconds_allowed(params, jobs, kept, now, theta, usual, pace)
    room = KvBudget(kv.total, kv.free, kv.size, kv.slots - others, kv.row_chunk)
    select(params, jobs, kept, room, now, theta, pace, limits.tpot, limits.first, growth_of(params.keep, pressure))
    if answers.deferred.size:
        defer(jobs, kept, answers.deferred)
    make_way(params, jobs, kept, theta, limits, now, pace)
    if params.keep.turn_capacity > 0.0:
        take_turns(params, jobs, kept, theta, limits, now, pace, kv.row_chunk)
    queue = queue_of(params.keep, jobs, kept, outlook, theta, now)
    return compose(params, jobs, kept, queue, others, kv, theta, limits, now)


@compiled
def outlooks_of(
    params: PackerParams, jobs: Rows, rows: Ints, now: float, theta: Floats, pace: Pace, lost: Ints
) -> Outlook:
    """Return the level of each row; lost: rows that `in_pace` gives up."""
    outlook = Outlook(rows, np.full(rows.size, LOST), np.full(rows.size, -np.inf))
    _revise(params, jobs, outlook, now, theta, pace, lost)
    return outlook


@compiled
def _revise(
    params: PackerParams, jobs: Rows, outlook: Outlook, now: float, theta: Floats, pace: Pace, lost: Ints
) -> None:
    """Update the outlook for these parameters, in place; OTHER does not depend on them."""
    rows, level, start = outlook
    for i in range(rows.size):
        # What is over `outlook_of` calls LOST, too, at several times the cost.
        if level[i] != OTHER and not is_over(jobs, rows[i], now):
            level[i], start[i] = outlook_of(params, jobs, rows[i], now, theta, pace)
    if lost.size:
        place = np.empty(jobs["live"].size, np.int64)
        place[rows] = np.arange(rows.size)
        level[place[lost]], start[place[lost]] = LOST, -np.inf


@compiled
def kept_of(jobs: Rows, outlook: Outlook, theta: Floats, pace: Pace) -> Outlook:
    """Return the kept rows by urgency, level and latest start (HOPE: size; STREAM: last token)."""
    kept = np.flatnonzero(outlook.level <= HOPE)
    rows, level, start = outlook.rows[kept], outlook.level[kept], outlook.start[kept]
    keys = np.empty((3, kept.size))
    for i in range(kept.size):
        rank = jobs["urgency"][rows[i]]
        # What waits beyond a tenant's fair share comes last; an answer in progress keeps its pace.
        keys[0, i], keys[1, i] = outer(rank) if level[i] <= ANSWER else rank, level[i]
        keys[2, i] = size_of(jobs, rows[i], theta, pace) if level[i] == HOPE else start[i]
        if level[i] == STREAM:
            keys[2, i] = jobs["last"][rows[i]]
    order = ordered(keys, jobs["serial"][rows])
    return Outlook(rows[order], level[order], start[order])


@compiled
def _let_streams_go_on(
    params: PackerParams, jobs: Rows, outlook: Outlook, inside: Ints, kv: KvBudget, now: float, usual: float
) -> None:
    """Make streams that have been silent for long STREAM, in place, those first that were silent longest.

    Those that are kept, or owed a whole answer by a far deadline, may be silent for longer. Of the others no
    more come at once than take turns in half of `max_gap`, if iterations take `usual` seconds: they would
    fill the batch of an engine that is slow. inside: places of the rows that hold a slot.
    """
    keep, free, places, size, holders = params.keep, kv.free, np.empty(inside.size, np.int64), 0, 0
    for i in inside:
        waits = WAITS < outlook.level[i] < FAR or outlook.level[i] == LOST
        holders += waits and kernels.decodes(jobs, outlook.rows[i])
        share = keep.overdue_share if waits else keep.kept_overdue_share
        if is_silent(jobs, outlook.rows[i], now, share * params.max_gap):
            places[size], size = i, size + 1
    if size == 0:
        return
    turns = np.ceil(2.0 * holders * usual / params.max_gap)
    silent, keys = outlook.rows[places[:size]], np.empty((1, size))
    keys[0] = jobs["last"][silent]
    for k in ordered(keys, jobs["serial"][silent]):
        row = outlook.rows[places[k]]
        needs = kernels.needs_block(jobs, row, kv.size)
        overdue = is_silent(jobs, row, now, keep.kept_overdue_share * params.max_gap)
        if (overdue or turns > 0) and (not needs or free > 0):
            outlook.level[places[k]] = STREAM
            turns, free = turns - 1, free - needs
