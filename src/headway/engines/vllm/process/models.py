"""The models of one engine: which one it serves, which ones it can load, how, and in how many seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from headway.config import Engine
from headway.engines.vllm.process.exits import BadArguments
from headway.engines.vllm.process.host_weights import HostWeights, is_warm
from headway.errors import EngineError
from headway.models.compare import difference, weight_bytes, weight_files
from headway.models.resolve import resolve
from headway.types import Instance, Loadable

log = logging.getLogger("headway.engine")
# Seconds in which a model that could not be loaded is not offered; after one more failure it is given up.
RETRY_AFTER = (10.0, 60.0)


class ModelUnavailable(EngineError):
    """A model that no engine can load."""

    status = 503


@dataclass(frozen=True, slots=True)
class SwapReport:
    """How a swap ended.

    model: the one to be loaded.
    way: how it was to be loaded.
    warm: its weights were in host memory when the load began.
    seconds: of the load, without the wait for streams to end.
    error: why the engine serves the model before again, None = the swap succeeded.
    """

    model: str
    way: Way
    warm: bool
    seconds: float
    error: EngineError | None = None


@dataclass(slots=True)
class _Failures:
    count: int = 0
    until: float = 0.0
    error: EngineError | None = None


class EngineModels:
    """The models of one engine, by name.

    names: of all of them. swaps: there is more than one.
    current: the one that it serves, or is to serve when it is started.
    held: whose weights are in host memory, within the budget.
    """

    def __init__(self, config: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self.names = tuple(config.served)
        self.swaps = len(self.names) > 1
        self.current = config.name
        self.held = HostWeights(config.host_weights_gib * 2**30)
        self.times = LoadTimes()
        self._paths: dict[str, str] = {}
        self._in_place_of: dict[str, frozenset[str]] = {}
        self._other_way: Way = "sleep" if config.sleep_mode else "restart"  # than in place
        self._limits: dict[str, int] = {}
        self._failures: dict[str, _Failures] = {}
        self._stop_reading = threading.Event()

    def path(self, model: str) -> str:
        """Return what vLLM loads for a model: its directory, or a hub id."""
        if model not in self._paths:
            self._paths[model] = resolve(self._config.served[model])
        return self._paths[model]

    def size(self, model: str) -> int:
        """Return the bytes of a model's weights, 0 = not known."""
        return weight_bytes(self.path(model))

    def config_of(self, model: str) -> Engine:
        """Return the configuration of an engine of this kind that is started with another model."""
        return replace(self._config, model=self._config.served[model], served_name=model)

    # ---- how a model comes in

    def survey(self) -> None:
        """Find out by their directories which models can take each other's place in an engine. (blocks)"""
        alike = list[list[str]]()
        for model in self.names if self.swaps else ():
            others = (some for some in alike if difference(self.path(some[0]), self.path(model)) is None)
            if (found := next(others, None)) is None:
                alike.append([model])
            else:
                found.append(model)
        self._in_place_of = {model: frozenset(some) - {model} for some in alike for model in some}

    def way(self, model: str) -> Way:
        """Return how a model takes the place of the current one, as its directory is now. (blocks)"""
        why = difference(self.path(self.current), self.path(model))
        if why is None:
            return "in_place"
        log.debug("%s is not loaded in the place of %s: %s", model, self.current, why)
        return self._other_way

    def is_warm(self, model: str) -> bool:
        """Return whether a model's weights are in host memory, held or not. (blocks)"""
        return model in self.held.names or is_warm(weight_files(self.path(model)))

    def stop_reading(self) -> None:
        """End the reading that is under way: a load has the disk for itself."""
        self._stop_reading.set()
        self._stop_reading = threading.Event()

    def hold(self, model: str) -> None:
        """Bring a model's weights into host memory and keep them, as far as the budget goes. (blocks)"""
        try:
            stop, files = self._stop_reading, weight_files(self.path(model))
            began, warm = self._clock(), self.is_warm(model)
            if self.held.hold(model, files, stop) and not warm:
                self.times.read(self.size(model), self._clock() - began)
        except (OSError, ValueError) as error:
            log.warning("the weights of %s are not held in host memory: %s", model, error)

    def started(self, warm: bool, seconds: float) -> None:
        """Take note of how long the engine took to start with the current model."""
        self.times.loaded(self.current, "restart", warm, self.size(self.current), seconds)

    def report(self, report: SwapReport) -> None:
        """Take note of how a swap ended."""
        if report.error is None:
            self._failures.pop(report.model, None)
            size = self.size(report.model)
            self.times.loaded(report.model, report.way, report.warm, size, report.seconds)
            return
        failures = self._failures.setdefault(report.model, _Failures())
        final = isinstance(report.error, BadArguments)
        failures.count, failures.error = len(RETRY_AFTER) + 1 if final else failures.count + 1, report.error
        if failures.count <= len(RETRY_AFTER):
            failures.until = self._clock() + RETRY_AFTER[failures.count - 1]

    def postpone(self, model: str) -> None:
        """Do not offer a model for a while, though it has not failed."""
        self._failures.setdefault(model, _Failures()).until = self._clock() + RETRY_AFTER[0]

    # ---- events for the core

    def unavailable(self, model: str) -> EngineError | None:
        """Return why a model is given up: vLLM refuses its arguments, or it failed too often."""
        failures = self._failures.get(model, _Failures())
        return failures.error if failures.count > len(RETRY_AFTER) and model != self.current else None

    @property
    def next_offer(self) -> float | None:
        """Return seconds until a model that failed is offered again, None = there is none."""
        waits = [
            failures.until - self._clock()
            for model, failures in self._failures.items()
            if model != self.current and self.unavailable(model) is None
        ]
        return min((wait for wait in waits if wait > 0), default=None)

    def announce(self, instance: Instance) -> Instance:
        """Return the instance, as vLLM describes it, with its model and those that it can load."""
        self._limits[self.current] = instance.limit
        longest, others = instance.max_model_len, (one for one in self._in_place_of if one != self.current)
        loadable = tuple(self._loadable(model, longest) for model in others if self._is_offered(model))
        loaded = self._loadable(self.current, longest) if self.swaps else None
        return replace(instance, model=self.current, loadable=loadable, warm=self.held.names, loaded=loaded)

    def _is_offered(self, model: str) -> bool:
        failures = self._failures.get(model, _Failures())
        return self.unavailable(model) is None and failures.until <= self._clock()

    def _loadable(self, model: str, longest: int) -> Loadable:
        """Return what is known of a load. Its KV is not, before it was loaded: then the context counts."""
        alike = self._in_place_of.get(model, frozenset())
        limit = self._limits.get(self.current if self.current in alike else model, longest)
        cold, warm = self._seconds(model, self._other_way)
        in_place_cold, in_place_warm = self._seconds(model, "in_place")
        return Loadable(
            model, cold, warm, limit, in_place_of=alike, in_place_cold_s=in_place_cold, in_place_warm_s=in_place_warm
        )

    def _seconds(self, model: str, way: Way) -> tuple[float, float]:
        """Return the seconds of a load with the weights on disk, and in host memory."""
        cold, warm = (self.times.seconds(model, way, warm, self.size(model)) for warm in (False, True))
        return max(cold, warm), warm


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
