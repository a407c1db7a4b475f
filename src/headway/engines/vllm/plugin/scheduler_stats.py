"""What did a scheduler's memory cost? One count for stock vLLM and for Headway's hook, which decides nothing.

`Counting` stands before a scheduler class and looks on: running requests that found no block, requests that
lost their place, tokens computed a second time, and how full the KV was. Every figure is a total that only
grows, so that the difference of two readings is what happened between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


class Recorder:
    """The totals, without vLLM.

    counters: alloc_failures (a running request asked for a block in an iteration and there was none, counted
    once per iteration), preempted (running requests whose KV was taken), recomputed (tokens computed again),
    busy_seconds (iterations) and kv_seconds (busy seconds x share of all KV slots that are written; a prefix
    that several requests share counts for each).
    """

    def __init__(self) -> None:
        self.counters: dict[str, float] = {
            "alloc_failures": 0, "preempted": 0, "recomputed": 0, "busy_seconds": 0.0, "kv_seconds": 0.0,
        }  # fmt: skip
        self._owed: dict[str, int] = {}  # tokens that were computed before the KV was taken
        self._short: set[str] = set()

    def begin(self, ended: Iterable[str]) -> None:
        """Begin an iteration; `ended` are requests that are no more."""
        self._short.clear()
        if self._owed:
            for id in ended:
                self._owed.pop(id, None)

    def short(self, id: str) -> None:
        """Note that a running request found no block."""
        self.counters["alloc_failures"] += id not in self._short
        self._short.add(id)

    def preempted(self, id: str, computed: int) -> None:
        """Note that a request of so many computed tokens loses its KV, or has it taken to the host."""
        self.counters["preempted"] += 1
        self._owed[id] = max(computed, self._owed.get(id, 0))

    def ran(self, tokens: Mapping[str, int], computed: Callable[[str], int]) -> None:
        """Note what an iteration computes: tokens of each request, and what it will have computed then.

        What comes back from the host or a prefix cache is not computed, so it is not counted.
        """
        for id in self._owed.keys() & tokens.keys():
            end, owed = computed(id), self._owed[id]
            self.counters["recomputed"] += max(min(end, owed) - (end - tokens[id]), 0)
            if end >= owed:
                del self._owed[id]

    def passed(self, seconds: float, written: float) -> None:
        """Note that an iteration took so long while this share of the KV was written."""
        self.counters["busy_seconds"] += seconds
        self.counters["kv_seconds"] += seconds * written


class Counting:
    """The onlooker: in the resolution order before a stock scheduler class and behind Headway's hook."""

    # Stock attributes used here; declared because mypy does not see vLLM.
    running: list[Any]
    requests: dict[str, Any]
    kv_cache_manager: Any
    finished_req_ids: set[str]
    timer: Callable[[], float] = staticmethod(time.perf_counter)  # virtual in clockwork.py

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder = Recorder()
        manager, stock = self.kv_cache_manager, self
        allocate = manager.allocate_slots
        self._slots_total = (manager.block_pool.num_gpu_blocks - 1) * int(stock.block_size)  # type: ignore[attr-defined]
        self._scheduled = 0.0

        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            found = allocate(request, *args, **kwargs)
            if found is None and request.status == RequestStatus.RUNNING:
                self.recorder.short(request.request_id)
            return found

        manager.allocate_slots = watched

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.recorder.begin(self.finished_req_ids)
        self._scheduled = self.timer()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.recorder.ran(output.num_scheduled_tokens, lambda id: self.requests[id].num_computed_tokens)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.num_scheduled_tokens:
            written = sum(request.num_computed_tokens for request in self.running) - self._away()
            self.recorder.passed(self.timer() - self._scheduled, written / self._slots_total)
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _away(self) -> int:
        """Return how many computed tokens of running requests are not in the KV; stock has none."""
        return 0

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.recorder.preempted(request.request_id, request.num_computed_tokens)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]


class _Readable(Counting):
    """Stock vLLM that can be asked what it counted, over the hook's own route (`control.py`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from headway.engines.vllm.plugin.control import install

        install()

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the state; nothing else can be asked of stock vLLM."""
        if message.get("op") != "state":
            return {"error": f"stock vLLM knows no op {message.get('op')!r}; use state"}
        pool = self.kv_cache_manager.block_pool
        return {
            "running": len(self.running),
            "waiting": len(self.requests) - len(self.running),
            "blocks_free": pool.get_num_free_blocks(),
            "blocks_total": pool.num_gpu_blocks - 1,
            "block_size": int(self.block_size),  # type: ignore[attr-defined]
            "counters": dict(self.recorder.counters),
        }


class CountingScheduler(_Readable, Scheduler):
    """Stock vLLM's synchronous loop, counted."""


class CountingAsyncScheduler(_Readable, AsyncScheduler):
    """Stock vLLM's overlapped loop, counted."""
