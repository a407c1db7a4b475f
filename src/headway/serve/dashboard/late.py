"""Requests that missed their SLO by most, with where their time went."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from headway.serve.requests import InFlightRequest

_SHOWN = 12
_BUCKET_S, _BUCKETS = 10.0, 60  # requests of so many seconds are compared, and kept for so long


@dataclass(frozen=True, slots=True)
class LateRequest:
    """A request that missed its SLO.

    ended: instant of its end. outcome: finished, failed or refused.
    target: the target that it missed by most. promised, by: its seconds, and how much later it was.
    spans: (state, seconds), from the arrival to the end.
    """

    id: str
    model: str
    tier: str
    ended: float
    outcome: str
    target: str
    promised: float
    by: float
    spans: tuple[tuple[str, float], ...]

    def shown(self, now: float) -> dict[str, Any]:
        """Return the request as JSON has it, with the seconds since its end."""
        return asdict(self) | {"ago": now - self.ended}


Entry = tuple[float, int, LateRequest]


class LateRequests:
    """The requests of the last ten minutes that missed their SLO by most; what it costs is bounded."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[float, list[Entry]]] = deque(maxlen=_BUCKETS)
        self._order = count()

    def note(self, one: InFlightRequest, end: float, output_tokens: int, outcome: str) -> None:
        """Take note of a request's end; output_tokens: of its answer."""
        missed = _missed(one, end, output_tokens)
        if missed is None:
            return
        bucket = self._bucket(end)
        if len(bucket) >= _SHOWN and missed[2] <= bucket[0][0]:
            return
        request = one.request
        late = LateRequest(request.id, request.model, request.tier, end, outcome, *missed, spans(one, end))
        entry = late.by, next(self._order), late
        if len(bucket) < _SHOWN:
            heapq.heappush(bucket, entry)
        else:
            heapq.heapreplace(bucket, entry)

    def latest(self, now: float) -> list[LateRequest]:
        """Return the latest ones of the last ten minutes, the latest first."""
        since = now - _BUCKET_S * _BUCKETS
        found = [entry for begun, bucket in self._buckets if begun >= since for entry in bucket]
        return [late for _, _, late in heapq.nlargest(_SHOWN, found)]

    def _bucket(self, now: float) -> list[Entry]:
        if not self._buckets or now >= self._buckets[-1][0] + _BUCKET_S:
            self._buckets.append((now, []))
        return self._buckets[-1][1]


def spans(one: InFlightRequest, end: float) -> tuple[tuple[str, float], ...]:
    """Return where a request's time went: in the queue, in engines before its first token, in its answer."""
    marks = [("queued", one.request.arrival), *((f"in {engine}", at) for at, engine in one.sends)]
    if one.first_token is not None:
        marks.append(("answering", one.first_token))
    ends = [*(at for _, at in marks[1:]), end]
    return tuple((state, max(until - at, 0.0)) for (state, at), until in zip(marks, ends, strict=True))


def _missed(one: InFlightRequest, end: float, output_tokens: int) -> tuple[str, float, float] | None:
    """Return the target that a request missed by most, its seconds and how much later it was."""
    late = [found for found in _targets(one, end, output_tokens) if found[2] > 0]
    return max(late, key=lambda found: found[2], default=None)


def _targets(one: InFlightRequest, end: float, output_tokens: int) -> Iterator[tuple[str, float, float]]:
    slo, arrival = one.request.slo, one.request.arrival
    first = one.first_token if one.streams and one.first_token is not None else end
    if slo.ttft is not None:
        yield "ttft", slo.ttft, first - arrival - slo.ttft
    more = one.request.per_answer(output_tokens) - 1
    if slo.tpot is not None and more > 0:
        whole, start = slo.tpot * more, max(first, arrival + slo.ttft) if slo.line and slo.ttft else first
        yield "tpot", whole, end - start - whole
    if slo.e2e is not None:
        yield "e2e", slo.e2e, end - arrival - slo.e2e
