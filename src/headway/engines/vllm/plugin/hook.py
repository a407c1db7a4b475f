"""What does vLLM run in the next iteration? What Headway's packer says.

A subclass of vLLM's own scheduler. Before each `schedule()` it brings the `Jobs` table up to date, asks the
packer, and shows the stock code exactly the requests that the `Step` names, in its order; afterwards it puts
everything else back. Stock code is called, never copied, so all it knows (prefix caching, structured output,
speculation, connectors) keeps working. `tests/engine/test_names.py` pins every internal touched here.
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

from headway.engines.vllm.plugin.control import PendingUrgency, install
from headway.engines.vllm.plugin.iteration_log import IterationLog, Row
from headway.engines.vllm.plugin.kv_policy import KvPolicy, kv_policy_of
from headway.engines.vllm.plugin.scheduler_stats import SchedulerStats, StatsMixin
from headway.engines.vllm.request_metadata import RequestMetadata, finite, read_metadata
from headway.forecast.latency.online import OnlineLatency, batch_of
from headway.memory.budget import KvBudget
from headway.recipes.registry import find
from headway.types import Batch, Jobs, Step

_LOG = 4096  # steps kept for `headway` control's "log"


class HeadwayMixin:
    """The hook itself, put before a stock scheduler class in the method resolution order."""

    # Stock attributes used here; declared because mypy does not see vLLM.
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    connector: Any
    kv_cache_manager: Any
    stats: SchedulerStats
    # Both are virtual in clockwork.py: instants as clients count them, and what measures durations.
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
        self.packer = self.recipe.packer(running, stock.max_num_scheduled_tokens, self.latency)
        self.jobs = Jobs()
        names = ("steps", "evictions", "saves", "swapped_tokens", "pauses", "loans")
        self.counters: dict[str, float] = dict.fromkeys(names, 0) | {"step_seconds": 0.0}
        self.log: deque[tuple[float, dict[str, int], list[str], list[str], Row]] = deque(maxlen=_LOG)
        self.diary = IterationLog()
        self.pending = PendingUrgency()
        self._caps: dict[str, int] = {}
        self._ours: dict[str, str] = {}  # the engine's id -> Headway's (several to one when n > 1)
        self._blocks = stock.kv_cache_manager.block_pool
        self._block_size = int(stock.block_size)
        self._total = self._blocks.num_gpu_blocks - 1  # one is reserved as the null block
        self._serial = 0
        self._saved = (0, 0)
        self._batch: Batch | None = None
        self._ran: list[str] = []
        self._began = 0.0
        self.holding: KvPolicy = kv_policy_of(self)
        install()
        self._compile()

    def _compile(self) -> None:
        """Compile the hot loops now (seconds at the very first start), not under the first request."""
        self.packer.pack(self.jobs, self._ledger(), 0.0)
        OnlineLatency().learn(Batch(1, 1, 0), 0.01)

    # ---- what vLLM calls

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if request.request_id not in self.jobs:
            self._enter(request, read_metadata(request))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = self.clock()
        self.diary.decide(now)
        self._refresh(now)
        step = self.holding.plan(self.packer.pack(self.jobs, self._ledger(), now))
        for row in step.save:
            self._save(self.requests[str(self.jobs.keys[row])])
        for row in step.evict:
            self._evict(self.requests[str(self.jobs.keys[row])])
        self.holding.begin(step)
        paused, candidates, backlog = self._show(step)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._restore(paused, candidates, backlog)
        self._note(output, now, paused, step)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        if self._batch is not None:
            seconds = self.timer() - self._began
            self.latency.learn(self._batch, seconds)
            self.diary.output(seconds)
            self.counters["step_seconds"] += seconds
            self._batch = None
        output = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for id in self._ran:  # rows are freed in the order in which they ran, as the simulated engine does
            if id not in self.requests:
                self._leave(id, self.clock())
        self._ran = []
        return output

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Stock asks here, for running and waiting alike, how many tokens of a request may run."""
        cap = self._caps.get(request.request_id)
        if cap is not None:
            num_new_tokens = min(num_new_tokens, cap)
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))  # type: ignore[misc]

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
        self._ours[request.request_id] = metadata.id
        self.diary.enter(request.request_id, self.clock())

    def _refresh(self, now: float) -> None:
        """Bring the table up to date: O(running) plus what ended since the last step."""
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
        self.holding.refresh(rows)

    def _leave(self, id: str, now: float) -> None:
        if id in self.jobs:
            self.diary.leave(id, self._ours[id], float(self.jobs.first[self.jobs.row_of[id]]), now)
            self.holding.leave(self.jobs.row_of[id])
        self.jobs.remove(id)
        self.pending.drop(self._ours.pop(id, ""))

    def _ledger(self) -> KvBudget:
        free = self._blocks.get_num_free_blocks()
        return self.holding.ledger(KvBudget(self._total, free, self._block_size, self._slots))

    # ---- applying a step

    def _evict(self, request: Any) -> None:
        """Take a request's KV; it waits again and is recomputed (or found in the prefix cache) later."""
        self.running.remove(request)
        stock: Any = self
        stock._preempt_request(request, time.monotonic())
        row = self.jobs.row_of[request.request_id]
        self.holding.leave(row)
        self.jobs.running[row] = False
        self.jobs.evictions[row] += 1
        self.counters["evictions"] += 1

    def _save(self, request: Any) -> None:
        """Take a request's KV to the host; when there is no pool or no room in it, it is computed again."""
        tokens = request.num_computed_tokens
        blocks = self.kv_cache_manager.get_block_ids(request.request_id)[0][: -(-tokens // self._block_size)]
        save = getattr(self.connector, "save", None)
        kept = save is not None and save(request.request_id, blocks, tokens)
        self.counters["saves"] += kept
        self.counters["swapped_tokens"] += tokens * kept
        self._evict(request)

    def _show(self, step: Step) -> tuple[list[Any], list[Any], Any]:
        """Let stock code see only what the step names. Returns what `_restore` needs."""
        names = [str(self.jobs.keys[row]) for row in step.order]
        live = [self.requests[name].status == RequestStatus.RUNNING for name in names]
        chosen = [self.requests[name] for name, runs in zip(names, live, strict=True) if runs]
        candidates = [self.requests[name] for name, runs in zip(names, live, strict=True) if not runs]
        kept = set(map(id, chosen))
        paused = [request for request in self.running if id(request) not in kept]
        self._caps = {} if step.tokens is None else dict(zip(names, step.tokens.tolist(), strict=True))
        backlog, self.waiting = self.waiting, FCFSRequestQueue(candidates)
        self.running = chosen
        self._limit(step)
        return paused, candidates, backlog

    def _limit(self, step: Step) -> None:
        """Set stock's limits for this step; paused requests keep their slots in the model runner."""
        stock: Any = self
        running = self.jobs.running
        paused = int(np.count_nonzero(running) - np.count_nonzero(running[step.order]))
        self._saved = (stock.max_num_active_reqs, stock.max_num_scheduled_tokens)
        active = step.max_running if step.max_running is not None else self._slots
        stock.max_num_active_reqs = min(active, self._slots - paused)
        if step.token_budget is not None:
            stock.max_num_scheduled_tokens = min(step.token_budget, self._saved[1])

    def _restore(self, paused: list[Any], candidates: list[Any], backlog: Any) -> None:
        """Put back what was hidden: paused requests run on, those not admitted wait on."""
        stock: Any = self
        stock.max_num_active_reqs, stock.max_num_scheduled_tokens = self._saved
        self._caps = {}
        self.running = self.running + paused
        shown, self.waiting = self.waiting, backlog
        known = set(map(id, candidates))
        for request in candidates:
            if request.status == RequestStatus.RUNNING:
                backlog.remove(request)
        # Stock preempted these itself: memory ran out within the step.
        lost = [request for request in shown if id(request) not in known]
        backlog.extendleft(reversed(lost))
        for request in lost:
            row = self.jobs.row_of[request.request_id]
            self.holding.leave(row)
            self.jobs.evictions[row] += 1

    def _note(self, output: Any, now: float, paused: list[Any], step: Step) -> None:
        """Remember what ran, for the pace, the counters and the log."""
        ran: dict[str, int] = output.num_scheduled_tokens
        self.holding.check(ran)
        if ran:
            self._ran = [name for name in self.jobs.names(step.order) if name in ran]
            self._batch = self._shape(ran)
            row = self.diary.begin(now, self._batch)
            self._began = self.timer()
            self.counters["steps"] += 1
            self.counters["pauses"] += len(paused)
            evicted = self.jobs.names([*step.evict, *step.save])
            self.log.append((now, ran, [request.request_id for request in paused], evicted, row))

    def _shape(self, ran: dict[str, int]) -> Batch:
        rows = np.fromiter((self.jobs.row_of[id] for id in ran), np.int64, len(ran))
        tokens = np.fromiter(ran.values(), np.int64, len(ran))
        return batch_of(self.jobs, rows, tokens)

    # ---- control: called between steps on the engine's own thread (control.py)

    def _tokens_on_host(self) -> int:
        return self.holding.away()

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Carry out a control message and return the scheduler's state (`control.py` lists the messages)."""
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
        return self._state(message) | self._diary(message)

    def _rank(self, values: dict[str, float]) -> None:
        """Set the urgency of requests, also of those that have not arrived."""
        self._set("urgency", values)
        known = set(self._ours.values())
        for id, urgency in values.items():
            if id not in known or id in self.pending:
                self.pending.keep(id, urgency)

    def _set(self, column: str, values: dict[str, Any]) -> None:
        for engine_id, ours in self._ours.items():
            if ours in values:
                getattr(self.jobs, column)[self.jobs.row_of[engine_id]] = values[ours]

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
            "counters": self.stats.counters | self.counters | self.holding.counters(),
            **self.holding.state(),
            "jobs": [self._job(int(row)) for row in rows],
            "log": [list(entry) for entry in list(self.log)[-log:]] if log else [],
        }

    def _diary(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return as many of the diary's last rows as were asked for."""
        kinds: dict[str, deque[Any]] = {
            "iterations": self.diary.iterations,
            "requests": self.diary.requests,
        }
        asked = {kind: int(message.get(kind, 0)) for kind in kinds}
        return {kind: list(kinds[kind])[-count:] for kind, count in asked.items() if count > 0}

    def _job(self, row: int) -> dict[str, Any]:
        jobs, name = self.jobs, str(self.jobs.keys[row])
        return {
            "id": self._ours[name],
            "running": bool(jobs.running[row]),
            "held": bool(jobs.held[row]),
            "urgency": float(jobs.urgency[row]),
            "computed": int(jobs.computed[row]),
            "output_tokens": int(jobs.output_tokens[row]),
        }


class HeadwayScheduler(HeadwayMixin, StatsMixin, Scheduler):
    """Headway inside vLLM's synchronous loop."""


class HeadwayAsyncScheduler(HeadwayMixin, StatsMixin, AsyncScheduler):
    """Headway inside vLLM's overlapped loop (GPU)."""
