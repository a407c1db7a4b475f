"""Counters of what KV memory costs a scheduler, the same for stock vLLM and for Headway's hook.

`StatsMixin` goes before a scheduler class in the method resolution order and decides nothing. It counts
failed block allocations of running requests, preemptions, recomputed tokens, and the fill level of the KV
cache over time. Every counter only grows, so the difference of two readings is what happened between them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


class SchedulerStats:
    """The counters, without vLLM.

    counters["alloc_failures"]: running requests that got no block, each once per iteration.
    counters["preempted"]: running requests that lost their KV.
    counters["recomputed"]: tokens computed again.
    counters["busy_seconds"]: seconds of all iterations.
    counters["kv_seconds"]: busy seconds x share of all KV slots that are written; a prefix that several
        requests share counts for each.
    """

    def __init__(self) -> None:
        self.counters: dict[str, float] = {
            "alloc_failures": 0,
            "preempted": 0,
            "recomputed": 0,
            "busy_seconds": 0.0,
            "kv_seconds": 0.0,
        }
        self._owed: dict[str, int] = {}  # tokens that were computed before the KV was taken
        self._short: set[str] = set()

    def begin(self, ended: Iterable[str]) -> None:
        """Begin an iteration; `ended`: requests that have finished since the last."""
        self._short.clear()
        if self._owed:
            for id in ended:
                self._owed.pop(id, None)

    def short(self, id: str) -> None:
        """Count a running request that got no block."""
        self.counters["alloc_failures"] += id not in self._short
        self._short.add(id)

    def preempted(self, id: str, computed: int) -> None:
        """Count a request that loses its KV of `computed` tokens, or has it copied to the host."""
        self.counters["preempted"] += 1
        self._owed[id] = max(computed, self._owed.get(id, 0))

    def ran(self, tokens: Mapping[str, int], computed: Callable[[str], int]) -> None:
        """Count recomputed tokens; those read from the host or a prefix cache do not count.

        tokens: tokens scheduled per request. computed: a request's computed tokens after this iteration.
        """
        for id in self._owed.keys() & tokens.keys() if self._owed else ():
            end, owed = computed(id), self._owed[id]
            self.counters["recomputed"] += max(min(end, owed) - (end - tokens[id]), 0)
            if end >= owed:
                del self._owed[id]

    def passed(self, seconds: float, written: float) -> None:
        """Count an iteration of `seconds` during which the share `written` of the KV cache was in use."""
        self.counters["busy_seconds"] += seconds
        self.counters["kv_seconds"] += seconds * written


class StatsMixin:
    """Counts for the scheduler class behind it; in the method resolution order it follows Headway's hook."""

    # Stock attributes used here; declared because mypy does not see vLLM.
    running: list[Any]
    requests: dict[str, Any]
    kv_cache_manager: Any
    block_size: int
    max_num_active_reqs: int
    finished_req_ids: set[str]
    timer: Callable[[], float] = staticmethod(time.perf_counter)  # virtual in oracle.py

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stats = SchedulerStats()
        stock: Any = self
        manager, self._pool = self.kv_cache_manager, self.kv_cache_manager.block_pool
        self._slots_total = (self._pool.num_gpu_blocks - 1) * int(stock.block_size)
        self._scheduled = 0.0
        self._allocate = allocate = manager.allocate_slots

        def allocate_and_count(request: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate(request, *args, **kwargs)
            if blocks is None and request.status == RequestStatus.RUNNING:
                self.stats.short(request.request_id)
            return blocks

        self._counting = manager.allocate_slots = allocate_and_count
        self._counts = True
        # Tokens per request beyond those that it misses: part of a block, drafts, what a drafter looks ahead.
        self._spare = stock.block_size + 2 * stock.num_spec_tokens + stock.num_lookahead_tokens
        kinds = [type(one).__name__ for one in manager.coordinator.single_type_managers]
        self._is_plain = kinds == ["FullAttentionManager"]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.stats.begin(self.finished_req_ids)
        self._scheduled = self.timer()
        # Another plugin may have wrapped the method meanwhile: then it stays as it is.
        ours = self.kv_cache_manager.allocate_slots in (self._counting, self._allocate)
        if ours and self._may_run_short() != self._counts:
            self._counts = not self._counts
            self.kv_cache_manager.allocate_slots = self._counting if self._counts else self._allocate
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.stats.ran(output.num_scheduled_tokens, lambda id: self.requests[id].num_computed_tokens)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.num_scheduled_tokens:
            written = sum(request.num_computed_tokens for request in self.running) - self._tokens_on_host()
            self.stats.passed(self.timer() - self._scheduled, written / self._slots_total)
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _may_run_short(self) -> bool:
        """Return whether a running request may get no block in this step; to count those takes its time."""
        if not self._is_plain:
            return True
        needed = self._missing_tokens() + len(self.running) * self._spare
        return bool(needed > self._pool.get_num_free_blocks() * self.block_size)

    def _missing_tokens(self) -> float:
        """Return the tokens that running requests still have to compute, inf = not known."""
        return math.inf

    def _tokens_on_host(self) -> int:
        """Return the computed tokens of running requests whose KV is in host memory; stock has none."""
        return 0

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.stats.preempted(request.request_id, request.num_computed_tokens)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]


class _ReadableStats(StatsMixin):
    """Answers the control message "state" (`control.py`) with the counters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from headway.engines.vllm.plugin.control import install

        install()

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the state; stock vLLM has no other message."""
        if message.get("op") != "state":
            return {"error": f"stock vLLM knows no op {message.get('op')!r}; use state"}
        pool, stock = self.kv_cache_manager.block_pool, cast(Any, self)
        running, waiting = stock.get_request_counts()
        return {
            "running": running,
            "waiting": waiting,
            "blocks_free": pool.get_num_free_blocks(),
            "blocks_total": pool.num_gpu_blocks - 1,
            "block_size": int(self.block_size),
            "max_running": int(self.max_num_active_reqs),
            "counters": dict(self.stats.counters),
        }


class StatsScheduler(_ReadableStats, Scheduler):
    """Stock vLLM's synchronous scheduler with counters."""


class StatsAsyncScheduler(_ReadableStats, AsyncScheduler):
    """Stock vLLM's asynchronous scheduler with counters."""


def scheduler(**arguments: Any) -> Any:
    """Return the scheduler that vLLM would take, with counters: the value of `--scheduler-cls`."""
    overlapped = arguments["vllm_config"].scheduler_config.async_scheduling
    return (StatsAsyncScheduler if overlapped else StatsScheduler)(**arguments)
