"""What if, a thousand times faster than real time? The same simulation as `run.py`, as one compiled loop.

For one instance, a planner that orders by a rank and a packer with a `rule`. It calls the very functions that
those packers, the engine, the pace and vLLM's hook call; only the slow loop's bookkeeping is written anew, as
heaps instead of tables, and `tests/sim/test_fast.py` requires the same outcome to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.engines.simulated import kernels as engine
from headway.engines.simulated.kernels import FREE, HOLDING, Limits
from headway.forecast.latency.laws import law_seconds
from headway.forecast.latency.online import OnlineLatency, learn, shape
from headway.forecast.latency.profiles import SHORTEST, FixedLatency
from headway.forecast.lengths.task import TaskLengths
from headway.memory.budget import KvBudget
from headway.pack.kernels import SLACK, PackerParams, pack
from headway.plan.ordered import Ordered, Rank, by_arrival, by_attainable_deadline, by_due, by_priority
from headway.recipes.recipe import Recipe
from headway.sim.workload.traffic import Workload
from headway.types import Floats, Ints, Jobs

if TYPE_CHECKING:
    from headway.sim.run import InstanceSpec

Rows = NDArray[np.void]
# How a planner ranks; each is a rank of `plan/ordered.py`.
ARRIVAL, PRIORITY, DUE, ATTAINABLE = range(4)
# Places in `RunState.counts`.
(ARRIVED, INSIDE, ROWS, RAN, RUNNING, SERIAL, ITERATIONS, PREEMPTED, PAUSED, HEAP) = range(10)
END, BUSY = 0, 1  # places in `RunState.clock`
_HEAPS = 3  # on time, late, best effort: only `ATTAINABLE` uses more than the first
_ASK = np.dtype([("key1", float), ("key2", float), ("max_tokens", int), ("task", int), ("blocks", int)])


class Line(NamedTuple):
    """The planner and what `plan/dispatch.py` reads of the instance."""

    kind: int
    window: int
    blocks: int
    size: int


class RunState(NamedTuple):
    """The state of a run. Row i of `jobs` and `asks` is request i; nothing is ever moved or used again.

    target: outputs, aligned. heaps: waiting requests, one heap per row, sizes in counts[HEAP:]. inside:
    requests that are sent and not known to have ended, place: where in it. rows: those the engine has. ran:
    rows and tokens of the iteration in progress. seen: the last answers' lengths per task, taught: how many
    there have been. first, end: the outcome.
    """

    jobs: Rows
    asks: Rows
    target: Ints
    heaps: Ints
    inside: Ints
    place: Ints
    rows: Ints
    ran: Ints
    seen: Ints
    taught: Ints
    theta: Floats
    cov: Floats
    cap: Floats
    law: Floats
    balance: Ints
    counts: Ints
    clock: Floats
    first: Floats
    end: Floats
    law_kind: int
    prior: int
    rule: PackerParams
    line: Line
    limits: Limits
    forget: float
    surprise: float


@compiled
def advance(w: RunState, stop: int) -> None:
    """Run until `stop` requests have arrived; to the end of everything when that is all of them."""
    size = w.target.size
    while w.counts[ARRIVED] < stop or (stop == size and w.counts[RUNNING]):
        i = w.counts[ARRIVED]
        if w.counts[RUNNING] and (i == size or w.clock[END] <= w.jobs["arrival"][i]):
            _iteration_ends(w, w.clock[END])
        else:
            _arrive(w, i)


@compiled
def _arrive(w: RunState, i: int) -> None:
    w.asks["blocks"][i] = np.ceil((w.jobs["prompt"][i] + _forecast(w, i)) / w.line.size)
    w.counts[ARRIVED] += 1
    _push(w, 2 if w.line.kind == ATTAINABLE and np.isinf(w.asks["key1"][i]) else 0, i)
    _send(w, w.jobs["arrival"][i])


# ---- the engine


@compiled
def _begin(w: RunState, now: float) -> None:
    """Start the next iteration if there is anything to compute."""
    rows = w.rows[: w.counts[ROWS]]
    ledger = KvBudget(w.line.blocks, w.balance[FREE], w.limits.size, w.limits.slots)
    step = pack(w.rule, w.jobs, rows, ledger, now, w.theta)
    engine.evict(w.jobs, w.balance, step.evict)
    paused = w.balance[HOLDING] - np.count_nonzero(w.jobs["running"][step.order])
    budget = w.rule.budget if w.rule.budget else w.limits.budget
    ran = engine.run(w.jobs, w.balance, w.limits, step.order, step.caps, w.rule.max_running, budget)
    size = ran.rows.size
    w.counts[RUNNING], w.counts[RAN] = size > 0, size
    if size == 0:
        return
    w.ran[0, :size], w.ran[1, :size] = ran.rows, ran.tokens
    w.counts[ITERATIONS] += 1
    w.counts[PREEMPTED] += ran.lost.size
    w.counts[PAUSED] += paused
    seconds = _seconds(w, ran.rows, ran.tokens)
    w.clock[BUSY] += seconds
    w.clock[END] = now + seconds


@compiled
def _seconds(w: RunState, rows: Ints, tokens: Ints) -> float:
    """Return how long an iteration takes, and teach the packer's pace."""
    decodes, context, prefill, pairs = shape(w.jobs, rows, tokens)
    seconds = max(law_seconds(w.law_kind, w.law, decodes, context, prefill, pairs), SHORTEST)
    if w.rule.kind == SLACK:
        parts = (float(decodes), float(context), float(prefill), float(pairs))
        learn(w.theta, w.cov, w.cap, *parts, seconds, w.forget, w.surprise)
    return float(seconds)


