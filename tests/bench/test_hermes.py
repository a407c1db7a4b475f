"""Hermes' tables: VTC by tokens served, intervals over seeds, and the runs of the authors' published code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers import hermes
from benchmarks.papers.hermes import _less, _reductions
from benchmarks.papers.hermes_vtc import ServedTokens
from benchmarks.papers.hermes_workloads import AUTHORS, PUBLISHED, WIDE, HermesSetting, ServedRuns, engines, pool
from headway.policy.apps.graph import LLM
from tests.pack.driven import Ask, Driven, Limits

SETTING = HermesSetting("1x", runs=2)
TENANTS = "aabbbb"  # by number of the request


def first_tokens(packer: ServedTokens, asks: list[Ask]) -> list[str]:
    """Return the requests in the order in which they were admitted, one at a time."""
    order: list[str] = []
    for seen in Driven(packer, Limits(running=1, budget=512)).go(asks):
        order += [name for name in seen.tokens if name not in order]
    return order


def owner(id: str) -> int:
    return "ab".index(TENANTS[int(id[1:])])


def test_the_tenant_that_was_served_least_is_next() -> None:
    """a's first answer is as long as three of b's: b has three turns, then both alternate by arrival."""
    asks = [Ask(10, 90), Ask(10, 30), *(Ask(10, 30) for _ in range(4))]
    packer = ServedTokens(1, owner, 1.0, 2.0)
    order = first_tokens(packer, asks)
    assert order[:4] == ["r0", "r2", "r3", "r4"]
    assert packer.served[:2] == pytest.approx([20 + 2 * 120, 40 + 2 * 120])


def test_without_prompts_and_lift_the_fewest_output_tokens_are_next() -> None:
    asks = [Ask(100, 50), Ask(10, 5), *(Ask(10, 20) for _ in range(4))]
    assert first_tokens(ServedTokens(1, owner, 0.0, 1.0, lifts=False), asks) == ["r0", "r2", "r3", "r4", "r1", "r5"]


def test_with_shares_a_new_run_waits_behind_one_that_has_waited() -> None:
    """r2's run was served before, and is then owed half of what r1 gets; r3's run comes when r1 is nearly done."""
    asks = [Ask(10, 5), Ask(10, 60, after=1), Ask(10, 5, after=8), Ask(10, 5, after=50)]
    for shares, order in ((False, ["r0", "r1", "r3", "r2"]), (True, ["r0", "r1", "r2", "r3"])):
        packer = ServedTokens(1, lambda id: (1, 0, 1, 2)[int(id[1:])], 0.1, 1.0, lifts=False, shares=shares)
        assert first_tokens(packer, asks) == order


def runs(system: str, *act: float) -> ServedRuns:
    none = np.zeros(len(act))
    return ServedRuns(system, SETTING, np.array(act), none, none, ["EV"] * len(act))


def test_reductions_have_the_interval_of_their_seeds() -> None:
    equal = _reductions(runs("hermes", 1, 1, 1, 1), runs("vllm", 2, 2, 2, 2), (77.0, 82.4))
    assert [row.ours for row in equal] == pytest.approx([50.0] * 6)
    assert [row.paper for row in equal] == [77.0, None, None, 82.4, None, None]
    rows = {row.id: row.ours for row in _reductions(runs("hermes", 1, 1, 1, 1), runs("vllm", 2, 2, 4, 4), (None, None))}
    low, high = rows["act.mean.reduction_pct.low"], rows["act.mean.reduction_pct.high"]
    assert rows["act.mean.reduction_pct"] == pytest.approx(_less(np.ones(2), np.array([2.0, 4.0])))
    assert (low, high) == pytest.approx((50.0, 75.0))
    one = ServedRuns("hermes", replace(SETTING, runs=4), np.ones(4), np.ones(4), np.ones(4), ["EV"] * 4)
    assert [row.id.split(".")[-1] for row in _reductions(one, one, (None, None))] == ["reduction_pct"] * 2


def test_the_published_runs_are_those_of_the_authors_code() -> None:
    served, taught = pool(published=True)
    assert set(served) == set(taught) == {*PUBLISHED, WIDE}
    assert all(sum(step.backend == LLM for step in run.steps) > 1 for run in (*served["CG"], *taught["CG"]))
    assert {run.steps[-1].unit for run in served["FEV"]} == {"thought"}
    assert set(pool()[0]) == set(PUBLISHED) - {"FEV", "MRS"}


def test_the_authors_engine_is_named_and_slower() -> None:
    parts = {one.name: one for one in hermes.full().experiments}
    settings = [setting for one in parts.values() for setting in one.settings]
    assert all(("authors" in one.name) == (one.engine == AUTHORS) for one in settings)
    ours, theirs = (engines(name)[0].latency.prefill_seconds(np.array([1000.0]))[0] for name in ("7b", AUTHORS))
    assert 2 < theirs / ours < 4
