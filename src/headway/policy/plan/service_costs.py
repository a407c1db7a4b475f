"""What a token costs a fleet, by the latency of its instances (Hermes 3.2)."""

from __future__ import annotations

import numpy as np

from headway.events import Event, Learned
from headway.policy.apps.demand import Costs
from headway.policy.core.cluster import Cluster
from headway.policy.forecast.latency.online import OnlineLatency
from headway.types import Batch, Floats, Instance

_PROBE = 512  # prompt tokens of the batch from which their cost is read
_CONTEXT = 1024  # tokens of context per answer in a batch
_SAME = 0.1  # relative; costs that have changed by less count as before, or every second would bring new ones


class ServiceCosts:
    """The costs of the fleet as it is now; read from the latencies when these or the fleet have changed."""

    def __init__(self) -> None:
        self._fleet_version = -1
        self._learned: dict[str, Floats] = {}  # by instance
        self._news = False
        self._known = np.zeros(len(Costs._fields))

    def note(self, event: Event) -> None:
        """Take note of what an engine has learned."""
        if isinstance(event, Learned):
            self._learned[event.instance], self._news = event.theta, True

    def changed(self, cluster: Cluster) -> Costs | None:
        """Return the mean costs of the instances, or None where they are as before or there are none."""
        if cluster.fleet_version == self._fleet_version and not self._news:
            return None
        self._fleet_version, self._news = cluster.fleet_version, False
        costs = [costs_of(one, self._learned.get(name)) for name, one in cluster.instances.items()]
        if not costs:
            return None
        mean = np.mean(costs, axis=0)
        if np.allclose(mean, self._known, rtol=_SAME, atol=0.0):
            return None
        self._known = mean
        return Costs(*mean.tolist())


def costs_of(instance: Instance, theta: Floats | None = None) -> Costs:
    """Return what tokens cost in a full batch of an instance.

    theta: of its latency, as learned; an instance that has a profile has no need of it, and one without
        either counts as what `OnlineLatency` begins with.
    """
    learned = OnlineLatency()
    if theta is not None:
        learned.theta = theta
    latency = instance.latency or learned.seconds
    kv_tokens = instance.blocks_total * instance.block_size
    answers = max(min(instance.max_running, kv_tokens // _CONTEXT), 1)
    alone = latency(Batch(answers, answers * _CONTEXT, 0))
    with_prompt = latency(Batch(answers, answers * _CONTEXT, _PROBE, _PROBE * _PROBE // 2))
    # A latency that was learned from few iterations may say that prompts cost less than nothing.
    prompt = max(with_prompt - alone, 0.0) / _PROBE
    return Costs(prompt, alone, answers * prompt)
