"""The interface by which the hook lets requests share KV blocks, and `StockKv`, which does not.

The hook calls its `KvPolicy` wherever KV is allocated, freed or accounted; vLLM's own block manager still
does the work.
"""

from __future__ import annotations

from typing import Any, Protocol

from headway.policy.memory.budget import KvBudget
from headway.types import Ints, Step


class KvPolicy(Protocol):
    """One scheduler's policy for KV blocks. Rows are rows of its `Jobs`; calls come in this order in a step.

    An implementation wraps methods of `kv_cache_manager` in its constructor.
    """

    def leave(self, row: int) -> None:
        """Forget a row that has lost its KV or is leaving the table; its columns are still valid.

        Called for finished and aborted requests before `refresh`, for evicted and saved ones after vLLM has
        freed their blocks, and for those that vLLM preempted itself after its `schedule()`.
        """

    def refresh(self, rows: Ints) -> None:
        """Correct the columns of the running `rows`, just read from vLLM (blocks: by computed tokens)."""

    def trim(self, request: Any) -> None:
        """Free what a request that waits with its KV has reserved beyond it; called before `refresh`."""

    def budget(self, stock: KvBudget) -> KvBudget:
        """Return the budget that the packer reads; stock: by vLLM's own count."""

    def plan(self, step: Step) -> Step:
        """Return the step to execute instead of the packer's; called before its evictions and saves."""

    def begin(self, step: Step) -> None:
        """Prepare stock's allocations; called after evictions and saves, before stock schedules."""

    def check(self, ran: dict[str, int]) -> None:
        """Check what stock has scheduled (request id -> tokens) against the blocks; raises AssertionError."""

    def tokens_on_host(self) -> int:
        """Return the tokens on the host of requests that are running for vLLM."""

    def counters(self) -> dict[str, int]:
        """Return counters for the hook's state."""

    def state(self) -> dict[str, Any]:
        """Return further entries of the hook's state."""


class StockKv:
    """vLLM's own blocks, unshared. why: the reason, where the recipe wants two-ended blocks."""

    def __init__(self, why: str | None = None) -> None:
        self.why = why

    def leave(self, row: int) -> None:
        """Do nothing."""

    def refresh(self, rows: Ints) -> None:
        """Do nothing."""

    def trim(self, request: Any) -> None:
        """Do nothing."""

    def budget(self, stock: KvBudget) -> KvBudget:
        """Return vLLM's own budget."""
        return stock

    def plan(self, step: Step) -> Step:
        """Return the packer's step."""
        return step

    def begin(self, step: Step) -> None:
        """Do nothing."""

    def check(self, ran: dict[str, int]) -> None:
        """Do nothing."""

    def tokens_on_host(self) -> int:
        """Return 0: requests on the host are not running for vLLM."""
        return 0

    def counters(self) -> dict[str, int]:
        """Return no counters."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return why blocks are not two-ended, where the recipe wants them to be."""
        return {} if self.why is None else {"two_ended": False, "two_ended_why": self.why}
