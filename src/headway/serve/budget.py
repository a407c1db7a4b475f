"""The memory that bodies of requests may take, those that are still being uploaded included, and answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

from headway.engines.vllm.process.connection import MalformedAnswer
from headway.errors import EngineError, RequestError

_SMALL = 2**18  # bytes of an answer that do not count: nearly all answers have fewer
_LARGE_ONES = 4  # answers of the largest size that may be in memory at a time


@dataclass(slots=True)
class ByteBudget:
    """Bytes of all bodies together; `used` never exceeds `limit`."""

    limit: int
    used: int = 0

    def hold(self) -> Held:
        """Return what holds a part of it, nothing yet."""
        return Held(self)

    def check(self, size: int) -> None:
        """Refuse (429) what has no room now."""
        if self.used + size > self.limit:
            raise RequestError(
                f"Requests that wait hold {self.limit / 2**20:g} MiB (server.max_queued_mib).",
                "Try again in 1 s.", status=429, kind="rate_limit_error", code="queue_full",
                headers={"retry-after": "1", "x-headway-dropped-reason": "queue_full", "connection": "close"},
            )  # fmt: skip


@dataclass(slots=True)
class Held:
    """A part of a budget, given back by `close` or at the end of the block unless it was kept."""

    budget: ByteBudget
    size: int = field(default=0, init=False)
    _kept: bool = field(default=False, init=False)

    def add(self, size: int) -> None:
        """Hold so many bytes more; RequestError (429) when there is no room."""
        self.budget.check(size)
        self.budget.used += size
        self.size += size

    def keep(self) -> Held:
        """Hold it after the end of the block, until `close`."""
        self._kept = True
        return self

    def close(self) -> None:
        """Give it back; to close it again changes nothing."""
        self.budget.used -= self.size
        self.size = 0

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._kept:
            self.close()


@dataclass(slots=True)
class AnswerBudget:
    """The memory of answers that are read whole. most: bytes of one."""

    most: int
    used: int = 0

    def of(self, engine: str) -> AnswerMemory:
        """Return what holds the memory of one answer of an engine, nothing yet."""
        return AnswerMemory(self, engine)


@dataclass(slots=True)
class AnswerMemory:
    """What one answer, or the unfinished event of a stream, takes of the memory; given back by `close`."""

    budget: AnswerBudget
    engine: str
    _counted: int = field(default=0, init=False)

    def hold(self, size: int, most: int | None = None) -> None:
        """Hold this many bytes from now on, instead of those before.

        MalformedAnswer when one answer has more than it may, EngineError (503) when all large ones together.
        """
        budget, counted = self.budget, max(size - _SMALL, 0)
        most = budget.most if most is None else min(most, budget.most)
        if size > most:
            raise MalformedAnswer(self.engine, f"it has more than {most / 2**20:g} MiB (max_answer_mib)")
        if budget.used - self._counted + counted > _LARGE_ONES * budget.most:
            raise EngineError(
                "There is no memory for another large answer.", "Try again, or stream it.", status=503
            )
        budget.used += counted - self._counted
        self._counted = counted

    def close(self) -> None:
        """Give it back."""
        self.hold(0)
