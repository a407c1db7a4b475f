"""What the hook records of every batch: for the latency model, the counters and the logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from headway.engines.vllm.plugin.kv_policy import KvPolicy
from headway.engines.vllm.plugin.prefix_cache import PrefixCache
from headway.policy.forecast.latency.online import OnlineLatency, batch_of
from headway.types import Batch, Ints, Jobs

_KEPT = 65_536  # rows of each kind: half an hour of a small model
_STOPS = 64  # kept of a request; further ones are left out
Row = list[float | None]
Stop = tuple[float, float, str]
# (id, entered, first, last, admitted, stops)
RequestRow = tuple[str, float, float, float, float | None, list[Stop]]


@dataclass(slots=True)
class _Stay:
    """A request inside the engine. stopped: since when it computes nothing, and why."""

    entered: float
    admitted: float | None = None
    stopped: tuple[float, str] | None = None
    stops: list[Stop] = field(default_factory=list)

    def end_stop(self, now: float) -> None:
        if self.stopped is not None and len(self.stops) < _STOPS:
            self.stops.append((self.stopped[0], now, self.stopped[1]))
        self.stopped = None


class IterationLog:
    """The last iterations and requests, by which the simulator is validated; instants are of the hook's clock.

    Two times of an iteration differ: `seconds`, from the decision to the model's output, which the latency model
    learns; and `interval`, from one decision to the next, which a request waits for. The interval includes the
    processing of the output and other work on the same CPU core.

    iterations: [start, seconds, interval, decodes, context, prefill, prefill_context, blocks, waiting], times
        in seconds, the middle four as in `types.Batch`, then KV blocks in use and requests that wait inside;
        None = not over yet.
    requests: (id, entered, first, last, admitted, stops): the instants at which the scheduler got the request
        and at which it decided after the request's first and last token; that of its first iteration, None
        when it had none; and the stretches after that in which it computed nothing: (from, to, "p" = paused
        with its KV, "e" = it had lost its KV).
    """

    def __init__(self, max_rows: int = _KEPT) -> None:
        self.iterations: deque[Row] = deque(maxlen=max_rows)
        self.requests: deque[RequestRow] = deque(maxlen=max_rows)
        self._stays: dict[str, _Stay] = {}
        self._stopped: set[str] = set()
        self._open: Row | None = None

    def enter(self, key: str, now: float) -> None:
        """Log that the scheduler got a request."""
        self._stays[key] = _Stay(now)

    def decide(self, now: float) -> None:
        """Log that the next decision begins, which ends the interval of the iteration before."""
        if self._open is not None and self._open[0] is not None:
            self._open[2] = now - self._open[0]
            self._open = None

    def begin(self, start: float, batch: Batch, blocks: int = 0, waiting: int = 0) -> Row:
        """Log an iteration that has been decided; return its row, whose seconds the caller sets later."""
        shape = batch.decodes, batch.context, batch.prefill, batch.prefill_context
        row: Row = [start, None, None, *shape, blocks, waiting]
        self.iterations.append(row)
        self._open = row
        return row

    def ran(self, now: float, fresh: Iterable[str], paused: Iterable[str], ran: Collection[str]) -> None:
        """Log what an iteration did to requests: those that run for the first time, pause, and run on."""
        for key in fresh:
            if key in self._stays and self._stays[key].admitted is None:
                self._stays[key].admitted = now
        for key in [key for key in self._stopped if key in ran]:
            self._stopped.discard(key)
            self._stays[key].end_stop(now)
        for key in paused:
            self.stop(key, now, "p")

    def stop(self, key: str, now: float, kind: Literal["p", "e"]) -> None:
        """Log that a request computes nothing from now on: it is paused, or has lost its KV."""
        stay = self._stays.get(key)
        if stay is None or stay.admitted is None or (stay.stopped and stay.stopped[1] == kind):
            return
        stay.end_stop(now)
        stay.stopped = now, kind
        self._stopped.add(key)

    def leave(self, key: str, id: str, first: float, now: float) -> None:
        """Log that a request has ended. first: 0 when its first token came with its last.

        The first token of an answer that another engine began was there before the request.
        """
        stay = self._stays.pop(key, None)
        self._stopped.discard(key)
        if stay is not None:
            stay.end_stop(now)
            first = max(first or now, stay.admitted or stay.entered)
            self.requests.append((id, stay.entered, first, now, stay.admitted, stay.stops))

    def since(self, iterations: int, requests: int, start: float, ended: float) -> tuple[list[Row], list[RequestRow]]:
        """Return the first rows after these instants, at most so many of each, oldest first.

        start: of iterations that are over. ended: of requests.
        """
        rows, stays = list[Row](), list[RequestRow]()
        for row in reversed(self.iterations):
            if row[0] is None or row[0] <= start:
                break
            if row[1] is not None:
                rows.append(row)
        for stay in reversed(self.requests):
            if stay[3] <= ended:
                break
            stays.append(stay)
        return rows[::-1][:iterations], stays[::-1][:requests]


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
