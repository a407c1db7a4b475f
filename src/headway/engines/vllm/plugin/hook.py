"""vLLM's scheduler with Headway's packer inside.

A subclass of vLLM's own scheduler. Before each `schedule()` it updates the `Jobs` table, calls the packer,
and shows the stock code only the requests that the `Step` names, in its order; afterwards it puts the others
back. Stock code is called, never copied, so prefix caching, structured output, speculation and connectors
keep working. `tests/engine/test_names.py` pins every internal of vLLM used here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from headway.clock import now
from headway.engines.vllm.plugin.cache_log import CacheLog
from headway.engines.vllm.plugin.columns import RunningRows, cut
from headway.engines.vllm.plugin.connector import HostPool
from headway.engines.vllm.plugin.continuations import ContinuationsMixin
from headway.engines.vllm.plugin.control import ControlMixin, PendingUrgency, install
from headway.engines.vllm.plugin.grammar_time import GrammarTimeMixin
from headway.engines.vllm.plugin.kv_policy import KvPolicy, StockKv
from headway.engines.vllm.plugin.prefix_cache import PrefixCache
from headway.engines.vllm.plugin.recording import RecordingMixin, ints
from headway.engines.vllm.plugin.run_blocks import RunBlocks
from headway.engines.vllm.plugin.scheduler_stats import SchedulerStats, StatsMixin
from headway.engines.vllm.plugin.setup import kv_policy_of, settings_of, spec_of
from headway.engines.vllm.plugin.token_caps import TokenCapsMixin
from headway.engines.vllm.plugin.view import Blocked, View, sort_by_arrival, within_adapters
from headway.engines.vllm.request_metadata import RequestMetadata, read_metadata
from headway.policy.core.engine_spec import check
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.recipes.registry import find
from headway.types import UNLIMITED, Batch, Jobs, Step


class HeadwayMixin(ControlMixin, TokenCapsMixin, GrammarTimeMixin, ContinuationsMixin, RecordingMixin):
    """The hook, placed before a stock scheduler class in the method resolution order."""

    # Stock attributes used here; declared because mypy does not see vLLM.
    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any
    pause_state: Any
    requests: dict[str, Any]
    connector: Any
    kv_cache_manager: Any
    stats: SchedulerStats
    # Instants as clients count them, and durations; both are virtual in oracle.py.
    clock: Callable[[], float] = staticmethod(now)
    timer: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stock: Any = self
        options = (stock.vllm_config.additional_config or {}).get("headway", {})
        self._slots = int(stock.max_num_running_reqs)
        running = int(options.get("max_running") or stock.max_num_active_reqs)
        self._threshold = int(stock.scheduler_config.long_prefill_token_threshold)
        self._limits = {"max_running": running, "token_budget": int(stock.max_num_scheduled_tokens)}
        self.recipe = find(options.get("recipe", "vllm"))
        self.spec = spec_of(self, running, float(options.get("max_gap_s", 1.0)))
        self.packer = self.recipe.packer(self.spec)
        check(self.spec, self.packer.kv, self.recipe.name)
        self.jobs = Jobs()
        self.pending = PendingUrgency()
        self.token_caps: dict[str, int] = {}
        self.held: set[str] = set()  # paused by control
        self._blocked = Blocked(self)
        self._hidden = (0, 0)
        self._headway_id: dict[str, str] = {}  # by the engine's id; several have one when n > 1
        self._blocks = stock.kv_cache_manager.block_pool
        self._block_size = int(stock.block_size)
        self._total = self._blocks.num_gpu_blocks - 1  # one is reserved as the null block
        self._serial = 0
        self._stock_limits = (0, 0)
        self._ended: list[str] = []
        self.kv_policy: KvPolicy = kv_policy_of(self)
        self.settings = settings_of(self)
        self._prefix_cache = PrefixCache(self)
        self.cache_log, self.run_blocks = CacheLog(self), RunBlocks(self)
        self._own_order = self._in_order = False  # stock decides by itself, within the recipe's batch limit
        self._own_step = Step(ints(()), max_running=running)
        self._running = RunningRows(self)
        install()
        self._compile()

    def _compile(self) -> None:
        """Compile the hot loops now (seconds at the very first start), not during the first request."""
        none = ints(())
        cut(self.jobs.data, none, none)
        self.packer.pack(self.jobs, self._budget(), 0.0)
        OnlineLatency().learn(Batch(1, 1, 0), 0.01)

    # ---- what vLLM calls

    def add_request(self, request: Any) -> None:
        self._take_up(request)
        super().add_request(request)  # type: ignore[misc]
        id = request.request_id
        # A session that this call has ended stays in `requests` while a connector delays its freeing.
        if id not in self.jobs and id in self.requests and not self.requests[id].is_finished():
            self._enter(request, read_metadata(request))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = self.clock()
        self.iteration_log.decide(now)
        self._refresh(now)
        if self.pause_state == PauseState.PAUSED_ALL:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        own_order = self._own_order
        step = self._own_step if own_order else self.packer.pack(self.jobs, self._budget(), now)
        step = self.kv_policy.plan(step)
        lost = self._free(step)
        self.kv_policy.begin(step)
        rows, names = self._running.array, self._running.ids
        if not own_order and (order := step.order.tolist()) != self._running.rows:
            rows, names = step.order, self.jobs.names(order)
        view = None if own_order else self._show(step, names)
        paused = [] if view is None else view.paused
        self._limit(step, self._slots_of(paused))
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._restore(view)
        self._record(output, now, paused, lost, rows, names)
        return output

    def get_request_counts(self) -> tuple[int, int]:
        """Count hidden requests, too: stock adapts prompt chunks to how many requests there are."""
        running, waiting = super().get_request_counts()  # type: ignore[misc]
        return running + self._hidden[0], waiting + self._hidden[1]

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        ran = self._learn(scheduler_output)
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._said:
            self._prepend_said(outputs)
        if ended := set(self._ended):
            # Rows are freed in the order in which they ran, as in the simulated engine.
            self._ended = [id for id in ran if id in ended] + [id for id in self._ended if id not in ran]
            self._leave_ended()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self._leave_ended()
        return finished

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._ended.append(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def reset_connector_cache(self) -> bool:
        """Discard the KV on the host, also that of requests which two-ended blocks keep running."""
        if self.kv_policy.tokens_on_host():
            for request in [r for r in self.running if self.jobs.saved[self.jobs.row_of[r.request_id]]]:
                self._evict(request)
        return bool(super().reset_connector_cache())  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        row = self.jobs.row_of[request.request_id]
        self.kv_policy.leave(row)
        self._prefix_cache.enter(request, row)
        self.jobs.running[row] = False
        self.jobs.evictions[row] += 1
        self.iteration_log.stop(request.request_id, self.clock(), "e")
        self._blocked.preempted(request)

    def _tokens_on_host(self) -> int:  # called by `StatsMixin`, as the next one
        return self.kv_policy.tokens_on_host()

    def _missing_tokens(self) -> float:
        return self._running.missing if type(self.kv_policy) is StockKv else math.inf

    # ---- the table

    def _enter(self, request: Any, metadata: RequestMetadata) -> None:
        self._serial += 1
        said = request.num_output_tokens
        self.jobs.add(
            request.request_id,
            arrival=metadata.arrival,
            first=(metadata.first or metadata.arrival) if said else 0.0,
            last=self.clock() if said else 0.0,
            gap=math.inf if said and metadata.itl < math.inf else 0.0,  # it was silent for longer
            ttft=metadata.ttft,
            tpot=metadata.tpot,
            e2e=metadata.e2e,
            itl=metadata.itl,
            line_from=metadata.arrival + metadata.ttft if metadata.line else -math.inf,
            weight=metadata.weight,
            soft=metadata.soft,
            tokens_left=metadata.tokens_left,
            spread=metadata.spread,
            prompt=request.num_prompt_tokens,
            output_tokens=said,
            priority=request.priority,
            urgency=self.pending.of(metadata.id, metadata.urgency),
            resumable=request.resumable,
            serial=self._serial,
        )
        self._headway_id[request.request_id] = metadata.id
        self.run_blocks.enter(request.request_id, metadata.run)
        self._prefix_cache.enter(request, self.jobs.row_of[request.request_id])
        self.iteration_log.enter(request.request_id, self.clock())

    def _refresh(self, now: float) -> None:
        """Update the table: O(running), and those that wait with KV or cannot be admitted."""
        jobs = self.jobs
        self._running.refresh(self.running, now)
        rows = self._running.array
        if isinstance(self.connector, HostPool):
            for id, tokens in self.connector.saved.items():
                jobs.computed[jobs.row_of[id]] = jobs.saved[jobs.row_of[id]] = tokens
        self._prefix_cache.refresh(jobs, rows)
        for request in self.kv_holding_waiting:
            self._refresh_waiting(request)
        self._hold()
        self.kv_policy.refresh(rows)

    def _refresh_waiting(self, request: Any) -> None:
        """Update a request that waits with KV; a streaming session has another prompt at each turn."""
        jobs, row = self.jobs, self.jobs.row_of[request.request_id]
        self.kv_policy.trim(request)
        if request.num_prompt_tokens != jobs.prompt[row]:
            jobs.arrival[row], jobs.first[row], jobs.verdict[row] = self.clock(), 0.0, 0
            jobs.tokens_left[row] = request.max_tokens
        jobs.prompt[row], jobs.output_tokens[row] = request.num_prompt_tokens, request.num_output_tokens
        jobs.computed[row] = request.num_computed_tokens
        jobs.blocks[row] = -(-request.num_computed_tokens // self._block_size)

    def _hold(self) -> None:
        """Keep the packer from requests that control holds back or that stock would skip."""
        jobs = self.jobs
        self._own_order = self._is_own_order()
        if self._own_order:
            self._in_order = self._in_order or sort_by_arrival(self, jobs)
            return
        self._in_order = False
        for request in self._blocked.requests():
            row = jobs.row_of[request.request_id]
            jobs.held[row], jobs.output_tokens[row] = True, request.num_output_tokens
        for id in self.held:
            jobs.held[jobs.row_of[id]] = True

    def _leave_ended(self) -> None:
        now, self._ended, ended = self.clock(), [], self._ended
        for id in ended:
            self._leave(id, now)

    def _leave(self, id: str, now: float) -> None:
        if id in self.jobs:
            self.iteration_log.leave(id, self._headway_id[id], float(self.jobs.first[self.jobs.row_of[id]]), now)
            self.kv_policy.leave(self.jobs.row_of[id])
            self._prefix_cache.leave(self.jobs.row_of[id])
        self.jobs.remove(id)
        self.run_blocks.leave(id)
        self.held.discard(id)
        self._said.pop(id, None)
        self.pending.drop(self._headway_id.pop(id, ""))

    def _budget(self) -> KvBudget:
        free = self._blocks.get_num_free_blocks()
        chunk = self._row_chunk() if self._threshold else UNLIMITED
        return self.kv_policy.budget(KvBudget(self._total, free, self._block_size, self._slots, chunk))

    def _row_chunk(self) -> int:
        """Return the most prompt tokens of one request in this step, as stock bounds them."""
        stock: Any = self
        requests = sum(stock.get_request_counts())
        if requests <= 1:
            return UNLIMITED
        share = stock.scheduler_config.max_num_batched_tokens // requests
        return max(self._threshold, share if stock.adaptive_long_prefill_threshold else 0)

    # ---- applying a step

    def _free(self, step: Step) -> list[str]:
        """Save and evict what the step says; return the ids."""
        saved, evicted = self.jobs.names(step.save.tolist()), self.jobs.names(step.evict.tolist())
        for id in saved:
            self._save(self.requests[id])
        for id in evicted:
            self._evict(self.requests[id])
        return evicted + saved

    def _evict(self, request: Any) -> None:
        """Free a request's KV; it waits again and is recomputed, or found in the prefix cache.

        It stays paused instead while a connector may still write to its blocks. So does a session while a
        token of it is on its way: if that ended its turn, vLLM would lose the session, which waits again.
        """
        stock: Any = self
        ends = request.resumable and request.num_output_placeholders > 0
        if stock._request_blocks_can_be_freed(request) and not ends:
            self.running.remove(request)
            stock._preempt_request(request, time.monotonic(), drop_stale_output=stock.requires_kv_delivery)
            self.counters["evictions"] += 1

    def _save(self, request: Any) -> None:
        """Copy a request's KV to the host pool; without a pool, or when it is full, it is recomputed."""
        stock: Any = self
        if not stock._request_blocks_can_be_freed(request):
            return  # it stays paused, as in `_evict`
        if isinstance(self.connector, HostPool):
            tokens = request.num_computed_tokens - request.num_output_placeholders  # without drafts
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)[0]
            kept = self.connector.save(request.request_id, blocks[: -(-tokens // self._block_size)], tokens)
            self.counters["saves"] += kept
            self.counters["swapped_tokens"] += tokens * kept
        self._evict(request)

    def _is_own_order(self) -> bool:
        """Return whether stock decides by itself: the packer wants its order, and nothing says otherwise."""
        if self.held or not self.packer.own_order or not isinstance(self.kv_policy, StockKv):
            return False  # two-ended blocks grant what the packer's step names
        return bool(not self.jobs.urgency[self.jobs.live].any() and self._blocked.adapters_fit())

    def _show(self, step: Step, names: list[str]) -> View | None:
        """Show stock code only the requests that the step names; None where it would see no others."""
        stock: Any = self
        if names is self._running.ids and not (self.waiting or self.kv_holding_waiting or stock.lora_config):
            self._prefix_cache.renew([])
            self._cap_short(step, names, [])
            return None
        chosen, candidates = self.running, list[Any]()
        if names is not self._running.ids:
            requests = list(map(self.requests.__getitem__, names))
            chosen = [request for request in requests if request.status is RequestStatus.RUNNING]
            if len(chosen) < len(requests):
                candidates = [one for one in requests if one.status is not RequestStatus.RUNNING]
        if self.packer.own_order and stock.policy is SchedulingPolicy.PRIORITY:
            candidates = self._by_stock_priority()
        if not chosen and self._blocked.first:
            # All would pause for KV that only waiting requests could give back, while those need more, too:
            # stock takes it from a running one.
            chosen = [request for request in self.running if request.request_id not in self.held]
        self._prefix_cache.renew(candidates)
        if stock.lora_config is not None:
            chosen = within_adapters(chosen, stock.lora_config.max_loras)
        loads = [] if step.tokens is None else self._blocked.loads(names)
        candidates += loads
        self._cap_short(step, names, loads)
        view = View(self, chosen, [*self._blocked.first, *candidates])
        self._hidden = view.hidden
        return view

    def _cap_short(self, step: Step, names: list[str], loads: list[Any]) -> None:
        """Cap the requests that the step gives less than they miss, and loads, which get no tokens."""
        if step.tokens is not None:
            short = cut(self.jobs.data, step.order, step.tokens).tolist()
            self._cap({names[i]: int(step.tokens[i]) for i in short} | {r.request_id: 0 for r in loads})

    def _by_stock_priority(self) -> list[Any]:
        """Return the waiting requests by rank, then as stock's priority policy orders them."""
        jobs = self.jobs
        rows = [(request, jobs.row_of[request.request_id]) for request in self.waiting]
        ready = [(float(jobs.urgency[row]), request) for request, row in rows if not jobs.held[row]]
        return [request for _, request in sorted(ready, key=itemgetter(0))]

    def _slots_of(self, paused: list[Any]) -> int:
        """Return the slots that paused requests hold; with two-ended blocks, those on the host hold none."""
        return sum(bool(self.jobs.running[self.jobs.row_of[request.request_id]]) for request in paused)

    def _limit(self, step: Step, paused: int) -> None:
        """Set stock's limits for this step; paused requests hold their slots in the model runner."""
        stock: Any = self
        self._stock_limits = (stock.max_num_active_reqs, stock.max_num_scheduled_tokens)
        active = self._stock_limits[0] if step.max_running is None else step.max_running
        stock.max_num_active_reqs = min(active, self._slots - paused)
        if step.token_budget is not None:
            stock.max_num_scheduled_tokens = min(step.token_budget, self._stock_limits[1])

    def _restore(self, view: View | None) -> None:
        """Set stock's limits back, and put back what was hidden."""
        stock: Any = self
        stock.max_num_active_reqs, stock.max_num_scheduled_tokens = self._stock_limits
        self._cap({})
        self._hidden = (0, 0)
        if view is not None:
            view.close()


class HeadwayScheduler(HeadwayMixin, StatsMixin, Scheduler):
    """Headway in vLLM's synchronous scheduler."""


class HeadwayAsyncScheduler(HeadwayMixin, StatsMixin, AsyncScheduler):
    """Headway in vLLM's asynchronous scheduler (GPU)."""


def scheduler(**arguments: Any) -> Any:
    """Return the hook over the scheduler class that vLLM would take: the value of `--scheduler-cls`."""
    overlapped = arguments["vllm_config"].scheduler_config.async_scheduling
    return (HeadwayAsyncScheduler if overlapped else HeadwayScheduler)(**arguments)
