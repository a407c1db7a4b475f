"""The state of a compiled run (`compiled_loop.py`): its tables, how it begins and what it came to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.engines.simulated import kernels as engine
from headway.engines.simulated.iteration import CLOCK, TOTALS, EngineState, state_of
from headway.engines.simulated.kernels import Limits
from headway.policy.core.ranks import ARRIVAL, ATTAINABLE, DUE, PRIORITY, SOFT, due_at, first_keys
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.forecast.latency.profiles import FixedLatency
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.pack.kernels import SLACK, Rows
from headway.policy.plan.by_fleet import ByFleet
from headway.policy.plan.ordered import Ordered
from headway.policy.plan.sent import kv_room
from headway.policy.recipes.recipe import Recipe
from headway.ports import Lengths
from headway.simulate.forecasts import Noisy, Oracle
from headway.simulate.instance import InstanceSpec
from headway.simulate.outcome import Outcome
from headway.simulate.workload.traffic import Workload
from headway.types import Floats, Ints, Jobs

_HEAPS = 3  # one per level of `policy/core/ranks.py`; only `ATTAINABLE` uses more than the first
# Kinds of rank and `displaces` of the planners that the loop knows.
_PLANNERS = {(ARRIVAL, False), (PRIORITY, True), (DUE, True), (ATTAINABLE, True)}

RequestColumns = np.dtype(
    [
        ("max_tokens", int),
        ("task", int),  # what the output length is forecast from
        ("blocks", int),  # KV blocks of prompt and forecast output
    ]
)
Progress = np.dtype(
    [
        ("arrived", int),
        ("serial", int),  # requests that have arrived, and been sent
        ("inside", int),
        ("early", int),  # of `RunState.inside`, those that were not overdue at the last look; they come first
        ("rows", int),  # lengths in use of `RunState.inside` and `RunState.rows`
        ("first_late", int),
        ("after_late", int),  # of `RunState.late`, from where to where it is in use
        ("refused", int),  # the head of the queue that does not belong inside as it is, -1 = not known
        ("late_at", float),  # when the next request inside is late, as of the last look at them
    ]
)


class PlannerParams(NamedTuple):
    """The planner, and the fields of the instance that `policy/plan/dispatch.py` reads.

    kind: its rank, one of ARRIVAL, PRIORITY, DUE, ATTAINABLE.
    ranked: requests take the first number of their rank into the engine, as `Send.rank`.
    counts_late: what is overdue inside ranks behind newcomers that can be on time.
    room: KV blocks that requests inside the engine may be expected to take together.
    """

    kind: int
    ranked: bool
    counts_late: bool
    window: int
    room: int
    block_size: int


class RunState(NamedTuple):
    """The state of a run. Row i of the engine's jobs and `requests` is request i; no row is moved or used again.

    progress: one row of `Progress`, totals: one of `iteration.TOTALS`.
    requests: `RequestColumns`.
    keys: the planner's rank of each, most significant first, shape (2, requests); order: their numbers.
    heaps: waiting requests, one heap per row; heap_sizes: their lengths.
    inside: requests that were sent and have not ended for the planner; place: a request's index in it.
    rows: the requests that the engine has, without those in `late`.
    late: the overdue ones (`promises/outlook.py`) by `due`, shape (1, requests), nan for all others.
    lengths: the last output lengths by task; learned: how many there have been.
    first, end: as in `Outcome`.
    given: forecast output tokens and their spread by request, shape (2, requests); (2, 0) = learned by task.
    prior: forecast output tokens of a task without any answer.
    """

    progress: Rows
    totals: Rows
    engine: EngineState
    requests: Rows
    keys: Floats
    order: Ints
    heaps: Ints
    heap_sizes: Ints
    inside: Ints
    place: Ints
    rows: Ints
    late: Ints
    due: Floats
    lengths: Ints
    learned: Ints
    first: Floats
    end: Floats
    given: Floats
    prior: int
    planner: PlannerParams


def initial_state(recipe: Recipe, spec: InstanceSpec, workload: Workload, lengths: Lengths) -> RunState | None:
    """Return the start of a compiled run; None when a part of it is known to Python only."""
    instance, planner, latency = spec.instance, recipe.planner(), OnlineLatency()
    if isinstance(planner, ByFleet):  # this instance cannot load other models
        planner = planner.still
    params = recipe.packer(spec.engine_spec(latency)).params
    if not isinstance(planner, Ordered) or (planner.kind, planner.displaces) not in _PLANNERS:
        return None
    if planner.key or (planner.follows_runs and any(workload.runs)):
        return None
    forecasts = _forecasts(workload, lengths)
    known = workload.models == (instance.model,)
    if params is None or forecasts is None or not isinstance(spec.latency, FixedLatency) or not known:
        return None
    n, tasks = len(workload), len(workload.tiers)
    given, learned = forecasts
    blocks, size = instance.blocks_total, instance.block_size
    jobs, output = _jobs(workload), workload.output.copy()
    return RunState(
        progress=_progress(), totals=np.zeros(1, TOTALS), requests=_requests(workload),
        engine=state_of(
            np.zeros(1, CLOCK), jobs, output, engine.account_of(blocks), latency, spec.latency, params,
            Limits(size, spec.slots, spec.budget, instance.max_model_len), blocks, spec.latency_error,
            learns=params.kind >= SLACK,
        ),
        keys=_keys(workload, planner), order=np.arange(n), heaps=np.zeros((_HEAPS, n), np.int64),
        heap_sizes=np.zeros(_HEAPS, np.int64), inside=np.zeros(n, np.int64), place=np.zeros(n, np.int64),
        rows=np.zeros(n, np.int64), late=np.zeros(n, np.int64), due=np.full((1, n), np.nan),
        lengths=np.zeros((tasks, learned.window), np.int64), learned=np.zeros(tasks, np.int64),
        first=np.full(n, np.nan), end=np.full(n, np.nan), given=given, prior=learned.prior,
        planner=PlannerParams(
            planner.kind, planner.ranked, planner.counts_late, instance.window + (planner.ahead or 0),
            kv_room(instance, planner.ahead), size,
        ),
    )  # fmt: skip


def outcome(state: RunState) -> Outcome:
    """Return what became of the requests of a run that has ended."""
    total, jobs = state.totals[0], state.engine.jobs
    evictions = np.where(np.isnan(state.end), 0, jobs["evictions"])
    return Outcome(
        state.first,
        state.end,
        np.where(jobs["serial"] > 0, 0, -1),
        evictions,
        np.where(np.isnan(state.end), 0.0, jobs["gap"]),
        int(total["iterations"]),
        float(total["busy"]),
        int(total["preempted"]),
        int(total["paused"]),
    )


def _forecasts(workload: Workload, lengths: Lengths) -> tuple[Floats, TaskLengths] | None:
    """Return `RunState.given` and what learns; None for forecasts that only Python knows."""
    if isinstance(lengths, (Noisy, Oracle)):
        each = [lengths.forecast(workload.request(i)) for i in range(len(workload))]
        return np.array([[one.mean for one in each], [one.spread for one in each]]), TaskLengths()
    if type(lengths) is TaskLengths and not lengths.taught:
        return np.zeros((2, 0)), lengths
    return None


def _progress() -> Rows:
    """Return the progress of a run that has not begun."""
    progress = np.zeros(1, Progress)
    progress["refused"], progress["late_at"] = -1, np.inf
    return progress


def _jobs(workload: Workload) -> Rows:
    jobs = np.zeros(len(workload), Jobs.DTYPE)
    for name in ("arrival", "prompt", "priority", "ttft", "e2e", "itl", "weight", "soft"):
        jobs[name] = getattr(workload, name)
    jobs["tpot"] = np.minimum(workload.tpot, workload.itl)
    jobs["line_from"] = np.where(workload.line == 1, workload.arrival + workload.ttft, -np.inf)
    return jobs


def _requests(workload: Workload) -> Rows:
    requests = np.zeros(len(workload), RequestColumns)
    requests["max_tokens"], requests["task"] = workload.max_tokens, workload.tier
    return requests


def _keys(workload: Workload, planner: Ordered) -> Floats:
    due = due_at(workload.arrival, workload.ttft, workload.e2e)
    if planner.follows_runs:  # `policy/plan/run_order.py`
        soft = workload.arrival + np.where(workload.soft > 0.0, workload.soft, SOFT)
        due = np.where(np.isinf(due), soft, due)
    return np.array([first_keys(planner.kind, workload.arrival, workload.priority, due), workload.arrival])
