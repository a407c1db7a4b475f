"""A class that promises a share of its requests gives up its own ones so that another class keeps more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway.policy.recipes.registry import find
from headway.simulate.fleet import build, spec
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import TrafficClass, make, poisson
from headway.types import Slo
from headway.whatif import slo_violations

SLO = Slo(ttft=0.4, tpot=0.05)


def kept(share: float | None) -> dict[str, float]:
    """Return the share of their promises that two classes keep of the same traffic; `assist` promises `share`."""
    rng, fleet = np.random.default_rng(0), build([spec("llama-2-7b-h100,max_running=64")])
    classes = TrafficClass("chat", 0.5, SLO), TrafficClass("assist", 0.5, replace(SLO, share=share))
    workload = replace(make(classes, poisson(14.0, 240.0, rng), rng), models=(fleet[0].instance.model,))
    workload = workload.take(workload.prompt + workload.output <= fleet[0].instance.limit)
    met = slo_violations.met(workload, Simulation(find("headway"), fleet, workload, fast=False).run())
    return {name: float(met[workload.tier == i].mean()) for i, name in enumerate(workload.tiers)}


def test_the_other_class_keeps_more_and_the_share_is_kept() -> None:
    without, given = kept(None), kept(0.9)
    assert given["chat"] > without["chat"] + 0.01
    assert given["assist"] >= 0.9
