"""How does vLLM hold what a packer reserves and lends? (EcoServe 3.2 exact allocation, 3.4 KVC pipelining.)

vLLM gives blocks as answers grow. Here `allocate_slots` is asked for more at once, as for speculative tokens,
and a guest's block list ends with blocks of its host's list, counted twice by vLLM's own reference counts; so
whoever ends first takes nothing from the other. Who lends what to whom stands in the table
(`memory/reservations.py`), as in the simulated engine; whether blocks are there is vLLM's own answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.core.engine_spec import Obstacle
from headway.engines.vllm.plugin.kv_policy import StockKv
from headway.memory import reservations
from headway.types import Ints, Jobs, Loans, Step


class Reservations(StockKv):
    """Exact allocation and loans on one scheduler's KV cache manager, which it wraps."""

    def __init__(self, manager: Any, jobs: Jobs) -> None:
        super().__init__()
        self._manager, self._jobs = manager, jobs
        single = manager.coordinator.single_type_managers[0]
        self._lists, self._size = single.req_to_blocks, int(single.block_size)
        self._allocate = manager.allocate_slots
        self._wanted: dict[str, int] = {}  # tokens to hold blocks for, in this step
        self._coming: dict[str, list[Any]] = {}  # loans that their guest's list does not have yet
        self._lent = 0
        manager.allocate_slots = self.allocate

    def leave(self, row: int) -> None:
        """End the loans of a row; its blocks went by vLLM's own counts."""
        lent = self._coming.pop(str(self._jobs.keys[row]), None)
        if lent is not None:
            self._manager.block_pool.free_blocks(reversed(lent))
        if self._jobs.first_lent_block[row] or self._jobs.loan_blocks[row]:
            reservations.end_loans(self._jobs.data, row)

    def refresh(self, rows: Ints) -> None:
        """Rows hold the blocks of their lists; those that are borrowed are not their own.

        Loans end of rows that vLLM has preempted outside of a step (when its caches are reset).
        """
        jobs = self._jobs
        for row in np.flatnonzero(
            ((jobs.loan_blocks > 0) | (jobs.first_lent_block > 0)) & ~jobs.running & jobs.live
        ).tolist():
            self.leave(row)
        names = [str(jobs.keys[row]) for row in rows.tolist()]
        held = (len(self._lists[name]) + len(self._coming.get(name, ())) for name in names)
        jobs.blocks[rows] = np.fromiter(held, np.int64, rows.size) - jobs.loan_blocks[rows]

    def begin(self, step: Step) -> None:
        """Take note of what a step reserves, and begin its loans."""
        names = [str(self._jobs.keys[row]) for row in step.order.tolist()]
        self._wanted = {} if step.reserve is None else dict(zip(names, step.reserve.tolist(), strict=True))
        if step.lend is not None:
            reservations.begin_loans(
                self._jobs.data, step.lend.borrower, step.lend.lender, step.lend.start, step.lend.blocks
            )
            self._lend(step.lend)

    def _lend(self, loans: Loans) -> None:
        """Hold what guests borrow, until it is in their lists: their hosts may end before that."""
        columns = (
            loans.borrower.tolist(),
            loans.lender.tolist(),
            loans.start.tolist(),
            loans.blocks.tolist(),
        )
        for guest, host, start, span in zip(*columns, strict=True):
            blocks = self._lists[str(self._jobs.keys[host])][start : start + span]
            assert len(blocks) == span, "a loan lies in its host's blocks"
            self._manager.block_pool.touch(blocks)
            self._coming[str(self._jobs.keys[guest])] = blocks
            self._lent += 1

    def allocate(self, request: Any, tokens: int, **options: Any) -> Any:
        """Do as `allocate_slots` for as many tokens as are reserved; a loan counts as there already."""
        end = request.num_computed_tokens + tokens + options.get("num_external_computed_tokens", 0)
        ahead = self._wanted.get(request.request_id, 0) - end
        options["num_lookahead_tokens"] = max(options.get("num_lookahead_tokens", 0), ahead)
        lent = self._coming.get(request.request_id)
        if lent is None:
            return self._allocate(request, tokens, **options)
        return self._let_in(request, tokens, lent, options)

    def _let_in(self, request: Any, tokens: int, lent: list[Any], options: dict[str, Any]) -> Any:
        """Let a guest begin: its list is its own blocks, the new ones too, and then its loan."""
        mine = self._lists[request.request_id]
        there = len(mine)
        mine.extend(lent)
        made = self._allocate(request, tokens, **options)
        if made is None:
            del mine[there:]
            return None
        del self._coming[request.request_id]
        fresh = mine[there + len(lent) :] + lent
        mine[there:] = fresh
        return self._manager.create_kv_cache_blocks((fresh,))

    def check(self, ran: dict[str, int]) -> None:
        """Take back loans of guests that stock did not let in; assert that nobody computes where it may not.

        A host stays before its guests, and everybody inside its blocks.
        """
        for id in [id for id in self._coming if not self._lists.get(id)]:
            self.leave(self._jobs.row_of[id])
        jobs, count = self._jobs, len(ran)
        rows = np.fromiter((jobs.row_of[id] for id in ran), np.int64, count)
        ends = -(-(jobs.computed[rows] + np.fromiter(ran.values(), np.int64, count)) // self._size)
        room = np.fromiter((len(self._lists[id]) for id in ran), np.int64, count)
        lent = jobs.first_lent_block[rows]
        assert (ends <= np.where(lent > 0, lent, room)).all(), "a host runs into its guest"
        assert (ends <= room).all(), "a row computes beyond its blocks"

    def counters(self) -> dict[str, int]:
        """Return how many loans there were."""
        return {"loans": self._lent}


def obstacle(scheduler: Any) -> Obstacle | None:
    """Return why this engine cannot keep reservations, None = it can."""
    manager, config = scheduler.kv_cache_manager, scheduler.vllm_config
    kinds = [type(one).__name__ for one in manager.coordinator.single_type_managers]
    hinders = {
        Obstacle("shares prefixes", 'args = ["--no-enable-prefix-caching"]'): manager.enable_caching,
        Obstacle("runs overlapped", "async_scheduling = false"): config.scheduler_config.async_scheduling,
        Obstacle("speculates", "no --speculative-config in args"): scheduler.num_lookahead_tokens,
        Obstacle(
            f"keeps KV as {', '.join(kinds)}", "a model of full attention"
        ): kinds != ["FullAttentionManager"],
    }  # fmt: skip
    found = next((why for why, hinders in hinders.items() if hinders), None)
    return found and Obstacle(found.reason, f"Start the engine with {found.hint}")
