"""The packers that compiled loops know, by the kind in their `PackerParams`."""

from __future__ import annotations

from headway.compiled import compiled
from headway.policy.core.engine_spec import PackerParams
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.kernels import PROMISES, CompiledStep, Rows
from headway.policy.pack.kernels import pack as pack_by_rank
from headway.policy.pack.promises.packer import pack as pack_promises
from headway.types import Floats, Ints


@compiled
def pack(
    params: PackerParams, jobs: Rows, rows: Ints, kv_budget: KvBudget, now: float, theta: Floats, slow: float
) -> CompiledStep:
    """Return the step of one of the packers; rows: all of the engine's, in any order; theta, slow: `OnlineLatency`."""
    if params.kind == PROMISES:
        return pack_promises(params, jobs, rows, kv_budget, now, theta, slow)
    return pack_by_rank(params, jobs, rows, kv_budget, now, theta)
