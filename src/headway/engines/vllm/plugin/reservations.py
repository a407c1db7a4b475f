"""ReservedKv and loans of KV blocks in vLLM (EcoServe 3.2 exact allocation, 3.4 KVC pipelining).

vLLM allocates blocks as answers grow. Here `allocate_slots` is called for more tokens at once, as for
speculative ones, and a borrower's block list ends with blocks of its lender's list, which vLLM's reference
counts count twice; so the first of the two to finish frees nothing of the other. The `Jobs` table holds the
loans (`policy/memory/reservations.py`), as in the simulated engine; vLLM counts the free blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.engines.vllm.plugin.connector import HostPool
from headway.engines.vllm.plugin.kv_policy import StockKv
from headway.policy.core.engine_spec import Obstacle
from headway.policy.memory import reservations
from headway.types import Ints, Jobs, Loans, Step


class ReservedKv(StockKv):
    """Exact allocation and loans on one scheduler's KV cache manager, which it wraps."""

    def __init__(self, manager: Any, jobs: Jobs) -> None:
        super().__init__()
        self._manager, self._jobs = manager, jobs
        single = manager.coordinator.single_type_managers[0]
        self._blocks_of, self._size = single.req_to_blocks, int(single.block_size)
        self._allocate = manager.allocate_slots
        self._reserve: dict[str, int] = {}  # tokens to hold blocks for, in this step
        self._pending: dict[str, list[Any]] = {}  # loans that are not in their borrower's block list yet
        self._loans = 0
        manager.allocate_slots = self.allocate

    def leave(self, row: int) -> None:
        """End the loans of a row; vLLM's reference counts have freed its blocks."""
        loan = self._pending.pop(str(self._jobs.keys[row]), None)
        if loan is not None:
            self._manager.block_pool.free_blocks(reversed(loan))
        if self._jobs.first_lent_block[row] or self._jobs.loan_blocks[row]:
            reservations.end_loans(self._jobs.data, row)

    def refresh(self, rows: Ints) -> None:
        """Set each row's own blocks: those of its list without the borrowed ones."""
        jobs = self._jobs
        names = [str(jobs.keys[row]) for row in rows.tolist()]
        held = (len(self._blocks_of[name]) + len(self._pending.get(name, ())) for name in names)
        jobs.blocks[rows] = np.fromiter(held, np.int64, rows.size) - jobs.loan_blocks[rows]

    def trim(self, request: Any) -> None:
        """Free a streaming session's reserved blocks: how long its next turn will be is not known."""
        blocks = self._blocks_of[request.request_id]
        kept = -(-request.num_computed_tokens // self._size)
        if len(blocks) > kept:
            self._manager.block_pool.free_blocks(reversed(blocks[kept:]))
            del blocks[kept:]

    def begin(self, step: Step) -> None:
        """Keep what the step reserves, and begin its loans."""
        names = [str(self._jobs.keys[row]) for row in step.order.tolist()]
        self._reserve = {} if step.reserve is None else dict(zip(names, step.reserve.tolist(), strict=True))
        if step.lend is not None:
            reservations.begin_loans(
                self._jobs.data, step.lend.borrower, step.lend.lender, step.lend.start, step.lend.blocks
            )
            self._lend(step.lend)

    def _lend(self, loans: Loans) -> None:
        """Hold the blocks of loans until they are in the borrowers' lists: lenders may end before that."""
        columns = (loans.borrower.tolist(), loans.lender.tolist(), loans.start.tolist(), loans.blocks.tolist())
        for borrower, lender, start, count in zip(*columns, strict=True):
            blocks = self._blocks_of[str(self._jobs.keys[lender])][start : start + count]
            assert len(blocks) == count, "a loan lies in its lender's blocks"
            self._manager.block_pool.touch(blocks)
            self._pending[str(self._jobs.keys[borrower])] = blocks
            self._loans += 1

    def allocate(self, request: Any, tokens: int, **options: Any) -> Any:
        """Replace `allocate_slots`: allocate for the tokens reserved; a loan counts as allocated."""
        end = request.num_computed_tokens + tokens + options.get("num_external_computed_tokens", 0)
        ahead = self._reserve.get(request.request_id, 0) - end
        options["num_lookahead_tokens"] = max(options.get("num_lookahead_tokens", 0), ahead)
        loan = self._pending.get(request.request_id)
        if loan is None:
            return self._allocate(request, tokens, **options)
        return self._admit_borrower(request, tokens, loan, options)

    def _admit_borrower(self, request: Any, tokens: int, loan: list[Any], options: dict[str, Any]) -> Any:
        """Allocate a borrower's first blocks: its list is its own blocks, old and new, then its loan."""
        blocks = self._blocks_of[request.request_id]
        before = len(blocks)
        blocks.extend(loan)
        allocated = self._allocate(request, tokens, **options)
        if allocated is None:
            del blocks[before:]
            return None
        del self._pending[request.request_id]
        fresh = blocks[before + len(loan) :] + loan
        blocks[before:] = fresh
        return self._manager.create_kv_cache_blocks((fresh,))

    def check(self, ran: dict[str, int]) -> None:
        """End the loans of borrowers that stock did not admit; assert that every row stays in its own blocks.

        A lender stays before the blocks it has lent.
        """
        for id in [id for id in self._pending if not self._blocks_of.get(id)]:
            self.leave(self._jobs.row_of[id])
        jobs, count = self._jobs, len(ran)
        rows = np.fromiter((jobs.row_of[id] for id in ran), np.int64, count)
        ends = -(-(jobs.computed[rows] + np.fromiter(ran.values(), np.int64, count)) // self._size)
        room = np.fromiter((len(self._blocks_of[id]) for id in ran), np.int64, count)
        lent = jobs.first_lent_block[rows]
        assert (ends <= np.where(lent > 0, lent, room)).all(), "a lender reaches the blocks it has lent"
        assert (ends <= room).all(), "a row computes beyond its blocks"

    def counters(self) -> dict[str, int]:
        """Return the number of loans so far."""
        return {"loans": self._loans}


def obstacle(scheduler: Any) -> Obstacle | None:
    """Return why this engine cannot keep reservations, None = it can."""
    manager, config = scheduler.kv_cache_manager, scheduler.vllm_config
    kinds = [type(one).__name__ for one in manager.coordinator.single_type_managers]
    connector = scheduler.connector
    foreign = connector is not None and not isinstance(connector, HostPool)
    hinders = {
        Obstacle("has a KV connector", "no --kv-transfer-config in args"): foreign,
        Obstacle("shares prefixes", 'args = ["--no-enable-prefix-caching"]'): manager.enable_caching,
        Obstacle("runs overlapped", "async_scheduling = false"): config.scheduler_config.async_scheduling,
        Obstacle("speculates", "no --speculative-config in args"): scheduler.num_spec_tokens,
        Obstacle(f"keeps KV as {', '.join(kinds)}", "a model of full attention"): kinds != ["FullAttentionManager"],
    }
    found = next((why for why, hinders in hinders.items() if hinders), None)
    return found and Obstacle(found.reason, f"Start the engine with {found.hint}")
