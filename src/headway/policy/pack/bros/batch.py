"""The batch that Algorithm 1 puts together, and the sums that forecast its seconds (BROS 4.1). Compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.forecast.latency.online import seconds_of
from headway.policy.pack.kernels import exclusive_of
from headway.types import Bools, Floats, Ints

Rows = NDArray[np.void]
# The shape of an iteration, tokens to copy, the bound on its seconds, and tokens of the budget that are left.
SUMS = np.dtype(
    [(name, float) for name in ("decodes", "context", "prefill", "prefill_context", "copies", "bound", "budget")]
)
# Blocks that can be had, blocks that are empty (below 0: to be emptied), slots for rows that come in, rows
# chosen, rows to save, real-time rows kept out, whether real-time rows crowd the KV or the batch (then none
# is replaced), whether they hold too much KV for prompts in parts, whether the time check kept one out.
ROOM = np.dtype(
    [
        (name, int)
        for name in ("available", "empty", "free_slots", "chosen", "saved", "refused", "crowded", "full", "late")
    ]
)


class StepLimits(NamedTuple):
    """What bounds one iteration.

    batch_limit: rows that may run (B).
    budget: tokens of the iteration.
    total, free, size, slots, row_chunk: as in `KvBudget`.
    copy: seconds to move one token's KV; shared: blocks have two ends.
    The others: as in `packer.Bros`.
    """

    batch_limit: int
    budget: int
    total: int
    free: int
    size: int
    slots: int
    row_chunk: int
    copy: float
    shared: bool
    replaces: bool
    spare: float
    lost_last: bool
    crowded: float
    parts_below: float
    parts_fill: float
    fixed_bound: bool
    returns_early: bool
    replaces_long: bool


class Batch(NamedTuple):
    """An iteration being built.

    rows, tokens: the chosen rows and their tokens.
    left: seconds each chosen row has left (inf = best effort).
    save: rows that go to the host.
    sums, room: one record each of `SUMS` and `ROOM`.
    """

    rows: Ints
    tokens: Ints
    left: Floats
    save: Ints
    sums: Rows
    room: Rows


@compiled
def with_row(jobs: Rows, batch: Batch, row: int, want: int, copies: int, theta: Floats, copy: float) -> float:
    """Return the forecast seconds of the iteration with one more row: max(t_exec, t_swap)."""
    count(jobs, batch, row, want, 1)
    batch.sums[0]["copies"] += copies
    seconds = forecast(batch.sums, theta, copy)
    batch.sums[0]["copies"] -= copies
    count(jobs, batch, row, want, -1)
    return seconds


@compiled
def forecast(all_sums: Rows, theta: Floats, copy: float) -> float:
    """Return max(t_exec, t_swap) of an iteration in seconds (BROS 4.1)."""
    sums = all_sums[0]
    t_exec = seconds_of(theta, sums["decodes"], sums["context"], sums["prefill"], sums["prefill_context"])
    return float(max(t_exec, sums["copies"] * copy))


@compiled
def count(jobs: Rows, batch: Batch, row: int, tokens: int, sign: int) -> None:
    """Add a row to the sums (sign 1), or take it out (-1)."""
    sums, there = batch.sums[0], jobs["computed"][row]
    if tokens == 1:
        sums["decodes"] += sign
        sums["context"] += sign * there
    else:
        sums["prefill"] += sign * tokens
        sums["prefill_context"] += sign * (tokens * there + tokens * tokens // 2)
    sums["budget"] -= sign * tokens


@compiled
def take(jobs: Rows, batch: Batch, row: int, want: int, left: float, blocks: int, copies: int) -> None:
    """Choose a row."""
    at = batch.room[0]["chosen"]
    batch.rows[at], batch.tokens[at], batch.left[at] = row, want, left
    count(jobs, batch, row, want, 1)
    batch.sums[0]["copies"] += copies
    batch.room[0]["chosen"] += 1
    batch.room[0]["available"] -= blocks
    batch.room[0]["empty"] -= blocks
    batch.room[0]["free_slots"] -= not jobs["running"][row]


@compiled
def save(jobs: Rows, batch: Batch, row: int) -> None:
    """Send a row to the host as a whole, if it is here."""
    if jobs["running"][row]:
        batch.save[batch.room[0]["saved"]] = row
        batch.room[0]["saved"] += 1
        batch.room[0]["available"] += exclusive_of(jobs, row)
        batch.room[0]["empty"] += exclusive_of(jobs, row)
        batch.room[0]["free_slots"] += 1
        batch.sums[0]["copies"] += jobs["computed"][row] - jobs["saved"][row]


@compiled
def make_room(jobs: Rows, batch: Batch, other: Ints) -> None:
    """Swap out whole best-effort rows that do not run, until the chosen ones fit.

    The least urgent goes first, of equals the last to arrive.
    """
    chosen: Bools = np.zeros(jobs.size, np.bool_)
    chosen[batch.rows[: batch.room[0]["chosen"]]] = True
    while batch.room[0]["empty"] < 0:
        last = -1
        for row in other:
            idle = jobs["running"][row] and not chosen[row]
            if idle and (last < 0 or goes_first(jobs, last, jobs["serial"][last], row, jobs["serial"][row])):
                last = row
        if last < 0:
            return
        chosen[last] = True
        save(jobs, batch, last)


@compiled
def goes_first(jobs: Rows, a: int, a_key: float, b: int, b_key: float) -> bool:
    """Tell whether row a goes before row b: by urgency, then by their keys."""
    if jobs["urgency"][a] != jobs["urgency"][b]:
        return bool(jobs["urgency"][a] < jobs["urgency"][b])
    return bool(a_key <= b_key)
