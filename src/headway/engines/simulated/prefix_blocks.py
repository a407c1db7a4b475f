"""KV blocks with a prefix cache, as vLLM's block pool keeps them (`v1/core/block_pool.py`).

A full block is known by a key that stands for all tokens up to its end; freed blocks keep theirs until the
pool hands them out again, least recently used first. The functions are those of `BlockPool` and of
`FullAttentionManager`, on arrays and compiled; rows are rows of the engine's `Jobs`.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled, compiled_in_place
from headway.prefix import GRAIN, Prefix
from headway.types import Ints

_STATE = np.dtype(
    [
        ("free", np.int64),
        ("recount", np.bool_),
        ("changes", np.int64),
        ("first", np.int64),
        ("last", np.int64),
        ("named", np.int64),
        ("fresh", np.int64),
        ("found", np.int64),
        ("released", np.int64),
        *((name, np.int64) for name in ("requests", "queries", "hits")),
        *((f"preempted_{name}", np.int64) for name in ("requests", "queries", "hits")),
    ]
)
_STEP, _MIX_1, _MIX_2 = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # of SplitMix64


class PrefixBlocks(NamedTuple):
    """The blocks of one engine, numbered from 1 as in vLLM, whose block 0 stays empty.

    By block:
    references: rows and pins that hold it.
    key: what it holds, 0 = not cached.
    same: the next block with the same key, 0 = none; vLLM keeps such duplicates, too.
    before, after: its neighbours in the queue of free blocks, in which 0 is the head and the last number the
        tail.
    run: the application run that alone has used it since it was cached (`prefix.run_number`), 0 = none or several.
    depth: its place in the sequence of the row that cached it.

    By slot of a table of keys, a power of two of them (open addressing; with numba's own dictionary every call
    from Python would take a third of a millisecond longer):
    slot_key: 0 = the slot is empty. slot_block: the first block of the key.

    By row:
    tables: its blocks in the order of its tokens, `held` of them, of which the first `cached` have a key.
    keys: of the blocks of its whole sequence.
    found_tokens, found_blocks: of a waiting row, the tokens that were cached when it was looked up last, and
        how many of their blocks were held.
    shared: of a running row, how many of its blocks others hold, too, when they were counted last.
    row_run: its application run, 0 = none.
    place: of a waiting row in vLLM's queue, from `first` to `last` in `state`; 0 = it does not wait.
    named: rows that the packer wanted in the last step and that waited. fresh: rows that have come and were not looked
        up yet. `state` has the numbers of both.

    recent: the tokens that were cached of the last requests when they were looked up first; `found` in `state` counts.
    `released` there: host blocks of requests that were aborted since the last step.
    changed, taken_in: a log since the last `drain`: a key, and whether the cache took it in or gave it up. Its length
        is `changes` in `state`; entries beyond its capacity are only counted.
    state: one record: free blocks; whether `shared` is out of date; and the requests, queried tokens and hits
        as vLLM's `PrefixCacheStats` counts them, those that had been preempted apart.
    """

    references: Ints
    key: Ints
    same: Ints
    before: Ints
    after: Ints
    run: Ints
    depth: Ints
    slot_key: Ints
    slot_block: Ints
    tables: Ints
    held: Ints
    cached: Ints
    keys: Ints
    found_tokens: Ints
    found_blocks: Ints
    shared: Ints
    row_run: Ints
    place: Ints
    named: Ints
    fresh: Ints
    recent: Ints
    changed: Ints
    taken_in: NDArray[np.bool_]
    state: NDArray[np.void]


_BY_ROW = (
    "tables", "held", "cached", "keys", "found_tokens", "found_blocks", "shared", "row_run", "place", "named", "fresh",
)  # fmt: skip
_RECENT = 1024  # requests of which the longest cached prefix is remembered, as in the plugin


def new(blocks: int, longest: int, rows: int) -> PrefixBlocks:
    """Return so many free blocks for requests of at most `longest` blocks."""
    ring = np.arange(blocks + 2)
    none = np.zeros(blocks + 1, np.int64)
    slots = np.zeros(1 << (2 * blocks).bit_length(), np.int64)
    state = np.zeros(1, _STATE)
    state["free"] = blocks
    shape = {"tables": (rows, longest), "keys": (rows, longest)}  # pages take memory once they are written to
    by_row: dict[str, Any] = {name: np.zeros(shape.get(name, rows), np.int64) for name in _BY_ROW}
    return PrefixBlocks(
        references=none,
        key=none.copy(),
        same=none.copy(),
        before=ring - 1,
        after=ring + 1,
        run=none.copy(),
        depth=none.copy(),
        slot_key=slots,
        slot_block=slots.copy(),
        recent=np.zeros(_RECENT, np.int64),
        changed=np.zeros(4 * blocks, np.int64),
        taken_in=np.zeros(4 * blocks, np.bool_),
        state=state,
        **by_row,
    )


def resized(pool: PrefixBlocks, rows: int) -> PrefixBlocks:
    """Return the same blocks with place for more rows."""
    more = {}
    for name in _BY_ROW:
        old: Ints = getattr(pool, name)
        more[name] = np.zeros((rows, *old.shape[1:]), np.int64)  # its pages take memory once they are written to
        more[name][: len(old)] = old
    return pool._replace(**more)


# ---- keys


def keys_of(prefix: Prefix | None, own: int, blocks: int, size: int) -> Ints:
    """Return the keys of a request's first blocks; own: a number that no other request of the engine has.

    A block whose last token is in a piece of a chain is that chain's block of this index; the others are the
    request's own. Keys have 64 bits.
    """
    whole = prefix is not None and prefix.answer
    keys = _sequence(_seed(prefix.id, b"chain") if prefix and whole else _seed(str(own), b"own"), blocks, size)
    shared = shared_keys(prefix, size)[:blocks]
    keys[: shared.size] = shared
    return keys


def shared_keys(prefix: Prefix | None, size: int = GRAIN) -> Ints:
    """Return the keys of the full blocks of a prefix."""
    if prefix is None:
        return np.empty(0, np.int64)
    keys = _sequence(_seed(prefix.id, b"chain"), prefix.tokens // size, size)
    while prefix.parent is not None:
        prefix = prefix.parent
        count = prefix.tokens // size
        keys[:count] = _sequence(_seed(prefix.id, b"chain"), count, size)
    return keys


@lru_cache(4096)
def _seed(name: str, kind: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8, person=kind).digest()))


def _sequence(seed: np.uint64, count: int, size: int) -> Ints:
    """Return the keys of blocks 0 to count - 1 of a chain, none of them 0: by where each ends."""
    bits = np.arange(size, size * count + 1, size, dtype=np.uint64) * _STEP + np.full(count, seed)
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    bits ^= bits >> np.uint64(31)
    bits[bits == 0] = 1
    return bits.view(np.int64)


# ---- the queue of free blocks


@compiled
def _unlink(pool: PrefixBlocks, block: int) -> None:
    before, after = pool.before[block], pool.after[block]
    pool.after[before], pool.before[after] = after, before
    pool.state[0]["free"] -= 1


@compiled
def _link(pool: PrefixBlocks, block: int, before: int) -> None:
    """Put a block into the queue behind another one."""
    after = pool.after[before]
    pool.before[block], pool.after[block] = before, after
    pool.after[before] = pool.before[after] = block
    pool.state[0]["free"] += 1


@compiled
def free_queue(pool: PrefixBlocks) -> Ints:
    """Return the free blocks, that which is handed out next first."""
    blocks, block = np.empty(pool.state[0]["free"], np.int64), 0
    for i in range(blocks.size):
        block = pool.after[block]
        blocks[i] = block
    return blocks


@compiled
def _take(pool: PrefixBlocks) -> int:
    """Take the first free block, which is not cached any more."""
    block = int(pool.after[0])
    _unlink(pool, block)
    if pool.key[block] != 0:
        _forget(pool, block)
    pool.references[block] = 1
    return block


@compiled
def release(pool: PrefixBlocks, blocks: Ints) -> None:
    """Give up references to blocks, which are in the order of their tokens.

    As in vLLM, what is not cached is used first, and of what is cached the end of a chain before its begin.
    """
    for block in blocks:
        pool.references[block] -= 1
        if pool.references[block] == 0 and pool.key[block] == 0:
            _link(pool, block, 0)
    tail = pool.before.size - 1
    for block in blocks[::-1]:
        if pool.references[block] == 0 and pool.key[block] != 0:
            _link(pool, block, pool.before[tail])


@compiled
def touch(pool: PrefixBlocks, block: int) -> None:
    """Hold a cached block, which may be free."""
    if pool.references[block] == 0:
        _unlink(pool, block)
    pool.references[block] += 1


@compiled
def give_up_first(pool: PrefixBlocks, run: int) -> int:
    """Put the free blocks that only this run has used first in the queue, behind leading ones that hold nothing.

    Return how many they are.

    The ends of chains go first, so that what is left of a chain is still its beginning.
    """
    blocks = np.flatnonzero((pool.run == run) & (pool.key != 0) & (pool.references == 0))
    for i in blocks:
        _unlink(pool, i)
    first, tail = 0, pool.after.size - 1
    while pool.after[first] != tail and pool.key[pool.after[first]] == 0:
        first = pool.after[first]
    for i in np.argsort(pool.depth[blocks], kind="mergesort"):
        _link(pool, blocks[i], first)
    return blocks.size


# ---- the cache


@compiled_in_place
def _slot_of(pool: PrefixBlocks, key: int) -> int:
    """Return the slot that a key has, or the empty one that it would get."""
    last = pool.slot_key.size - 1
    slot = key & last
    while pool.slot_key[slot] != 0 and pool.slot_key[slot] != key:
        slot = (slot + 1) & last
    return slot


@compiled_in_place
def _empty(pool: PrefixBlocks, slot: int) -> None:
    """Empty a slot, and move keys up that would not be found behind it."""
    last = pool.slot_key.size - 1
    at = slot
    while True:
        at = (at + 1) & last
        key = pool.slot_key[at]
        if key == 0:
            break
        if (at - (key & last)) & last >= (at - slot) & last:
            pool.slot_key[slot], pool.slot_block[slot] = key, pool.slot_block[at]
            slot = at
    pool.slot_key[slot] = 0


def cached_keys(pool: PrefixBlocks) -> Ints:
    """Return the keys of all that is cached."""
    return np.asarray(pool.slot_key[pool.slot_key != 0], np.int64)


@compiled
def _insert(pool: PrefixBlocks, block: int, key: int) -> None:
    """Cache a block that has become full, behind those with the same key."""
    pool.key[block], pool.same[block] = key, 0
    slot = _slot_of(pool, key)
    if pool.slot_key[slot] == 0:
        pool.slot_key[slot], pool.slot_block[slot] = key, block
        _note(pool, key, True)
        return
    last = pool.slot_block[slot]
    while pool.same[last] != 0:
        last = pool.same[last]
    pool.same[last] = block


@compiled
def _forget(pool: PrefixBlocks, block: int) -> None:
    key, rest = pool.key[block], pool.same[block]
    slot = _slot_of(pool, key)
    first = pool.slot_block[slot]
    if first != block:
        while pool.same[first] != block:
            first = pool.same[first]
        pool.same[first] = rest
    elif rest != 0:
        pool.slot_block[slot] = rest
    else:
        _empty(pool, slot)
        _note(pool, key, False)
    pool.key[block] = pool.same[block] = 0


@compiled
def _note(pool: PrefixBlocks, key: int, taken_in: bool) -> None:
    """Note that the cache has taken a key in, or given it up."""
    count = pool.state[0]["changes"]
    if count < pool.changed.size:
        pool.changed[count], pool.taken_in[count] = key, taken_in
    pool.state[0]["changes"] = count + 1


def drain(pool: PrefixBlocks) -> tuple[Ints, Ints] | None:
    """Return the keys taken in and given up since this was asked last; None = they were too many to note."""
    count = int(pool.state[0]["changes"])
    pool.state[0]["changes"] = 0
    if count > pool.changed.size:
        return None
    last = dict(zip(pool.changed[:count].tolist(), pool.taken_in[:count].tolist(), strict=True))
    added = [key for key, taken in last.items() if taken]
    removed = [key for key, taken in last.items() if not taken]
    return np.array(added, np.int64), np.array(removed, np.int64)


@compiled
def cached_blocks(pool: PrefixBlocks, keys: Ints) -> Ints:
    """Return the blocks of the longest cached run of keys from the first on."""
    blocks, size = np.empty(keys.size, np.int64), 0
    for key in keys:
        slot = _slot_of(pool, key)
        if pool.slot_key[slot] == 0:
            break
        blocks[size] = pool.slot_block[slot]
        size += 1
    return blocks[:size]


@compiled
def cached_prefix(pool: PrefixBlocks, row: int, tokens: int, size: int) -> Ints:
    """Return the cached blocks of a row of so many tokens, the last of which must be computed."""
    return cached_blocks(pool, pool.keys[row, : (tokens - 1) // size])


@compiled
def look_up(pool: PrefixBlocks, row: int, tokens: int, size: int) -> bool:
    """Look a waiting row up; tell whether another part of it is cached than before."""
    blocks, before = cached_prefix(pool, row, tokens, size), pool.found_tokens[row]
    pool.found_tokens[row] = blocks.size * size
    pool.found_blocks[row] = np.count_nonzero(pool.references[blocks])
    return bool(before != blocks.size * size)


# ---- rows


@compiled
def begin(pool: PrefixBlocks, row: int, blocks: Ints) -> None:
    """Let a row that is admitted hold the cached blocks of its prefix."""
    for block in blocks:
        touch(pool, block)
    for block in blocks[::-1]:
        if pool.run[block] == 0 or pool.run[block] == pool.row_run[row]:
            break  # so it is of all before it
        pool.run[block] = 0
    pool.tables[row, : blocks.size] = blocks
    pool.held[row] = pool.cached[row] = blocks.size


@compiled
def extend(pool: PrefixBlocks, row: int, blocks: int, full: int) -> None:
    """Give a row `blocks` blocks in all, and cache the first `full` of them."""
    for i in range(pool.held[row], blocks):
        pool.tables[row, i] = _take(pool)
    pool.held[row] = max(pool.held[row], blocks)
    for i in range(pool.cached[row], full):
        block = pool.tables[row, i]
        _insert(pool, block, pool.keys[row, i])
        pool.run[block], pool.depth[block] = pool.row_run[row], i
    pool.cached[row] = max(pool.cached[row], full)


@compiled
def end(pool: PrefixBlocks, row: int) -> None:
    """Free a row's blocks; those that shared them may have them alone now."""
    release(pool, pool.tables[row, : pool.held[row]])
    pool.held[row] = pool.cached[row] = 0
    pool.state[0]["recount"] |= pool.shared[row] > 0
    pool.shared[row] = 0


