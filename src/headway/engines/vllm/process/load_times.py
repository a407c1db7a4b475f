"""How long an engine takes to load each of its models: an estimate at first, then what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# How a model comes in: its weights replace those of the same shape, vLLM is started anew, or a vLLM that
# sleeps is woken (and started anew when there is none).
Way = Literal["in_place", "restart", "sleep"]

# Before anything was measured: bytes per second of a disk and of host memory, and seconds beside the reading.
_DISK, _MEMORY = 5e8, 4e9
_FIXED: dict[Way, float] = {"in_place": 0.1, "restart": 20.0, "sleep": 1.0}
_NEWEST = 0.5  # weight of the newest measurement


@dataclass(slots=True)
class LoadTimes:
    """Seconds of loads by model, way, and whether the weights were in host memory.

    A load that was measured is forecast by the exponentially weighted mean of its own times. Any other is
    forecast as seconds that depend on the way alone (the mean over all models) and its reading.
    """

    _measured: dict[tuple[str, Way, bool], float] = field(default_factory=dict)
    _fixed: dict[Way, float] = field(default_factory=lambda: dict(_FIXED))
    _known: set[Way] = field(default_factory=set)
    _disk: float = _DISK

    def seconds(self, model: str, way: Way, warm: bool, bytes: int) -> float:
        """Return the seconds that a load will take. bytes: of the weights."""
        measured = self._measured.get((model, way, warm))
        return self._fixed[way] + self._reading(warm, bytes) if measured is None else measured

    def loaded(self, model: str, way: Way, warm: bool, bytes: int, seconds: float) -> None:
        """Take note of a load; the first measurement of a way replaces the guess."""
        key = model, way, warm
        self._measured[key] = _mean(self._measured.get(key), seconds)
        fixed = max(seconds - self._reading(warm, bytes), 0.0)
        self._fixed[way] = _mean(self._fixed[way] if way in self._known else None, fixed)
        self._known.add(way)

    def read(self, bytes: int, seconds: float) -> None:
        """Take note of weights that were read from disk into host memory."""
        if bytes and seconds > 0:
            self._disk = bytes / _mean(bytes / self._disk, seconds)

    def _reading(self, warm: bool, bytes: int) -> float:
        return bytes / _MEMORY + (0.0 if warm else bytes / self._disk)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - _NEWEST) * before + _NEWEST * now
