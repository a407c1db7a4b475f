"""The memory that bodies of requests may take, those that are still being uploaded included."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

from headway.errors import RequestError


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
