"""Requests that missed their SLO by most, with where their time went."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from headway import clock
from headway.gateway.in_flight import InFlightRequest
from headway.gateway.watch.ends import Ended, Observer
from headway.gateway.watch.history import WINDOWS, HistoryView, RatePair

_SHOWN = 12
_BUCKETS = 4  # of a window, and the one that is not over yet


@dataclass(frozen=True, slots=True)
class LateRequest:
    """A request that missed its SLO.

    ended: instant of its end. outcome: finished, failed or refused.
    target: the target that it missed by most. promised, by: its seconds, and how much later it was.
    tenant: its label. spans: (state, seconds), from the arrival to the end.
    """

    id: str
    model: str
    tier: str
    tenant: str
    ended: float
    outcome: str
    target: str
    promised: float
    by: float
    spans: tuple[tuple[str, float], ...]

    def shown(self) -> dict[str, Any]:
        """Return the request as JSON has it; its end by the machine's clock."""
        return asdict(self) | {"ended": clock.shown(self.ended)}


Entry = tuple[float, int, LateRequest]
Heaps = dict[RatePair, list[Entry]]


class LateRequests(Observer):
    """The requests that missed their SLO by most, in every window, of every pair; memory is bounded.

    pair_of: the pair that a request of a class and a tenant counts for.
    """

    def __init__(self, pair_of: Callable[[str, str], RatePair]) -> None:
        self._pair_of = pair_of
        self._buckets: dict[str, deque[tuple[float, Heaps]]] = {
            window: deque(maxlen=_BUCKETS + 1) for window in WINDOWS
        }
        self._order = count()

    def ended(self, end: Ended) -> None:
        """Take note of a request that ended here, unless its client left."""
        if end.here and end.outcome != "cancelled":
            self._note(end.in_flight, end.at, end.output_tokens, end.outcome)

    def _note(self, one: InFlightRequest, end: float, output_tokens: int, outcome: str) -> None:
        missed = _missed(one, end, output_tokens)
        if missed is None:
            return
        request, late = one.request, None
        pair = self._pair_of(request.tier, request.tenant)
        for window in WINDOWS:
            heap = self._bucket(window, end).setdefault(pair, [])
            if len(heap) >= _SHOWN and missed[2] <= heap[0][0]:
                continue
            late = late or LateRequest(
                request.id, request.model, pair.tier, pair.tenant, end, outcome, *missed, spans(one, end)
            )
            entry = late.by, next(self._order), late
            if len(heap) < _SHOWN:
                heapq.heappush(heap, entry)
            else:
                heapq.heapreplace(heap, entry)

    def latest(self, view: HistoryView, now: float) -> list[LateRequest]:
        """Return the requests of a view that were late by most, in descending order."""
        since = now - view.seconds
        entries = [
            entry
            for _, heaps in self._buckets[view.window]
            for pair, heap in heaps.items()
            if view.shows(pair)
            for entry in heap
            if entry[2].ended >= since
        ]
        return [late for _, _, late in heapq.nlargest(_SHOWN, entries)]

    def _bucket(self, window: str, now: float) -> Heaps:
        buckets = self._buckets[window]
        if not buckets or now >= buckets[-1][0] + WINDOWS[window][0] / _BUCKETS:
            buckets.append((now, {}))
        return buckets[-1][1]


def spans(one: InFlightRequest, end: float) -> tuple[tuple[str, float], ...]:
    """Return where a request's time went: in the queue, in engines before its first token, in its answer."""
    marks = [("queued", one.request.arrival), *((f"in {engine}", at) for at, engine in one.sends)]
    if one.first_token is not None:
        marks.append(("answering", one.first_token))
    ends = [*(at for _, at in marks[1:]), end]
    return tuple((state, max(until - at, 0.0)) for (state, at), until in zip(marks, ends, strict=True))


def _missed(one: InFlightRequest, end: float, output_tokens: int) -> tuple[str, float, float] | None:
    """Return the target that a request missed by most, its seconds and how much later it was."""
    late = [target for target in _targets(one, end, output_tokens) if target[2] > 0]
    return max(late, key=lambda target: target[2], default=None)


def _targets(one: InFlightRequest, end: float, output_tokens: int) -> Iterator[tuple[str, float, float]]:
    slo, arrival = one.request.slo, one.request.arrival
    first = one.first_token if one.streams and one.first_token is not None else end
    if slo.ttft is not None:
        yield "ttft", slo.ttft, first - arrival - slo.ttft
    more = one.request.per_answer(output_tokens) - 1
    if slo.tpot is not None and more > 0:
        whole, start = slo.tpot * more, max(first, arrival + slo.ttft) if slo.line and slo.ttft else first
        yield "tpot", whole, end - start - whole
    if slo.itl is not None and one.silence is not None:
        yield "itl", slo.itl, one.silence - slo.itl
    if slo.e2e is not None:
        yield "e2e", slo.e2e, end - arrival - slo.e2e
