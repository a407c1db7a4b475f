"""The simulation of `loop.py` as one compiled loop, about a thousand times faster than real time.

It covers one instance, an `Ordered` planner and a packer with `params`. It calls the very functions that
those packers, the engine, the latency model and vLLM's hook call; only the slow loop's bookkeeping is written
anew, as heaps instead of tables. `tests/sim/test_compiled_loop.py` requires the same outcome to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.core.engine_spec import PackerParams
from headway.core.ranks import ARRIVAL, ATTAINABLE, DUE, LATE, ON_TIME, PRIORITY, due_at, first_keys, level_of
from headway.core.sorting import before, pop, push
from headway.engines.simulated import kernels as engine
from headway.engines.simulated.kernels import Limits, Usage
from headway.forecast.latency.laws import law_seconds
from headway.forecast.latency.online import OnlineLatency, learn, shape
from headway.forecast.latency.profiles import SHORTEST, FixedLatency
from headway.forecast.lengths.task import TELLING, TaskLengths
from headway.memory.budget import KvBudget
from headway.pack.compiled_packers import pack
from headway.pack.kernels import SLACK, Rows
from headway.plan.ordered import Ordered
from headway.plan.sent import kv_room
from headway.recipes.recipe import Recipe
from headway.sim.instance import InstanceSpec
from headway.sim.outcome import Outcome
from headway.sim.workload.traffic import Workload
from headway.types import Floats, Ints, Jobs

_HEAPS = 3  # one per level of `core/ranks.py`; only `ATTAINABLE` uses more than the first
# Kinds of rank and `displaces` of the planners that this loop knows.
_PLANNERS = {(ARRIVAL, False), (PRIORITY, True), (DUE, True), (ATTAINABLE, True)}

RequestColumns = np.dtype(
    [
        ("max_tokens", int), ("task", int),  # what the output length is forecast from
        ("blocks", int),  # KV blocks of prompt and forecast output
    ]
)  # fmt: skip
Progress = np.dtype(
    [
        ("arrived", int), ("serial", int),  # requests that have arrived, and been sent
        ("inside", int), ("rows", int),  # lengths in use of `RunState.inside` and `RunState.rows`
        ("running", int),  # rows that the iteration in progress computes, 0 = the engine is idle
        ("iteration_end", float),
        ("iterations", int), ("preempted", int), ("paused", int), ("busy", float),  # as in `Outcome`
    ]
)  # fmt: skip


class PlannerParams(NamedTuple):
    """The planner, and the fields of the instance that `plan/dispatch.py` reads.

    kind: its rank, one of ARRIVAL, PRIORITY, DUE, ATTAINABLE.
    ranked: requests take the first number of their rank into the engine, as `Send.rank`.
    room: KV blocks that requests inside the engine may be expected to take together.
    """

    kind: int
    ranked: bool
    window: int
    room: int
    blocks: int
    block_size: int


class RunState(NamedTuple):
    """The state of a run. Row i of `jobs` and `requests` is request i; no row is moved or used again.

    progress: one row of `Progress`.
    requests: `RequestColumns`.
    keys: the planner's rank of each, most significant first, shape (2, requests); order: their numbers.
    output: output tokens, by request.
    heaps: waiting requests, one heap per row; heap_sizes: their lengths.
    inside: requests that were sent and have not ended for the planner; place: a request's index in it.
    rows: the requests that the engine has.
    iteration: rows and tokens of the iteration in progress.
    lengths: the last output lengths by task; learned: how many there have been.
    theta, cov, cap, forget, surprise: the packer's `OnlineLatency`.
    law, law_kind: the instance's latency model.
    usage: the engine's KV account.
    first, end: as in `Outcome`.
    prior: forecast output tokens of a task without any answer.
    error: `InstanceSpec.latency_error`.
    packer: the packer's `params`.
    """

    progress: Rows
    jobs: Rows
    requests: Rows
    keys: Floats
    order: Ints
    output: Ints
    heaps: Ints
    heap_sizes: Ints
    inside: Ints
    place: Ints
    rows: Ints
    iteration: Ints
    lengths: Ints
    learned: Ints
    theta: Floats
    cov: Floats
    cap: Floats
    law: Floats
    usage: Usage
    first: Floats
    end: Floats
    law_kind: int
    prior: int
    packer: PackerParams
    planner: PlannerParams
    limits: Limits
    forget: float
    surprise: float
    error: float


@compiled
def advance(run: RunState, stop: int) -> None:
    """Run until `stop` requests have arrived; to the end of everything when that is all of them."""
    progress = run.progress[0]
    size = run.output.size
    while progress["arrived"] < stop or (stop == size and progress["running"]):
        i = progress["arrived"]
        if progress["running"] and (i == size or progress["iteration_end"] <= run.jobs["arrival"][i]):
            _end_iteration(run, progress["iteration_end"])
        else:
            _arrive(run, i)


@compiled
def _arrive(run: RunState, i: int) -> None:
    progress = run.progress[0]
    run.requests["blocks"][i] = np.ceil((run.jobs["prompt"][i] + _forecast(run, i)) / run.planner.block_size)
    progress["arrived"] += 1
    _add(run, level_of(run.keys[0, i], False) if run.planner.kind == ATTAINABLE else ON_TIME, i)
    _send(run, run.jobs["arrival"][i])


# ---- the engine


@compiled
def _begin(run: RunState, now: float) -> None:
    """Start the next iteration if there is anything to compute."""
    progress = run.progress[0]
    rows = run.rows[: progress["rows"]]
    kv_budget = KvBudget(run.planner.blocks, run.usage["free_blocks"], run.limits.size, run.limits.slots)
    step = pack(run.packer, run.jobs, rows, kv_budget, now, run.theta)
    engine.evict(run.jobs, run.usage, step.evict)
    paused = run.usage["held_slots"] - np.count_nonzero(run.jobs["running"][step.order])
    budget = run.packer.budget if run.packer.budget else run.limits.budget
    ran = engine.run(run.jobs, run.usage, run.limits, step.order, step.caps, run.packer.max_running, budget)
    size = ran.rows.size
    progress["running"] = size
    if size == 0:
        return
    run.iteration[0, :size], run.iteration[1, :size] = ran.rows, ran.tokens
    progress["iterations"] += 1
    progress["preempted"] += ran.lost.size
    progress["paused"] += paused
    seconds = _seconds(run, ran.rows, ran.tokens)
    progress["busy"] += seconds
    progress["iteration_end"] = now + seconds


@compiled
def _seconds(run: RunState, rows: Ints, tokens: Ints) -> float:
    """Return how long an iteration takes; the packer's latency model learns from it."""
    decodes, context, prefill, pairs = shape(run.jobs, rows, tokens)
    seconds = max(law_seconds(run.law_kind, run.law, decodes, context, prefill, pairs), SHORTEST)
    if run.packer.kind >= SLACK:
        parts = (float(decodes), float(context), float(prefill), float(pairs))
        learn(run.theta, run.cov, run.cap, *parts, seconds * run.error, run.forget, run.surprise)
    return float(seconds)


