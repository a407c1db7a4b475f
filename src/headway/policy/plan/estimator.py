"""Completion times of kinds of request on instances, for the plan generator (QLM 6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from headway.policy.core.cluster import Cluster
from headway.policy.forecast.completion import Inefficiency, Pace, Tokens, pace_of
from headway.policy.plan.groups import Kind
from headway.types import Batch, Instance

# An instance without a latency profile, before anything is known: seconds of a prompt and between tokens.
_UNKNOWN_PREFILL, _UNKNOWN_TOKEN = 0.2, 0.05
_PACES = 20_000  # paces that are kept


class Normal(NamedTuple):
    """A normal distribution of seconds."""

    mean: float
    std: float


class Serving(NamedTuple):
    """How one instance serves one model; equal for instances that are alike."""

    latency: Callable[[Batch], float] | None
    max_running: int
    kv_tokens: int
    limit: int
    factor: float


def _rounded(value: float) -> int:
    """Return a whole number within some per cent of a value, so that few different ones occur."""
    if value < 16:
        return max(math.ceil(value), 0)
    if math.isinf(value):
        return 1 << 40
    step = 1 << (int(value).bit_length() - 5)
    return math.ceil(value / step) * step


class Estimator:
    """Completion times of kinds of request on instances (`policy/forecast/completion.py`)."""

    def __init__(self) -> None:
        self.inefficiency = Inefficiency()
        self._paces: dict[tuple[Serving, Tokens, int], Pace] = {}
        self.latencies: dict[str, Callable[[Batch], float]] = {}  # as learned, of instances without a profile

    def serving(self, instance: Instance, model: str) -> Serving | None:
        """Return how an instance serves a model, None = it cannot."""
        factor = round(20 * self.inefficiency.factor(instance.id, model)) / 20
        if model == instance.model:
            latency = instance.latency or self.latencies.get(instance.id)
            return Serving(
                latency, instance.max_running, instance.blocks_total * instance.block_size, instance.limit, factor
            )
        for other in instance.loadable:
            if other.model == model:
                kv = other.kv_tokens or instance.blocks_total * instance.block_size
                latency = other.latency or self.latencies.get(instance.id)
                return Serving(latency, instance.max_running, kv, other.limit, factor)
        return None

    def pace(self, serving: Serving, tokens: Tokens, requests: float = math.inf) -> Pace:
        """Return the pace at which an instance serves requests with these tokens.

        requests: of the model that the instance has to serve; the batch does not exceed them.
        """
        batch = min(serving.max_running, _rounded(max(requests, 1.0)))
        rough = Tokens(*(float(_rounded(value)) for value in tokens))
        key = serving, rough, batch
        if key not in self._paces:
            if len(self._paces) > _PACES:
                self._paces.clear()
            self._paces[key] = self._pace(serving, rough, batch)
        return self._paces[key]

    def _pace(self, serving: Serving, tokens: Tokens, batch: int) -> Pace:
        if serving.latency is None:
            return Pace(float(batch), _UNKNOWN_PREFILL, _UNKNOWN_TOKEN * serving.factor, tokens)
        return pace_of(serving.latency, tokens, batch, serving.kv_tokens, serving.factor)

    def completion(
        self, instance: Instance, kind: Kind, base: float, work: float, before: int = 0, model: str | None = None
    ) -> Normal:
        """Return the distribution of the seconds until a request of an instance's queue is complete (eq. 1).

        base, work: see `Seen.waiting`. before: requests of its group that go before it.
        """
        serving = self.serving(instance, model or instance.model)
        assert serving is not None, "a group stands only where it can be served"
        pace = self.pace(serving, kind.tokens)
        waiting = max(work + before * pace.share - pace.decode, 0.0)
        spread = math.hypot(pace.tokens.std * pace.token, math.sqrt(before) * pace.share_std)
        return Normal(base + waiting + pace.prefill + pace.decode, spread)


def fleet_of(cluster: Cluster) -> list[Instance]:
    """Return all instances, those in a model swap, too."""
    return [*cluster.instances.values(), *(instance for instance, _ in cluster.loading.values())]


def load_seconds(instance: Instance, model: str, before: str) -> float:
    """Return the seconds until a model serves that an instance loads after another one, inf = it cannot."""
    for one in (*instance.loadable, instance.loaded):
        if one is not None and one.model == model:
            warm = model in instance.warm
            if before in one.in_place_of:
                return one.in_place_warm_s if warm else one.in_place_cold_s
            return one.warm_s if warm else one.cold_s
    return math.inf


def limit_of(instance: Instance, model: str) -> int:
    """Return the tokens of a model's longest request that an instance can hold, 0 = it has no such model."""
    if instance.model == model:
        return instance.limit
    return max((other.limit for other in instance.loadable if other.model == model), default=0)


def holds(instance: Instance, model: str, longest: int, most: int) -> bool:
    """Tell whether an instance can serve requests so long: all tokens fit, or no other instance is larger.

    most: the largest `limit_of` of the fleet.
    """
    here = limit_of(instance, model)
    return 0 < here >= min(longest, most)
