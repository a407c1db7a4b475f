"""What vLLM's own code sees in one `schedule()`: the requests that a step names, in its order.

Stock keeps requests in `running` and in two queues: `kv_holding_waiting` (their KV is there or on its way:
asynchronous loads, streaming sessions), which it always empties first, and `waiting`. A view replaces the
three for one call; `close` puts the others back and follows what stock did to those it saw.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.request import RequestStatus

from headway.types import Jobs


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
    """Some requests of a scheduler, shown to its stock code until `close`.

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
