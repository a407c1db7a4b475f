"""Calls of the PostgreSQL broker on their way to its thread, and their values as PostgreSQL holds them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import HeadwayError
from headway.store.queue.port import Job
from headway.store.queue.settling import deliver

GROUP_BYTES = 8 * 2**20  # of the bodies of a group's calls; one call may have more
LARGEST = 512 * 2**20  # bytes of a body or text: half of PostgreSQL's limit, which messages have, too
SINGLE = ("cancel", "gone")  # calls that are statements of their own
log = logging.getLogger("headway.store.queue")

# PostgreSQL's text holds every character but this one. A noncharacter, which Unicode leaves to programs' own
# use, stands for it, and for itself.
_NUL, _ESCAPE = "\0", "\ufdd0"


@dataclass(slots=True, eq=False)
class Call:
    """One call as the function `apply` in the database takes it, and the future that its caller waits on."""

    verb: str
    number: int
    future: asyncio.Future[Any]
    id: str | None = None
    instant: float | None = None
    count: int | None = None
    job: Job | None = None
    text: str | None = None
    body: bytes | None = None
    ids: Sequence[str] = ()

    def row(self) -> tuple[Any, ...]:
        """Return the elements of the function's arrays."""
        job = self.job
        return (
            self.verb, self.number, stored(self.id), self.instant, self.count,
            job.background if job else None, stored(job.tenant if job else None),
            stored(job.path if job else None), stored(self.text), self.body,
        )  # fmt: skip


class Lane:
    """Calls on their way to one connection, in the order in which they were made.

    carry_out: returns the outcome of each call of a group.
    """

    def __init__(self, limit: int, carry_out: Callable[[list[Call]], Awaitable[Sequence[Any]]]) -> None:
        self._limit, self._carry_out = limit, carry_out
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Call] = deque()
        self._some, self._told, self._closed = asyncio.Event(), False, False

    def add(self, call: Call) -> None:
        """Add a call, from any thread."""
        self._calls.append(call)
        if not self._told:  # else the lane is about to look
            self._told = True
            self._loop.call_soon_threadsafe(self._some.set)

    def close(self) -> None:
        """Let `run` return when all calls are carried out."""
        self._closed = True
        self._some.set()

    async def run(self) -> None:
        """Carry out calls until the lane is closed and empty."""
        while True:
            self._told = False
            self._some.clear()
            while group := self._group():
                try:
                    outcomes = await self._carry_out(group)
                except Exception as error:  # whatever it is, the callers are told and the lane goes on
                    log.exception("calls of the broker have failed")
                    outcomes = [down(type(error).__name__)] * len(group)
                deliver(zip([call.future for call in group], outcomes, strict=True))
            if self._closed:
                return
            await self._some.wait()

    def _group(self) -> list[Call]:
        group: list[Call] = []
        size = 0
        while self._calls and len(group) < self._limit and size < GROUP_BYTES:
            if group and (group[0].verb in SINGLE or self._calls[0].verb in SINGLE):
                break
            group.append(self._calls.popleft())
            size += len(group[-1].body or b"")
            if group[-1].verb == "take":  # its jobs are read after the commit, as no later call has left them
                break
        return group


def down(why: str) -> HeadwayError:
    """Return the error of a call that the server did not carry out (status 503)."""
    fix = "Look at the PostgreSQL server, then send the request again."
    return HeadwayError(f"The broker is out: {why}.", fix, status=503, kind="server_error")


def unfit(why: object) -> HeadwayError:
    """Return the error of a call whose values PostgreSQL cannot hold (status 400)."""
    return HeadwayError(f"The job cannot be stored: {why}.", "Send a smaller or well-formed request.")


def check(call: Call) -> None:
    """Refuse what would be understood otherwise (NaN comes after all instants), or cannot be sent."""
    if call.instant is not None and math.isnan(call.instant):
        raise unfit("an instant is NaN")
    if max(len(call.body or b""), len(call.text or "") * 4) > LARGEST:
        raise unfit(f"it is larger than {LARGEST >> 20} MiB")


def stored(text: str | None) -> str | None:
    """Return a text as PostgreSQL can hold it."""
    if text is None or not (_NUL in text or _ESCAPE in text):
        return text
    return text.replace(_ESCAPE, _ESCAPE + "1").replace(_NUL, _ESCAPE + "0")


def loaded(text: Any) -> Any:
    """Return what `stored` was given; values that are no text as they are."""
    if not isinstance(text, str) or _ESCAPE not in text:
        return text
    return text.replace(_ESCAPE + "0", _NUL).replace(_ESCAPE + "1", _ESCAPE)
