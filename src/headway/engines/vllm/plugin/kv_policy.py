"""Whose KV blocks are whose? StockKv vLLM's answer, and where an engine that shares blocks gives another.

The hook asks its `KvPolicy` at each point at which KV changes hands; vLLM's own block manager goes on doing
the work. `StockKv` adds nothing to it.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np

from headway.memory.budget import KvBudget
from headway.memory.two_ended.allocation import TwoEndedBudget
from headway.types import Ints, Step

_log = logging.getLogger(__name__)
_NOBODY = np.empty(0, np.int64)


class KvPolicy(Protocol):
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

    def ledger(self, plain: KvBudget) -> KvBudget:
        """Return the account that the packer reads."""

    def plan(self, step: Step) -> Step:
        """Return the step to carry out instead of the packer's: before its evictions and saves."""

    def begin(self, step: Step) -> None:
        """Prepare what stock is about to allocate: after evictions and saves, before stock schedules."""

    def check(self, ran: dict[str, int]) -> None:
        """Assert that what stock has scheduled (request id -> tokens) lies where it may."""

    def away(self) -> int:
        """Return the tokens of requests that run for vLLM and lie on the host."""

    def counters(self) -> dict[str, int]:
        """Return what it has done so far, for the hook's counters."""

    def state(self) -> dict[str, Any]:
        """Return what the hook's state says about it."""


class StockKv:
    """vLLM's blocks as they are; `why` they are not otherwise, where the recipe would have it."""

    def __init__(self, why: str | None = None) -> None:
        self.why = why

    def leave(self, row: int) -> None:
        """Nothing is shared."""

    def refresh(self, rows: Ints) -> None:
        """A row holds what it has computed."""

    def ledger(self, plain: KvBudget) -> KvBudget:
        """Return it as it is."""
        return plain

    def plan(self, step: Step) -> Step:
        """Return it as it is."""
        return step

    def begin(self, step: Step) -> None:
        """vLLM allocates as it goes."""

    def check(self, ran: dict[str, int]) -> None:
        """vLLM checks itself."""

    def away(self) -> int:
        """Who is on the host does not run for vLLM."""
        return 0

    def counters(self) -> dict[str, int]:
        """Return nothing."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return why blocks have no second end, where a recipe wants them to."""
        return {} if self.why is None else {"two_ended": False, "two_ended_why": self.why}


class HostPoolKv(StockKv):
    """Plain blocks with a host pool behind them: the packer swaps whole requests and knows what it costs."""

    def __init__(self, copy_seconds: float) -> None:
        super().__init__()
        self.copy_seconds = copy_seconds

    def ledger(self, plain: KvBudget) -> KvBudget:
        """Return it with the seconds that moving a token's KV takes."""
        return TwoEndedBudget(*plain, self.copy_seconds, _NOBODY, False)


def kv_policy_of(scheduler: Any) -> KvPolicy:
    """Return how a scheduler's KV is held; asked once, when all else of the hook is there."""
    from headway.engines.vllm.plugin.reservations import reservations_of  # it subclasses `StockKv`

    if scheduler.recipe.reserves:
        return reservations_of(scheduler)
    wants = getattr(scheduler.packer, "two_ended", None)
    if wants:
        return _two_ended(scheduler)
    swaps = wants is not None and hasattr(scheduler.connector, "save")
    return HostPoolKv(scheduler.connector.copy_seconds) if swaps else StockKv()


def _two_ended(scheduler: Any) -> KvPolicy:
    from headway.engines.vllm.plugin import two_ended

    why = two_ended.why_not(scheduler)
    if why is None:
        return two_ended.TwoEndedKv(scheduler)
    _log.warning("%s runs without two-ended blocks here: %s.", scheduler.recipe.name, why)
    return StockKv(why)