@compiled
def end_all(pool: PrefixBlocks, rows: Ints) -> None:
    """Free the blocks of rows, in their order."""
    for row in rows:
        end(pool, row)


@compiled
def record(pool: PrefixBlocks, tokens: int, hits: int, preempted: bool) -> None:
    """Count an admission as vLLM's `PrefixCacheStats.record` does."""
    state = pool.state[0]
    if preempted:
        state["preempted_requests"] += 1
        state["preempted_queries"] += tokens
        state["preempted_hits"] += hits
    else:
        state["requests"] += 1
        state["queries"] += tokens
        state["hits"] += hits


# ---- the queue of waiting rows


@compiled
def enqueue(pool: PrefixBlocks, row: int) -> None:
    """Put a row that has come last in the queue, to be looked up before the next step."""
    state = pool.state[0]
    state["last"] += 1
    pool.place[row], pool.fresh[state["fresh"]] = state["last"], row
    state["fresh"] += 1


@compiled
def requeue(pool: PrefixBlocks, rows: Ints) -> None:
    """Put rows that have lost their KV first in the queue."""
    for row in rows:
        pool.state[0]["first"] -= 1
        pool.place[row] = pool.state[0]["first"]


@compiled
def look_up_fresh(pool: PrefixBlocks, jobs: NDArray[np.void], size: int) -> None:
    """Look up rows that have come."""
    state = pool.state[0]
    for row in pool.fresh[: state["fresh"]]:
        look_up(pool, row, jobs["prompt"][row], size)
        pool.recent[state["found"] % pool.recent.size] = pool.found_tokens[row]
        state["found"] += 1
    state["fresh"] = 0