@compiled
def _iteration_ends(w: RunState, now: float) -> None:
    size = w.counts[RAN]
    done = engine.complete(w.jobs, w.balance, w.target, w.ran[0, :size], w.ran[1, :size], now)
    w.counts[RUNNING] = 0
    for row in done:
        w.jobs["live"][row] = False
        w.first[row], w.end[row] = w.jobs["first"][row], now
    if done.size:
        _drop_ended(w)
    if w.counts[ROWS]:
        _begin(w, now)
    for row in done:
        _leave(w, row)
        _learn_length(w, row)
        _send(w, now)


@compiled
def _drop_ended(w: RunState) -> None:
    kept = 0
    for k in range(w.counts[ROWS]):
        if w.jobs["live"][w.rows[k]]:
            w.rows[kept] = w.rows[k]
            kept += 1
    w.counts[ROWS] = kept


# ---- the lengths (`forecast/lengths/task.py`)


@compiled
def _forecast(w: RunState, i: int) -> float:
    """Return the mean of the task's last answers, none longer than the request allows."""
    task, most = w.asks["task"][i], w.asks["max_tokens"][i]
    known = min(w.taught[task], w.seen.shape[1])
    if known == 0:
        return float(min(w.prior, most))
    total = 0
    for k in range(known):
        total += min(w.seen[task, k], most)
    return float(total / known)


@compiled
def _learn_length(w: RunState, i: int) -> None:
    task = w.asks["task"][i]
    w.seen[task, w.taught[task] % w.seen.shape[1]] = w.target[i]
    w.taught[task] += 1


# ---- the line (`plan/ordered.py`, `plan/dispatch.py`)


@compiled
def _send(w: RunState, now: float) -> None:
    """Send the head of the queue as long as it belongs inside the engine."""
    while True:
        heap = _head(w, now)
        if heap < 0 or not _belongs(w, w.heaps[heap, 0], heap):
            return
        i = _pop(w, heap)
        w.place[i] = w.counts[INSIDE]
        w.inside[w.counts[INSIDE]] = i
        w.counts[INSIDE] += 1
        _deliver(w, i, now)


@compiled
def _head(w: RunState, now: float) -> int:
    """Return the heap whose first request is the most urgent of those waiting, -1 = none waits."""
    if w.line.kind == ATTAINABLE:  # who has become late goes behind all who can still make it
        while w.counts[HEAP] and w.asks["key1"][w.heaps[0, 0]] < now:
            _push(w, 1, _pop(w, 0))
    for heap in range(_HEAPS):
        if w.counts[HEAP + heap]:
            return heap
    return -1


@compiled
def _belongs(w: RunState, i: int, heap: int) -> bool:
    """Tell whether the first of a heap stands in the line's window, with its KV and theirs before it."""
    # Rows, not the whole world, go into the loop: each array in a call costs its reference count.
    ahead, blocks, asks, kind = 0, 0, w.asks, w.line.kind
    for j in w.inside[: w.counts[INSIDE]]:
        if kind == ARRIVAL or _inside_first(asks, kind, j, i, heap):
            ahead += 1
            blocks += asks["blocks"][j]
    if ahead >= w.line.window:
        return False
    return bool(ahead == 0 or blocks + asks["blocks"][i] <= w.line.blocks)


@compiled
def _inside_first(asks: Rows, kind: int, j: int, i: int, heap: int) -> bool:
    """Tell whether j, which is inside, ranks before i, which waits in `heap`."""
    if kind == ATTAINABLE:
        best_effort = np.isinf(asks["key1"][j])
        if best_effort != (heap == 2):
            return not best_effort
        if heap == 1:
            return True
    return _before(asks, j, i)


