"""Which waiting requests vLLM's own code would skip in this step, so that no place is made for them.

A grammar that compiles, KV or an encoder's output on its way, a streaming session without input, output still
to be delivered, an adapter that does not fit beside those that run, an engine that is paused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from headway.engines.vllm.plugin.connector import HostPool

_LOADS = 64  # waiting requests that a connector is asked about in a step


class Blocked:
    """The waiting requests of one scheduler that cannot be admitted now.

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