@compiled
def leave(pool: PrefixBlocks, row: int) -> None:
    """Take a row that was aborted out of the queue."""
    state, kept = pool.state[0], 0
    pool.place[row] = 0
    for other in pool.fresh[: state["fresh"]]:
        if other != row:
            pool.fresh[kept], kept = other, kept + 1
    state["fresh"] = kept


@compiled
def name(pool: PrefixBlocks, rows: Ints) -> None:
    """Note the waiting rows that the packer wants in this step."""
    pool.named[: rows.size], pool.state[0]["named"] = rows, rows.size


@compiled
def _ahead(pool: PrefixBlocks, most: int) -> Ints:
    """Return the first rows of the queue."""
    rows = np.flatnonzero(pool.place)
    return rows[np.argsort(pool.place[rows])[:most]]


@compiled
def fill_columns(pool: PrefixBlocks, jobs: NDArray[np.void], rows: Ints) -> None:
    """Set `computed`, `found`, `blocks` and `shared` of the engine's rows to what is known of the cache.

    Of a row whose KV is on the host, that is what it has computed.
    """
    _count_shared(pool, jobs, rows)
    for row in rows:
        if jobs["running"][row]:
            jobs["shared"][row] = pool.shared[row]
        elif jobs["saved"][row]:
            jobs["shared"][row] = 0
        else:
            jobs["computed"][row] = pool.found_tokens[row]
            if jobs["evictions"][row] == 0:  # else it would find what it has computed itself
                jobs["found"][row] = pool.found_tokens[row]
            jobs["blocks"][row] = jobs["shared"][row] = pool.found_blocks[row]


@compiled
def _count_shared(pool: PrefixBlocks, jobs: NDArray[np.void], rows: Ints) -> None:
    """Count the blocks that running rows share, if it may have changed.

    A row that was named and has come in with blocks of others has those first.
    """
    changed = pool.state[0]["recount"]
    for row in pool.named[: pool.state[0]["named"]]:
        changed |= pool.held[row] > 0 and pool.references[pool.tables[row, 0]] > 1
    if not changed:
        return
    pool.state[0]["recount"] = False
    for row in rows:
        if jobs["running"][row]:
            pool.shared[row] = np.count_nonzero(pool.references[pool.tables[row, : pool.held[row]]] > 1)


@compiled
def look_up_again(pool: PrefixBlocks, jobs: NDArray[np.void], most: int, size: int) -> None:
    """Look up the rows that the packer names; if other parts of them are cached, the first `most` that wait, too."""
    changed = False
    for row in pool.named[: pool.state[0]["named"]]:
        changed |= look_up(pool, row, jobs["prompt"][row] + jobs["output_tokens"][row], size)
    if changed:
        for row in _ahead(pool, most):
            look_up(pool, row, jobs["prompt"][row] + jobs["output_tokens"][row], size)
