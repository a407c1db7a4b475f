"""What the hook records of every batch: for the latency model, the counters and the logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from headway.engines.vllm.plugin.iteration_log import IterationLog, Row
from headway.engines.vllm.plugin.kv_policy import KvPolicy
from headway.engines.vllm.plugin.prefix_cache import PrefixCache
from headway.policy.forecast.latency.online import OnlineLatency, batch_of
from headway.types import Batch, Ints, Jobs

_LOG = 4096  # steps kept for the control message's "log"


def ints(values: Iterable[int]) -> Ints:
    """Return the values as an array."""
    return np.fromiter(values, np.int64)


class _Decided(NamedTuple):
    """A batch that stock has scheduled and whose output has not come: its shape, begin, order, log row."""

    batch: Batch
    began: float
    ran: list[str]
    row: Row


class RecordingMixin:
    """Records what runs and how long it takes.

    counters: since the start of the engine.
    step_log: (instant, tokens per request, paused, evicted or saved, log row) of the last steps.
    latency: as learned from them.
    """

    # The hook's attributes used here.
    jobs: Jobs
    kv_policy: KvPolicy
    running: list[Any]
    _blocks: Any
    _total: int
    _prefix_cache: PrefixCache
    timer: Callable[[], float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = ("steps", "evictions", "saves", "swapped_tokens", "pauses", "loans")
        self.counters: dict[str, float] = dict.fromkeys(names, 0) | {"step_seconds": 0.0}
        self.step_log: deque[tuple[float, dict[str, int], list[str], list[str], Row]] = deque(maxlen=_LOG)
        self.iteration_log = IterationLog()
        self.latency = OnlineLatency()
        self._decided: dict[int, _Decided] = {}  # by the id of stock's output, until it comes back
        self._updated = 0.0

    def _record(
        self, output: Any, now: float, paused: list[Any], lost: list[str], rows: Ints, names: list[str]
    ) -> None:
        """Record what stock has scheduled.

        paused, lost: requests that paused, ids of those that lost their KV. rows, names: those that were to
        run, in order.
        """
        ran: dict[str, int] = output.num_scheduled_tokens
        self.kv_policy.check(ran)
        if not ran:
            return
        self._prefix_cache.admitted(output)
        order = list(ran)
        if order != names:  # stock was shown more than the packer named, or has not scheduled all of it
            rows = ints(map(self.jobs.row_of.__getitem__, order))
            order = list(dict.fromkeys([*(name for name in names if name in ran), *order]))
        batch = batch_of(self.jobs, rows, ints(ran.values()))
        used = self._total - self._blocks.get_num_free_blocks()
        row = self.iteration_log.begin(now, batch, used, len(self.jobs) - len(self.running))
        fresh = (request.req_id for request in output.scheduled_new_reqs)
        self.iteration_log.ran(now, fresh, (request.request_id for request in paused), ran)
        self._decided[id(output)] = _Decided(batch, self.timer(), order, row)
        self.counters["steps"] += 1
        self.counters["pauses"] += len(paused)
        self.step_log.append((now, ran, [request.request_id for request in paused], lost, row))

    def _learn(self, output: Any) -> list[str]:
        """Learn how long a batch took, whose tokens are there now; return its requests in order."""
        decided, now = self._decided.pop(id(output), None), self.timer()
        if decided is None:
            return []
        # With overlapping batches, one begins when the one before has ended.
        seconds = now - max(decided.began, self._updated)
        self.latency.learn(decided.batch, seconds)
        decided.row[1] = seconds
        self.counters["step_seconds"] += seconds
        self._updated = now
        return decided.ran
