"""The KV blocks of one engine at the start of a step, as packers see them.

The engine's own block manager is the authority; this is a copy of its balance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.types import UNLIMITED, Ints


class KvBudget(NamedTuple):
    """What one engine has for its next step. A named tuple, because compiled loops take it as it is.

    total: usable blocks.
    free: blocks without an owner.
    size: tokens per block.
    slots: requests that may hold KV at once, running and paused.
    row_chunk: most prompt tokens of one request in the step (vLLM's `long_prefill_token_threshold`).
    """

    total: int
    free: int
    size: int
    slots: int
    row_chunk: int = UNLIMITED

    def blocks_for(self, tokens: Ints) -> Ints:
        """Return the blocks that token counts occupy, elementwise."""
        return np.asarray(-(-tokens // self.size), np.int64)
