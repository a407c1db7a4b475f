"""Calls of the PostgreSQL broker, which go to the server in groups."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import HeadwayError
from headway.store.postgres import session
from headway.store.postgres.schema import stored
from headway.store.queue.keys import StoredKey
from headway.store.queue.port import NO_CHARGES, Charge, Job, Unused

GROUP_BYTES = 8 * 2**20  # limit of the bodies in a group; a single call may have more
LARGEST = 512 * 2**20  # bytes of a body or text: half of PostgreSQL's limit, which also holds for messages
SINGLE = ("cancel", "gone", "amend", "trim", "refund", "counted", "keys", "put_keys")  # calls with a separate statement


@dataclass(slots=True, eq=False)
class QueueCall(session.SessionCall):
    """One call for the function `apply` in the database."""

    verb: str
    number: int
    id: str | None = None
    instant: float | None = None
    count: int | None = None
    job: Job | None = None
    text: str | None = None
    body: bytes | None = None
    ids: Sequence[str] = ()
    units: float = 0.0
    charges: Sequence[Charge] = ()
    unused: Unused = field(default_factory=lambda: NO_CHARGES)
    keys: Sequence[StoredKey] = ()

    @property
    def accounts(self) -> list[str]:
        """Return the accounts that it changes or looks at, but for `refund`."""
        return [*(charge.account for charge in self.charges), *self.unused]

    def row(self) -> tuple[Any, ...]:
        """Return the elements of the function's arrays."""
        job = self.job
        return (
            self.verb,
            self.number,
            stored(self.id),
            self.instant,
            self.count,
            job.background if job else None,
            stored(job.tenant if job else None),
            stored(job.path if job else None),
            stored(self.text),
            self.body,
        )


def together(calls: deque[QueueCall], limit: int) -> list[QueueCall]:
    """Take up to `limit` of the first calls, which share one round trip."""
    group: list[QueueCall] = []
    size = 0
    while calls and len(group) < limit and size < GROUP_BYTES:
        if group and (group[0].verb in SINGLE or calls[0].verb in SINGLE):
            break
        if calls[0].verb == "take" and any(call.accounts for call in group):  # they are one transaction with accounts
            break
        group.append(calls.popleft())
        size += len(group[-1].body or b"")
        if group[-1].verb == "take":  # its jobs are read after the commit, before a later call changes them
            break
    return group


def unfit(why: object) -> HeadwayError:
    """Return the error of a call whose values PostgreSQL cannot hold (status 400)."""
    return HeadwayError(f"The job cannot be stored: {why}.", "Send a smaller or well-formed request.")


def check(call: QueueCall) -> None:
    """Refuse values that PostgreSQL would misread (NaN sorts after all instants) or cannot take."""
    if call.instant is not None and math.isnan(call.instant):
        raise unfit("an instant is NaN")
    if max(len(call.body or b""), len(call.text or "") * 4) > LARGEST:
        raise unfit(f"it is larger than {LARGEST >> 20} MiB")