@compiled
def _end_iteration(run: RunState, now: float) -> None:
    progress = run.progress[0]
    size = progress["running"]
    done = engine.complete(
        run.jobs, run.usage, run.output, run.iteration[0, :size], run.iteration[1, :size], now
    )
    progress["running"] = 0
    for row in done:
        run.jobs["live"][row] = False
        run.first[row], run.end[row] = run.jobs["first"][row], now
    if done.size:
        _drop_ended(run)
    if progress["rows"]:
        _begin(run, now)
    for row in done:
        _leave(run, row)
        _learn_length(run, row)
        _send(run, now)


@compiled
def _drop_ended(run: RunState) -> None:
    progress = run.progress[0]
    kept = 0
    for k in range(progress["rows"]):
        if run.jobs["live"][run.rows[k]]:
            run.rows[kept] = run.rows[k]
            kept += 1
    progress["rows"] = kept


# ---- output lengths (`forecast/lengths/task.py`)


@compiled
def _forecast(run: RunState, i: int) -> float:
    """Return the mean of the task's last answers, none longer than the request allows."""
    task, most = run.requests["task"][i], run.requests["max_tokens"][i]
    known = min(run.learned[task], run.lengths.shape[1])
    if known == 0:
        return float(min(run.prior, most))
    total = 0
    for k in range(known):
        total += min(run.lengths[task, k], most)
    return float(total / known)


