"""How does the simulated engine account an iteration in microseconds? Compiled, on the table's own array.

The functions do to `jobs` (`Jobs.data`) what stock `schedule()` and `update_from_output()` do to requests.
A balance carries what they change beside it: free blocks and rows that hold a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.memory.reservations import end_loans
from headway.pack.kernels import missing_of
from headway.types import Ints

Rows = NDArray[np.void]
FREE, HOLDING = 0, 1  # places in a balance: free blocks; rows that hold a slot


class Limits(NamedTuple):
    """What bounds an engine: tokens per block, slots, tokens per iteration, tokens per request."""

    size: int
    slots: int
    budget: int
    max_model_len: int


class Ran(NamedTuple):
    """What an iteration computes: rows and tokens (aligned), the last `admitted` of them newly in.

    lost: rows that memory took (stock's rule). copied: tokens of KV that came back from the host.
    """

    rows: Ints
    tokens: Ints
    lost: Ints
    admitted: int
    copied: int


@compiled
def release(jobs: Rows, balance: Ints, row: int) -> None:
    """Take a row's KV, on the host too, and its slot; what it has lent stays with its guests."""
    if jobs["first_lent_block"][row] or jobs["loan_blocks"][row]:
        balance[FREE] -= end_loans(jobs, row)
    balance[FREE] += jobs["blocks"][row]
    balance[HOLDING] -= jobs["running"][row]
    jobs["blocks"][row] = 0
    jobs["computed"][row] = 0
    jobs["saved"][row] = 0
    jobs["running"][row] = False


@compiled
def evict(jobs: Rows, balance: Ints, rows: Ints) -> None:
    """Take rows' KV; they compute it again."""
    for row in rows:
        release(jobs, balance, row)
        jobs["evictions"][row] += 1


@compiled
def save(jobs: Rows, balance: Ints, rows: Ints) -> int:
    """Move rows' KV to the host: blocks and slots are free, the work is kept. Returns the tokens moved."""
    moved = 0
    for row in rows:
        computed = jobs["computed"][row]
        release(jobs, balance, row)
        jobs["computed"][row] = computed
        jobs["saved"][row] = computed
        jobs["evictions"][row] += 1
        moved += computed
    return moved


@compiled
def run(
    jobs: Rows, balance: Ints, limits: Limits, order: Ints, caps: Ints, max_running: int, budget: int
) -> Ran:
    """Account one iteration of the rows of `order`, which hold only the blocks that they need now."""
    none = np.zeros(order.size, np.int64)
    return run_reserved(jobs, balance, limits, order, caps, none, max_running, budget)


@compiled
def run_reserved(
    jobs: Rows, balance: Ints, limits: Limits, order: Ints, caps: Ints, reserve: Ints, max_running: int,
    budget: int,
) -> Ran:  # fmt: skip
    """Account one iteration of the rows of `order`, of each at most its cap of tokens.

    reserve: tokens whose blocks each row holds from now on, at least (`Step.reserve`).

    As stock does it: running rows first, in order; when memory runs out in between the last of them lose
    theirs and nobody is admitted, else waiting rows are, in order.
    """
    budget = min(budget, limits.budget)
    live = jobs["running"][order]
    chosen, waiting = order[live], order[~live]
    paused = balance[HOLDING] - chosen.size
    rows, tokens, lost = _continue(jobs, balance, limits, chosen, caps[live], reserve[live], budget)
    places = min(max_running, limits.slots - paused) - (chosen.size - lost.size)
    if lost.size:
        return Ran(rows, tokens, lost, 0, 0)
    budget -= tokens.sum()
    given, copied = _admit(jobs, balance, limits, waiting, caps[~live], reserve[~live], budget, places)
    fresh = waiting[: given.size]
    return Ran(np.concatenate((rows, fresh)), np.concatenate((tokens, given)), lost, given.size, copied)


@compiled
def _grows(jobs: Rows, row: int, tokens: int, reserve: int, size: int) -> int:
    """Return the free blocks a row takes to compute `tokens` more and hold its reservation."""
    end = -(-(jobs["computed"][row] + tokens) // size)
    blocks, span, lent = jobs["blocks"][row], jobs["loan_blocks"][row], jobs["first_lent_block"][row]
    assert lent == 0 or end <= lent, "a host runs into its guest"
    more = max(max(end, -(-reserve // size)) - blocks - span, 0)
    if span and more:  # its own blocks come first, so they are complete before the loan is used
        fresh = not jobs["running"][row] or (jobs["computed"][row] <= blocks * size and lent == 0)
        assert fresh, "a guest outgrows its loan"
    return int(more)


@compiled
def _continue(
    jobs: Rows, balance: Ints, limits: Limits, chosen: Ints, caps: Ints, reserve: Ints, budget: int
) -> tuple[Ints, Ints, Ints]:
    """Give running rows their tokens in order. Returns rows, tokens, and rows preempted for memory."""
    n, size, left = chosen.size, 0, budget
    rows, tokens, lost = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    end = n
    for i in range(n):
        if i >= end:
            break
        row = chosen[i]
        want = min(missing_of(jobs, row), limits.max_model_len - jobs["computed"][row] - 1, caps[i])
        give = max(min(want, left), 0)
        left -= want
        if give == 0:
            continue
        more = _grows(jobs, row, give, reserve[i], limits.size)
        while more > balance[FREE] and end > i:  # stock takes it from the last row, then from itself
            end -= 1
            lost[n - 1 - end] = chosen[end]
            evict(jobs, balance, chosen[end : end + 1])
        if end <= i:
            break
        balance[FREE] -= more
        jobs["blocks"][row] += more
        rows[size], tokens[size] = row, give
        size += 1
    return rows[:size], tokens[:size], lost[: n - end]


@compiled
def _admit(
    jobs: Rows, balance: Ints, limits: Limits, waiting: Ints, caps: Ints, reserve: Ints, budget: int,
    places: int,
) -> tuple[Ints, int]:  # fmt: skip
    """Admit waiting rows in order until one does not fit whole, or there is no place or budget."""
    given, size, copied = np.empty(waiting.size, np.int64), 0, 0
    for i in range(waiting.size):
        row = waiting[i]
        whole = jobs["prompt"][row] + jobs["output_tokens"][row]
        tokens = min(whole - jobs["computed"][row], caps[i], budget)
        most = max(-(-max(whole, reserve[i]) // limits.size) - jobs["loan_blocks"][row], 0)
        if places <= 0 or tokens <= 0 or most > balance[FREE]:
            break
        blocks = _grows(jobs, row, tokens, reserve[i], limits.size)
        balance[FREE] -= blocks
        balance[HOLDING] += 1
        copied += jobs["saved"][row]
        jobs["saved"][row] = 0
        jobs["blocks"][row] = blocks
        jobs["running"][row] = True
        given[size] = tokens
        size, budget, places = size + 1, budget - tokens, places - 1
    return given[:size], copied


@compiled
def complete(jobs: Rows, balance: Ints, target: Ints, rows: Ints, tokens: Ints, now: float) -> Ints:
    """Let tokens come out at `now`. Returns the rows that have made all of `target`; they hold nothing."""
    done, size = np.empty(rows.size, np.int64), 0
    for i in range(rows.size):
        row = rows[i]
        jobs["computed"][row] += tokens[i]
        if jobs["computed"][row] < jobs["prompt"][row] + jobs["output_tokens"][row]:
            continue
        if jobs["output_tokens"][row] == 0:
            jobs["first"][row] = now
        jobs["output_tokens"][row] += 1
        jobs["tokens_left"][row] = max(jobs["tokens_left"][row] - 1.0, 1.0)
        if jobs["output_tokens"][row] >= target[row]:
            release(jobs, balance, row)
            done[size] = row
            size += 1
    return done[:size]
