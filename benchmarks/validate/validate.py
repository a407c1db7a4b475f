"""`headway bench truth`: the simulator against real vLLM, on one trace and step by step.

Below and above saturation, the same arrivals, prompt lengths and output lengths (those of the real run) go
through the same recipe on a real vLLM and in virtual time. The latency profile is measured in the same run,
before, between and after the replays, so that the remaining error comes from effects not in the simulator.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.validate import report
from benchmarks.validate.replay import ReplayResults, ReplaySetup, pair, run
from headway.errors import ConfigError
from headway.whatif.load import mix
from headway.whatif.output.results import SIMULATED, Ask

_QUICK_RATES, _QUICK_SECONDS, _QUICK_TOKENS = {"below": 3.0, "above": 9.0}, 4.0, 48


@experiment("truth", "vllm", f"Real vLLM against the simulator ({SIMULATED})")
def main(ask: Ask, setup: ReplaySetup) -> Result:
    """Run the benchmark; write latency profiles if a folder is given."""
    setup = shortened(setup) if ask.quick else setup
    results = asyncio.run(run(setup))
    pairs = [pair(replay, one, setup) for one in results.runs for replay in one.replays]
    findings = report.Findings(pairs, results.runs, results.conformance)
    if ask.out is not None:
        report.save_profiles(findings, ask.out)
    return report.result(findings, describe(setup, results))


def fixed(text: str | None) -> dict[str, float] | None:
    """Read "1.5,2.8" as the rates below and above saturation; None = measure the capacity."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
        usable = 0 < low < np.inf and 0 < high < np.inf
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{text!r} is not two rates.", "Write them like --rates 1.5,2.8.")
    return {"below": low, "above": high}


def shortened(setup: ReplaySetup) -> ReplaySetup:
    """Return a setup that ends within a minute: one system, fixed rates, a few seconds of short outputs."""
    tiers = tuple(replace(t, max_tokens=min(t.max_tokens, _QUICK_TOKENS)) for t in setup.mix.tiers)
    return replace(
        setup,
        mix=replace(setup.mix, tiers=tiers),
        systems=setup.systems[:1],
        quick=True,
        rates=setup.rates or dict(_QUICK_RATES),
        duration=min(setup.duration, _QUICK_SECONDS),
    )


def describe(setup: ReplaySetup, results: ReplayResults) -> str:
    """Return the workload line of the report."""
    rates = {r.setting: f"{r.rate:.3f}" for run in results.runs[:1] for r in run.replays}
    known = f" (capacity {results.capacity:.3f} req/s)" if results.capacity else ""
    loads = ", ".join(f"{setting} saturation {rate} req/s" for setting, rate in rates.items())
    return (
        f"{mix.describe(setup.mix)}; Poisson arrivals, {loads}{known}, {setup.duration:g} s each; the "
        "simulator has the same arrivals and the lengths that the real run had, and a profile of this run"
    )
