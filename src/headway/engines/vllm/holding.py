"""Whose KV blocks are whose? Plain vLLM's answer, and where an engine that shares blocks gives another.

The hook asks its `Holding` at each point at which KV changes hands; vLLM's own block manager goes on doing
the work. `Plain` adds nothing to it.
"""

from __future__ import annotations

from typing import Any, Protocol

from headway.memory.ledger import Ledger
from headway.types import Ints, Step


class Holding(Protocol):
    """One scheduler's extra account of KV. Rows are rows of its `Jobs`; calls come in this order in a step.

    An implementation wraps what it must of `kv_cache_manager` when it is made, and raises ConfigError there
    when the engine's settings do not allow it.
    """

    def leave(self, row: int) -> None:
        """Forget a row that has lost its KV or is leaving the table; its columns are still there.

        Called for the finished and aborted before `refresh`, for the evicted and saved after vLLM has freed
        their blocks, and for those that vLLM preempted itself after its `schedule()`.
        """

    def refresh(self, rows: Ints) -> None:
        """Correct the table's columns of the running `rows`, just read from vLLM (blocks = by computed)."""

    def ledger(self, plain: Ledger) -> Ledger:
        """Return the account that the packer reads."""

    def plan(self, step: Step) -> Step:
        """Return the step to carry out instead of the packer's: before its evictions and saves."""

    def begin(self, step: Step) -> None:
        """Prepare what stock is about to allocate: after evictions and saves, before stock schedules."""

    def check(self, ran: dict[str, int]) -> None:
        """Assert that what stock has scheduled (request id -> tokens) lies where it may."""

    def counters(self) -> dict[str, int]:
        """Return what it has done so far, for the hook's counters."""


class Plain:
    """vLLM's blocks as they are."""

    def leave(self, row: int) -> None:
        """Nothing is shared."""

    def refresh(self, rows: Ints) -> None:
        """A row holds what it has computed."""

    def ledger(self, plain: Ledger) -> Ledger:
        """Return it as it is."""
        return plain

    def plan(self, step: Step) -> Step:
        """Return it as it is."""
        return step

    def begin(self, step: Step) -> None:
        """vLLM allocates as it goes."""

    def check(self, ran: dict[str, int]) -> None:
        """vLLM checks itself."""

    def counters(self) -> dict[str, int]:
        """Return nothing."""
        return {}


def holding_of(scheduler: Any) -> Holding:
    """Return how a scheduler's KV is held; asked once, when all else of the hook is there."""
    from headway.engines.vllm.reserve import reservations_of  # it subclasses `Plain`

    return reservations_of(scheduler) if scheduler.recipe.reserves else Plain()
