"""What has been promised, as long as this process lives?

Jobs sit in a dict and calls never wait, so this broker costs nothing. It survives nothing: a crash or a
restart forgets every promise, which is why it is meant for tests, simulations and throw-away gateways.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from headway.broker.port import Job
from headway.errors import HeadwayError


def known(id: str) -> HeadwayError:
    """Return the error of a put whose id is taken (status 409)."""
    return HeadwayError(f"A job {id!r} is stored already.", "Give every job an id of its own.", status=409)


def unknown(id: str) -> HeadwayError:
    """Return the error of an attempt at a job that was never put, or is forgotten (status 404)."""
    return HeadwayError(f"There is no job {id!r}.", "Put the job before it is tried.", status=404)


class MemoryBroker:
    """A `Broker` in a dict that survives nothing; the port's promises hold while the process lives.

    Jobs are copied in and out, so that changing one does not change what was promised.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    async def put(self, job: Job) -> None:
        """Store a new open job. Raises HeadwayError (409) when its id is known, closed jobs included."""
        assert job.state == "open", f"job {job.id} is {job.state}"
        if job.id in self._jobs:
            raise known(job.id)
        self._jobs[job.id] = replace(job)

    async def done(self, id: str, result: bytes | None, now: float) -> bool:
        """Close an open job as done at the instant `now`. False when it is not open (or not known)."""
        return self._end(id, state="done", result=result, finished=now)

    async def fail(self, id: str, reason: str, now: float) -> bool:
        """Close an open job as failed at the instant `now`. False when it is not open (or not known)."""
        return self._end(id, state="failed", reason=reason, finished=now)

    async def attempt(self, id: str) -> int:
        """Count one more try; return how many there were. Raises HeadwayError (404) on an unknown id."""
        if (job := self._jobs.get(id)) is None:
            raise unknown(id)
        job.attempts += 1
        return job.attempts

    async def get(self, id: str) -> Job | None:
        """Return a copy of the job; a closed one has an empty body. None when unknown or forgotten."""
        job = self._jobs.get(id)
        return replace(job) if job else None

    async def open(self) -> AsyncIterator[Job]:
        """Yield open jobs by arrival, then in the order of their puts; those put meanwhile are left out."""
        owed = [job for job in self._jobs.values() if job.state == "open"]
        for job in sorted(owed, key=lambda job: job.arrival):  # stable: ties keep the order of the dict
            if (now := self._jobs.get(job.id)) and now.state == "open":
                yield replace(now)

    async def forget(self, before: float) -> int:
        """Delete jobs closed before that instant; return how many."""
        old = [id for id, job in self._jobs.items() if job.finished is not None and job.finished < before]
        for id in old:
            del self._jobs[id]
        return len(old)

    async def close(self) -> None:
        """Do nothing: there is nothing to write and nothing to let go of."""

    def _end(self, id: str, **closing: object) -> bool:
        job = self._jobs.get(id)
        if job is None or job.state != "open":
            return False
        # What the engine was asked is needed only until it has answered, and may be large.
        self._jobs[id] = replace(job, body=b"", **closing)  # type: ignore[arg-type]
        return True