@compiled
def _spread(run: RunState, i: int) -> float:
    """Return `Forecast.spread` of the same answers."""
    task, most = run.requests["task"][i], run.requests["max_tokens"][i]
    known = max(min(run.learned[task], run.lengths.shape[1]), 1)
    squares = 0
    for k in range(known):
        squares += min(run.lengths[task, k], most) ** 2
    mean = _forecast(run, i)
    told = run.learned[task] >= TELLING
    return float(np.sqrt(max(squares / known - mean * mean, 0.0)) / mean) if told else 1.0


@compiled
def _learn_length(run: RunState, i: int) -> None:
    task = run.requests["task"][i]
    run.lengths[task, run.learned[task] % run.lengths.shape[1]] = run.output[i]
    run.learned[task] += 1


# ---- the virtual queue (`plan/ordered.py`, `plan/dispatch.py`)


@compiled
def _send(run: RunState, now: float) -> None:
    """Send the head of the queue as long as it belongs inside the engine."""
    progress = run.progress[0]
    while True:
        heap = _head(run, now)
        if heap < 0 or not _belongs(run, run.heaps[heap, 0], heap):
            return
        i = _take_first(run, heap)
        run.place[i] = progress["inside"]
        run.inside[progress["inside"]] = i
        progress["inside"] += 1
        if run.planner.ranked:
            run.jobs["urgency"][i] = run.keys[0, i]
        _submit(run, i, now)


@compiled
def _head(run: RunState, now: float) -> int:
    """Return the heap whose first request is the most urgent of those waiting, -1 = none waits."""
    if run.planner.kind == ATTAINABLE:  # a late request goes behind those that can still meet their SLO
        while run.heap_sizes[ON_TIME] and run.keys[0, run.heaps[ON_TIME, 0]] < now:
            _add(run, LATE, _take_first(run, ON_TIME))
    for heap in range(_HEAPS):
        if run.heap_sizes[heap]:
            return heap
    return -1


@compiled
def _belongs(run: RunState, i: int, heap: int) -> bool:
    """Tell whether i, the first of a heap, is within the dispatch window and its KV fits."""
    progress = run.progress[0]
    # The loop takes the columns, not the whole state: each array in a call costs its reference count.
    ahead, blocks, requests, keys, order, kind = 0, 0, run.requests, run.keys, run.order, run.planner.kind
    for j in run.inside[: progress["inside"]]:
        if kind == ARRIVAL or _inside_first(keys, order, kind, j, i, heap):
            ahead += 1
            blocks += requests["blocks"][j]
    if ahead >= run.planner.window:
        return False
    return bool(ahead == 0 or blocks + requests["blocks"][i] <= run.planner.room)


@compiled
def _inside_first(keys: Floats, order: Ints, kind: int, j: int, i: int, heap: int) -> bool:
    """Tell whether j, which is inside, ranks before i, which waits in `heap`."""
    if kind == ATTAINABLE:
        level = level_of(keys[0, j], False)
        if level != heap:
            return bool(level < heap)
    return before(keys, order, j, i)


@compiled
def _submit(run: RunState, i: int, now: float) -> None:
    progress = run.progress[0]
    progress["serial"] += 1
    run.jobs["serial"][i] = progress["serial"]
    run.jobs["tokens_left"][i] = _forecast(run, i)
    run.jobs["spread"][i] = _spread(run, i)
    run.jobs["live"][i] = True
    run.rows[progress["rows"]] = i
    progress["rows"] += 1
    if not progress["running"]:
        _begin(run, now)


