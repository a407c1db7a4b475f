"""The simulated twin of a replay: the same arrivals and lengths, the same recipe, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.validate.replay import Replay, ReplayRun, ReplaySetup
from headway.config import Engine
from headway.engines.vllm.process.sizes import expected
from headway.policy.forecast.latency.measurement import bias, disturbed
from headway.policy.forecast.latency.profiles import LatencyProfile
from headway.policy.recipes.registry import find
from headway.simulate.run import InstanceSpec, Simulation
from headway.simulate.workload.traffic import Workload
from headway.types import Instance
from headway.whatif import experiment
from headway.whatif.load.records import Call, Record


@dataclass(slots=True)
class TwinPair:
    """A replay beside its simulation, both without requests that did not complete.

    bias: relative error of the latency profile over the replay's iterations; positive: the profile is too slow
    disturbed: seconds of the replay in which another program used the machine
    """

    replay: Replay
    real: list[Record]
    simulated: list[Record]
    bias: float
    disturbed: float


def pair(replay: Replay, run: ReplayRun, setup: ReplaySetup) -> TwinPair:
    """Return a replay and its simulation with the run's latency profile."""
    kept = [(c, r) for c, r in zip(replay.calls, replay.records, strict=True) if r.ok and r.output_tokens]
    load = workload(kept, setup.engine.name)
    outcome = Simulation(find(replay.system), [instance(run.profile, setup.engine)], load).run()
    more = len(replay.records) * (run.profile.interruption_s or 0.0)
    wrong = bias(run.profile.law, replay.rows, more=more)
    slow = disturbed(run.profile.law, replay.rows)
    return TwinPair(replay, [r for _, r in kept], experiment.records(load, outcome), wrong, slow)


def workload(kept: Sequence[tuple[Call, Record]], model: str) -> Workload:
    """Return the requests of a replay with the lengths that they had in the real run."""
    tiers = tuple(dict.fromkeys(call.tier for call, _ in kept))
    slo = {name: np.array([getattr(c.slo, name) or np.inf for c, _ in kept]) for name in ("ttft", "tpot", "e2e", "itl")}
    output = np.array([record.output_tokens for _, record in kept])
    zeros = np.zeros(len(kept), np.int64)
    return Workload(
        arrival=np.array([call.at for call, _ in kept]),
        output=output,
        prompt=np.array([record.prompt_tokens for _, record in kept]),
        max_tokens=np.maximum([call.max_tokens for call, _ in kept], output),
        priority=np.array([call.priority for call, _ in kept]),
        tier=np.array([tiers.index(call.tier) for call, _ in kept]),
        model=zeros,
        tenant=zeros,
        ttft=slo["ttft"],
        tpot=slo["tpot"],
        e2e=slo["e2e"],
        tiers=tiers,
        models=(model,),
    )


def instance(profile: LatencyProfile, engine: Engine) -> InstanceSpec:
    """Return the simulated twin of an engine: the same blocks, request slots, budget and batch limit."""
    assert profile.kv_tokens is not None, "a measured profile has them"
    sizes = expected(engine)
    shape = Instance(
        "e0",
        engine.name,
        sizes.max_running,
        profile.kv_tokens // profile.block_size,
        profile.block_size,
        sizes.max_model_len,
    )
    return InstanceSpec(
        shape,
        profile.latency(),
        engine.slots or 2 * sizes.max_running,
        sizes.max_batched_tokens,
        request_overhead=profile.request_overhead_s or 0.0,
        token_overhead=profile.token_overhead_s or 0.0,
        interruption=profile.interruption_s or 0.0,
    )
