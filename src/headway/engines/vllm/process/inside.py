"""The requests inside an instance, as it reports them: computing, paused and waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from headway.engines.vllm.process.limits import samples

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@dataclass(frozen=True, slots=True)
class Inside:
    """Counts of requests of all clients, each choice (`n`) by itself. paused: with their KV."""

    computing: int
    paused: int
    waiting: int


def inside_of(state: Mapping[str, Any], page: str) -> Inside | None:
    """Return what is inside an instance; None when neither reports it.

    state: of its scheduler, empty when that is not Headway's. page: its /metrics; stock vLLM pauses nothing.
    """
    running, paused, waiting = state.get("running"), state.get("paused", 0), state.get("waiting")
    if running is None:
        sums = dict[str, float]()
        for sample in samples(page, _RUNNING, _WAITING):  # one of each for every engine core
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        running, waiting = sums.get(_RUNNING), sums.get(_WAITING)
    if not (_is_count(running) and _is_count(paused) and _is_count(waiting)):
        return None
    return Inside(max(int(running) - int(paused), 0), int(paused), int(waiting))


def _is_count(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
