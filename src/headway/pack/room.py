"""Who gets the slots, the KV blocks and the iteration's tokens, once it is known who is more urgent?

Each of the three goes to the most urgent first. A running job that ends up without a place keeps its KV as
long as nobody more urgent needs the blocks (a pause costs nothing), and is evicted when somebody does and
evicting the less urgent would not do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.memory.ledger import Ledger
from headway.types import Bools, Ints, Jobs, Step


def arrange(
    jobs: Jobs, ranked: Ints, ledger: Ledger, max_running: int, budget: int, chunk: int | None = None
) -> Step:
    """Return the step in which the rows of `ranked` (most urgent first) get what there is.

    At most `max_running` rows run, their blocks fit the ledger, and at most `budget` tokens are computed,
    `chunk` of them (None = all) for prompts. Nobody makes place for a row that gets no tokens; with
    budget >= max_running (vLLM requires it) the most urgent row always gets some.
    """
    chunk = budget if chunk is None else chunk
    while True:
        room = _room(jobs, ranked, ledger, max_running, min(budget, chunk))
        runs, stays = room.shared() if room.ample else room.squeezed()
        order = ranked[runs]
        tokens = grant(jobs, order, budget, chunk)
        hungry = order[(tokens == 0) & ~jobs.running[order]]
        if not hungry.size:
            evict = ranked[room.running & ~runs & ~stays][::-1]
            return Step(order, tokens, evict, max_running=max_running, token_budget=budget)
        last = int(np.flatnonzero(ranked == hungry[0])[0])
        ranked = ranked[room.running | (np.arange(ranked.size) < last)]


def missing(jobs: Jobs, rows: Ints) -> Ints:
    """Return the tokens each row must compute before its next token comes out: 1 for a decode."""
    return np.asarray(np.maximum(jobs.prompt[rows] + jobs.made[rows] - jobs.computed[rows], 1), np.int64)


def grant(jobs: Jobs, order: Ints, budget: int, chunk: int | None = None) -> Ints:
    """Share a token budget: one token for every running decode, the rest to prompts in order.

    Prompts get at most `chunk` tokens together (None = the whole rest). Returns the tokens per row of
    `order`; rows that get nothing have 0.
    """
    want = missing(jobs, order)
    decodes = jobs.running[order] & (want == 1)
    spare = max(budget - int(np.count_nonzero(decodes)), 0)
    spare = spare if chunk is None else min(spare, chunk)
    prompts = np.where(decodes, 0, want)
    before = np.cumsum(prompts) - prompts
    each = decodes & (np.cumsum(decodes) <= budget)
    return np.asarray(np.where(decodes, each, np.clip(spare - before, 0, prompts)), np.int64)


@dataclass(slots=True)
class _Room:
    """What there is to share, and per row of the ranking the blocks it holds and needs in this step.

    A prompt is admitted only whole (vLLM's own rule), and with a block to spare so that its first tokens do
    not evict somebody at once. One in progress then keeps room for its rest without more ado: as long as it
    is not complete it takes all tokens, and nobody less urgent is admitted.
    """

    running: Bools
    holds: Ints
    needs: Ints
    blocks: int  # free, or held by rows that may lose them
    slots: int  # not taken by rows that control holds
    places: int

    @property
    def ample(self) -> bool:
        """Tell whether the most urgent rows run as they come and everybody else keeps what he holds."""
        head, rest = slice(self.places), slice(self.places, None)
        holders = min(self.places, self.running.size) + int(np.count_nonzero(self.running[rest]))
        return int(self.needs[head].sum() + self.holds[rest].sum()) <= self.blocks and holders <= self.slots

    def shared(self) -> tuple[Bools, Bools]:
        """Return masks of the rows that run and of those that pause, when there is room for all."""
        runs = np.arange(self.running.size) < self.places
        return runs, self.running & ~runs

    def squeezed(self) -> tuple[Bools, Bools]:
        """Return the same when room is short: in order of urgency, those whose need still fits.

        No newcomer overtakes a row that does not fit: small prompts would keep it out for ever. Running rows
        that need no more may go on.
        """
        runs, stays = np.zeros_like(self.running), np.zeros_like(self.running)
        blocks, slots, places, stuck = self.blocks, self.slots, self.places, False
        looked = np.flatnonzero(self.running | (np.cumsum(~self.running) <= self.places))
        columns = (looked, self.running[looked], self.holds[looked], self.needs[looked])
        for i, running, holds, needs in zip(*(column.tolist() for column in columns), strict=True):
            if needs <= blocks and min(places, slots) > 0 and (running or not stuck):
                runs[i], places, taken = True, places - 1, needs
            elif running and slots > 0 and holds <= blocks:
                stays[i], stuck, taken = True, True, holds
            else:
                stuck = True
                continue
            blocks, slots = blocks - taken, slots - 1
        if not runs.any() and slots > 0:  # held rows have the rest: whoever fits is better than nobody
            fits = ~self.running & (self.needs <= blocks)
            runs[np.flatnonzero(fits)[:1]] = True
        return runs, stays


def _room(jobs: Jobs, ranked: Ints, ledger: Ledger, max_running: int, most: int) -> _Room:
    """Return the room there is for the rows of `ranked` in a step that computes at most `most` per prompt."""
    running, holds, want = jobs.running[ranked], jobs.blocks[ranked], missing(jobs, ranked)
    grown = ledger.blocks_for(jobs.computed[ranked] + np.minimum(want, most))
    whole = np.minimum(ledger.blocks_for(jobs.computed[ranked] + want + 1) + 1, ledger.total)
    needs = np.where(running, np.maximum(holds, grown), whole)
    slots = ledger.slots - int(np.count_nonzero(jobs.running & jobs.live)) + int(np.count_nonzero(running))
    blocks = ledger.free + int(holds.sum())
    return _Room(running, holds, needs, blocks, slots, max(min(max_running, slots), 0))
