"""Who gets the slots, the KV blocks and the iteration's tokens, once it is known who is more urgent?

Each of the three goes to the most urgent first. A running job that ends up without a place keeps its KV as
long as nobody more urgent needs the blocks (a pause costs nothing), and is evicted from the least urgent
upwards when somebody does.
"""

from __future__ import annotations

import numpy as np

from headway.memory.ledger import Ledger
from headway.types import Bools, Ints, Jobs, Step


def arrange(jobs: Jobs, ranked: Ints, ledger: Ledger, max_running: int, budget: int) -> Step:
    """Return the step in which the rows of `ranked` (most urgent first) get what there is.

    At most `max_running` rows run, their blocks fit the ledger, and at most `budget` tokens are computed.
    """
    claims = _claims(jobs, ranked, ledger)
    active = _active(jobs, ranked, claims, _capacity(jobs, ranked, ledger), max_running)
    evict = _evicted(jobs, ranked, active, claims, ledger)
    order = ranked[active]
    tokens = grant(jobs, order, budget)
    runs = (tokens > 0) | jobs.running[order]
    return Step(order[runs], tokens[runs], evict, max_running, budget)


def missing(jobs: Jobs, rows: Ints) -> Ints:
    """Return the tokens each row must compute before its next token comes out: 1 for a decode."""
    return np.asarray(np.maximum(jobs.prompt[rows] + jobs.made[rows] - jobs.computed[rows], 1), np.int64)


def grant(jobs: Jobs, order: Ints, budget: int) -> Ints:
    """Share a token budget: one token for every running decode, the rest to prompts in order.

    Returns the tokens per row of `order`; rows that get nothing have 0.
    """
    want = missing(jobs, order)
    decodes = jobs.running[order] & (want == 1)
    spare = budget - int(np.count_nonzero(decodes))
    prompts = np.where(decodes, 0, want)
    before = np.cumsum(prompts) - prompts
    return np.asarray(np.where(decodes, 1, np.clip(spare - before, 0, prompts)), np.int64)


def _claims(jobs: Jobs, ranked: Ints, ledger: Ledger) -> Ints:
    """Return the blocks each row must have to take part: what it holds and grows by, or its whole prompt.

    A prompt is admitted only whole (vLLM's own rule), and with a block to spare so that its first tokens do
    not evict somebody at once.
    """
    running = jobs.running[ranked]
    whole = ledger.blocks_for(jobs.prompt[ranked] + jobs.made[ranked] + 1)
    grown = np.maximum(jobs.blocks[ranked], ledger.blocks_for(jobs.computed[ranked] + 1))
    return np.asarray(np.where(running, grown, np.minimum(whole + 1, ledger.total)), np.int64)


def _capacity(jobs: Jobs, ranked: Ints, ledger: Ledger) -> int:
    """Blocks that are free or held by rows that may lose them."""
    return ledger.free + int(jobs.blocks[ranked].sum())


def _active(jobs: Jobs, ranked: Ints, claims: Ints, capacity: int, max_running: int) -> Bools:
    """Mark the rows that run: in order of urgency, those whose claim still fits, up to max_running."""
    head = claims[:max_running]
    active = np.zeros(ranked.size, np.bool_)
    if int(head.sum()) <= capacity:
        active[:max_running] = True
        return active
    places, blocked = max_running, False
    for i in _candidates(jobs.running[ranked], max_running):
        waiting = not jobs.running[ranked[i]]
        if not places or (waiting and blocked):
            continue
        if claims[i] <= capacity:
            active[i] = True
            capacity -= int(claims[i])
            places -= 1
        # Memory is short: small prompts must not overtake for ever the first one that does not fit.
        blocked = blocked or (waiting and not active[i])
    return active


def _candidates(running: Bools, max_running: int) -> Ints:
    """Return the positions worth a look when memory is short: all running, the first waiting ones."""
    return np.flatnonzero(running | (np.cumsum(~running) <= max_running))


def _evicted(jobs: Jobs, ranked: Ints, active: Bools, claims: Ints, ledger: Ledger) -> Ints:
    """Return the paused rows to evict, least urgent first, until the active ones' claims and slots fit."""
    paused = ranked[jobs.running[ranked] & ~active][::-1]
    if not paused.size:
        return paused
    short = int(claims[active].sum() - jobs.blocks[ranked[active]].sum()) - ledger.free
    crowd = int(np.count_nonzero(active)) + paused.size - ledger.slots
    freed = np.cumsum(jobs.blocks[paused])
    needed = int(np.searchsorted(freed, short)) + 1 if short > 0 else 0
    return paused[: max(needed, crowd, 0)]
