"""The interface of brokers: the data and guarantees of every kind.

A `Broker` is one gateway's connection to a store that several gateways may share. The gateway has one
lease, and holds every job that it put or took under this lease, so that a heartbeat costs one write however
many jobs are open. When a gateway dies its lease runs out, and the others take its jobs.

Guarantees, for any number of gateways:
  - A job whose `put` has returned is kept until it is done or failed, and afterwards until it is forgotten.
  - A job ends once. Only the gateway that holds it can end it, except by `cancel`.
  - A job is held by at most one gateway.

Instants are arguments: a broker reads no clock. The gateways' clocks must agree to within a fraction of the
lease's length. If they do not, a job may run twice, but still ends once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from headway.errors import HeadwayError
from headway.store.queue.keys import KeyStore

RETRY_S = 10  # seconds until a refused request may be sent again
# In the request of a job, before what others may go on from; inside a text its quotes would be escaped.
KEPT_MARK = '"kept":'
TOTAL = ""  # stands for the ended requests of an account, whose units are kept as one sum


@dataclass(slots=True)
class Job:
    """One accepted request, with all that is needed to run it again after a crash.

    Attributes:
        id: unique among all jobs that are not forgotten
        tenant: owner of the request's API key
        path: the engine's HTTP path
        body: the request for the engine; empty once the job has ended
        request: the `Request` of the decision core, as JSON
        arrival: when the request arrived, in seconds since the epoch
        background: whether the client polls for the response instead of waiting for it
        state: "open", then "done" or "failed"
        attempts: how often engines died while they ran the job
        result: the response, if it is kept
        reason: why the job failed
        finished: when the job ended
        owner: the gateway that holds the job, or that ended it; None if it was given back
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
    owner: str | None = None


CANCELLED = "cancelled"  # reason of a job that its client cancelled


class Charge(NamedTuple):
    """What a request may cost, in an account that all gateways of the store share.

    most: it is counted if no more than this is counted with it. at: instant from which it counts.
    old: what was counted from this instant or before it counts no more.
    """

    account: str
    units: float
    most: float
    at: float
    old: float


Unused = Mapping[str, float]  # account -> units of a request's charge that it did not use
NO_CHARGES: Unused = MappingProxyType({})


class AccountSpent(HeadwayError):
    """A charge finds no room in its account, in which `counted` units are counted (429)."""

    def __init__(self, account: str, counted: float) -> None:
        super().__init__(f"The account {account} has no room.", "Wait until it has.", status=429)
        self.account, self.counted = account, counted


