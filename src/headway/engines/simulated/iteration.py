"""Iterations of a simulated engine as compiled functions, for compiled loops; `caching.py` has those with a cache.

They call the very functions that the packer, the engine, the latency model and vLLM's hook call, and give what
`simulate/loop.py` gives with `engine.py`, to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled, compiled_into_callers
from headway.engines.simulated import kernels
from headway.engines.simulated.kernels import Limits, Ran, Rows
from headway.policy.core.engine_spec import PackerParams
from headway.policy.forecast.latency.laws import law_seconds
from headway.policy.forecast.latency.online import OnlineLatency, learn, shape
from headway.policy.forecast.latency.profiles import SHORTEST, FixedLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.preemption_cost import are_swapped
from headway.policy.pack.kernels import PROMISES, CompiledStep
from headway.policy.pack.kernels import pack as pack_by_rank
from headway.policy.pack.promises.packer import pack as pack_promises
from headway.types import UNLIMITED, Floats, Ints


@compiled
def pack(
    params: PackerParams, jobs: Rows, rows: Ints, kv_budget: KvBudget, now: float, theta: Floats, slow: float
) -> CompiledStep:
    """Return the step of one of the packers; rows: all of the engine's, in any order; theta, slow: `OnlineLatency`."""
    if params.kind == PROMISES:
        return pack_promises(params, jobs, rows, kv_budget, now, theta, slow)
    return pack_by_rank(params, jobs, rows, kv_budget, now, theta)


# The iteration in progress: its end (inf = the engine is idle), its place among what ends at one instant, its rows.
CLOCK = np.dtype([("end", float), ("serial", int), ("rows", int)])
TOTALS = np.dtype(
    [
        ("now", float),
        ("serial", int),  # iterations and timers so far
        ("iterations", int),
        ("busy", float),
        ("preempted", int),
        ("paused", int),
        ("queried", int),
        ("hits", int),  # as in `Outcome`
    ]
)


class EngineState(NamedTuple):
    """What an iteration of one engine reads and writes.

    clock: one record of `CLOCK`.
    output: output tokens, by row of `jobs`.
    account: one record of `kernels.USAGE`.
    iteration: rows and tokens of the iteration in progress, shape (2, slots).
    theta, cov, cap, slow, taught, forget, surprise: the packer's `OnlineLatency`; `learns`: it is taught.
    law, law_kind: the latency model. error: `InstanceSpec.latency_error`.
    packer: its `params`.
    """

    clock: Rows
    jobs: Rows
    output: Ints
    account: Rows
    iteration: Ints
    theta: Floats
    cov: Floats
    cap: Floats
    slow: Floats
    taught: Ints
    law: Floats
    law_kind: int
    packer: PackerParams
    limits: Limits
    blocks: int
    forget: float
    surprise: float
    error: float
    learns: bool


@compiled
def begin(engine: EngineState, rows: Ints, now: float, totals: Rows) -> Ran:
    """Start the next iteration with these rows, as `outlook.in_sight` returns them, if one of them can compute."""
    step = decide(engine, rows, engine.account[0]["free_blocks"], now)
    ran, copied, paused = account(engine, step)
    start(engine, ran, copied, paused, now, totals)
    return ran


@compiled_into_callers
def decide(engine: EngineState, rows: Ints, free: int, now: float) -> CompiledStep:
    """Return the packer's step for these rows. free: blocks."""
    kv_budget = KvBudget(engine.blocks, free, engine.limits.size, engine.limits.slots, UNLIMITED)
    return pack(engine.packer, engine.jobs, rows, kv_budget, now, engine.theta, engine.slow[0])


@compiled_into_callers
def account(engine: EngineState, step: CompiledStep) -> tuple[Ran, int, int]:
    """Account one iteration; return also the tokens copied to the host and the number of paused rows."""
    jobs, usage, packer = engine.jobs, engine.account[0], engine.packer
    copied = _yield(engine, step.evict) if step.evict.size else 0
    paused = usage["held_slots"] - np.count_nonzero(jobs["running"][step.order])
    budget = packer.budget if packer.budget else engine.limits.budget
    ran = kernels.run(jobs, usage, engine.limits, step.order, step.caps, packer.max_running, budget)
    return ran, copied, paused


@compiled_into_callers
def start(engine: EngineState, ran: Ran, copied: int, paused: int, now: float, totals: Rows) -> None:
    """Start an iteration that is accounted, and teach the packer its latency; without rows the engine idles."""
    clock, total, size, moved = engine.clock[0], totals[0], ran.rows.size, copied + ran.copied
    clock["rows"], clock["end"] = size, np.inf
    if size == 0:
        return
    engine.iteration[0, :size], engine.iteration[1, :size] = ran.rows, ran.tokens
    total["iterations"] += 1
    total["preempted"] += ran.lost.size
    total["paused"] += paused
    decodes, context, prefill, pairs = shape(engine.jobs, ran.rows, ran.tokens)
    seconds = max(law_seconds(engine.law_kind, engine.law, decodes, context, prefill, pairs), SHORTEST)
    if engine.learns:
        parts = (float(decodes), float(context), float(prefill), float(pairs))
        learn(
            engine.theta, engine.cov, engine.cap, engine.slow, engine.taught, *parts, seconds * engine.error,
            engine.forget, engine.surprise,
        )  # fmt: skip
    copies = moved * engine.packer.copy_seconds  # beside the computation
    seconds = max(seconds, copies if moved else 0.0)
    total["busy"] += seconds
    clock["end"], clock["serial"] = now + seconds, total["serial"]
    total["serial"] += 1


@compiled
def _yield(engine: EngineState, evict: Ints) -> int:
    """Free the KV of rows that yield; return the tokens that are copied to the host for that.

    Rows go there as long as it has room (`two_ended.HostPoolEngine`).
    """
    if not engine.packer.host:
        kernels.evict(engine.jobs, engine.account[0], evict)
        return 0
    swapped = are_swapped(engine.jobs["computed"][evict], engine.theta, engine.packer.copy_seconds)
    left = engine.packer.host - engine.account[0]["on_host"]
    for i in range(evict.size):
        if swapped[i]:
            left -= engine.jobs["computed"][evict[i]]
            swapped[i] = left >= 0
    kernels.evict(engine.jobs, engine.account[0], evict[~swapped])
    return int(kernels.save(engine.jobs, engine.account[0], evict[swapped]))


@compiled_into_callers
def complete(engine: EngineState, now: float) -> Ints:
    """End the iteration in progress; return the rows that are complete, which live no more."""
    clock = engine.clock[0]
    rows, tokens = engine.iteration[0, : clock["rows"]], engine.iteration[1, : clock["rows"]]
    done = kernels.complete(engine.jobs, engine.account[0], engine.output, rows, tokens, now)
    clock["rows"], clock["end"] = 0, np.inf
    for row in done:
        engine.jobs["live"][row] = False
    return done


def state_of(
    clock: Rows, jobs: Rows, output: Ints, account: Rows, learned: OnlineLatency, latency: FixedLatency,
    packer: PackerParams, limits: Limits, blocks: int, error: float, *, learns: bool,
) -> EngineState:  # fmt: skip
    """Return the state of an engine that is idle."""
    clock["end"], clock["rows"] = np.inf, 0
    kind, law = latency.compiled_law
    return EngineState(
        clock, jobs, output, account, np.zeros((2, limits.slots), np.int64), learned.theta, learned.cov, learned.cap,
        learned.slow, learned.taught, law, kind, packer, limits, blocks, learned.forget, learned.surprise, error,
        learns,
    )  # fmt: skip
