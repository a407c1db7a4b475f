"""Conformance of the simulated engine: it gets the same work as vLLM's scheduler and is compared step by step.

vLLM's real `Scheduler` runs in virtual time (`engines/vllm/oracle.py`), with Headway's hook inside or stock.
Identical means: the same requests in the same order with the same tokens, the same preemptions, free blocks
and finished requests. `tests/engine/test_licence.py` uses the same driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from headway.engines.simulated.caching import CachingEngine
from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.engines.simulated.two_ended import HostPoolEngine, TwoEndedEngine
from headway.engines.vllm import oracle
from headway.engines.vllm.kv_transfer import host_pool, two_ended_pool
from headway.engines.vllm.oracle import SchedulerOracle
from headway.engines.vllm.request_metadata import finite
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.two_ended.block_table import TwoEndedTable
from headway.policy.recipes.registry import find
from headway.prefix import Prefix
from headway.types import Slo
from headway.whatif.output.results import Row

BLOCK = 16
STOCK, HOOK, POOL = "stock", "hook", "pool"
COMMON = (  # also compared with prefix caching (`prefixes.py`)
    ("vllm", HOOK),
    ("vllm", STOCK),
    ("priority", HOOK),
    ("edf", HOOK),
    ("slack", HOOK),
    ("headway", HOOK),
)
PAIRS = (*COMMON, ("ecoserve", HOOK), ("bros", POOL), ("bros-plain-blocks", POOL))
_SLOS = (Slo(), Slo(0.4, 0.1), Slo(1.5, 0.05), Slo(e2e=6.0), Slo(0.1))
LONGEST = 1024  # tokens of one request, prompt and answer
_NOISE = 0.5  # log-normal error of predicted lengths
_STEP = (0.01, 0.09)  # seconds, drawn anew for each iteration
_TWO_ENDED = 32  # tokens of a two-ended block; vLLM's CPU attention has multiples of this
_STANDSTILL = 200  # steps in a row in which no request runs although some wait
_COPY = 1e-5  # seconds to move a token's KV to the host
_URGENCIES = (-math.inf, -1.0, 0.0, 0.5, 2.0, math.inf)
_RANKED = 0.5  # share of drawn workloads whose requests have an urgency, which changes now and then
_RERANKED = 0.1  # share of their steps before which urgencies change


@dataclass(frozen=True, slots=True)
class Task:
    """A request of a workload.

    at: arrival time.
    prompt, output: tokens.
    tokens_left: predicted output tokens; None = the true number.
    spread: `Jobs.spread`.
    urgency: `Send.rank`; stock vLLM has none.
    prefix: tokens shared with other requests (`prefixes.py`). run: its application run, 0 = none.
    """

    at: float
    prompt: int
    output: int
    slo: Slo
    priority: int
    tokens_left: float | None = None
    urgency: float = 0.0
    spread: float = 0.0
    prefix: Prefix | None = None
    run: int = 0


@dataclass(frozen=True, slots=True)
class ConformanceCase:
    """A workload and its engine.

    blocks: usable blocks of `BLOCK` tokens. seed: of the iterations' durations, and of the host's size if blocks
    have two ends. copy_seconds: time to copy one token's KV to the host, as packers see it. host_blocks: of
    the host pool beside a prefix cache; None = room for all.
    """

    tasks: tuple[Task, ...]
    max_running: int
    budget: int
    blocks: int
    max_model_len: int
    seed: int
    copy_seconds: float = 1e-5
    host_blocks: int | None = None


@dataclass(slots=True)
class StepTally:
    """Numbers of compared and of identical steps. difference: description of the first difference."""

    workloads: int = 0
    steps: int = 0
    identical: int = 0
    difference: str | None = None

    def add(self, other: StepTally) -> None:
        """Add another count."""
        self.workloads += other.workloads
        self.steps += other.steps
        self.identical += other.identical
        self.difference = self.difference or other.difference


def draw(rng: np.random.Generator) -> ConformanceCase:
    """Return a random workload: bursts and lulls, tight and ample KV, small and large batches."""
    count = int(rng.integers(20, 60))
    running = int(rng.choice((2, 4, 8, 16, 32)))
    arrivals = np.cumsum(rng.exponential(rng.uniform(0.0, 3.0) / running, count))
    long, chatty = int(rng.choice((120, 400, 800))), int(rng.choice((20, 60, 150)))
    tasks = tuple(
        Task(
            float(at),
            int(rng.integers(1, long)),
            int(rng.integers(1, chatty)),
            _SLOS[rng.integers(len(_SLOS))],
            int(rng.integers(4)),
        )
        for at in arrivals
    )
    least = LONGEST // BLOCK
    blocks = int(rng.integers(least, least + running * (long + chatty) // BLOCK + 1))
    budget, seed = int(rng.choice((64, 200, 512, 2048))), int(rng.integers(2**31))
    return ConformanceCase(_ranked(_predicted(tasks, seed), seed), running, budget, blocks, LONGEST, seed)


def _predicted(tasks: tuple[Task, ...], seed: int) -> tuple[Task, ...]:
    """Return tasks whose answers are predicted too long or too short, as predictors do."""
    factors = np.exp(_NOISE * np.random.default_rng(seed).standard_normal(len(tasks)))
    lefts = (float(np.ceil(task.output * factor)) for task, factor in zip(tasks, factors, strict=True))
    return tuple(replace(task, tokens_left=left, spread=_NOISE) for task, left in zip(tasks, lefts, strict=True))


def _ranked(tasks: tuple[Task, ...], seed: int) -> tuple[Task, ...]:
    """Return tasks with urgencies, in some of the workloads."""
    rng = np.random.default_rng((seed, 1))
    if rng.random() >= _RANKED:
        return tasks
    drawn = rng.choice(_URGENCIES, len(tasks)).tolist()
    return tuple(replace(task, urgency=urgency) for task, urgency in zip(tasks, drawn, strict=True))


def compare(case: ConformanceCase, recipe: str, host: str = HOOK) -> StepTally:
    """Drive both engines with a workload and compare each step."""
    return tally_of(Both(case, recipe, host))


def tally_of(both: Both) -> StepTally:
    """Count the steps; after the first difference the states differ, so no later step counts as identical."""
    tally = StepTally(1)
    for difference in both.steps():
        tally.steps += 1
        tally.difference = tally.difference or difference
        tally.identical += tally.difference is None
    return tally


def run(
    rng: np.random.Generator, *, workloads: int, steps: int, progress: Callable[[int], None] | None = None
) -> dict[tuple[str, str], StepTally]:
    """Compare at least this number of workloads and steps for every pair of `PAIRS`; `progress` gets new steps."""
    found = {}
    for recipe, host in PAIRS:
        tally = found[recipe, host] = StepTally()
        while tally.workloads < workloads or tally.steps < steps:
            one = compare(draw(rng), recipe, host)
            tally.add(one)
            if progress is not None:
                progress(one.steps)
    return found


def rows(found: dict[tuple[str, str], StepTally]) -> list[Row]:
    """Return conformance.steps and conformance.identical_pct; system = packer, setting = hook or stock."""
    return [
        row
        for (recipe, host), tally in found.items()
        for row in (
            Row("conformance.steps", recipe, host, float(tally.steps), "count"),
            Row("conformance.identical_pct", recipe, host, 100 * tally.identical / tally.steps, "%"),
        )
    ]


class Both:
    """vLLM's scheduler and the simulated engine, given the same work; caching: both cache prefixes."""

    def __init__(self, case: ConformanceCase, recipe: str, host: str, *, caching: bool = False) -> None:
        self.case, self.latency = case, OnlineLatency()
        self.idle = 0  # steps in a row in which no request ran
        self.budget = max(case.budget, case.max_running)
        self.slots = case.max_running if host == STOCK else 2 * case.max_running
        # Stock vLLM serves running requests in the order of admission, whatever their priority, and admits
        # restored requests first: the order within an iteration is its own.
        self.ordered = host == HOOK or (host, recipe) == (STOCK, "vllm")
        if host == POOL:
            self.real, self.lean = _pooled(case, self.budget, self.slots, recipe, self.latency)
        else:
            self.real = _real(case, self.budget, self.slots, recipe, host, caching)
            spec = _spec(case, self.budget, BLOCK, self.latency)
            settings: dict[str, Any] = {
                "blocks": case.blocks,
                "size": BLOCK,
                "slots": self.slots,
                "budget": self.budget,
                "max_model_len": case.max_model_len,
            }
            packer = find(recipe).packer(spec)
            self.lean = (
                CachingEngine(packer, host=spec.host_tokens, **settings)
                if caching
                else SimulatedEngine(packer, **settings)
            )
        self.todo = sorted(enumerate(case.tasks), key=lambda item: item[1].at)
        self.urgency = {f"r{i}": 0.0 if host == STOCK else task.urgency for i, task in enumerate(case.tasks)}
        self.reranks = np.random.default_rng((case.seed, 2)) if any(self.urgency.values()) else None

    def steps(self) -> Iterator[str | None]:
        """Yield the difference in each step, None = no difference, until vLLM has finished everything."""
        rng, difference = np.random.default_rng(self.case.seed), None
        while self.todo or self.real.busy:
            if self.idle > _STANDSTILL:
                yield f"at {self.real.now:.3f}: nothing runs, and only {len(self.real.finished)} have ended"
                return
            self._arrive()
            self._rerank()
            # What a clock shows of them: the hook learns from that, to the last bit.
            seconds = self.real.now + float(rng.uniform(*_STEP)) - self.real.now
            difference = self._alone(seconds) if difference else self._step(seconds)
            yield difference
        if difference is None and self.lean.busy:
            yield "vLLM has finished, the simulated engine has not"

    def _arrive(self) -> None:
        while self.todo and self.todo[0][1].at <= self.real.now:
            i, task = self.todo.pop(0)
            self._add(f"r{i}", task)

    def _add(self, id: str, task: Task, **text: Any) -> None:
        """Give a request to both engines. text: the tokens passed to vLLM."""
        self.real.add(
            id, task.prompt, task.output, priority=task.priority, metadata=_metadata(id, task), arrival=task.at, **text
        )
        self.lean.add(
            id,
            task.prompt,
            task.output,
            arrival=task.at,
            slo=task.slo,
            priority=task.priority,
            tokens_left=task.tokens_left,
            urgency=self.urgency[id],
            spread=task.spread,
            prefix=task.prefix,
            run=task.run,
        )

    def _rerank(self) -> None:
        """Now and then change the urgency of some requests, also of ended ones and of ones not yet arrived."""
        rng = self.reranks
        if rng is None or rng.random() >= _RERANKED:
            return
        ids = rng.choice(list(self.urgency), 3)
        ranks = dict(zip(ids.tolist(), rng.choice(_URGENCIES, ids.size).tolist(), strict=True))
        self.urgency |= ranks
        self.lean.rerank(ranks)
        answer = self.real.scheduler.control({"op": "urgency", "values": ranks})
        assert "error" not in answer, answer

    def _step(self, seconds: float) -> str | None:
        now, before = self.real.now, len(self.real.finished)
        output, ran = self.real.schedule(), self.lean.schedule(now)
        difference = self._decided(output, ran)
        if ran.rows.size:
            self.latency.learn(self.lean.batch(ran), seconds)
        self._complete(output, seconds)
        ends = self.lean.complete(ran, now + seconds).ids
        wanted = self.real.finished[before:]
        if not self.ordered:
            ends, wanted = sorted(ends), sorted(wanted)
        return difference or (None if ends == wanted else f"at {now:.3f}: vLLM ended {wanted}, we {ends}")

    def _alone(self, seconds: float) -> str:
        self._complete(self.real.schedule(), seconds)
        return "an earlier step differed"

    def _complete(self, output: Any, seconds: float) -> None:
        self.real.complete(output, seconds)
        self.idle = 0 if output.num_scheduled_tokens else self.idle + 1
        if self.idle and self.todo:
            self.real.now = max(self.real.now, self.todo[0][1].at)

    def _decided(self, output: Any, ran: Ran) -> str | None:
        """Return the first difference between the decisions."""
        for what, (theirs, mine) in self._pairs(output, ran).items():
            if theirs != mine:
                return f"at {self.real.now:.3f}: vLLM {what} {theirs}, we {mine}"
        return None

    def _pairs(self, output: Any, ran: Ran) -> dict[str, tuple[Any, Any]]:
        """Return the values that must be equal, vLLM's and ours: order and tokens, preemptions, free blocks."""
        jobs, scheduler = self.lean.jobs, self.real.scheduler
        ours = list(zip(jobs.names(ran.rows), ran.tokens.tolist(), strict=True))
        lost = {id: int(jobs.evictions[row]) for id, row in jobs.row_of.items()}
        pairs: dict[str, tuple[Any, Any]] = {
            "runs": (list(output.num_scheduled_tokens.items()), ours)
            if self.ordered
            else (output.num_scheduled_tokens, dict(ours)),
            "preempted": ({id: _lost(scheduler, id) for id in lost}, lost),
            "has free": (scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), self.lean.free),
        }
        if isinstance(self.lean, TwoEndedEngine):
            pairs["shares and saves"] = (_account(scheduler.kv_policy.kv), _account(self.lean.kv))
        return pairs


