"""vLLM's queues as a step shows them to vLLM's own `schedule()`, and what that would skip."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.request import RequestStatus

from headway.engines.vllm.plugin.connector import HostPool
from headway.types import Jobs

_LOADS = 64  # waiting requests that a connector is asked about in a step


class Blocked:
    """The waiting requests of one scheduler that vLLM's own code would skip now, so that no place is made for them.

    A grammar that compiles, KV or an encoder's output on its way, a streaming session without input, output still
    to be delivered, an adapter that does not fit beside those that run, an engine that is paused.

    Attributes:
        first: requests that stock is shown before those that the packer names: those that only it can judge,
            since it asks another program's connector, and those that hold KV while they wait. They always go
            first in vLLM; nothing could take their KV, and behind others they might wait for each other.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._foreign = scheduler.connector is not None and not isinstance(scheduler.connector, HostPool)
        self._stale: dict[Any, None] = {}  # in the order in which they were preempted
        self.first: list[Any] = []

    def preempted(self, request: Any) -> None:
        """Note a request that may have output on its way."""
        if request.num_stale_output_tokens:
            self._stale = self._on_their_way() | {request: None}

    def _on_their_way(self) -> dict[Any, None]:
        return {r: None for r in self._stale if r.num_stale_output_tokens and not r.is_finished()}

    def requests(self) -> Iterator[Any]:
        """Yield the requests; promote those that have become ready, as stock does when it comes to them."""
        scheduler = self._scheduler
        if self.first:
            self.first = []
        if not (
            scheduler.deferred_waiting
            or scheduler.kv_holding_waiting
            or self._stale
            or scheduler.lora_config is not None
            or scheduler.pause_state != PauseState.UNPAUSED
        ):
            return
        self._stale = self._on_their_way()
        yield from (request for request in self._stale if not request.drop_stale_output)
        holding = {request.request_id for request in scheduler.kv_holding_waiting}
        # Stock keeps a set: by arrival, steps do not depend on where objects lie in memory.
        for request in sorted(scheduler.deferred_waiting, key=lambda one: (one.arrival_time, one.request_id)):
            ready = scheduler._handle_blocked_waiting_request(request)
            if not ready or scheduler._ec_transfer_pending(request, request.num_computed_tokens):
                yield request
            elif self._foreign and not request.num_computed_tokens and request.request_id not in holding:
                self.first.append(request)
                yield request
        for request in scheduler.kv_holding_waiting:
            self.first.append(request)
            yield request
        if scheduler.lora_config is not None:
            yield from self._without_adapter()
        if scheduler.pause_state != PauseState.UNPAUSED:
            yield from scheduler.waiting

    def loads(self, named: list[str]) -> list[Any]:
        """Return waiting requests that the packer does not name, but whose KV may come from elsewhere.

        Only their connector knows, and stock asks it. A load takes no tokens; to begin all of them at once,
        stock is shown these last, with no tokens to compute.
        """
        scheduler = self._scheduler
        if not self._foreign or not scheduler.scheduler_config.enable_chunked_prefill:
            return []
        if scheduler.need_mamba_block_aligned_split:
            return []
        known, held, row_of = set(named), scheduler.jobs.held, scheduler.jobs.row_of
        return [
            request
            for request in islice(scheduler.waiting, _LOADS)
            if request.request_id not in known
            and not held[row_of[request.request_id]]
            and not request.has_encoder_inputs
        ]

    def adapters_fit(self) -> bool:
        """Return whether the running requests, paused ones too, may all be in one batch."""
        config = self._scheduler.lora_config
        return config is None or len({*map(adapter_of, self._scheduler.running)} - {0}) <= config.max_loras

    def _without_adapter(self) -> Iterator[Any]:
        """Yield those whose adapter finds no place beside the running ones."""
        scheduler = self._scheduler
        loaded = {adapter_of(request) for request in scheduler.running} - {0}
        if len(loaded) >= scheduler.lora_config.max_loras:
            yield from (r for r in scheduler.waiting if adapter_of(r) not in loaded | {0})


