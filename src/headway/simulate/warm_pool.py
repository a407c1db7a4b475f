"""Simulated backends outside the LLM that are started ahead of the units that need them (Hermes 5.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Warm:
    """A backend that was started ahead. ready: instant; until: when it is stopped if nothing has used it."""

    ready: float
    until: float


@dataclass(slots=True)
class WarmPool:
    """Backends by name; each serves one unit and ends with it, as a sandbox does.

    cold_s: seconds until one can be used, by backend; others need none.

    Counters, in seconds but for the first three:
    units: that needed a backend that has to be started. hits: that found one ready. warmed: started ahead.
    used: in which a backend served. idle: in which one that was started ahead waited, to the end in vain.
    waited: of units for their backend.
    """

    cold_s: Mapping[str, float]
    units: int = 0
    hits: int = 0
    warmed: int = 0
    used: float = 0.0
    idle: float = 0.0
    waited: float = 0.0
    _warm: dict[str, list[_Warm]] = field(default_factory=dict)

    def warm(self, backend: str, now: float, until: float) -> float:
        """Start a backend ahead, to wait at most to `until`; return the seconds that it takes."""
        seconds = self.cold_s.get(backend, 0.0)
        if seconds:
            self.warmed += 1
            self._warm.setdefault(backend, []).append(_Warm(now + seconds, max(until, now + seconds)))
        return seconds

    def take(self, backend: str, seconds: float, now: float) -> float:
        """Return after how many seconds a unit's backend is ready; it serves for `seconds` then."""
        cold = self.cold_s.get(backend, 0.0)
        self.used += seconds
        if not cold:
            return 0.0
        self.units += 1
        self._expire(backend, now)
        waiting = self._warm.get(backend, [])
        if not waiting:
            self.waited += cold
            return cold
        first = min(waiting, key=lambda one: one.ready)
        waiting.remove(first)
        delay = max(first.ready - now, 0.0)
        self.hits += delay == 0.0
        self.idle += max(now - first.ready, 0.0)
        self.waited += delay
        return delay

    def close(self) -> None:
        """Stop what was started ahead and is not used any more, at the end of a run."""
        for backend in self._warm:
            self._expire(backend, float("inf"))

    def _expire(self, backend: str, now: float) -> None:
        waiting = self._warm.get(backend, [])
        for one in [one for one in waiting if one.until < now]:
            waiting.remove(one)
            self.idle += one.until - one.ready
