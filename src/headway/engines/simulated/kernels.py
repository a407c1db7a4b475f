"""The simulated engine's iteration as compiled functions over the array of its `Jobs` table.

They do to `jobs` (`Jobs.data`) what vLLM's `schedule()` and `update_from_output()` do to requests. What they
change besides is in the `usage` record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.memory.reservations import end_loans
from headway.policy.pack.kernels import missing_of
from headway.types import Ints

Rows = NDArray[np.void]
Usage = np.void  # a record of USAGE
# held_slots: by running and paused rows. on_host: tokens whose KV is there.
USAGE = np.dtype([("free_blocks", np.int64), ("held_slots", np.int64), ("on_host", np.int64)])


def usage_of(free_blocks: int, held_slots: int = 0) -> Usage:
    """Return a new record of what an engine has in use."""
    record: Usage = account_of(free_blocks, held_slots)[0]
    return record


def account_of(free_blocks: int, held_slots: int = 0) -> Rows:
    """Return an array of one such record."""
    return np.array([(free_blocks, held_slots, 0)], USAGE)


class Limits(NamedTuple):
    """What bounds an engine.

    size: tokens per block.
    slots: requests that may hold KV.
    budget: tokens per iteration.
    max_model_len: tokens per request.
    """

    size: int
    slots: int
    budget: int
    max_model_len: int


class Ran(NamedTuple):
    """What an iteration computes.

    rows, tokens: aligned; the last `admitted` rows were admitted in this iteration.
    lost: rows preempted because blocks ran out, by vLLM's rule.
    copied: tokens of KV that were copied back from the host.
    """

    rows: Ints
    tokens: Ints
    lost: Ints
    admitted: int
    copied: int


@compiled
def release(jobs: Rows, usage: Usage, row: int) -> None:
    """Free a row's KV, on the host too, and its slot; blocks that it has lent stay with the borrowers."""
    if jobs["first_lent_block"][row] or jobs["loan_blocks"][row]:
        usage["free_blocks"] -= end_loans(jobs, row)
    usage["free_blocks"] += jobs["blocks"][row]
    usage["held_slots"] -= jobs["running"][row]
    usage["on_host"] -= jobs["saved"][row]
    jobs["blocks"][row] = 0
    jobs["computed"][row] = 0
    jobs["saved"][row] = 0
    jobs["running"][row] = False


@compiled
def evict(jobs: Rows, usage: Usage, rows: Ints) -> None:
    """Preempt rows: their KV is lost and computed again."""
    for row in rows:
        release(jobs, usage, row)
        jobs["evictions"][row] += 1


@compiled
def save(jobs: Rows, usage: Usage, rows: Ints) -> int:
    """Copy rows' KV to the host and free their blocks and slots. Returns the tokens copied."""
    moved = 0
    for row in rows:
        computed = jobs["computed"][row]
        release(jobs, usage, row)
        jobs["computed"][row] = computed
        jobs["saved"][row] = computed
        usage["on_host"] += computed
        jobs["evictions"][row] += 1
        moved += computed
    return moved


@compiled
def run(jobs: Rows, usage: Usage, limits: Limits, order: Ints, caps: Ints, max_running: int, budget: int) -> Ran:
    """Account one iteration of the rows of `order`, without reservations."""
    none = np.zeros(order.size, np.int64)
    return run_reserved(jobs, usage, limits, order, caps, none, max_running, budget)


@compiled
def run_reserved(
    jobs: Rows, usage: Usage, limits: Limits, order: Ints, caps: Ints, reserve: Ints, max_running: int, budget: int
) -> Ran:
    """Account one iteration of the rows of `order`, of each at most its cap of tokens.

    reserve: tokens whose blocks each row holds from now on, at least (`Step.reserve`).

    As in vLLM: running rows come first, in order. When blocks run out, the last of them are preempted and no
    row is admitted; else waiting rows are admitted, in order.
    """
    budget = min(budget, limits.budget)
    live = jobs["running"][order]
    chosen, waiting = order[live], order[~live]
    paused = usage["held_slots"] - chosen.size
    rows, tokens, lost = _continue(jobs, usage, limits, chosen, caps[live], reserve[live], budget)
    free_slots = min(max_running, limits.slots - paused) - (chosen.size - lost.size)
    if lost.size:
        return Ran(rows, tokens, lost, 0, 0)
    budget -= tokens.sum()
    granted, copied = _admit(jobs, usage, limits, waiting, caps[~live], reserve[~live], budget, free_slots)
    fresh = waiting[: granted.size]
    return Ran(np.concatenate((rows, fresh)), np.concatenate((tokens, granted)), lost, granted.size, copied)


