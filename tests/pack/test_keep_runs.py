"""The default recipe's packer over whole runs: nothing waits for ever, and more promises are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from headway.policy.core.engine_spec import PromisesConfig
from headway.policy.pack.promises.packer import Promises
from headway.policy.recipes.registry import find
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload, concat, single
from headway.types import Slo
from tests.pack.keep import instance


def crowd(seed: int, seconds: float, rate: float) -> Workload:
    """Return three classes at a rate that one engine cannot serve."""
    rng = np.random.default_rng(seed)
    parts = [
        single(
            np.sort(rng.uniform(0, seconds, int(rate * seconds))),
            rng.integers(10, 300, int(rate * seconds)),
            rng.integers(2, 80, int(rate * seconds)),
            slo=slo,
            tier=name,
        )
        for name, slo in (("chat", Slo(1.0, 0.05)), ("code", Slo(e2e=4.0)), ("batch", Slo()))
    ]
    return concat(*parts).sorted()


@pytest.mark.parametrize("seed", range(3))
def test_everything_is_answered_in_the_end(seed: int) -> None:
    load = crowd(seed, 20.0, 8.0)
    outcome = Simulation(find("headway"), [instance()], load).run()
    assert np.isfinite(outcome.end).all()


def test_it_keeps_more_promises_than_least_slack_under_overload() -> None:
    load = crowd(1, 60.0, 6.0)
    kept = {}
    for name in ("headway", "slack"):
        outcome = Simulation(find(name), [instance()], load).run()
        tpot = (outcome.end - outcome.first) / np.maximum(load.output - 1, 1)
        met = (outcome.first - load.arrival <= load.ttft) & (tpot <= load.tpot)
        kept[name] = int((met & (outcome.end - load.arrival <= load.e2e))[load.promised].sum())
    assert kept["headway"] > 1.3 * kept["slack"]


@pytest.mark.parametrize("running", [2, 8])
def test_nothing_waits_for_ever(running: int) -> None:
    """Under lasting overload what is not kept is served by its soft due, the eldest first.

    What passes a request without a promise is kept, or was due before it (Jackson 1955: of all orders that
    leave the kept alone, none has a smaller largest lateness).
    """
    load = concat(crowd(2, 60.0, 8.0), single(np.array([1.0]), 50, 20, tier="one")).sorted()
    one = int(np.flatnonzero(load.tier == load.tiers.index("one"))[0])
    outcome = Simulation(find("headway"), [instance(running=running)], load).run()
    plain = ~load.promised
    later = plain & (load.arrival > load.arrival[one] + 10.0)
    assert outcome.first[one] < outcome.first[later].min()


def test_what_an_overload_leaves_is_worked_off_while_promises_are_kept() -> None:
    """Iterations that leave time for a burst end soon after the last loss, not with the last lost request."""
    n = 400
    calm = single(np.linspace(60.0, 400.0, n), 50, 40, slo=Slo(1.0, 0.05), tier="later")
    load = concat(crowd(3, 60.0, 12.0), calm).sorted()
    later = load.tier == load.tiers.index("later")
    end = {}
    for overload_s in (60.0, np.inf):
        packer = partial(Promises, keep=PromisesConfig(overload_s=overload_s))
        outcome = Simulation(replace(find("headway"), packer=packer), [instance()], load).run()
        assert np.mean((outcome.first - load.arrival <= 1.0)[later & (load.arrival > 120.0)]) > 0.99
        end[overload_s] = outcome.end[~later].max()
    assert end[60.0] < end[np.inf] - 10.0


@pytest.mark.parametrize("seed", range(3))
def test_streams_go_on_at_a_bounded_gap_while_they_hold_their_kv(seed: int) -> None:
    """With KV for all, no stream is silent for more than a second and two iterations, kept or not."""
    load = crowd(seed, 30.0, 8.0)
    outcome = Simulation(find("headway"), [instance(running=32, blocks=4000)], load).run()
    streams = (load.tier != load.tiers.index("code")) & (outcome.evictions == 0)
    assert streams.sum() >= 2 * 8 * 30 - 2, "a lost one may lose its slot"
    assert outcome.gap[streams].max() < 1.0 + 2 * 0.2
