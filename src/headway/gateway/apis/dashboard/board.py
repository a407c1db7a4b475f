"""The dashboard's snapshots of the gateway: one a second, shared by all viewers of the same view."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from headway import __version__, clock
from headway.engines.vllm.process.limits import inside_of
from headway.engines.vllm.process.view import EngineView
from headway.errors import HeadwayError
from headway.gateway.control.targets import describe
from headway.gateway.gateway import Gateway
from headway.gateway.in_flight import RequestState
from headway.gateway.watch.figures import figures
from headway.gateway.watch.history import HistoryView, RatePair

_EVERY_S = 1.0
_ENGINE_S = 1.0  # for an engine to say how it is


@dataclass(slots=True)
class _Line:
    """Requests of a class. oldest: seconds that the first of those that wait has waited."""

    waiting: int = 0
    inside: int = 0
    oldest: float = 0.0

    def add(self, other: _Line) -> None:
        self.waiting += other.waiting
        self.inside += other.inside
        self.oldest = max(self.oldest, other.oldest)


Lines = dict[RatePair, _Line]


class Board:
    """Makes snapshots as long as there are viewers.

    viewers: with the operator's key (True) and without.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._lock = asyncio.Lock()
        self._taken_at, self._shared, self._lines = -_EVERY_S, dict[str, Any](), Lines()
        self._texts: dict[HistoryView, bytes] = {}
        self.viewers = Counter[bool]()

    async def events(self, stopping: asyncio.Event, operator: bool, view: HistoryView) -> AsyncIterator[bytes]:
        """Yield a snapshot a second, as server-sent events, until the gateway stops.

        operator: the viewer has the operator's key.
        """
        self.viewers[operator] += 1
        try:
            while not stopping.is_set():
                yield b"data: " + await self.snapshot(view) + b"\n\n"
                try:
                    async with asyncio.timeout(_EVERY_S):
                        await stopping.wait()
                except TimeoutError:
                    continue
        finally:
            self.viewers[operator] -= 1

    async def snapshot(self, view: HistoryView) -> bytes:
        """Return the latest snapshot as JSON, at most a second old; engines are asked once for all views."""
        async with self._lock:
            now = clock.now()
            if now - self._taken_at >= 0.9 * _EVERY_S:
                self._shared = await self._take(now)
                self._texts.clear()
                self._taken_at = now
            if view not in self._texts:
                self._texts[view] = json.dumps(self._shared | self._view_fields(view)).encode()
            return self._texts[view]

    async def _take(self, now: float) -> dict[str, Any]:
        """Return what all views have in common, and count the requests of each pair."""
        gateway = self._gateway
        engines = gateway.dispatcher.engines
        self._lines, inside = self._count(now)
        states = await asyncio.gather(*(_engine(one, inside[id]) for id, one in engines.items()))
        gateway.metrics.history.note(clock.now())
        return {
            "version": __version__,
            "recipe": gateway.config.recipe,
            "at": clock.shown(now),
            "classes": {name: describe(tier) for name, tier in gateway.config.classes.items()},
            "tenants": gateway.metrics.history.tenants,
            "engines": dict(zip(engines, states, strict=True)),
        }

    def _view_fields(self, view: HistoryView) -> dict[str, Any]:
        """Return what one view shows."""
        now, gateway = clock.now(), self._gateway
        data = figures(gateway.metrics.history, view, now)
        names = [name for name in gateway.config.classes if view.tier in (None, name)]
        lines = {name: _Line() for name in names}
        for pair, line in self._lines.items():
            if view.shows(pair):
                lines.setdefault(pair.tier, _Line()).add(line)
        return data | {
            "ends": [clock.shown(end) for end in data["ends"]],
            "attained": {name: asdict(one) for name, one in data["attained"].items()},
            "lines": {name: asdict(line) for name, line in lines.items()},
            "late": [late.shown() for late in gateway.late.latest(view, now)],
        }

    def _count(self, now: float) -> tuple[Lines, dict[str, int]]:
        """Return the requests by pair, and how many are in each engine."""
        lines, inside = defaultdict[RatePair, _Line](_Line), defaultdict[str, int](int)
        pair_of = self._gateway.metrics.history.pair
        for one in self._gateway.dispatcher.in_flight.values():
            line = lines[pair_of(one.request.tier, one.request.tenant)]
            if one.state in (RequestState.SENT, RequestState.ANSWERING):
                line.inside += 1
                inside[one.sends[-1][1]] += 1
            else:
                line.waiting += 1
                line.oldest = max(line.oldest, now - one.request.arrival)
        return lines, inside


async def _engine(engine: EngineView, inside: int) -> dict[str, Any]:
    """Return the state of an engine. None = not reported, or it is down.

    inside: requests sent to it. computing, paused, waiting: of all requests that it has. kv: share in use.
    """
    instance = engine.instance
    fields: dict[str, Any] = {
        "model": engine.models.current,
        "models": list(engine.models.names),
        "loading": engine.loading,
        "up": engine.up.is_set(),
        "state": engine.state,
        "restarts": engine.restarts,
        "inside": inside,
        "computing": None,
        "paused": None,
        "waiting": None,
        "batch": instance.max_running,
        "assumed": instance.assumed,
        "kv": None,
        "evictions": None,
    }
    if not engine.up.is_set():
        return fields
    try:
        state, page = await engine.control({"op": "state", "jobs": False}, _ENGINE_S), ""
    except HeadwayError:  # attached to a vLLM without Headway's scheduler
        state, page = {}, await engine.metrics(_ENGINE_S)
    if (counts := inside_of(state, page)) is not None:
        fields |= asdict(counts)
    try:
        used = 1 - int(state["blocks_free"]) / max(int(state["blocks_total"]), 1)
        fields["kv"] = min(max(used, 0.0), 1.0)
        fields["evictions"] = int(state["counters"]["evictions"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return fields  # another make, or a malformed state
    return fields
