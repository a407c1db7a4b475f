"""Whose KV lives where? One engine's block account, as packers read it.

The engine's own block manager is the truth; this is its balance at the start of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.types import Ints


class KvBudget(NamedTuple):
    """Blocks of one engine: `total` usable, `free` unheld, `size` tokens each; `slots` = requests that may
    hold KV at once (running and paused). A tuple, because compiled loops take it as it is."""

    total: int
    free: int
    size: int
    slots: int

    def blocks_for(self, tokens: Ints) -> Ints:
        """Return the blocks that token counts occupy, elementwise."""
        return np.asarray(-(-tokens // self.size), np.int64)
