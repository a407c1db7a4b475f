"""Gateway processes that put and end jobs, are killed, and are held to what they printed after each call."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.store.queue import SqliteBroker
from headway.store.queue.port import Broker
from headway.store.queue.postgres import PostgresBroker
from headway.store.queue.postgres_link import Address

PUTTERS = 8

# Every third job is left open; the others end as done or failed after their put returned. The lease of the
# gateway ends at the instant 10. A call that the broker could not carry out is left out of the account.
CHILD = """
import asyncio, itertools, os, sys
from tests.store.killed import Place
from headway.store.queue.port import Job
from headway.errors import HeadwayError

place, owner, putters = Place(sys.argv[1], *sys.argv[4:]), sys.argv[2], int(sys.argv[3])
say = lambda *words: os.write(1, (" ".join(words) + "\\n").encode())

async def put(broker, putter):
    for i in itertools.count():
        id = f"{owner}-{putter}-{i}"
        try:
            await broker.put(Job(id, "t", "/v1/completions", b"body" * 200, "{}", float(i)))
            say("open", id)
            if i % 3 == 0:
                assert await broker.done(id, id.encode(), 1.0)
                say("done", id)
            elif i % 3 == 1:
                assert await broker.fail(id, "why", 1.0)
                say("failed", id)
        except HeadwayError as error:
            assert error.status == 503, error
            say("refused", id)
            await asyncio.sleep(0.01)

async def main():
    broker = place.connect(owner)
    await broker.renew(10.0)
    await asyncio.gather(*(put(broker, putter) for putter in range(putters)))

asyncio.run(main())
"""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """Where a broker's store is: a file, or a URL and a schema."""

    kind: str
    where: str
    schema: str = ""

    def connect(self, owner: str) -> Broker:
        if self.kind == "sqlite":
            return SqliteBroker(self.where, owner)
        return PostgresBroker(Address(self.where, self.schema, 10.0), owner)


@contextmanager
def killed(place: Place, said: Path, owner: str) -> Iterator[None]:
    """Run the child while the block runs, then kill it; what it printed is in `said`."""
    argv = [sys.executable, "-c", CHILD, place.kind, owner, str(PUTTERS), place.where, place.schema]
    with said.open("wb") as out:
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        child = subprocess.Popen(argv, stdout=out, env=env)
        try:
            while not said.stat().st_size:
                assert child.poll() is None, "the child died by itself"
                time.sleep(0.005)
            yield
            assert child.poll() is None, "the child died by itself"
        finally:
            child.kill()
            child.wait()


def states(said: Path) -> dict[str, str]:
    """Return the last state printed of each job, from whole lines."""
    lines = said.read_text().split("\n")[:-1]
    return {id: state for state, id in (line.split() for line in lines)}


def grown(said: Path) -> None:
    """Wait until a child has printed 2 kB more."""
    size, deadline = said.stat().st_size, time.monotonic() + 60
    while said.stat().st_size < size + 2000:
        assert time.monotonic() < deadline, "the gateway stands still"
        time.sleep(0.01)


def rounds(place: Place, folder: Path) -> None:
    """Kill gateways at random moments on one store, so that each starts with the last one's wreck."""
    rng = random.Random()
    for round in range(4):
        said, wait = folder / f"said-{round}", rng.uniform(0, 0.25)
        with killed(place, said, f"g{round}"):
            time.sleep(wait)
        printed = states(said)
        assert printed, f"nothing was put in {wait} s"
        asyncio.run(audit(place, f"g{round}", printed))


async def audit(place: Place, owner: str, printed: dict[str, str]) -> None:
    """Check the store against what the killed gateway printed, then take its open jobs over and end them."""
    broker = place.connect(f"after {owner}")
    try:
        await broker.renew(20.0)
        assert await broker.take(9.9, 1) == [], "the dead gateway's lease is in force"
        taken = {job.id: job for job in await broker.take(10.0, 100_000)}
        ahead = 0  # calls that were committed but whose caller was killed before it printed
        for id, state in printed.items():
            assert state != "refused", id
            job = await broker.get(id)
            assert job is not None, f"{id} was accepted and is lost"
            assert (job.id in taken) == (job.state == "open")
            assert job.body == (b"body" * 200 if job.state == "open" else b"")
            assert job.result == (id.encode() if job.state == "done" else None)
            assert state in (job.state, "open"), f"{id} was {state} and is {job.state}"
            ahead += job.state != state
        assert ahead + len(taken.keys() - printed) <= PUTTERS
        ended = await asyncio.gather(*(broker.done(id, b"again", 9.0) for id in {*printed, *taken}))
        assert sum(ended) == len(taken), "a job ended twice, or an open one did not end"
    finally:
        await broker.close()


def one_of_two(place: Place, folder: Path, end_lease: Callable[[], object]) -> None:
    """Kill one of two processes that write one store: the other goes on, and what it holds is not touched.

    end_lease: ends the lease of "killed".
    """
    first, second = folder / "first", folder / "second"
    with killed(place, second, "living"):
        with killed(place, first, "killed"):
            time.sleep(0.2)
        grown(second)
        end_lease()
        taken = asyncio.run(_take_over(place, "killed"))
    opened = {id for id, state in states(first).items() if state == "open"}
    ended = asyncio.run(_ended_of(place, opened - taken))
    assert taken | ended >= opened, "one is lost"
    assert len(ended) <= PUTTERS, "more ended without a word than calls were in progress"
    asyncio.run(_unharmed(place, states(second)))


async def _take_over(place: Place, dead: str) -> set[str]:
    """Take the dead gateway's jobs and end them, while another gateway writes."""
    broker = place.connect("third")
    await broker.renew(20.0)
    seen: Counter[str] = Counter()
    while jobs := await broker.take(5.0, 7):
        for job in jobs:
            assert job.id.startswith(dead), "a living gateway's job was taken"
            seen[job.id] += 1
            assert await broker.done(job.id, b"third", 6.0)
    await broker.close()
    assert set(seen.values()) <= {1}
    return set(seen)


async def _ended_of(place: Place, ids: set[str]) -> set[str]:
    """Return which jobs have ended; the gateway was killed between a commit and the word that it is done."""
    broker = place.connect("reader")
    jobs = [await broker.get(id) for id in ids]
    await broker.close()
    return {job.id for job in jobs if job is not None and job.owner == "killed" and job.state != "open"}


async def _unharmed(place: Place, printed: dict[str, str]) -> None:
    """Check that the living gateway holds or has ended what it printed."""
    broker = place.connect("reader")
    for id, state in printed.items():
        job = await broker.get(id)
        assert job is not None
        assert job.owner == "living"
        assert state in (job.state, "open")
    await broker.close()
