"""QLM's packer swaps KV only where the engine has a pool for it."""

from __future__ import annotations

from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.ranked import ByRank


def test_a_packer_without_a_pool_recomputes() -> None:
    able = EngineSpec(4, 64, copy_seconds=1e-6, host_tokens=1000)
    assert ByRank(able).kv.saves
    assert not ByRank(able, swaps=False).kv.saves
    assert not ByRank(EngineSpec(4, 64, copy_seconds=1e-6, host_tokens=0)).kv.saves
