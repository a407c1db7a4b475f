"""An index that is fed by a scheduler's reports finds of every prompt what vLLM finds of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.validate.conformance import BLOCK, HOOK, ConformanceCase, tally_of
from benchmarks.validate.prefixes import Caching, draw
from headway.engines.simulated.engine import Ran
from headway.policy.placement.index import PrefixIndex
from headway.prefix import CacheReport, prompt_seed, token_keys

pytestmark = pytest.mark.filterwarnings("default")
SEED = prompt_seed(None, None)


class Indexed(Caching):
    """Both engines, and an index of vLLM's cache that hears of it now and then."""

    def __init__(self, case: ConformanceCase, recipe: str, host: str) -> None:
        super().__init__(case, recipe, host)
        self.index, self.random = PrefixIndex(), np.random.default_rng((case.seed, 5))
        self.index.add("e0", case.blocks, BLOCK)

    def _pairs(self, output: Any, ran: Ran) -> dict[str, tuple[Any, Any]]:
        pairs = super()._pairs(output, ran)
        if self.random.random() < 0.3:
            return pairs
        epoch, position = self.index.position("e0")
        asked = {"op": "cache", "epoch": epoch, "position": position}
        report = CacheReport.of(self.real.scheduler.control(asked)["cache"])
        lost, twice = self.random.random(2) < 0.1
        if not lost:
            self.index.report("e0", report)
        if twice:
            self.index.report("e0", report)
        if lost and not twice:
            return pairs
        requests = self.real.scheduler.requests.values()
        found = [self.index.tokens("e0", token_keys(request.prompt_token_ids, SEED)) for request in requests]
        return pairs | {"finds": ([self._cached(request) for request in requests], found)}

    def _cached(self, request: Any) -> int:
        """Return the tokens of a prompt that vLLM's cache holds."""
        pool, count = self.real.scheduler.kv_cache_manager.block_pool, 0
        for key in request.block_hashes[: request.num_prompt_tokens // BLOCK]:
            if not pool.get_cached_block(key, [0]):
                break
            count += BLOCK
        return count


@pytest.mark.parametrize("recipe", ["vllm", "headway", "slack"])
def test_it_finds_what_vllm_finds(recipe: str) -> None:
    cases = [draw(np.random.default_rng((seed, 7))) for seed in range(6)]
    tallies = [tally_of(Indexed(case, recipe, HOOK)) for case in cases]
    assert [tally.difference for tally in tallies] == [None] * len(cases)
    assert sum(tally.steps for tally in tallies) > 100
