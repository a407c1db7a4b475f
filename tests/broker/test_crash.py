"""What may go wrong without breaking a promise? kill -9, a full disk, a damaged file, callers that give up.

For kill -9 a process puts and closes jobs and prints each call after it returned; it is killed at a random
moment and the file must hold what was printed. SIGKILL loses nothing that the kernel holds, so this shows
that no promise is made before its COMMIT; that COMMIT syncs is SQLite's part.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.broker import SqliteBroker
from headway.broker import sqlite as module
from headway.broker.port import Job
from headway.errors import ConfigError, HeadwayError


def job(id: str = "a", **more: Any) -> Job:
    return Job(id, "tenant", "/v1/completions", b"body", "{}", **{"arrival": 1.0, **more})


async def owed(broker: SqliteBroker) -> list[str]:
    return [job.id async for job in broker.open()]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "jobs.db")


@pytest.fixture
async def durable(path: str) -> AsyncIterator[SqliteBroker]:
    broker = SqliteBroker(path)
    yield broker
    await broker.close()


# ---- kill -9


PUTTERS = 8

# Every third job is left open; the others close as done or failed after their put returned.
CHILD = """
import asyncio, itertools, os, sys
from headway.broker import SqliteBroker
from headway.broker.port import Job

path, round, putters = sys.argv[1], sys.argv[2], int(sys.argv[3])
say = lambda *words: os.write(1, (" ".join(words) + "\\n").encode())

async def put(broker, putter):
    for i in itertools.count():
        id = f"{round}-{putter}-{i}"
        await broker.put(Job(id, "t", "/v1/completions", b"body" * 200, "{}", float(i)))
        say("open", id)
        if i % 3 == 0:
            assert await broker.done(id, id.encode(), 1.0)
            say("done", id)
        elif i % 3 == 1:
            assert await broker.fail(id, "why", 1.0)
            say("failed", id)

async def main():
    broker = SqliteBroker(path)
    await asyncio.gather(*(put(broker, putter) for putter in range(putters)))

