"""Memory limits of request bodies, including those that are being uploaded, and of answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from headway.engines.vllm.process.connection import MalformedAnswer
from headway.errors import EngineError, RequestError

_SMALL = 2**18  # bytes of an answer that do not count: nearly all answers have fewer
_LARGE_ONES = 4  # answers of the largest size that may be in memory at a time


@dataclass(slots=True)
class ByteBudget:
    """Bytes of all bodies together; `used` never exceeds `limit`.

    share: what one tenant may have of the bytes that others leave, as of the queue (`policy/core/shares.py`).
        One body at a time is always within it.
    """

    limit: int
    share: float = 1.0
    used: int = 0
    _by_tenant: Counter[str] = field(default_factory=Counter)

    def hold(self) -> Held:
        """Return what holds a part of it, nothing yet."""
        return Held(self)

    def check(self, size: int, held: Held) -> None:
        """Refuse (429) what has no room now."""
        if self.used + size > self.limit:
            what = f"Requests that wait, and streams, hold {self.limit / 2**20:g} MiB (server.max_queued_mib)."
            raise _refusal(what, "queue_full")
        mine = self._by_tenant[held.tenant]
        part = self.share * (self.limit - (self.used - mine))
        if self.share < 1.0 and mine > held.size and mine + size > part:
            room = f"{part / 2**20:.3g} MiB (server.tenant_share of server.max_queued_mib)"
            raise _refusal(
                f"Your bodies that wait, or stream, hold {mine / 2**20:.3g} MiB; at the moment they may hold {room}.",
                "tenant_queue_full",
            )

    def change(self, size: int, held: Held) -> None:
        """Add `size` bytes; a negative size gives them back."""
        self.used += size
        held.size += size
        self._by_tenant[held.tenant] += size
        if not self._by_tenant[held.tenant]:
            del self._by_tenant[held.tenant]


def _refusal(what: str, reason: str) -> RequestError:
    return RequestError(
        what,
        "Try again in 1 s.",
        status=429,
        kind="rate_limit_error",
        code=reason,
        headers={"retry-after": "1", "x-headway-dropped-reason": reason, "connection": "close"},
    )


@dataclass(slots=True)
class Held:
    """A part of a budget, given back by `close` or at the end of the block unless it was kept.

    tenant: whose it is; to be set while it holds nothing.
    """

    budget: ByteBudget
    tenant: str = field(default="", init=False)
    size: int = field(default=0, init=False)
    _kept: bool = field(default=False, init=False)

    def add(self, size: int) -> None:
        """Hold `size` more bytes; RequestError (429) when there is no room."""
        self.budget.check(size, self)
        self.budget.change(size, self)

    def resize(self, size: int) -> None:
        """Hold this many bytes from now on; RequestError (429) when there is no room for more."""
        if (more := size - self.size) > 0:
            self.add(more)
        else:
            self.budget.change(more, self)

    def keep(self) -> Held:
        """Hold it after the end of the block, until `close`."""
        self._kept = True
        return self

    def close(self) -> None:
        """Give it back; to close it again changes nothing."""
        self.budget.change(-self.size, self)

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

        MalformedAnswer when one answer has more than it may, EngineError (503) when all large ones together do.
        """
        budget, counted = self.budget, max(size - _SMALL, 0)
        most = budget.most if most is None else min(most, budget.most)
        if size > most:
            raise MalformedAnswer(self.engine, f"it has more than {most / 2**20:g} MiB (max_answer_mib)")
        if budget.used - self._counted + counted > _LARGE_ONES * budget.most:
            raise EngineError("There is no memory for another large answer.", "Try again, or stream it.", status=503)
        budget.used += counted - self._counted
        self._counted = counted

    def close(self) -> None:
        """Give it back."""
        self.hold(0)