class Broker(KeyStore, Protocol):
    """One gateway's connection to the store of accepted requests, which also keeps API keys."""

    @property
    def owner(self) -> str:
        """Return the gateway's name, unique among the gateways of the store and all their starts."""

    @property
    def on_disk(self) -> bool:
        """Tell whether waiting jobs take no memory."""

    def problem(self) -> str | None:
        """Return why the broker can keep no new job now, None = it can. Cheap enough to call often."""

    async def renew(self, until: float) -> bool:
        """Extend the lease to that instant; the first call begins it.

        True when the lease was in force all the time since the last call. False when it has begun with this
        call: it is the first one, or another gateway's `take` found the lease expired and may have taken jobs.
        `gone` tells which; all others are held again.
        """

    async def put(self, job: Job, charges: Sequence[Charge] = ()) -> None:
        """Store a new open job, held by this gateway, with its charges. All survive a crash when this returns.

        Raises HeadwayError: 409 when the id is known, ended jobs included; 503 before the first `renew`; AccountSpent
        when one of the accounts has no room. Then nothing is stored. charges: of different accounts.
        """

    async def take(self, now: float, limit: int) -> list[Job]:
        """Take up to `limit` open jobs that no lease protects at `now`, oldest first; [] when all are held.

        These are jobs that were given back, and those of other gateways whose lease ended at or before `now`.
        Order is by arrival, then by put. A caller that is cancelled may have taken jobs without seeing them:
        the gateway then holds them until it closes. Raises HeadwayError (503) before the first `renew`.
        """

    async def give_back(self, id: str) -> bool:
        """Let others take an open job. False when this gateway does not hold it."""

    async def done(self, id: str, result: bytes | None, now: float, unused: Unused = NO_CHARGES) -> bool:
        """Acknowledge a job as done. False when it has ended, or when this gateway does not hold it.

        unused: of its charges; what it used of them is added to the sum of its account, once, and stays counted as long
        as the account counts what it was charged. Not for a background job that is open after this call: another
        gateway runs it.
        """

    async def fail(self, id: str, reason: str, now: float, unused: Unused = NO_CHARGES) -> bool:
        """Acknowledge a job as failed; otherwise as `done`."""

    async def cancel(self, id: str, now: float, unused: Unused = NO_CHARGES) -> bool:
        """End an open job as failed ("cancelled"), whichever gateway holds it. False when it is not open.

        The gateway that holds it learns of this from `gone`, and says what it has used of its charges. unused: of those
        of a job that no lease protects at `now`.
        """

    async def gone(self, ids: Sequence[str]) -> dict[str, bool]:
        """Return those of these jobs that this gateway does not hold: whether they have ended, by id.

        False for an open job that another gateway holds or has given back; a forgotten job is not among them.
        """

    async def attempt(self, id: str) -> int:
        """Count one more attempt and return the total. Raises HeadwayError (404) on an unknown id."""

    async def get(self, id: str) -> Job | None:
        """Return a job, whichever gateway holds it, ended ones too. None when unknown or forgotten."""

    async def forget(self, before: float) -> int:
        """Delete jobs that ended before that instant; return how many.

        Leases that ended before it are deleted too, if they protect no open job.
        """

    async def amend(self, id: str, result: bytes, now: float, attempts: int) -> bool:
        """Replace the result of a job that is done, as if it ended now, and count one more attempt.

        False when no such job is done, or it has another number of attempts: it was changed in the meantime.
        """

    async def trim(self, most: int) -> int:
        """Delete ended jobs that are kept for others to go on from, the oldest of each tenant beyond `most` bytes.

        These are jobs with `KEPT_MARK`, and answers that no client polls for; requests and answers count. Returns how
        many are gone.
        """

    async def delete(self, id: str) -> bool:
        """Delete a job that has ended. False when it is open, unknown or forgotten."""

    async def spend(self, id: str, charge: Charge) -> bool:
        """Count a charge of a request if its account has room; tell whether it was counted.

        A request that is in the account already costs as much more. It survives a crash when this returns.
        """

    async def refund(self, account: str, id: str, units: float) -> None:
        """Count this much less for a request, from the instant at which it was counted."""

    async def counted(self, charges: Sequence[Charge]) -> dict[str, float]:
        """Return the units that are counted in the accounts of charges, each from after its `old`; nothing changes.

        An account without any is not among them.
        """

    async def close(self) -> None:
        """Finish pending writes, end the lease and release files and threads.

        Jobs that are still open can be taken by others at once.
        """


def known_id(id: str) -> HeadwayError:
    """Return the error of a put whose id exists (status 409)."""
    return HeadwayError(f"A job {id!r} is stored already.", "Give every job a unique id.", status=409)


def unknown_id(id: str) -> HeadwayError:
    """Return the error of an attempt at a job that was never put, or is forgotten (status 404)."""
    return HeadwayError(
        f"There is no job {id!r}.", "Store the job first; its attempts are counted afterwards.", status=404
    )


def queue_unavailable(problem: str, what: str = "nothing") -> HeadwayError:
    """Return the error of a request refused because of a broker's `problem` (status 503)."""
    return HeadwayError(
        f"The queue takes {what}: {problem}.",
        "Send the request again once that is fixed.",
        status=503,
        kind="server_error",
        code="queue_unavailable",
        headers={"retry-after": str(RETRY_S)},
    )


def no_lease(owner: str) -> HeadwayError:
    """Return the error of a put or take without a lease (status 503)."""
    fix = "Renew the lease before jobs are put or taken."
    return HeadwayError(f"The gateway {owner} has no lease.", fix, status=503, kind="server_error")