def _lost(scheduler: Any, id: str) -> int:
    """Return how often a request's KV was taken; of two-ended blocks vLLM does not see what is saved."""
    jobs = getattr(scheduler, "jobs", None)
    if jobs is None or not scheduler.kv_policy.state().get("two_ended"):
        return int(scheduler.requests[id].num_preemptions)
    return int(jobs.evictions[jobs.row_of[id]])


def _account(kv: TwoEndedTable) -> tuple[int, ...]:
    """Return the sums of a table of slots: tokens on the host, dropped and stored, blocks shared, copies."""
    orders = kv.ops[: kv.state[0]["num_ops"]].sum(axis=0)
    return (
        *(int(kv.state[0][name]) for name in ("host_tokens", "dropped_tokens", "shared_blocks")),
        int(kv.num_tokens.sum()),
        *orders[[0, 2, 3]].tolist(),
    )


def _pooled(
    case: ConformanceCase, budget: int, slots: int, recipe: str, latency: OnlineLatency
) -> tuple[SchedulerOracle, SimulatedEngine]:
    """Return both hosts with BROS's host pool: scarce in most cases, but not behind plain blocks."""
    from headway.engines.vllm.plugin.hook import HeadwayScheduler

    scarce = case.blocks * BLOCK // (3 * _TWO_ENDED)  # leaves something to share
    blocks = max(scarce, -(-case.max_model_len // _TWO_ENDED))
    ends = find(recipe).wants.two_ended
    host = int(np.random.default_rng(case.seed).choice((0, 40, 400, 100_000))) if ends else 1 << 30
    setup = oracle.config(
        max_running=case.max_running,
        max_batched_tokens=budget,
        max_model_len=case.max_model_len,
        block_size=_TWO_ENDED,
        recipe=recipe,
        slots=slots,
        pool=two_ended_pool(1, host_tokens=host, copy_seconds=_COPY),
    )
    spec = _spec(case, budget, _TWO_ENDED, latency)
    packer = find(recipe).packer(replace(spec, copy_seconds=_COPY, host_tokens=host, two_ended=ends))
    settings: dict[str, Any] = {
        "blocks": blocks,
        "size": _TWO_ENDED,
        "slots": slots,
        "budget": budget,
        "host": host,
        "max_model_len": case.max_model_len,
        "copy_seconds": _COPY,
    }
    engine = TwoEndedEngine(packer, **settings, decode_only=True) if ends else HostPoolEngine(packer, **settings)
    return SchedulerOracle(oracle.scheduler(setup, blocks + 1, _TWO_ENDED, HeadwayScheduler)), engine


def _real(case: ConformanceCase, budget: int, slots: int, recipe: str, host: str, caching: bool) -> SchedulerOracle:
    from headway.engines.vllm.plugin.hook import HeadwayScheduler

    policy = "priority" if recipe == "vllm-priority" else "fcfs"
    hook, inside = (None, None) if host == STOCK else (HeadwayScheduler, recipe)
    spec = _spec(case, budget, BLOCK, OnlineLatency())
    copy = case.copy_seconds if hook is not None and find(recipe).packer(spec).kv.saves else None
    setup = _config(
        case.max_running, budget, case.max_model_len, slots, inside, policy, copy, case.host_blocks, caching
    )
    return SchedulerOracle(oracle.scheduler(setup, case.blocks + 1, BLOCK, hook))  # one is vLLM's null block


def _spec(case: ConformanceCase, budget: int, size: int, latency: OnlineLatency) -> EngineSpec:
    host = None if case.host_blocks is None else case.host_blocks * size
    return EngineSpec(
        case.max_running, budget, size, case.max_model_len, case.copy_seconds, host, reservations=True, latency=latency
    )


@cache
def _config(
    running: int,
    budget: int,
    longest: int,
    slots: int,
    recipe: str | None,
    policy: str,
    copy_seconds: float | None = None,
    host_blocks: int | None = None,
    caching: bool = False,
) -> Any:
    """Configurations are read only by what is made of them, and slow to make.

    copy_seconds: to move one token's KV to the engine's host pool; None = it has none. host_blocks: of that pool; None
    = room for all.
    """
    gib = 1.0 if host_blocks is None else host_blocks / 2**30  # a block takes a byte, as here no layer has a tensor
    return oracle.config(
        max_running=running,
        max_batched_tokens=budget,
        max_model_len=longest,
        block_size=BLOCK,
        recipe=recipe,
        slots=slots,
        policy=policy if recipe is None else "fcfs",
        pool=host_pool(gib, copy_seconds=copy_seconds) if copy_seconds is not None else None,
        enable_prefix_caching=caching,
    )


def _metadata(id: str, task: Task) -> dict[str, Any]:
    named = {"ttft": task.slo.ttft, "tpot": task.slo.tpot, "e2e": task.slo.e2e}
    kept = {f"headway_{name}": value for name, value in named.items() if value is not None}
    return {
        "headway_id": id,
        "headway_arrival": task.at,
        "headway_tokens_left": float(task.tokens_left or task.output),
        "headway_spread": task.spread,
        "headway_urgency": finite(task.urgency),
        "headway_run": float(task.run),
        **kept,
    }
