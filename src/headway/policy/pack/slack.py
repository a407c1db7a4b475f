"""Least slack first, with prompt chunks sized so that running answers keep their promises.

Jobs with a promise run by least slack: the time until their next token is due, less the time it takes to
make it (BROS 4.2). Best-effort jobs fill what is left, and how much prompt an iteration computes follows
from the smallest slack among the answers in progress, by the learned latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.policy.core.engine_spec import PackerParams
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.pack import kernels
from headway.ports import Packer
from headway.types import Jobs, Step


@dataclass(slots=True)
class Slack(Packer):
    """Least slack first, prompt chunks sized by the learned latency.

    max_running: rows that compute in one iteration.
    budget: most tokens of an iteration.
    latency: as learned on this engine.
    min_chunk: prompt tokens computed in any iteration, so that no prompt starves.
    max_step: seconds no iteration with prompts should exceed, so that an arrival is seen in time.
    max_gap: seconds that a stream may be silent while it holds its KV.
    """

    max_running: int
    budget: int
    latency: OnlineLatency
    min_chunk: int = 64
    max_step: float = 0.5
    max_gap: float = math.inf

    @property
    def params(self) -> PackerParams:
        """The parameters of this packer for compiled loops."""
        return PackerParams(
            kernels.SLACK, self.max_running, self.budget, self.min_chunk, self.max_step, max_gap=self.max_gap
        )

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step: on time by least slack, then the late, then best effort by arrival.

        Slack alone pauses but never evicts: a waiting row has ever less of it, so two equals would take each
        other's KV in turn and recompute their prompts forever. Among equals what holds KV goes on.
        """
        step = kernels.pack(self.params, jobs.data, jobs.rows(), kv_budget, now, self.latency.theta)
        return Step(step.order, step.caps, step.evict, max_running=self.max_running, token_budget=self.budget)
