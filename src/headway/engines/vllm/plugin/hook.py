"""vLLM's scheduler with Headway's packer inside.

A subclass of vLLM's own scheduler. Before each `schedule()` it updates the `Jobs` table, calls the packer,
and shows the stock code only the requests that the `Step` names, in its order; afterwards it puts the others
back. Stock code is called, never copied, so prefix caching, structured output, speculation and connectors
keep working. `tests/engine/test_names.py` pins every internal of vLLM used here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from headway.core.engine_spec import check
from headway.engines.vllm.plugin.control import PendingUrgency, install
from headway.engines.vllm.plugin.iteration_log import IterationLog, Row
from headway.engines.vllm.plugin.kv_policy import KvPolicy
from headway.engines.vllm.plugin.scheduler_stats import SchedulerStats, StatsMixin
from headway.engines.vllm.plugin.setup import kv_policy_of, spec_of
from headway.engines.vllm.request_metadata import RequestMetadata, finite, read_metadata
from headway.forecast.latency.online import OnlineLatency, batch_of
from headway.memory.budget import KvBudget
from headway.recipes.registry import find
from headway.types import Batch, Jobs, Step

_LOG = 4096  # steps kept for the control message's "log"


class HeadwayMixin:
    """The hook, placed before a stock scheduler class in the method resolution order."""

    # Stock attributes used here; declared because mypy does not see vLLM.
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    connector: Any
    kv_cache_manager: Any
    stats: SchedulerStats
    # Instants as clients count them, and durations; both are virtual in oracle.py.
    clock: Callable[[], float] = staticmethod(time.time)
    timer: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stock: Any = self
        options = (stock.vllm_config.additional_config or {}).get("headway", {})
        self._slots = int(stock.max_num_running_reqs)
        running = int(options.get("max_running") or stock.max_num_active_reqs)
        self._limits = {"max_running": running, "token_budget": int(stock.max_num_scheduled_tokens)}
        self.latency = OnlineLatency()
        self.recipe = find(options.get("recipe", "vllm"))
        self.spec = spec_of(self, running)
        self.packer = self.recipe.packer(self.spec)
        check(self.spec, self.packer.kv, self.recipe.name)
        self.jobs = Jobs()
        names = ("steps", "evictions", "saves", "swapped_tokens", "pauses", "loans")
        self.counters: dict[str, float] = dict.fromkeys(names, 0) | {"step_seconds": 0.0}
        self.step_log: deque[tuple[float, dict[str, int], list[str], list[str], Row]] = deque(maxlen=_LOG)
        self.iteration_log = IterationLog()
        self.pending = PendingUrgency()
        self._token_caps: dict[str, int] = {}
        self._headway_id: dict[str, str] = {}  # by the engine's id; several have one when n > 1
        self._blocks = stock.kv_cache_manager.block_pool
        self._block_size = int(stock.block_size)
        self._total = self._blocks.num_gpu_blocks - 1  # one is reserved as the null block
        self._serial = 0
        self._stock_limits = (0, 0)
        self._batch: Batch | None = None
        self._ran: list[str] = []
        self._began = 0.0
        self.kv_policy: KvPolicy = kv_policy_of(self)
        install()
        self._compile()

    def _compile(self) -> None:
        """Compile the hot loops now (seconds at the very first start), not during the first request."""
        self.packer.pack(self.jobs, self._budget(), 0.0)
        OnlineLatency().learn(Batch(1, 1, 0), 0.01)

    # ---- what vLLM calls

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if request.request_id not in self.jobs:
            self._enter(request, read_metadata(request))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = self.clock()
        self.iteration_log.decide(now)
        self._refresh(now)
        step = self.kv_policy.plan(self.packer.pack(self.jobs, self._budget(), now))
        for row in step.save:
            self._save(self.requests[str(self.jobs.keys[row])])
        for row in step.evict:
            self._evict(self.requests[str(self.jobs.keys[row])])
        self.kv_policy.begin(step)
        paused, candidates, backlog = self._show(step)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._restore(paused, candidates, backlog)
        self._record(output, now, paused, step)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        if self._batch is not None:
            seconds = self.timer() - self._began
            self.latency.learn(self._batch, seconds)
            self.iteration_log.output(seconds)
            self.counters["step_seconds"] += seconds
            self._batch = None
        output = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for id in self._ran:  # rows are freed in the order in which they ran, as in the simulated engine
            if id not in self.requests:
                self._leave(id, self.clock())
        self._ran = []
        return output

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Cap a request's tokens; stock calls this for running and waiting requests alike."""
        cap = self._token_caps.get(request.request_id)
        if cap is not None:
            num_new_tokens = min(num_new_tokens, cap)
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))  # type: ignore[misc]

    def _tokens_on_host(self) -> int:  # called by `StatsMixin`
        return self.kv_policy.tokens_on_host()

    # ---- the table

    def _enter(self, request: Any, metadata: RequestMetadata) -> None:
        self._serial += 1
        self.jobs.add(
            request.request_id,
            arrival=metadata.arrival,
            ttft=metadata.ttft,
            tpot=metadata.tpot,
            e2e=metadata.e2e,
            tokens_left=metadata.tokens_left,
            prompt=request.num_prompt_tokens,
            priority=request.priority,
            urgency=self.pending.of(metadata.id, metadata.urgency),
            serial=self._serial,
        )
        self._headway_id[request.request_id] = metadata.id
        self.iteration_log.enter(request.request_id, self.clock())

    def _refresh(self, now: float) -> None:
        """Update the table: O(running) plus the requests that ended since the last step."""
        for id in getattr(self, "finished_req_ids", ()):
            self._leave(id, now)
        jobs, running = self.jobs, self.running
        jobs.running[:] = False
        rows = np.fromiter((jobs.row_of[r.request_id] for r in running), np.int64, len(running))
        output_tokens = np.fromiter((r.num_output_tokens for r in running), np.int64, len(running))
        jobs.first[rows[(jobs.output_tokens[rows] == 0) & (output_tokens > 0)]] = now
        jobs.tokens_left[rows] = np.maximum(
            jobs.tokens_left[rows] - (output_tokens - jobs.output_tokens[rows]), 1.0
        )
        jobs.running[rows], jobs.output_tokens[rows] = True, output_tokens
        jobs.computed[:], jobs.blocks[:], jobs.saved[:] = 0, 0, 0
        jobs.computed[rows] = np.fromiter((r.num_computed_tokens for r in running), np.int64, len(running))
        jobs.blocks[rows] = -(-jobs.computed[rows] // self._block_size)
        for id, tokens in getattr(self.connector, "saved", {}).items():
            jobs.computed[jobs.row_of[id]] = jobs.saved[jobs.row_of[id]] = tokens
        self.kv_policy.refresh(rows)

    def _leave(self, id: str, now: float) -> None:
        if id in self.jobs:
            self.iteration_log.leave(
                id, self._headway_id[id], float(self.jobs.first[self.jobs.row_of[id]]), now
            )
            self.kv_policy.leave(self.jobs.row_of[id])
        self.jobs.remove(id)
        self.pending.drop(self._headway_id.pop(id, ""))

    def _budget(self) -> KvBudget:
        free = self._blocks.get_num_free_blocks()
        return self.kv_policy.budget(KvBudget(self._total, free, self._block_size, self._slots))

    # ---- applying a step

    def _evict(self, request: Any) -> None:
        """Free a request's KV; it waits again and is recomputed, or found in the prefix cache."""
        self.running.remove(request)
        stock: Any = self
        stock._preempt_request(request, time.monotonic())
        row = self.jobs.row_of[request.request_id]
        self.kv_policy.leave(row)
        self.jobs.running[row] = False
        self.jobs.evictions[row] += 1
        self.counters["evictions"] += 1

    def _save(self, request: Any) -> None:
        """Copy a request's KV to the host pool; without a pool, or when it is full, it is recomputed."""
        tokens = request.num_computed_tokens
        blocks = self.kv_cache_manager.get_block_ids(request.request_id)[0][: -(-tokens // self._block_size)]
        save = getattr(self.connector, "save", None)
        kept = save is not None and save(request.request_id, blocks, tokens)
        self.counters["saves"] += kept
        self.counters["swapped_tokens"] += tokens * kept
        self._evict(request)

    def _show(self, step: Step) -> tuple[list[Any], list[Any], Any]:
        """Show stock code only the requests that the step names. Returns what `_restore` needs."""
        names = [str(self.jobs.keys[row]) for row in step.order]
        live = [self.requests[name].status == RequestStatus.RUNNING for name in names]
        chosen = [self.requests[name] for name, runs in zip(names, live, strict=True) if runs]
        candidates = [self.requests[name] for name, runs in zip(names, live, strict=True) if not runs]
        kept = set(map(id, chosen))
        paused = [request for request in self.running if id(request) not in kept]
        self._token_caps = {} if step.tokens is None else dict(zip(names, step.tokens.tolist(), strict=True))
        backlog, self.waiting = self.waiting, FCFSRequestQueue(candidates)
        self.running = chosen
        self._limit(step)
        return paused, candidates, backlog

    def _limit(self, step: Step) -> None:
        """Set stock's limits for this step; paused requests hold their slots in the model runner."""
        stock: Any = self
        running = self.jobs.running
        paused = int(np.count_nonzero(running) - np.count_nonzero(running[step.order]))
        self._stock_limits = (stock.max_num_active_reqs, stock.max_num_scheduled_tokens)
        active = step.max_running if step.max_running is not None else self._slots
        stock.max_num_active_reqs = min(active, self._slots - paused)
        if step.token_budget is not None:
            stock.max_num_scheduled_tokens = min(step.token_budget, self._stock_limits[1])

    def _restore(self, paused: list[Any], candidates: list[Any], backlog: Any) -> None:
        """Put back what was hidden: paused requests are running again, those not admitted wait."""
        stock: Any = self
        stock.max_num_active_reqs, stock.max_num_scheduled_tokens = self._stock_limits
        self._token_caps = {}
        self.running = self.running + paused
        shown, self.waiting = self.waiting, backlog
        known = set(map(id, candidates))
        for request in candidates:
            if request.status == RequestStatus.RUNNING:
                backlog.remove(request)
        # Stock preempted these itself: blocks ran out within the step.
        lost = [request for request in shown if id(request) not in known]
        backlog.extendleft(reversed(lost))
        for request in lost:
            row = self.jobs.row_of[request.request_id]
            self.kv_policy.leave(row)
            self.jobs.evictions[row] += 1

    def _record(self, output: Any, now: float, paused: list[Any], step: Step) -> None:
        """Record what runs, for the latency model, the counters and the logs."""
        ran: dict[str, int] = output.num_scheduled_tokens
        self.kv_policy.check(ran)
        if ran:
            self._ran = [name for name in self.jobs.names(step.order) if name in ran]
            self._batch = self._shape(ran)
            row = self.iteration_log.begin(now, self._batch)
            self._began = self.timer()
            self.counters["steps"] += 1
            self.counters["pauses"] += len(paused)
            evicted = self.jobs.names([*step.evict, *step.save])
            self.step_log.append((now, ran, [request.request_id for request in paused], evicted, row))

    def _shape(self, ran: dict[str, int]) -> Batch:
        rows = np.fromiter((self.jobs.row_of[id] for id in ran), np.int64, len(ran))
        tokens = np.fromiter(ran.values(), np.int64, len(ran))
        return batch_of(self.jobs, rows, tokens)

    # ---- control messages, between steps on the engine's own thread (control.py)

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Execute a control message and return the scheduler's state (`control.py` lists the messages)."""
        match message.get("op"):
            case "urgency":
                self._rank({id: finite(float(rank)) for id, rank in message["values"].items()})
            case "pause":
                self._set("held", dict.fromkeys(message["ids"], True))
            case "resume":
                self._set("held", dict.fromkeys(message["ids"], False))
            case "state":
                pass
            case other:
                return {"error": f"unknown op {other!r}; use state, urgency, pause or resume"}
        return self._state(message) | self._log_rows(message)

    def _rank(self, values: dict[str, float]) -> None:
        """Set the urgency of requests, also of those that have not arrived."""
        self._set("urgency", values)
        known = set(self._headway_id.values())
        for id, urgency in values.items():
            if id not in known or id in self.pending:
                self.pending.keep(id, urgency)

    def _set(self, column: str, values: dict[str, Any]) -> None:
        for engine_id, id in self._headway_id.items():
            if id in values:
                getattr(self.jobs, column)[self.jobs.row_of[engine_id]] = values[id]

    def _state(self, message: dict[str, Any]) -> dict[str, Any]:
        log = int(message.get("log", 0))
        rows = self.jobs.rows() if message.get("jobs", True) else ()
        return {
            "recipe": self.recipe.name,
            "running": len(self.running),
            "waiting": len(self.jobs) - len(self.running),
            "blocks_free": self._blocks.get_num_free_blocks(),
            "blocks_total": self._total,
            "block_size": self._block_size,
            **self._limits,
            "counters": self.stats.counters | self.counters | self.kv_policy.counters(),
            **self.kv_policy.state(),
            "jobs": [self._job(int(row)) for row in rows],
            "log": [list(entry) for entry in list(self.step_log)[-log:]] if log else [],
        }

    def _log_rows(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the last rows of the iteration log, as many as the message asks for."""
        log = self.iteration_log
        kinds: dict[str, deque[Any]] = {"iterations": log.iterations, "requests": log.requests}
        counts = {kind: int(message.get(kind, 0)) for kind in kinds}
        return {kind: list(kinds[kind])[-count:] for kind, count in counts.items() if count > 0}

    def _job(self, row: int) -> dict[str, Any]:
        jobs, name = self.jobs, str(self.jobs.keys[row])
        return {
            "id": self._headway_id[name],
            "running": bool(jobs.running[row]),
            "held": bool(jobs.held[row]),
            "urgency": float(jobs.urgency[row]),
            "computed": int(jobs.computed[row]),
            "output_tokens": int(jobs.output_tokens[row]),
        }


class HeadwayScheduler(HeadwayMixin, StatsMixin, Scheduler):
    """Headway in vLLM's synchronous scheduler."""


class HeadwayAsyncScheduler(HeadwayMixin, StatsMixin, AsyncScheduler):
    """Headway in vLLM's asynchronous scheduler (GPU)."""