asyncio.run(main())
"""


@contextmanager
def killed(path: Path, said: Path, round: int) -> Iterator[None]:
    """Run the child while the block runs, then kill it; what it printed is in `said`."""
    with said.open("wb") as out:
        child = subprocess.Popen([sys.executable, "-c", CHILD, path, str(round), str(PUTTERS)], stdout=out)
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


async def audit(path: Path, printed: dict[str, str]) -> None:
    """Check the file against what was printed, then close all that is open, once."""
    broker = SqliteBroker(str(path))
    try:
        owed = {job.id: job async for job in broker.open()}
        ahead = 0  # calls that were committed but whose caller was killed before it printed
        for id, state in printed.items():
            job = await broker.get(id)
            assert job is not None, f"{id} was promised and is lost"
            assert (job.id in owed) == (job.state == "open")
            assert job.body == (b"body" * 200 if job.state == "open" else b"")
            assert job.result == (id.encode() if job.state == "done" else None)
            assert state in (job.state, "open"), f"{id} was {state} and is {job.state}"
            ahead += job.state != state
        assert ahead + len(owed.keys() - printed) <= PUTTERS
        closed = await asyncio.gather(*(broker.done(id, b"again", 9.0) for id in [*printed, *owed]))
        assert sum(closed) == len(owed), "a job was closed twice, or an open one was not closed"
    finally:
        await broker.close()


def test_what_was_printed_survives_kill_9(tmp_path: Path) -> None:
    path, rng = tmp_path / "jobs.db", random.Random()
    for round in range(4):  # on the same file, so that each round starts with the last one's wreck
        said, wait = tmp_path / f"said-{round}", rng.uniform(0, 0.25)
        with killed(path, said, round):
            time.sleep(wait)
        printed = states(said)
        assert printed, f"nothing was put in {wait} s"
        asyncio.run(audit(path, printed))


def test_a_killed_gateway_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with killed(path, tmp_path / "said", 0), pytest.raises(ConfigError, match="served by another gateway"):
        SqliteBroker(str(path))
    asyncio.run(SqliteBroker(str(path)).close())


# ---- restarts, full disks, damage, callers that give up


async def test_a_reopened_file_is_the_same(path: str) -> None:
    broker = SqliteBroker(path)
    await asyncio.gather(*(broker.put(job(id)) for id in "abc"))
    await broker.attempt("a")
    await broker.done("b", b"r", 2.0)
    before = [await broker.get(id) for id in "abc"]
    await broker.close()
    broker = SqliteBroker(path)
    assert [await broker.get(id) for id in "abc"] == before
    assert await owed(broker) == ["a", "c"]
    await broker.close()


async def test_calls_that_come_together_share_commits(durable: SqliteBroker) -> None:
    commits: list[str] = []
    durable._db.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    await asyncio.gather(*(durable.put(job(str(i))) for i in range(module.GROUP)))
    assert 1 <= len(commits) < module.GROUP / 4
    assert len(await owed(durable)) == module.GROUP


async def test_close_carries_out_what_was_asked(path: str) -> None:
    broker, count = SqliteBroker(path), 2 * module.GROUP + 7  # the end is asked for behind half a group
    puts = [asyncio.create_task(broker.put(job(str(i)))) for i in range(count)]
    await asyncio.sleep(0)
    await asyncio.gather(broker.close(), *puts)
    broker = SqliteBroker(path)
    assert len(await owed(broker)) == count
    await broker.close()


async def test_a_closed_broker_says_so(path: str) -> None:
    broker = SqliteBroker(path)
    await broker.close()
    await broker.close()
    for late in (broker.put(job()), broker.get("a"), owed(broker)):
        with pytest.raises(HeadwayError, match="it is closed") as error:
            await late
        assert error.value.status == 503


async def test_a_cancelled_caller_holds_up_nobody(durable: SqliteBroker) -> None:
    tasks = [asyncio.create_task(durable.put(job(str(i)))) for i in range(10)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    assert [type(end) for end in await asyncio.gather(*tasks, return_exceptions=True)].count(type(None)) == 9
    # Calls keep their order, so a caller who gives up can close what may have been stored.
    assert await durable.fail("3", "cancelled", 1.0) in (True, False)
    assert "3" not in await owed(durable)


def test_callers_of_a_dead_loop_hold_up_nobody(path: str) -> None:
    broker = SqliteBroker(path)

    async def leave() -> None:
        tasks = [asyncio.create_task(broker.put(job(str(i)))) for i in range(50)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()

    async def come() -> None:
        await broker.put(job())
        await broker.close()

    with suppress(asyncio.CancelledError):
        asyncio.run(leave())
    asyncio.run(come())


@contextmanager
def full_disk(path: str) -> Iterator[None]:
    """Let no file of this process grow beyond the size of the write-ahead log."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path + "-wal"), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_disk_is_told_and_survived(durable: SqliteBroker) -> None:
    await durable.put(job("before"))
    large = replace(job(), body=b"x" * 1_000_000)
    with full_disk(durable.path):
        refused = await asyncio.gather(
            *(durable.put(replace(large, id=id)) for id in "abc"), return_exceptions=True
        )
        assert [error.status for error in refused if isinstance(error, HeadwayError)] == [503] * 3
        assert await owed(durable) == ["before"]
    await asyncio.gather(*(durable.put(replace(large, id=id)) for id in "abc"))
    assert await owed(durable) == ["before", "a", "b", "c"]


@pytest.mark.parametrize("bad", [job("x", arrival=float("nan")), job("\ud800")])
async def test_a_value_that_cannot_be_stored_hurts_its_caller_only(durable: SqliteBroker, bad: Job) -> None:
    puts = [durable.put(job("a")), durable.put(bad), durable.put(job("b"))]
    ends = await asyncio.gather(*puts, return_exceptions=True)
    assert isinstance(ends[1], HeadwayError)
    assert (ends[0], ends[1].status, ends[2]) == (None, 400, None)
    assert await owed(durable) == ["a", "b"]


async def test_a_damaged_file_is_told_and_its_repair_noticed(durable: SqliteBroker) -> None:
    await durable.put(job())
    durable._db.execute("ALTER TABLE jobs RENAME TO lost")
    for late in (durable.get("a"), durable.put(job("b"))):
        with pytest.raises(HeadwayError, match="no such table") as error:
            await late
        assert error.value.status == 503
    durable._db.execute("ALTER TABLE lost RENAME TO jobs")
    await durable.put(job("b"))
    assert await owed(durable) == ["a", "b"]


@pytest.mark.parametrize(("mode", "level"), [("full", 2), ("normal", 1)])
async def test_the_write_ahead_log_is_synced_as_asked(path: str, mode: str, level: int) -> None:
    broker = SqliteBroker(path, synchronous=mode)
    assert broker._db.execute("PRAGMA synchronous").fetchone() == (level,)
    assert broker._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    await broker.close()
