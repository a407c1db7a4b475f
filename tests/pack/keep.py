"""Rows and packers for the tests of the default recipe's packer."""

from __future__ import annotations

import numpy as np

from headway.policy.core.engine_spec import EngineSpec, PackerParams, PromisesConfig
from headway.policy.core.feasibility import Pace
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.promises.outlook import in_progress, outlook_of, pace_of
from headway.policy.pack.promises.packer import Promises
from headway.simulate.instance import InstanceSpec
from headway.types import Batch, Instance, Ints, Jobs, Step

ROOM = KvBudget(1000, 1000, 16, 64)
NONE = np.empty(0, np.int64)


class Linear:
    """Seconds that the packer has learned already: its first guess."""

    def __init__(self) -> None:
        self.known = OnlineLatency()

    def seconds(self, batch: Batch) -> float:
        return self.known.seconds(batch)

    def learn(self, batch: Batch, seconds: float) -> None:
        """It is known."""


def packer(keep: PromisesConfig | None = None, running: int = 8) -> Promises:
    return Promises(EngineSpec(running, 2048), keep or PromisesConfig())


def jobs(*rows: dict[str, float]) -> Jobs:
    """Return a table of waiting rows; what is not given is a request without a promise."""
    table = Jobs()
    for i, values in enumerate(rows):
        given = {"prompt": 100, "tokens_left": 10.0, "serial": i}
        given |= dict.fromkeys(("ttft", "tpot", "e2e"), np.inf)
        table.add(f"r{i}", **(given | values))
    return table


def answer(**more: float) -> dict[str, float]:
    """Return a row that has made 5 tokens."""
    computed = {"computed": 104, "output_tokens": 5, "blocks": 7, "running": True, "first": 0.1}
    return computed | more


def instance(running: int = 8, blocks: int = 200) -> InstanceSpec:
    return InstanceSpec(Instance("e0", "default", running, blocks, 16, 2048), Linear(), 64, 512)


def level(row: dict[str, float], now: float = 0.0, params: PackerParams | None = None) -> int:
    table, theta = jobs(row), OnlineLatency().theta
    pace = pace_among(table)
    return outlook_of(params or packer().params, table.data, 0, now, theta, pace)[0]


def pace_among(table: Jobs) -> Pace:
    return pace_of(table.data, in_progress(PromisesConfig(), table.data, table.rows(), 0.0), OnlineLatency().theta)


def ran(step: Step) -> Ints:
    assert step.tokens is not None
    return step.order[step.tokens > 0]
