"""The broker's interface: what every kind of broker stores and guarantees."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Job:
    """One accepted request as the broker keeps it: what is needed to run it again after a crash.

    `request` is the core's view (as JSON-able fields), `body` what goes to the engine at `path`.
    state: open -> done | failed. Background jobs are run again after a crash and answered once.
    """

    id: str
    tenant: str
    path: str
    body: bytes
    request: str
    arrival: float
    background: bool = False
    state: str = "open"
    attempts: int = 0
    result: bytes | None = None
    reason: str | None = None
    finished: float | None = None


class Broker(Protocol):
    """What has been promised? Nothing accepted is forgotten; nothing is answered twice."""

    async def put(self, job: Job) -> None:
        """Store a new open job; when this returns it survives a crash. A known id is an error."""

    async def done(self, id: str, result: bytes | None, now: float) -> bool:
        """Close an open job as done. False when it was closed before: the caller's answer is a second one."""

    async def fail(self, id: str, reason: str, now: float) -> bool:
        """Close an open job as failed with its reason. False when it was closed before."""

    async def attempt(self, id: str) -> int:
        """Count one more try to run the job; return how many there have been."""

    async def get(self, id: str) -> Job | None:
        """Return one job, closed ones too, None when it is unknown or forgotten."""

    def open(self) -> AsyncIterator[Job]:
        """Yield every open job, oldest first: what a restarted gateway owes."""

    async def forget(self, before: float) -> int:
        """Delete jobs closed before that instant; return how many."""

    async def close(self) -> None:
        """Write what is pending and let go of files and threads."""