@compiled
def _leave(run: RunState, i: int) -> None:
    progress = run.progress[0]
    progress["inside"] -= 1
    last = run.inside[progress["inside"]]
    run.inside[run.place[i]], run.place[last] = last, run.place[i]


@compiled
def _add(run: RunState, heap: int, i: int) -> None:
    run.heap_sizes[heap] = push(run.keys, run.order, run.heaps[heap], run.heap_sizes[heap], i)


@compiled
def _take_first(run: RunState, heap: int) -> int:
    first = int(run.heaps[heap, 0])
    run.heap_sizes[heap] = pop(run.keys, run.order, run.heaps[heap], run.heap_sizes[heap])
    return first


def initial_state(
    recipe: Recipe, spec: InstanceSpec, workload: Workload, lengths: TaskLengths
) -> RunState | None:
    """Return the start of a compiled run; None when a part of it is known to Python only."""
    instance, planner, latency = spec.instance, recipe.planner(), OnlineLatency()
    params = recipe.packer(spec.engine_spec(latency)).params
    if not isinstance(planner, Ordered) or (planner.kind, planner.displaces) not in _PLANNERS or planner.key:
        return None
    known = workload.models == (instance.model,) and not lengths.taught
    if params is None or not isinstance(spec.latency, FixedLatency) or not known:
        return None
    n, tasks = len(workload), len(workload.tiers)
    blocks, size = instance.blocks_total, instance.block_size
    return RunState(
        progress=np.zeros(1, Progress), jobs=_jobs(workload), requests=_requests(workload),
        keys=_keys(workload, planner.kind), order=np.arange(n),
        output=workload.output.copy(), heaps=np.zeros((_HEAPS, n), np.int64),
        heap_sizes=np.zeros(_HEAPS, np.int64), inside=np.zeros(n, np.int64), place=np.zeros(n, np.int64),
        rows=np.zeros(n, np.int64), iteration=np.zeros((2, spec.slots), np.int64),
        lengths=np.zeros((tasks, lengths.window), np.int64), learned=np.zeros(tasks, np.int64),
        theta=latency.theta, cov=latency.cov, cap=latency.cap, law=spec.latency.compiled_law[1],
        usage=engine.usage_of(blocks), first=np.full(n, np.nan), end=np.full(n, np.nan),
        law_kind=spec.latency.compiled_law[0], prior=lengths.prior, packer=params,
        planner=PlannerParams(
            planner.kind, planner.ranked, instance.window + (planner.ahead or 0),
            kv_room(instance, planner.ahead), blocks, size,
        ),
        limits=Limits(size, spec.slots, spec.budget, instance.max_model_len),
        forget=latency.forget, surprise=latency.surprise, error=spec.latency_error,
    )  # fmt: skip


def outcome(state: RunState) -> Outcome:
    """Return what became of the requests of a run that has ended."""
    progress = state.progress[0]
    return Outcome(
        state.first, state.end, np.where(state.jobs["serial"] > 0, 0, -1), state.jobs["evictions"].copy(),
        int(progress["iterations"]), float(progress["busy"]), int(progress["preempted"]),
        int(progress["paused"]),
    )  # fmt: skip


def _jobs(workload: Workload) -> Rows:
    jobs = np.zeros(len(workload), Jobs.DTYPE)
    for name in ("arrival", "prompt", "priority", "ttft", "tpot", "e2e"):
        jobs[name] = getattr(workload, name)
    return jobs


def _requests(workload: Workload) -> Rows:
    requests = np.zeros(len(workload), RequestColumns)
    requests["max_tokens"], requests["task"] = workload.max_tokens, workload.tier
    return requests


def _keys(workload: Workload, kind: int) -> Floats:
    due = due_at(workload.arrival, workload.ttft, workload.e2e)
    return np.array([first_keys(kind, workload.arrival, workload.priority, due), workload.arrival])
