"""`headway bench placement` in small: every figure is there, and none beats what is possible."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.catalog.grid import Cell, Grid
from benchmarks.catalog.grounds import fleet
from benchmarks.catalog.workloads import CHAT
from benchmarks.placement import hindsight, routers, simulated
from benchmarks.placement.simulated import CLAIRVOYANT, least_tokens
from headway.errors import ConfigError
from headway.policy.recipes.registry import find
from headway.simulate.run import Simulation
from headway.types import Request
from headway.whatif.output.results import Ask


@pytest.mark.parametrize("system", ["headway", "headway+ends", "sglang", "dynamo+packer"])
def test_every_figure_is_there(system: str) -> None:
    figures = simulated.figures_of(Cell("deep-research", 2, 0.3, system, 60.0, 0))
    assert {*figures} == {*simulated._UNITS, CLAIRVOYANT}
    assert figures["tokens.computed"] >= figures[CLAIRVOYANT] > 0
    assert 0 <= figures["attainment.promised"] <= 100
    assert figures["balance"] >= 1


def test_one_engine_computes_no_more_than_must_be() -> None:
    """With room for all, and one request after the other, what is computed is the least."""
    work = CHAT.workload(0.02, 400.0, np.random.default_rng(1))
    outcome = Simulation(find("vllm"), fleet(1), work).run()
    assert least_tokens(work) == outcome.queried - outcome.hits


@pytest.mark.parametrize(
    "wrong",
    [
        {"systems": ("x",)},
        {"grounds": ("x",)},
        {"engines": (0,)},
        {"engines": (1.5,)},
        {"loads": (math.nan,)},
        {"systems": ("headway+ends",), "grounds": ("mooncake",)},
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_is(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"There is no|A fleet needs|Mooncake's trace"):
        simulated.main(Ask(quick=True), Grid(**wrong))


@pytest.mark.parametrize(
    ("systems", "margins"), [(("headway", "sglang"), 3), (("headway",), 0), (("sglang", "sglang+packer"), 0)]
)
def test_margins_need_headway_and_a_router(systems: tuple[str, ...], margins: int) -> None:
    found = {Cell("hermes", 2, 1.0, name, 1.0, 0): {"attainment.promised": 90.0} for name in systems}
    assert len([*simulated._margins(found)]) == margins


def test_no_rule_does_better_than_hindsight() -> None:
    kept, tokens = hindsight.figures_of(0)
    assert max(zip(kept, (-computed for computed in tokens), strict=True)) == (kept[-1], -tokens[-1])
    assert kept[-1] > kept[-2]


def seen(requests: int = 0, waiting: int = 0, found: int = 0, prompts: float = 0, context: float = 0) -> routers.Seen:
    return routers.Seen(requests, waiting, found, prompts, context, 10_000)


ASK = Request("r", "m", 1000, 10, 0.0)


@pytest.mark.parametrize(
    ("rule", "engines", "chosen"),
    [
        ("least-loaded", [seen(2), seen(1), seen(1)], 1),
        ("sglang", [seen(2), seen(9, found=400)], 1),  # more than 0.3 of the prompt
        ("sglang", [seen(2), seen(9, found=200)], 0),
        ("sglang", [seen(2), seen(70, found=1000)], 0),  # 64 requests more, and 1.5 times as many
        ("llm-d", [seen(), seen(waiting=1, found=1000)], 1),
        ("llm-d", [seen(), seen(waiting=1, found=500)], 0),
        ("dynamo", [seen(context=500), seen(found=800, context=900)], 1),
        ("dynamo", [seen(context=500), seen(found=800, context=1400)], 0),
    ],
)
def test_rules_are_those_of_their_projects(rule: str, engines: list[routers.Seen], chosen: int) -> None:
    assert routers.CHOICES[rule]()(ASK, engines) == chosen
