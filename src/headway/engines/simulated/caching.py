"""The simulated engine with vLLM's prefix cache.

It admits requests with what the cache holds of them, fills the columns of `Jobs` as
`engines/vllm/plugin/prefix_cache.py` does for the real engine, and hands out blocks in vLLM's order, so that
the same prefixes are lost. Which tokens requests share is said by their `Prefix`; without one a request finds
only what it has computed itself, after it has lost its KV.

A host pool beside the cache is that of `engines/vllm/plugin/connector.py`: a request is copied there whole, and what
the cache has of it when it is admitted again is not copied back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import numpy as np

from headway.compiled import compiled
from headway.engines.simulated import kernels, prefix_blocks
from headway.engines.simulated.engine import Done, Ran, SimulatedEngine, Sizes
from headway.engines.simulated.kernels import Limits, Rows, Usage
from headway.engines.simulated.prefix_blocks import PrefixBlocks
from headway.errors import ConfigError
from headway.policy.pack.allocation import missing
from headway.policy.pack.kernels import NO_CAP, CompiledStep, missing_of
from headway.ports import Packer
from headway.prefix import CacheReport, Prefix
from headway.types import UNLIMITED, Bools, Ints, Slo

_AHEAD = 64  # waiting requests that are looked up again when the cache has changed, as in the plugin


class CachingEngine(SimulatedEngine):
    """A simulated engine with a prefix cache.

    Raises ConfigError for packers that reserve and lend KV or count on two-ended blocks: blocks that change hands
    cannot be cached, nor can they in vLLM.

    host: tokens that a host pool holds, None = room for all; it counts whole blocks.
    pool: the blocks and what is cached in them.
    follows: the packer decides on the order, so it is told what the cache holds of waiting requests.
    defers: requests that come are looked up when the next iteration begins, by a compiled loop.
    """

    def __init__(
        self,
        packer: Packer,
        *,
        copy_seconds: float = 0.0,
        overlap: bool = False,
        host: int | None = None,
        **sizes: Unpack[Sizes],
    ) -> None:
        if packer.kv.reserves or packer.kv.two_ended:
            raise ConfigError(
                "A packer that reserves and lends KV, or needs two-ended blocks, does not work with prefix caching.",
                "Set prefix_caching = false, or use a recipe that does neither, such as headway, qlm or vllm.",
            )
        super().__init__(packer, copy_seconds=copy_seconds, overlap=overlap, **sizes)
        self._host_blocks = UNLIMITED if host is None else host // self.size
        self.pool = prefix_blocks.new(self.blocks, -(-sizes["max_model_len"] // self.size), self.target.size)
        self.follows, self.defers = not packer.own_order, False
        self._pinned: dict[str, Ints] = {}
        self._reported = 0

    @property
    def free(self) -> int:
        return int(self.pool.state[0]["free"])

    @property
    def host_room(self) -> int:
        """Free blocks of the host pool; those of an aborted request are free after the next step, as in the plugin."""
        held = -(-self.jobs.saved[self.jobs.live] // self.size)
        return self._host_blocks - int(held.sum()) - int(self.pool.state[0]["released"])

    @property
    def longest(self) -> int:
        """Tokens of the longest prefix that was cached of the last requests when they came.

        Longer than any prompt where the packer leaves the order to the engine.
        """
        return int(self.pool.recent.max()) if self.follows else UNLIMITED

    @property
    def cache_stats(self) -> Mapping[str, int]:
        """Requests, queried tokens and hits so far, as vLLM's `PrefixCacheStats` has them."""
        state = self.pool.state[0]
        names = ("requests", "queries", "hits")
        return {name: int(state[name]) for name in (*names, *(f"preempted_{name}" for name in names))}

    def report(self) -> CacheReport:
        """Return what the cache has taken in and given up since this was asked last."""
        since, self._reported = self._reported, self._reported + 1
        changes, epoch = prefix_blocks.drain(self.pool), str(id(self))
        if changes is None or since == 0:
            return CacheReport(epoch, since, since + 1, prefix_blocks.cached_keys(self.pool).tobytes(), whole=True)
        added, removed = changes
        return CacheReport(epoch, since, since + 1, added.tobytes(), removed.tobytes())

    def _enter(self, row: int, slo: Slo, prefix: Prefix | None, run: int) -> None:
        prompt = int(self.jobs.prompt[row])
        assert prefix is None or prefix.fits(prompt), f"{prompt} tokens cannot begin with {prefix}"
        if self.target.size > self.pool.held.size:
            self.pool = prefix_blocks.resized(self.pool, self.target.size)
        size = self.limits.size
        keys = prefix_blocks.keys_of(prefix, self._serial, (prompt + int(self.target[row])) // size, size)
        self.pool.keys[row, : keys.size], self.pool.row_run[row] = keys, run
        if self.follows:
            prefix_blocks.enqueue(self.pool, row)
            if not self.defers:
                prefix_blocks.look_up_fresh(self.pool, self.jobs.data, size)

    def drop(self, id: str) -> None:
        row = self.jobs.row_of[id]
        self.pool.state[0]["released"] += -(-int(self.jobs.saved[row]) // self.size)
        super().drop(id)
        prefix_blocks.end(self.pool, row)
        prefix_blocks.leave(self.pool, row)

    def schedule(self, now: float) -> Ran:
        """Decide on one iteration, account its KV and cache the blocks that it fills."""
        jobs, pool, limits = self.jobs, self.pool, self.limits
        if self.follows:
            if self.defers:
                prefix_blocks.look_up_fresh(pool, jobs.data, limits.size)
            prefix_blocks.fill_columns(pool, jobs.data, jobs.rows())
        step = self.packer.pack(jobs, self.kv_budget, now)
        saved, unsaved, copied = self._save(step.save) if step.save.size else (step.save, step.save, 0)
        for row in step.evict.tolist():
            _preempt(jobs.data, pool, self.usage, limits, row)
        self._requeue(step.evict)
        caps = np.full(step.order.size, NO_CAP)
        if step.tokens is not None:  # as in the plugin: a row that may compute all that it misses has no cap
            caps = np.where(step.tokens < missing(jobs, step.order), step.tokens, NO_CAP)
        if self.follows:
            prefix_blocks.name(pool, step.order[~jobs.running[step.order]])
        running = limits.slots if step.max_running is None else step.max_running
        budget = limits.budget if step.token_budget is None else step.token_budget
        paused, before = self._paused(step.order), pool.state.copy()[0]
        ran = _run(jobs.data, pool, self.usage, limits, step.order, caps, running, budget, _AHEAD)
        self._requeue(ran.lost)
        pool.state[0]["released"] = 0
        lost = np.concatenate([unsaved, step.evict, ran.lost])
        return Ran(
            now,
            ran.rows,
            ran.tokens,
            paused,
            lost,
            ran.lost.size,
            ran.admitted,
            copied + ran.copied,
            saved,
            queried=int(pool.state[0]["queries"] - before["queries"]),
            hits=int(pool.state[0]["hits"] - before["hits"]),
        )

    def complete(self, ran: Ran, now: float) -> Done:
        done = super().complete(ran, now)
        if done.ids:
            prefix_blocks.end_all(self.pool, ran.rows[~self.jobs.live[ran.rows]])
        return done

    def pin(self, prefix: Prefix) -> int:
        """Hold what is cached of a piece of a chain until `unpin`; return how many tokens that is.

        A pin replaces the chain's pin before. Pins leave room for the longest request: what does not fit
        beside it is not held. To make blocks the last that are given up, pin and unpin them.
        """
        self.unpin(prefix.id)
        size, pool = self.limits.size, self.pool
        keys = prefix_blocks.keys_of(prefix, 0, prefix.tokens // size, size)
        blocks = prefix_blocks.cached_blocks(pool, keys)
        held = np.unique(np.concatenate([*self._pinned.values(), np.empty(0, np.int64)])).size
        most = self.blocks - -(-self.limits.max_model_len // size) - held
        blocks = blocks[: max(most, 0)]
        for block in blocks.tolist():
            prefix_blocks.touch(pool, block)
        pool.state[0]["recount"] = True
        self._pinned[prefix.id] = blocks
        return int(blocks.size * size)

    def unpin(self, chain: str) -> None:
        """Give a chain's blocks back, as the last of the queue. A chain without a pin is ignored."""
        prefix_blocks.release(self.pool, self._pinned.pop(chain, np.empty(0, np.int64)))
        self.pool.state[0]["recount"] = True

    def end_run(self, run: int) -> int:
        """Give up first what only this application run has used and nothing holds; return how many blocks that is."""
        return int(prefix_blocks.give_up_first(self.pool, run))

    def _save(self, rows: Ints) -> tuple[Ints, Ints, int]:
        """Take rows' KV. Returns those that are on the host now, those without room there, and tokens copied."""
        kept, copied = _save(self.jobs.data, self.pool, self.usage, self.limits, rows, self.host_room)
        self._requeue(rows)
        return rows[kept], rows[~kept], copied

    def _requeue(self, rows: Ints) -> None:
        """Put rows that have lost their KV first in the queue."""
        if self.follows:
            prefix_blocks.requeue(self.pool, rows)


@compiled
def _preempt(jobs: Rows, pool: PrefixBlocks, usage: Usage, limits: Limits, row: int) -> None:
    """Take a row's KV and look up what is left of it."""
    kernels.evict(jobs, usage, np.full(1, row))
    prefix_blocks.end(pool, row)
    prefix_blocks.look_up(pool, row, jobs["prompt"][row] + jobs["output_tokens"][row], limits.size)


@compiled
def _save(jobs: Rows, pool: PrefixBlocks, usage: Usage, limits: Limits, rows: Ints, room: int) -> tuple[Bools, int]:
    """Take rows' KV, and keep it on the host as far as it finds room there, in blocks.

    Returns which rows are kept and the tokens copied.
    """
    kept, copied = np.zeros(rows.size, np.bool_), 0
    for i in range(rows.size):
        row, computed = rows[i], jobs["computed"][rows[i]]
        blocks = -(-computed // limits.size)
        _preempt(jobs, pool, usage, limits, row)
        if computed and blocks <= room:
            jobs["computed"][row] = jobs["saved"][row] = computed
            usage["on_host"] += computed
            kept[i], room, copied = True, room - blocks, copied + computed
    return kept, copied


@compiled
def _run(
    jobs: Rows,
    pool: PrefixBlocks,
    usage: Usage,
    limits: Limits,
    order: Ints,
    caps: Ints,
    max_running: int,
    budget: int,
    ahead: int,
) -> kernels.Ran:
    """Account one iteration of the rows of `order`; see `kernels.run_reserved`. ahead: as in `look_up_again`."""
    prefix_blocks.look_up_again(pool, jobs, ahead, limits.size)
    budget = min(budget, limits.budget)
    live = jobs["running"][order]
    chosen, waiting = order[live], order[~live]
    paused = usage["held_slots"] - chosen.size
    rows, tokens, lost = _continue(jobs, pool, usage, limits, chosen, caps[live], budget)
    if lost.size:
        return kernels.Ran(rows, tokens, lost, 0, 0)
    free_slots = min(max_running, limits.slots - paused) - chosen.size
    budget -= tokens.sum()
    granted, copied = _admit(jobs, pool, usage, limits, waiting, caps[~live], budget, free_slots)
    fresh = waiting[: granted.size]
    return kernels.Ran(np.concatenate((rows, fresh)), np.concatenate((tokens, granted)), lost, fresh.size, copied)


@compiled
def _compute(jobs: Rows, pool: PrefixBlocks, limits: Limits, row: int, tokens: int) -> None:
    """Give a row blocks for `tokens` more, and cache those that they fill."""
    reach = jobs["computed"][row] + tokens
    known = jobs["prompt"][row] + jobs["output_tokens"][row]
    prefix_blocks.extend(pool, row, -(-reach // limits.size), min(reach, known) // limits.size)
    jobs["blocks"][row] = pool.held[row]


@compiled
def _continue(
    jobs: Rows, pool: PrefixBlocks, usage: Usage, limits: Limits, chosen: Ints, caps: Ints, budget: int
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
        more = -(-(jobs["computed"][row] + give) // limits.size) - pool.held[row]
        while more > pool.state[0]["free"] and end > i:  # the last row is preempted, at the end the row itself
            end -= 1
            lost[n - 1 - end] = chosen[end]
            _preempt(jobs, pool, usage, limits, chosen[end])
        if end <= i:
            break
        _compute(jobs, pool, limits, row, give)
        rows[size], tokens[size] = row, give
        size += 1
    return rows[:size], tokens[:size], lost[: n - end]


@compiled
def _admit(
    jobs: Rows, pool: PrefixBlocks, usage: Usage, limits: Limits, waiting: Ints, caps: Ints, budget: int,
    free_slots: int,
) -> tuple[Ints, int]:  # fmt: skip
    """Admit waiting rows in order until one does not fit whole, or slots or budget run out.

    Returns the tokens of each, and those copied back from the host.
    """
    granted, size, copied = np.empty(waiting.size, np.int64), 0, 0
    for i in range(waiting.size):
        row = waiting[i]
        if free_slots <= 0 or budget <= 0:
            break
        whole = jobs["prompt"][row] + jobs["output_tokens"][row]
        cached = prefix_blocks.cached_prefix(pool, row, whole, limits.size)
        found = cached.size * limits.size
        computed = max(found, jobs["saved"][row])
        tokens = min(whole - computed, budget)
        if caps[i] < tokens:
            # Where less of its prefix is cached than the packer knew, it comes as far all the same.
            tokens = min(caps[i] + max(jobs["computed"][row] - computed, 0), tokens)
        unheld = cached.size - np.count_nonzero(pool.references[cached])
        if tokens <= 0 or -(-whole // limits.size) - cached.size + unheld > pool.state[0]["free"]:
            break
        prefix_blocks.begin(pool, row, cached)
        prefix_blocks.record(pool, whole, found, jobs["evictions"][row] > 0)
        copied += computed - found
        usage["on_host"] -= jobs["saved"][row]
        jobs["computed"][row], jobs["saved"][row] = computed, 0
        jobs["running"][row] = True
        pool.place[row] = 0
        usage["held_slots"] += 1
        _compute(jobs, pool, limits, row, tokens)
        granted[size] = tokens
        size, budget, free_slots = size + 1, budget - tokens, free_slots - 1
    return granted[:size], copied


# ---- an iteration as a part of compiled loops


@compiled
def prepare(jobs: Rows, pool: PrefixBlocks, limits: Limits, rows: Ints, follows: bool) -> None:
    """Tell the packer what the cache holds of the engine's rows."""
    if follows:
        prefix_blocks.look_up_fresh(pool, jobs, limits.size)
        prefix_blocks.fill_columns(pool, jobs, rows)


@compiled
def account(
    jobs: Rows, pool: PrefixBlocks, usage: Usage, limits: Limits, step: CompiledStep, save: Bools, host_blocks: int,
    max_running: int, budget: int, follows: bool,
) -> tuple[kernels.Ran, int, int]:  # fmt: skip
    """Account one iteration as `CachingEngine.schedule` does; save: rows of `step.evict` that the host may keep.

    Returns also the tokens copied to the host and the number of paused rows.
    """
    order, saved, evicted, copied = step.order, step.evict[save], step.evict[~save], 0
    if saved.size:
        room = host_blocks - pool.state[0]["released"]
        for row in np.flatnonzero(jobs["live"]):
            room -= -(-jobs["saved"][row] // limits.size)
        copied = _save(jobs, pool, usage, limits, saved, room)[1]
    for row in evicted:
        _preempt(jobs, pool, usage, limits, row)
    caps = np.empty_like(step.caps)
    for i in range(order.size):
        caps[i] = step.caps[i] if step.caps[i] < missing_of(jobs, order[i]) else NO_CAP
    running = jobs["running"][order]
    if follows:
        prefix_blocks.requeue(pool, saved)
        prefix_blocks.requeue(pool, evicted)
        prefix_blocks.name(pool, order[~running])
    paused = usage["held_slots"] - np.count_nonzero(running)
    ran = _run(jobs, pool, usage, limits, order, caps, max_running, budget, _AHEAD)
    if follows:
        prefix_blocks.requeue(pool, ran.lost)
    pool.state[0]["released"] = 0
    return ran, copied, paused
