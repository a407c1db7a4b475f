"""The packers' hot loops: order, slots, blocks and tokens of an iteration. Compiled, one row at a time.

`ranked.py` and `allocation.py` call these functions, and so does the compiled simulator
(`simulate/compiled_loop.py`). `jobs` is `Jobs.data`, `rows` are indices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.core.engine_spec import PackerParams
from headway.policy.core.ranks import ARRIVAL, ATTAINABLE, due_at, first_key, level_of
from headway.policy.core.sorting import leading, ordered
from headway.policy.forecast.latency.online import prefill_of, seconds_of
from headway.policy.memory.budget import KvBudget
from headway.types import Bools, Floats, Ints

Rows = NDArray[np.void]
# Kinds of packers: by the rank of that kind; `SLACK` has the levels of `ATTAINABLE` and orders by slack.
FCFS, SLACK = ARRIVAL, ATTAINABLE
PROMISES = 4  # `promises/packer.py`
NO_CAP = 1 << 60
_GRAIN = 32  # tokens; prompts are sized in steps of this
_KEYS = 4


class CompiledStep(NamedTuple):
    """A `Step` as compiled loops give it: cap = NO_CAP where tokens are not limited."""

    order: Ints
    caps: Ints
    evict: Ints


# ---- one row


@compiled
def missing_of(jobs: Rows, row: int) -> int:
    """Return the tokens a row must compute before its next token comes out: 1 for a decode."""
    return int(max(jobs["prompt"][row] + jobs["output_tokens"][row] - jobs["computed"][row], 1))


@compiled
def exclusive_of(jobs: Rows, row: int) -> int:
    """Return the blocks that are free once a row has gone: those that no other row holds."""
    return int(jobs["blocks"][row] - jobs["shared"][row])


@compiled
def promised(jobs: Rows, row: int) -> bool:
    """Tell whether a row was promised anything."""
    return bool(min(jobs["ttft"][row], jobs["tpot"][row], jobs["e2e"][row]) < np.inf)


@compiled
def tpot_from(jobs: Rows, row: int) -> float:
    """Return the instant from which the tpot of a row with a first token counts."""
    return float(max(jobs["first"][row], jobs["line_from"][row]))


@compiled
def due_of(jobs: Rows, row: int) -> float:
    """Return the instant at which a row owes its next visible token, inf = never.

    Before the first token that is arrival + ttft; afterwards `tpot_from` + made * tpot (BROS 4.2's remaining
    time, cumulative so that tokens made early count). An e2e promise is due as a whole.
    """
    arrival, output_tokens = jobs["arrival"][row], jobs["output_tokens"][row]
    token = (
        arrival + jobs["ttft"][row] if output_tokens == 0 else tpot_from(jobs, row) + output_tokens * jobs["tpot"][row]
    )
    return float(min(token, arrival + jobs["e2e"][row]))


@compiled
def slack_of(jobs: Rows, row: int, now: float, work: float, token: float) -> float:
    """Return the seconds a row can still wait before its next token (or its whole answer) is late.

    work: seconds that its next token takes, token: seconds for each of the others.
    """
    answer = jobs["arrival"][row] + jobs["e2e"][row] - now - work - jobs["tokens_left"][row] * token
    return float(min(due_of(jobs, row) - now - work, answer))


# ---- slots, blocks and tokens


@compiled
def grant(jobs: Rows, order: Ints, budget: int, chunk: int, row_chunk: int) -> Ints:
    """Share a token budget: a token and its drafts for every running decode, at most `chunk` to prompts.

    Both in order, as far as the budget goes. No prompt gets more than `row_chunk`.
    """
    tokens, left = np.zeros(order.size, np.int64), budget
    for i in range(order.size):
        if jobs["running"][order[i]] and missing_of(jobs, order[i]) == 1:
            take = min(1 + jobs["drafts"][order[i]], left)
            tokens[i], left = take if take > 0 else -1, left - take
    spare = min(left, chunk)
    for i in range(order.size):
        if tokens[i] == 0:
            tokens[i] = min(spare, row_chunk, missing_of(jobs, order[i]))
            spare -= tokens[i]
        elif tokens[i] < 0:
            tokens[i] = 0
    return tokens


@compiled
def allocate(
    jobs: Rows, ranked: Ints, others: int, kv_budget: KvBudget, max_running: int, budget: int, chunk: int, pauses: int
) -> CompiledStep:
    """Return the step of `allocation.allocate`.

    others: rows that hold a slot and are not in the ranking.
    pauses: how many of the last in it hold KV and do not run.
    """
    free_slots = kv_budget.slots - others
    while True:
        batch_limit = max(min(max_running, free_slots, ranked.size - pauses), 0)
        most = max(min(budget, chunk), 1)
        runs, stays = _share(jobs, ranked, kv_budget, free_slots, batch_limit, most, pauses)
        order = ranked[runs]
        tokens = grant(jobs, order, budget, chunk, kv_budget.row_chunk)
        unfunded = -1
        for i in range(order.size):
            if tokens[i] == 0 and not jobs["running"][order[i]]:
                unfunded = order[i]
                break
        if unfunded < 0:
            return CompiledStep(order, tokens, _losers(jobs, ranked, runs, stays))
        ranked = _without(jobs, ranked, unfunded)


@compiled
def _share(
    jobs: Rows, ranked: Ints, kv_budget: KvBudget, free_slots: int, batch_limit: int, most: int, pauses: int
) -> tuple[Bools, Bools]:
    """Return masks of the rows that run and of those that pause, most urgent first.

    A prompt is admitted only whole (vLLM's own params), and with a block to spare so that its first tokens do
    not evict another row at once. One in progress then keeps room for its rest: as long as it is not complete
    it takes all tokens, and no less urgent row is admitted.
    """
    n = ranked.size
    needs, blocks, taken, holders = np.empty(n, np.int64), kv_budget.free, 0, min(batch_limit, n)
    for i in range(n):
        row = ranked[i]
        needs[i] = _needs(jobs, row, kv_budget, most)
        if jobs["running"][row]:
            blocks += exclusive_of(jobs, row)
        holders += i >= batch_limit and jobs["running"][row]
        taken += needs[i] if i < batch_limit else exclusive_of(jobs, row)
    if taken > blocks or holders > free_slots:
        return _squeeze(jobs, ranked, needs, blocks, free_slots, batch_limit, pauses)
    runs = np.arange(n) < batch_limit
    return runs, jobs["running"][ranked] & ~runs


@compiled
def _needs(jobs: Rows, row: int, kv_budget: KvBudget, most: int) -> int:
    """Return the blocks a row holds after a step of at most `most` of its tokens, or needs to come in.

    Blocks that other rows hold, too, take no room.
    """
    want, computed, shared = missing_of(jobs, row), jobs["computed"][row], jobs["shared"][row]
    if jobs["running"][row]:
        end = computed + min(want, most) + jobs["drafts"][row] + jobs["lookahead"][row]
        return int(max(jobs["blocks"][row], -(-end // kv_budget.size)) - shared)
    return int(min(-(-(computed + want + 1) // kv_budget.size) + 1, kv_budget.total) - shared)


@compiled
def _squeeze(
    jobs: Rows, ranked: Ints, needs: Ints, blocks: int, free_slots: int, batch_limit: int, pauses: int
) -> tuple[Bools, Bools]:
    """Return the masks when room is short: in order of urgency, those whose need still fits.

    No newcomer overtakes a row that does not fit: small prompts would keep it out forever. Running rows
    that need no more may go on.
    """
    n, most, newcomers, stuck = ranked.size, batch_limit, 0, False
    runs, stays = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    for i in range(n):
        running, holds = jobs["running"][ranked[i]], exclusive_of(jobs, ranked[i])
        newcomers += not running
        if not running and newcomers > most:
            continue
        fits = needs[i] <= blocks and min(batch_limit, free_slots) > 0
        if fits and (running or not stuck) and i < n - pauses:
            runs[i], batch_limit, free_slots, blocks = (True, batch_limit - 1, free_slots - 1, blocks - needs[i])
        elif running and free_slots > 0 and holds <= blocks:
            stays[i], stuck, free_slots, blocks = True, True, free_slots - 1, blocks - holds
        else:
            stuck = True
    if free_slots > 0 and not runs.any():  # held rows have the rest: any row that fits is better than none
        for i in range(n):
            if not jobs["running"][ranked[i]] and needs[i] <= blocks:
                runs[i] = True
                break
    return runs, stays


@compiled
def _losers(jobs: Rows, ranked: Ints, runs: Bools, stays: Bools) -> Ints:
    """Return the running rows that neither run nor pause, least urgent first."""
    lost = jobs["running"][ranked] & ~runs & ~stays
    return ranked[lost][::-1].copy()


@compiled
def _without(jobs: Rows, ranked: Ints, unfunded: int) -> Ints:
    """Return the ranking without the newcomers from the first that would get no token."""
    kept, size, met = np.empty_like(ranked), 0, False
    for row in ranked:
        met |= row == unfunded
        if jobs["running"][row] or not met:
            kept[size] = row
            size += 1
    return kept[:size]


# ---- the packers


@compiled
def without_held(jobs: Rows, rows: Ints) -> tuple[Ints, int]:
    """Return the rows that control does not hold, and how many of the others hold a slot."""
    free, size, others = np.empty_like(rows), 0, 0
    for row in rows:
        if jobs["held"][row]:
            others += jobs["running"][row]
        else:
            free[size], size = row, size + 1
    return free[:size], others


@compiled
def pack(params: PackerParams, jobs: Rows, rows: Ints, kv_budget: KvBudget, now: float, theta: Floats) -> CompiledStep:
    """Return the step of one of the four packers; rows: all of the engine's, in any order."""
    rows, others = without_held(jobs, rows)
    if params.kind == SLACK:
        return _slack(params, jobs, rows, others, kv_budget, now, theta)
    keys = keys_of(params.kind, jobs, rows)
    order = _leading(params, jobs, rows, keys)
    if params.kind != FCFS:
        return _allocate(params, jobs, rows, keys, order, others, kv_budget, now, params.budget)
    ranked = rows[order]
    running = np.count_nonzero(jobs["running"][ranked])
    inside, waiting = ranked[: min(running, params.max_running)], ranked[running:][: params.max_running]
    order = np.concatenate((inside, waiting))
    return CompiledStep(order, np.full(order.size, NO_CAP), np.empty(0, np.int64))


@compiled
def _leading(params: PackerParams, jobs: Rows, rows: Ints, keys: Floats) -> Ints:
    """Return the places of rows that hold a slot, and of as many others as may come in, by rank."""
    return leading(keys, jobs["serial"][rows], jobs["running"][rows], params.max_running)


@compiled
def _allocate(
    params: PackerParams,
    jobs: Rows,
    rows: Ints,
    keys: Floats,
    order: Ints,
    others: int,
    kv_budget: KvBudget,
    now: float,
    chunk: int,
) -> CompiledStep:
    """Return the step in which rows get what there is; order: `_leading` of them."""
    most, budget = params.max_running, params.budget
    ranked = silent_streams_first(jobs, rows[order], kv_budget, now, params.max_gap)
    step = allocate(jobs, ranked, others, kv_budget, most, budget, chunk, 0)
    if step.order.size == 0 and order.size < rows.size:  # none of them fits: any row is better than none
        order = ordered(keys, jobs["serial"][rows])
        ranked = silent_streams_first(jobs, rows[order], kv_budget, now, params.max_gap)
        step = allocate(jobs, ranked, others, kv_budget, most, budget, chunk, 0)
    return step


@compiled
def silent_streams_first(jobs: Rows, ranked: Ints, kv_budget: KvBudget, now: float, max_gap: float) -> Ints:
    """Return the ranking with silent streams first: those that made no token for half of `max_gap` seconds.

    They hold their KV, so each takes one token; one that needs a block goes first only if one is free.
    """
    places, size, free = np.empty(ranked.size, np.int64), 0, kv_budget.free
    for i in range(ranked.size):
        if decodes(jobs, ranked[i]) and now - jobs["last"][ranked[i]] > 0.5 * max_gap:
            places[size], size = i, size + 1
    if size == 0:
        return ranked
    silent, first = np.zeros(ranked.size, np.bool_), np.empty(size, np.int64)
    count = 0
    for k in np.argsort(jobs["last"][ranked[places[:size]]], kind="mergesort"):
        row, needs = ranked[places[k]], needs_block(jobs, ranked[places[k]], kv_budget.size)
        if not needs or free > 0:
            silent[places[k]], first[count] = True, row
            count, free = count + 1, free - needs
    return np.concatenate((first[:count], ranked[~silent]))


@compiled
def decodes(jobs: Rows, row: int) -> bool:
    """Tell whether a row has begun its answer, holds all its KV, and makes a token whenever it runs."""
    return bool(jobs["running"][row] and jobs["output_tokens"][row] > 0 and missing_of(jobs, row) == 1)


@compiled
def needs_block(jobs: Rows, row: int, size: int) -> bool:
    """Tell whether the next token of a row that decodes needs another KV block of `size` tokens."""
    end = jobs["computed"][row] + 1 + jobs["drafts"][row] + jobs["lookahead"][row]
    return bool(end > jobs["blocks"][row] * size)


@compiled
def keys_of(kind: int, jobs: Rows, rows: Ints) -> Floats:
    """Return the rank columns of a packer whose order does not depend on the time, shape (3, rows)."""
    keys = np.zeros((3, rows.size))
    for i in range(rows.size):
        row = rows[i]
        if kind == FCFS:  # those inside go on in order of arrival, whatever their urgency
            keys[0, i] = not jobs["running"][row]
            keys[1, i] = 0.0 if jobs["running"][row] else jobs["urgency"][row]
            continue
        arrival = jobs["arrival"][row]
        due = due_at(arrival, jobs["ttft"][row], jobs["e2e"][row])
        keys[0, i], keys[2, i] = jobs["urgency"][row], arrival
        keys[1, i] = first_key(kind, arrival, jobs["priority"][row], due)
    return keys


@compiled
def _slack(
    params: PackerParams, jobs: Rows, rows: Ints, others: int, kv_budget: KvBudget, now: float, theta: Floats
) -> CompiledStep:
    """Return the step of `ranked.Slack`."""
    token = seconds_of(theta, params.max_running, params.max_running * 512.0, 0.0, 0.0)
    keys, one = np.zeros((_KEYS, rows.size)), prefill_of(theta, 1.0)
    for i in range(rows.size):
        want = missing_of(jobs, rows[i])
        keys[3, i] = slack_of(jobs, rows[i], now, one if want == 1 else prefill_of(theta, want), token)
        keys[0, i] = jobs["urgency"][rows[i]]
        keys[1, i] = level_of(keys[3, i], jobs["output_tokens"][rows[i]] == 0)
    order = _leading(params, jobs, rows, keys)
    chunk = _chunk(params, jobs, rows[order], keys[3][order], theta)
    step = _allocate(params, jobs, rows, keys, order, others, kv_budget, now, chunk)
    if step.evict.size:
        for i in range(rows.size):
            keys[2, i] = not jobs["running"][rows[i]]
        order = _leading(params, jobs, rows, keys)
        step = _allocate(params, jobs, rows, keys, order, others, kv_budget, now, chunk)
    return step


@compiled
def _chunk(params: PackerParams, jobs: Rows, ranked: Ints, slack: Floats, theta: Floats) -> int:
    """Return the prompt tokens for this iteration: as many as the answers in progress can wait for."""
    decodes, context = 0, 0
    for row in ranked[: params.max_running]:
        if jobs["running"][row] and missing_of(jobs, row) == 1:
            decodes, context = decodes + 1, context + jobs["computed"][row]
    limit = _limit(params, jobs, ranked[: params.max_running], slack)
    return largest_chunk(params, theta, decodes, context, limit)


@compiled
def largest_chunk(params: PackerParams, theta: Floats, decodes: int, context: float, limit: float) -> int:
    """Return the most prompt tokens beside these decodes in an iteration of `limit` seconds.

    At least `min_chunk`, whatever the limit; at most what the budget leaves.
    """
    low, high = params.min_chunk, max(params.budget - decodes, params.min_chunk)
    if seconds_of(theta, decodes, context, high, high * high // 2) <= limit:
        return high
    while high - low > _GRAIN:  # seconds grow with the prompt, so halving finds the largest that fits
        middle = (low + high) // 2
        if seconds_of(theta, decodes, context, middle, middle * middle // 2) <= limit:
            low = middle
        else:
            high = middle
    return low


@compiled
def _limit(params: PackerParams, jobs: Rows, head: Ints, slack: Floats) -> float:
    """Return the seconds this iteration may take.

    Answers in progress must not fall behind. Slack they have gained is spent only for a first token that
    has a promise, not for best-effort prompts, so that it is there when a request arrives.
    """
    limit, latency, fresh = params.max_step, np.inf, False
    for i in range(head.size):
        if not np.isfinite(slack[i]):
            continue
        if jobs["output_tokens"][head[i]] == 0:
            fresh = True
            continue
        tpot = jobs["tpot"][head[i]]
        latency = min(latency, tpot)
        # One that is late catches up at half its tpot; to stop all prompts for it would not save it.
        limit = min(limit, tpot / 2 if slack[i] < 0 else slack[i])
    return float(limit if fresh else min(limit, latency))