@compiled
def _grows(jobs: Rows, row: int, tokens: int, reserve: int, size: int) -> int:
    """Return the free blocks a row takes to compute `tokens` more and hold its reservation."""
    end = -(-(jobs["computed"][row] + tokens) // size)
    blocks, span, lent = jobs["blocks"][row], jobs["loan_blocks"][row], jobs["first_lent_block"][row]
    assert lent == 0 or end <= lent, "a lender reaches the blocks it has lent"
    more = max(max(end, -(-reserve // size)) - blocks - span, 0)
    if span and more:  # its own blocks come first, so they are complete before the loan is used
        fresh = not jobs["running"][row] or (jobs["computed"][row] <= blocks * size and lent == 0)
        assert fresh, "a borrower outgrows its loan"
    return int(more)


@compiled
def _continue(
    jobs: Rows, usage: Usage, limits: Limits, chosen: Ints, caps: Ints, reserve: Ints, budget: int
) -> tuple[Ints, Ints, Ints]:
    """Give running rows their tokens in order. Returns rows, tokens, and rows preempted for memory."""
    n, size, budget_left = chosen.size, 0, budget
    rows, tokens, lost = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    end = n
    for i in range(n):
        if i >= end:
            break
        row = chosen[i]
        want = min(missing_of(jobs, row), limits.max_model_len - jobs["computed"][row] - 1, caps[i])
        give = max(min(want, budget_left), 0)
        budget_left -= want
        if give == 0:
            continue
        more = _grows(jobs, row, give, reserve[i], limits.size)
        while more > usage["free_blocks"] and end > i:  # vLLM preempts the last row, at the end the row itself
            end -= 1
            lost[n - 1 - end] = chosen[end]
            evict(jobs, usage, chosen[end : end + 1])
        if end <= i:
            break
        usage["free_blocks"] -= more
        jobs["blocks"][row] += more
        rows[size], tokens[size] = row, give
        size += 1
    return rows[:size], tokens[:size], lost[: n - end]


@compiled
def _admit(
    jobs: Rows, usage: Usage, limits: Limits, waiting: Ints, caps: Ints, reserve: Ints, budget: int, free_slots: int
) -> tuple[Ints, int]:
    """Admit waiting rows in order until one does not fit whole, or slots or budget run out."""
    granted, size, copied = np.empty(waiting.size, np.int64), 0, 0
    for i in range(waiting.size):
        row = waiting[i]
        whole = jobs["prompt"][row] + jobs["output_tokens"][row]
        tokens = min(whole - jobs["computed"][row], caps[i], budget)
        most = max(-(-max(whole, reserve[i]) // limits.size) - jobs["loan_blocks"][row], 0)
        if free_slots <= 0 or tokens <= 0 or most > usage["free_blocks"]:
            break
        blocks = _grows(jobs, row, tokens, reserve[i], limits.size)
        usage["free_blocks"] -= blocks
        usage["held_slots"] += 1
        copied += jobs["saved"][row]
        usage["on_host"] -= jobs["saved"][row]
        jobs["saved"][row] = 0
        jobs["blocks"][row] = blocks
        jobs["running"][row] = True
        granted[size] = tokens
        size, budget, free_slots = size + 1, budget - tokens, free_slots - 1
    return granted[:size], copied


@compiled
def complete(jobs: Rows, usage: Usage, target: Ints, rows: Ints, tokens: Ints, now: float) -> Ints:
    """Output the tokens of an iteration that ends at `now`. Returns finished rows, whose KV is freed.

    target: output tokens at which each row finishes.
    """
    finished, size = np.empty(rows.size, np.int64), 0
    for i in range(rows.size):
        row = rows[i]
        jobs["computed"][row] += tokens[i]
        if jobs["computed"][row] < jobs["prompt"][row] + jobs["output_tokens"][row]:
            continue
        if jobs["output_tokens"][row] == 0:
            jobs["first"][row] = now
        else:
            jobs["gap"][row] = max(jobs["gap"][row], now - jobs["last"][row])
        jobs["last"][row] = now
        jobs["output_tokens"][row] += 1
        jobs["tokens_left"][row] = max(jobs["tokens_left"][row] - 1.0, 1.0)
        if jobs["output_tokens"][row] >= target[row]:
            release(jobs, usage, row)
            finished[size] = row
            size += 1
    return finished[:size]