@compiled
def _deliver(w: RunState, i: int, now: float) -> None:
    w.counts[SERIAL] += 1
    w.jobs["serial"][i] = w.counts[SERIAL]
    w.jobs["tokens_left"][i] = _forecast(w, i)
    w.jobs["live"][i] = True
    w.rows[w.counts[ROWS]] = i
    w.counts[ROWS] += 1
    if not w.counts[RUNNING]:
        _begin(w, now)


@compiled
def _leave(w: RunState, i: int) -> None:
    w.counts[INSIDE] -= 1
    last = w.inside[w.counts[INSIDE]]
    w.inside[w.place[i]], w.place[last] = last, w.place[i]


# ---- heaps


@compiled
def _before(asks: Rows, a: int, b: int) -> bool:
    """Tell whether a ranks before b within one class; of equals the first to come."""
    if asks["key1"][a] != asks["key1"][b]:
        return bool(asks["key1"][a] < asks["key1"][b])
    if asks["key2"][a] != asks["key2"][b]:
        return bool(asks["key2"][a] < asks["key2"][b])
    return a < b


@compiled
def _push(w: RunState, heap: int, i: int) -> None:
    asks, rows, at = w.asks, w.heaps[heap], w.counts[HEAP + heap]
    w.counts[HEAP + heap] += 1
    while at > 0 and _before(asks, i, rows[(at - 1) // 2]):
        rows[at] = rows[(at - 1) // 2]
        at = (at - 1) // 2
    rows[at] = i


@compiled
def _pop(w: RunState, heap: int) -> int:
    asks, rows = w.asks, w.heaps[heap]
    w.counts[HEAP + heap] -= 1
    top, size = rows[0], w.counts[HEAP + heap]
    moved, at = rows[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        child += child + 1 < size and _before(asks, rows[child + 1], rows[child])
        if not _before(asks, rows[child], moved):
            break
        rows[at] = rows[child]
        at = child
    rows[at] = moved
    return int(top)


# ---- from a `Simulation` and back


_RANKS: dict[tuple[Rank, bool], int] = {
    (by_arrival, False): ARRIVAL, (by_priority, True): PRIORITY, (by_due, True): DUE, (by_attainable_deadline, True): ATTAINABLE,
}  # fmt: skip


def world(recipe: Recipe, node: InstanceSpec, workload: Workload, lengths: TaskLengths) -> RunState | None:
    """Return the start of a compiled run; None when a part of it is known to Python only."""
    instance, planner, latency = node.instance, recipe.planner(), OnlineLatency()
    rule = getattr(recipe.packer(instance.max_running, node.budget, latency), "rule", None)
    kind = _RANKS.get((planner.rank, planner.displaces)) if isinstance(planner, Ordered) else None
    simple = workload.models == (instance.model,) and not lengths.taught
    if rule is None or kind is None or not isinstance(node.latency, FixedLatency) or not simple:
        return None
    n, slots, size = len(workload), node.slots, instance.block_size
    never, none = np.full(n, np.nan), np.zeros(n, np.int64)
    return RunState(
        _jobs(workload), _asks(workload, kind), workload.output.copy(), np.zeros((_HEAPS, n), np.int64),
        none, none.copy(), none.copy(), np.zeros((2, slots), np.int64),
        np.zeros((len(workload.tiers), lengths.window), np.int64), np.zeros(len(workload.tiers), np.int64),
        latency.theta, latency.cov, latency.cap, node.latency.compiled_law[1], np.array([instance.blocks_total, 0]),
        np.zeros(HEAP + _HEAPS, np.int64), np.zeros(2), never, never.copy(), node.latency.compiled_law[0], lengths.prior,
        rule, Line(kind, instance.window, instance.blocks_total, size),
        Limits(size, slots, node.budget, instance.max_model_len), latency.forget, latency.surprise,
    )  # fmt: skip


def _jobs(workload: Workload) -> Rows:
    jobs = np.zeros(len(workload), Jobs.DTYPE)
    for name in ("arrival", "prompt", "priority", "ttft", "tpot", "e2e"):
        jobs[name] = getattr(workload, name)
    return jobs


def _asks(workload: Workload, kind: int) -> Rows:
    """Return the planner's columns: its rank, what lengths are forecast from."""
    asks = np.zeros(len(workload), _ASK)
    first = np.where(np.isinf(workload.ttft), workload.e2e, workload.ttft)
    asks["max_tokens"], asks["task"] = workload.max_tokens, workload.tier
    asks["key2"] = workload.arrival
    asks["key1"] = {PRIORITY: workload.priority, ARRIVAL: workload.arrival}.get(
        kind, workload.arrival + first
    )
    return asks
