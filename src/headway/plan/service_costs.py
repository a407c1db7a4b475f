"""What a token costs a fleet, by the latency of its instances (Hermes 3.2)."""

from __future__ import annotations

import numpy as np

from headway.apps.demand import Costs
from headway.core.cluster import Cluster
from headway.types import Batch, Instance

_PROBE = 512  # prompt tokens of the batch from which their cost is read
_CONTEXT = 1024  # tokens of context per answer in a batch


class ServiceCosts:
    """The costs of the fleet as it is now; read from the latencies when the fleet has changed."""

    def __init__(self) -> None:
        self._fleet_version = -1

    def changed(self, cluster: Cluster) -> Costs | None:
        """Return the mean costs of the instances; None = as before, or no latency is known."""
        if cluster.fleet_version == self._fleet_version:
            return None
        self._fleet_version = cluster.fleet_version
        costs = [costs_of(instance) for instance in cluster.instances.values()]
        known = [one for one in costs if one is not None]
        return Costs(*np.mean(known, axis=0).tolist()) if known else None


def costs_of(instance: Instance) -> Costs | None:
    """Return what tokens cost in a full batch of an instance; None = its latency is not known."""
    if instance.latency is None:
        return None
    kv_tokens = instance.blocks_total * instance.block_size
    answers = max(min(instance.max_running, kv_tokens // _CONTEXT), 1)
    alone = instance.latency(Batch(answers, answers * _CONTEXT, 0))
    with_prompt = instance.latency(Batch(answers, answers * _CONTEXT, _PROBE, _PROBE * _PROBE // 2))
    # A latency that was learned from few iterations may say that prompts cost less than nothing.
    prompt = max(with_prompt - alone, 0.0) / _PROBE
    return Costs(prompt, alone, answers * prompt)
