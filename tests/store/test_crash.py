"""What may fail without breaking a guarantee: kill -9, a full disk, a damaged file, callers that give up.

For kill -9, gateway processes put and end jobs on one file and print each call after it returned. One of them
is killed at a random moment, and the file must hold what was printed. SIGKILL loses nothing that the
kernel holds, so this shows that no call returns before its COMMIT; that COMMIT syncs is SQLite's part.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.store.killed import Place, one_of_two, rounds
from tests.store.stores import FAR, take_ids

from headway.errors import HeadwayError
from headway.store.queue import SqliteBroker
from headway.store.queue.port import Job


def job(id: str = "a", **more: Any) -> Job:
    return Job(id, "tenant", "/v1/completions", b"body", "{}", **{"arrival": 1.0, **more})


async def open_ids(broker: SqliteBroker) -> list[str]:
    """Return the open jobs, by arrival; they are taken by a gateway that comes after all leases."""
    other = SqliteBroker(broker.path, f"after {broker.owner}")
    await other.renew(2 * FAR)
    ids = await take_ids(other, now=FAR, limit=10_000)
    await other.close()
    await broker.renew(FAR)
    return ids


async def connect(path: str, **more: str) -> SqliteBroker:
    broker = SqliteBroker(path, "A", **more)
    await broker.renew(FAR)
    return broker


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "jobs.db")


@pytest.fixture
async def durable(path: str) -> AsyncIterator[SqliteBroker]:
    broker = await connect(path)
    yield broker
    await broker.close()


# ---- kill -9


def test_what_was_printed_survives_kill_9(tmp_path: Path) -> None:
    rounds(Place("sqlite", str(tmp_path / "jobs.db")), tmp_path)


def test_a_gateway_is_killed_beside_one_that_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "jobs.db")

    def end_lease() -> None:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE leases SET until = 5 WHERE owner = 'killed'")

    one_of_two(Place("sqlite", path), tmp_path, end_lease)


# It commits without a pause, and holds SQLite's lock nearly all the time.
GREEDY = """
import sqlite3, sys, time
from headway.store.queue.sqlite_file import WriteTurns

db, turns = sqlite3.connect(sys.argv[1], isolation_level=None), WriteTurns(sys.argv[1])
while True:
    turns.begin(db)
    print("begun", flush=True)
    time.sleep(0.01)
    db.execute("COMMIT")
"""


def test_a_writer_without_a_pause_lets_others_write(path: str) -> None:
    """Each put waits for one or two of the other's transactions, where it would wait for dozens."""
    asyncio.run(SqliteBroker(path, "A").close())
    with subprocess.Popen([sys.executable, "-c", GREEDY, path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == b"begun\n"
            os.set_blocking(other.stdout.fileno(), False)
            begun = asyncio.run(puts_beside(path, lambda: (other.stdout.read() or b"").count(b"begun")))
        finally:
            other.kill()
    assert sorted(begun)[len(begun) // 2] <= 3, begun


async def puts_beside(path: str, begun: Callable[[], int]) -> list[int]:
    """Return how many transactions another writer began during each of some puts."""
    broker, counts = await connect(path), []
    begun()
    for i in range(20):
        await broker.put(job(str(i)))
        counts.append(begun())
    await broker.close()
    return counts


# ---- restarts, full disks, damage, callers that give up


async def test_a_reopened_file_is_the_same(path: str) -> None:
    broker = await connect(path)
    await asyncio.gather(*(broker.put(job(id)) for id in "abc"))
    await broker.attempt("a")
    await broker.done("b", b"r", 2.0)
    before = [await broker.get(id) for id in "abc"]
    await broker.close()
    broker = await connect(path)
    assert [await broker.get(id) for id in "abc"] == before
    assert await open_ids(broker) == ["a", "c"]
    await broker.close()


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
        refused = await asyncio.gather(*(durable.put(replace(large, id=id)) for id in "abc"), return_exceptions=True)
        assert [error.status for error in refused if isinstance(error, HeadwayError)] == [503] * 3
        assert await durable.get("a") is None
        assert await durable.get("before") == replace(job("before"), owner="A")
    await asyncio.gather(*(durable.put(replace(large, id=id)) for id in "abc"))
    assert await open_ids(durable) == ["before", "a", "b", "c"]


@pytest.mark.parametrize("bad", [job("x", arrival=float("nan")), job("\ud800")])
async def test_a_value_that_cannot_be_stored_hurts_its_caller_only(durable: SqliteBroker, bad: Job) -> None:
    puts = [durable.put(job("a")), durable.put(bad), durable.put(job("b"))]
    ends = await asyncio.gather(*puts, return_exceptions=True)
    assert isinstance(ends[1], HeadwayError)
    assert (ends[0], ends[1].status, ends[2]) == (None, 400, None)
    assert await open_ids(durable) == ["a", "b"]


async def test_a_damaged_file_is_told_and_its_repair_noticed(durable: SqliteBroker) -> None:
    await durable.put(job())
    with closing(sqlite3.connect(durable.path)) as db:
        db.execute("ALTER TABLE jobs RENAME TO lost")
        for late in (durable.get("a"), durable.put(job("b"))):
            with pytest.raises(HeadwayError, match="no such table") as error:
                await late
            assert error.value.status == 503
        db.execute("ALTER TABLE lost RENAME TO jobs")
    await durable.put(job("b"))
    assert await open_ids(durable) == ["a", "b"]


@pytest.mark.parametrize(("mode", "level"), [("full", 2), ("normal", 1)])
async def test_the_write_ahead_log_is_synced_as_asked(path: str, mode: str, level: int) -> None:
    broker = await connect(path, synchronous=mode)
    assert broker._db.execute("PRAGMA synchronous").fetchone() == (level,)
    assert broker._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    await broker.close()
