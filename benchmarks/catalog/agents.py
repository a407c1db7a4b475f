"""`headway bench agents`: recorded coding agents in a closed loop beside chat, in the simulator.

An agent's next request comes when the one before it is answered and the recorded time of its tools has passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import numpy as np

from benchmarks.catalog import recorded, simulated
from benchmarks.catalog.grid import SOURCES, Cell, Grid, rows_of
from benchmarks.catalog.grounds import PROFILE, fleet
from benchmarks.catalog.margins import HEADWAY, bars
from benchmarks.catalog.programs import RECIPE as PROGRAMS
from benchmarks.catalog.workloads import CHAT
from benchmarks.experiment import Result, computed, experiment, refuse_unknown
from headway.policy.recipes.recipe import Recipe
from headway.simulate.replay import replay
from headway.simulate.workload.applications import Applications, AppRun, Step, applications, with_prefixes
from headway.simulate.workload.arrivals import poisson
from headway.simulate.workload.traces import locate
from headway.simulate.workload.traffic import concat
from headway.types import Floats
from headway.whatif.output.results import SIMULATED, Ask, Row, system_grid
from headway.whatif.slo_violations import met

STOCK = "vllm-fcfs"
SYSTEMS = (HEADWAY, STOCK, "session", PROGRAMS.name, "hermes")
SETTINGS = {"all-kv": "", "little-kv": ",kv_tokens=240000"}  # of the engines; the grounds here
_QUICK = Grid((HEADWAY, STOCK, PROGRAMS.name), ("little-kv",), (2,), (1.0,), 60.0)
_WHOLE = Grid(SYSTEMS, tuple(SETTINGS), (4, 16), (0.5, 0.7, 1.0), 240.0)
AGENTS, CHATS = 0.2, 0.3  # conversations per second and engine at 1.0 times the capacity
WARM_S = 150.0  # after which conversations count
_APP, _UNIT = "coding-agent", "turn"
_UNITS = {"conversation.mean": "s", "conversation.p95": "s", "attainment.promised": "%", "prompt.hit_pct": "%"}
_DRAWN = {"conversation.mean": "mean seconds of an agent", "attainment.promised": "promises of chat kept, %"}


@experiment("agents", "sim", f"Coding agents in a closed loop beside chat ({SIMULATED})")
def main(ask: Ask, asked: Grid) -> Result:
    """Simulate; what is not given: `quick`, two engines with little KV, a short time, three systems; else all."""
    grid = asked.within(_QUICK if ask.quick else _WHOLE)
    refuse_unknown("setting", grid.grounds, SETTINGS)
    locate(*recorded.FILE)
    for name in grid.systems:
        system(name)
    found = computed(grid.cells(ask.seed), figures_of, sources=() if ask.quick else SOURCES)
    rows = [*rows_of(found, _UNITS), *_of_stock(found)]
    rows.append(Row("conversation.mean", "alone", "on an idle engine", alone(), "s"))
    workload = (
        f"{SIMULATED}: engines of {PROFILE} with prefix caches; {AGENTS:g} agents and {CHATS:g} conversations of "
        f"interactive-chat begin per second and engine at 1x, those of {grid.seconds:g} s count."
    )
    return Result(rows, workload, lambda: {"agents": bars(rows, _DRAWN)}, system_grid(rows))


def system(name: str) -> Recipe:
    """Return a system by its name. ConfigError for an unknown one."""
    return PROGRAMS if name == PROGRAMS.name else simulated.system(name)


def figures_of(cell: Cell) -> dict[str, float]:
    """Simulate a cell and return its figures."""
    rng, end = np.random.default_rng(cell.seed), WARM_S + cell.seconds
    many = cell.engines * cell.load
    agents, chat = runs(AGENTS * many, end, rng), CHAT.workload(CHATS * many, end, rng)
    engines = fleet(cell.engines, more=SETTINGS[cell.ground])
    done = replay(system(cell.system), engines, agents, beside=chat, fast=True)
    took = (done.end - agents.arrival)[agents.arrival >= WARM_S]
    rows = np.zeros(len(done.outcome.end), bool)
    rows[: len(chat)] = chat.arrival >= WARM_S
    kept = met(concat(chat, agents.workload), done.outcome)[rows].mean()
    figures = float(took.mean()), float(np.quantile(took, 0.95)), 100 * float(kept), done.outcome.hit_pct
    return dict(zip(_UNITS, figures, strict=True))


def alone() -> float:
    """Return the mean seconds of a recorded conversation on an idle engine."""
    begins = np.array([3600.0 * number for number in range(len(_scripts()))])
    done = replay(system(STOCK), fleet(1), _applications(_scripts(), begins), fast=True)
    return float((done.end - begins).mean())


def runs(rate: float, seconds: float, rng: np.random.Generator) -> Applications:
    """Return agents that begin at `rate` per second, each with one of the recorded conversations."""
    scripts, begins = _scripts(), poisson(rate, seconds, rng)
    return _applications([scripts[i] for i in rng.integers(len(scripts), size=begins.size).tolist()], begins)


@cache
def _scripts() -> Sequence[AppRun]:
    return [AppRun(_APP, tuple(_steps(talk))) for talk in recorded.conversations()]


def _applications(scripts: Sequence[AppRun], begins: Floats) -> Applications:
    return with_prefixes(applications(scripts, begins, "default"), {f"{_APP}/{_UNIT}": recorded.SYSTEM})


def _steps(talk: Sequence[recorded.AgentTurn]) -> Iterator[Step]:
    for prompt, answer, tools_s in talk:
        yield Step(_UNIT, requests=((prompt, int(answer)),))
        yield Step("tools", "tools", seconds=tools_s)


def _of_stock(found: Mapping[Cell, Mapping[str, float]]) -> Iterator[Row]:
    """Yield mean seconds of a conversation as a multiple of stock vLLM's, where that ran."""
    stock = {cell.setting(): figures["conversation.mean"] for cell, figures in found.items() if cell.system == STOCK}
    for cell, figures in found.items():
        if (setting := cell.setting()) in stock:
            value = figures["conversation.mean"] / stock[setting]
            yield Row("conversation.of_stock", cell.system, setting, value, "x")
