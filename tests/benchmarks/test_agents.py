"""`headway bench agents` in small: closed loops beside chat, and programs that are paused while KV is short."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.catalog import agents
from benchmarks.catalog.agents_real import Turn, scaled
from benchmarks.catalog.grid import Cell, Grid
from benchmarks.catalog.grounds import fleet
from benchmarks.catalog.programs import RECIPE
from benchmarks.catalog.recorded import AgentTurn
from benchmarks.catalog.simulated import system
from benchmarks.catalog.workloads import CHAT
from headway.errors import ConfigError
from headway.simulate.replay import Replayed, replay
from headway.simulate.workload.applications import Applications, AppRun, Step, applications, with_prefixes
from headway.whatif.output.results import Ask

TURNS = 6
LITTLE = ",kv_tokens=40000"


def agent(first: int = 6000) -> AppRun:
    """A conversation whose prompts grow by 1,000 tokens with each turn, with tools of 2 s between them."""
    steps = []
    for turn in range(TURNS):
        steps += [Step("turn", requests=((first + 1000 * turn, 100),)), Step("tools", "tools", seconds=2.0)]
    return AppRun("agent", tuple(steps))


def agents_of(count: int) -> Applications:
    at = np.arange(count, dtype=float)
    return with_prefixes(applications([agent() for _ in range(count)], at, "default"), {"agent/turn": 100})


def served(name: str, count: int = 10, engines: int = 1, **more: Any) -> Replayed:
    specs = fleet(engines, longest=32_768, more=LITTLE)
    return replay(RECIPE if name == RECIPE.name else system(name), specs, agents_of(count), fast=True, **more)


@pytest.mark.parametrize("name", ["headway", "session", "thunderagent", "hermes"])
def test_agents_and_chat_beside_them_are_all_served(name: str) -> None:
    chat = CHAT.workload(0.2, 30.0, np.random.default_rng(0))
    done = served(name, engines=2, beside=chat)
    assert np.isfinite(done.end).all()
    assert np.isfinite(done.outcome.end).all()
    assert (done.outcome.first[: len(chat)] > chat.arrival).all()
    rows = len(chat) + np.arange(TURNS)
    begins, ends = done.outcome.first[rows], done.outcome.end[rows]
    assert (begins[1:] >= ends[:-1] + 2.0).all(), "a turn comes after the answer before it and the tools"


def test_compiled_iterations_serve_agents_as_others_do() -> None:
    chat = CHAT.workload(0.2, 20.0, np.random.default_rng(0))
    specs = fleet(2, longest=32_768, more=LITTLE)
    ends = [replay(system("session"), specs, agents_of(6), beside=chat, fast=fast).end for fast in (True, False)]
    np.testing.assert_array_equal(*ends)


def test_pausing_programs_keeps_their_kv() -> None:
    paused, stock = served("thunderagent"), served("session")
    assert paused.outcome.hit_pct > stock.outcome.hit_pct + 10
    assert paused.end.mean() < stock.end.mean()


def test_nothing_is_paused_while_all_fit() -> None:
    paused, stock = served("thunderagent", 2), served("session", 2)
    np.testing.assert_allclose(paused.end, stock.end)


@pytest.mark.parametrize("wrong", [{"systems": ("x",)}, {"grounds": ("x",)}, {"engines": (0,)}, {"loads": (math.nan,)}])
def test_what_cannot_be_simulated_is_refused_before_anything_is(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        agents.main(Ask(quick=True), Grid(**wrong))


def test_seconds_are_those_of_stock_vllm() -> None:
    found = {
        Cell("all-kv", 4, 1.0, name, 60.0, 0): {"conversation.mean": mean}
        for name, mean in (("headway", 70.0), ("vllm-fcfs", 100.0))
    }
    assert [row.ours for row in agents._of_stock(found)] == [0.7, 1.0]


def test_scaled_agents_keep_their_shape_and_fit_the_engines() -> None:
    talk = [AgentTurn(800, 80.0, 0.5), AgentTurn(1600, 4.0, 99.0), AgentTurn(40_000, 8.0, 1.0)]
    turns = scaled(talk)
    assert turns == [Turn(100, 10, 0.5), Turn(90, 2, 10.0)]  # the third is longer than the engine's context