def adapter_of(request: Any) -> int:
    """Return the number of a request's LoRA adapter, 0 = none."""
    return int(request.lora_request.lora_int_id) if request.lora_request else 0


def within_adapters(requests: list[Any], most: int) -> list[Any]:
    """Return the requests, in order, whose adapters are among the first `most` of all."""
    loaded: set[int] = set()
    kept = []
    for request in requests:
        adapter = adapter_of(request)
        if adapter and adapter not in loaded:
            if len(loaded) == most:
                continue
            loaded.add(adapter)
        kept.append(request)
    return kept


def sort_by_arrival(scheduler: Any, jobs: Jobs) -> bool:
    """Give stock its own order back after steps that ranks from outside or control have ordered.

    Returns False while a request waits that came before a running one: once stock admits it, it stands
    behind that one, and the order must be given again.
    """
    if scheduler.policy is not SchedulingPolicy.FCFS:
        return True

    def order(request: Any) -> tuple[float, int]:
        row = jobs.row_of[request.request_id]
        return float(jobs.arrival[row]), int(jobs.serial[row])

    scheduler.running.sort(key=order)
    scheduler.waiting = FCFSRequestQueue(sorted(scheduler.waiting, key=order))
    if not (scheduler.running and scheduler.waiting):
        return True
    return order(scheduler.running[-1]) < order(scheduler.waiting[0])


class View:
    """Some requests of a scheduler, shown to its stock code until `close`, in the order of a step.

    Stock keeps requests in `running` and in two queues: `kv_holding_waiting` (their KV is there or on its way:
    asynchronous loads, streaming sessions), which it always empties first, and `waiting`. A view replaces the
    three for one call; `close` puts the others back and follows what stock did to those it saw.

    chosen: running requests to show; candidates: waiting ones; both in order.

    Attributes:
        paused: running requests that are hidden.
        hidden: how many running and how many waiting requests are hidden.
    """

    def __init__(self, scheduler: Any, chosen: list[Any], candidates: list[Any]) -> None:
        self._scheduler, self._candidates = scheduler, candidates
        self._waiting, self._holding = scheduler.waiting, scheduler.kv_holding_waiting
        self.paused = []
        if len(chosen) < len(scheduler.running):
            kept = set(map(id, chosen))
            self.paused = [request for request in scheduler.running if id(request) not in kept]
        scheduler.running = chosen
        waiting = len(self._waiting) + len(self._holding)
        self.hidden = len(self.paused), waiting - len(candidates)
        self._narrow = waiting > 0  # else there is nothing to hide
        if self._narrow:
            self._held = set(map(id, self._holding))
            first = [request for request in candidates if id(request) in self._held]
            rest = [request for request in candidates if id(request) not in self._held]
            scheduler.waiting, scheduler.kv_holding_waiting = FCFSRequestQueue(rest), FCFSRequestQueue(first)

    def close(self) -> None:
        """Put back what was hidden: paused requests run again, those not admitted wait where they belong.

        Stock has put in front of the queue what it preempted itself because blocks ran out within the step.
        """
        scheduler = self._scheduler
        if self.paused:
            scheduler.running = scheduler.running + self.paused
        if not self._narrow:
            return
        shown = [*scheduler.waiting, *scheduler.kv_holding_waiting]
        scheduler.waiting, scheduler.kv_holding_waiting = self._waiting, self._holding
        for request in self._candidates:
            self._follow(request)
        known = set(map(id, self._candidates))
        for request in reversed(shown):
            if id(request) not in known:
                self._waiting.prepend_request(request)

    def _follow(self, request: Any) -> None:
        """Take an admitted request out of its queue; move one whose load has begun or failed to the other."""
        held = id(request) in self._held
        origin, other = (self._holding, self._waiting) if held else (self._waiting, self._holding)
        if request.status == RequestStatus.RUNNING:
            origin.remove_request(request)
        elif self._scheduler._holds_kv_blocks(request) != held:
            origin.remove_request(request)
            other.prepend_request(request)
