"""How much KV does a request get, and when? (EcoServe 3.2: exact allocation with a reserved pool.)

A request gets at once what its prompt and its predicted answer will need, so no allocation fails in the
middle. A small share of the memory stays out of that: there new prompts wait for their turn to generate, and
answers that turn out longer than predicted go on.
"""

from __future__ import annotations

import math

from headway.compiled import compiled


@compiled
def blocks_of(tokens: int, size: int) -> int:
    """Return the blocks that tokens occupy."""
    return -(-tokens // size)


@compiled
def pooled(free: int, reserve: int, queued: int) -> int:
    """Return the blocks that an exact allocation may take.

    free: blocks nobody holds. reserve: blocks of the pool, of which prompts that wait to generate hold
    `queued`; the rest of the pool stays free for others like them.
    """
    return free - max(reserve - queued, 0)


@compiled
def goal_of(prompt: int, left: float, most: int) -> int:
    """Return the tokens whose KV a request of `left` predicted tokens may come to hold, at most `most`."""
    return min(prompt + max(math.ceil(left), 1), most)


def reserve_of(total: int, share: float) -> int:
    """Return the blocks of a pool that is `share` of the memory, at least one."""
    return max(int(total * share), 1)
