"""Random programs of several gateways on one store, against a model that is as simple as possible."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.stores import STORES, Connect, job

from headway.errors import HeadwayError
from headway.store.queue.port import Broker, Job

IDS, OWNERS = "abcdef", "XYZ"


@dataclass
class Model:
    """What the store holds: jobs by id in the order of their puts, and each lease's end."""

    jobs: dict[str, Job] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def renew(self, owner: str, id: str, now: float) -> object:
        in_force = owner in self.until and owner not in self.ended
        self.until[owner] = now + 2
        self.ended.discard(owner)
        return in_force

    def put(self, owner: str, id: str, now: float) -> object:
        if owner not in self.until:
            return 503
        if id in self.jobs:
            return 409
        self.jobs[id] = job(id, now, owner=owner)
        return None

    def take(self, owner: str, id: str, now: float) -> object:
        if owner not in self.until:
            return 503
        self.ended |= {other for other, until in self.until.items() if until <= now and other != owner}
        others = self.ended - {owner} | {None}
        free = [job for job in self.jobs.values() if job.state == "open" and job.owner in others]
        taken = sorted(free, key=lambda job: job.arrival)[:2]
        for one in taken:
            one.owner = owner
        return [replace(job) for job in taken]

    def give_back(self, owner: str, id: str, now: float) -> object:
        return self._change(owner, id, owner=None)

    def done(self, owner: str, id: str, now: float) -> object:
        return self._change(owner, id, state="done", result=b"r", finished=now, body=b"")

    def fail(self, owner: str, id: str, now: float) -> object:
        return self._change(owner, id, state="failed", reason="why", finished=now, body=b"")

    def attempt(self, owner: str, id: str, now: float) -> object:
        if id not in self.jobs:
            return 404
        self.jobs[id].attempts += 1
        return self.jobs[id].attempts

    def forget(self, owner: str, id: str, now: float) -> object:
        kept = {id: job for id, job in self.jobs.items() if job.finished is None or job.finished >= now}
        forgotten, self.jobs = len(self.jobs) - len(kept), kept
        used = {job.owner for job in kept.values() if job.state == "open"}
        self.until = {owner: until for owner, until in self.until.items() if until >= now or owner in used}
        self.ended &= self.until.keys()
        return forgotten

    def _change(self, owner: str, id: str, /, **changes: Any) -> bool:
        held = self.jobs.get(id)
        if held is None or held.state != "open" or held.owner != owner:
            return False
        self.jobs[id] = replace(held, **changes)
        return True


async def call(broker: Broker, verb: str, id: str, now: float) -> object:
    """Make one call as the model words it: the value, or the status of the error."""
    arguments: dict[str, tuple[Any, ...]] = {
        "renew": (now + 2,),
        "put": (job(id, now),),
        "take": (now, 2),
        "give_back": (id,),
        "done": (id, b"r", now),
        "fail": (id, "why", now),
        "attempt": (id,),
        "forget": (now,),
    }
    try:
        return await getattr(broker, verb)(*arguments[verb])
    except HeadwayError as error:
        return error.status


VERBS = ["renew", "put", "put", "take", "take", "give_back", "done", "fail", "attempt", "forget"]
CALLS = st.tuples(st.sampled_from(VERBS), st.sampled_from(IDS), st.integers(0, 9).map(float))
BURSTS = st.tuples(st.sampled_from(OWNERS), st.lists(CALLS, min_size=1, max_size=8))


async def compare(connect: Connect, program: list[tuple[str, list[Any]]]) -> None:
    """Run a program; a burst is calls that one gateway makes at the same time, so that they share commits."""
    model, brokers = Model(), {owner: connect(owner) for owner in OWNERS}
    try:
        for owner, burst in program:
            seen = await asyncio.gather(*(call(brokers[owner], *step) for step in burst))
            assert seen == [getattr(model, verb)(owner, id, now) for verb, id, now in burst]
            assert [await brokers[owner].get(id) for id in IDS] == [model.jobs.get(id) for id in IDS]
    finally:
        for broker in brokers.values():
            await broker.close()


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=20)
@given(program=st.lists(BURSTS, max_size=14))
def test_every_program_gives_what_the_model_gives(kind: str, program: list[Any]) -> None:
    # In memory where there is such a place: these files need to be shared, not to survive.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        starting = [(owner, [("renew", "a", 3.0)]) for owner in OWNERS]
        asyncio.run(compare(STORES[kind](Path(folder)), starting + program))
