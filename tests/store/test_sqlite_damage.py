"""A queue's file that is damaged while it is used: nothing more is accepted, and nothing accepted is lost."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.helpers.damage import overwrite
from tests.store.stores import FAR, job, take_ids

from headway.errors import ConfigError, HeadwayError
from headway.store.queue import sqlite as module
from headway.store.queue import sqlite_health as health
from headway.store.queue import sqlite_jobs
from headway.store.queue.sqlite import SqliteBroker
from headway.store.queue.sqlite_file import open_file
from headway.store.queue.sqlite_jobs import Kept, recover_jobs
from headway.store.queue.sqlite_rescue import _rescued_files as rescued_files

MANY = [f"job{i}" for i in range(40)]
BODY = b'{"prompt": "%s"}' % (b"word " * 1000)  # more than a page


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "jobs.db")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PAUSE_S", 0.02)
    monkeypatch.setattr(module, "TICK_S", 0.02)


@pytest.fixture
async def broker(path: str) -> AsyncIterator[SqliteBroker]:
    broker = SqliteBroker(path, "A")
    await broker.renew(FAR)
    yield broker
    await broker.close()


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def put_many(broker: SqliteBroker) -> None:
    """Put jobs and move them from the log into the file."""
    await asyncio.gather(*(broker.put(replace(job(id, background=True), body=BODY)) for id in MANY))
    await broker._write(lambda db: None)
    with closing(sqlite3.connect(broker.path)) as db:
        assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)


@pytest.mark.parametrize("at", [0, 50_000, 200_000])
async def test_nothing_accepted_is_lost(
    path: str, broker: SqliteBroker, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    await put_many(broker)
    assert await broker.done("job0", b"answer", 5.0)
    overwrite(path, at)
    await until(lambda: broker.problem())
    assert "damaged" in str(broker.problem())
    assert "headway queue recover" in str(broker.problem())
    with pytest.raises(HeadwayError, match="headway queue recover") as error:
        await broker.put(job("late"))
    assert (error.value.status, error.value.code) == (503, "queue_unavailable")
    assert path not in str(error.value), "it goes to clients"
    await until(lambda: broker._moved)
    assert "is damaged" in caplog.text
    assert "what the queue has is saved" in caplog.text

    # What was accepted goes on.
    assert await broker.renew(FAR) in (True, False)
    assert await broker.take(FAR, 9) == []
    last = await broker.get("job39")
    assert last
    assert last.body == BODY
    assert await broker.done("job1", b"later answer", 6.0)
    await broker.close()

    with pytest.raises(ConfigError, match="headway queue recover"):
        SqliteBroker(path, "B")
    done = recover_jobs(path)
    assert done
    assert done.counts == (40, 38)
    assert Path(done.aside) in [*Path(path).parent.iterdir()]
    assert rescued_files(path) == []
    again = SqliteBroker(path, "B")
    await again.renew(FAR)
    assert await take_ids(again) == MANY[2:]
    for id, answer in (("job0", b"answer"), ("job1", b"later answer")):
        ended = await again.get(id)
        assert ended
        assert (ended.state, ended.result) == ("done", answer)
    await again.close()
    assert recover_jobs(path) is None


async def test_damage_is_noticed_by_what_is_read(
    path: str, broker: SqliteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker._watch.close()
    await put_many(broker)
    overwrite(path)
    broker._view.close()
    broker._view = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    with pytest.raises(HeadwayError, match="headway queue recover"):
        await broker.get("job1")
    assert broker.problem()


async def test_what_can_be_read_of_a_damaged_file_is_recovered(path: str) -> None:
    """Nothing was rescued: its gateway was killed, say."""
    broker = SqliteBroker(path, "A")
    await broker.renew(FAR)
    await put_many(broker)
    await broker.close()
    overwrite(path, 200_000)
    with pytest.raises(ConfigError, match=r"damaged|malformed|database|Tree") as error:
        SqliteBroker(path, "B")
    assert "headway queue recover" in error.value.hint
    done = recover_jobs(path)
    assert done
    total, still_open = done.counts
    assert done.unreadable > 0
    assert total + done.unreadable >= 40
    assert 20 <= total < 40
    again = SqliteBroker(path, "B")
    await again.renew(FAR)
    taken = await again.take(0.0, 100)
    assert len(taken) == still_open == total
    await again.close()


async def test_a_file_in_use_is_not_recovered(path: str, broker: SqliteBroker) -> None:
    await put_many(broker)
    command = f"from headway.store.queue.sqlite_jobs import recover_jobs; recover_jobs({path!r})"
    asked = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", command], capture_output=True, text=True)
    assert "is in use" in asked.stderr
    assert broker.problem() is None


async def test_a_file_that_cannot_be_rescued_yet_is_later(
    path: str, broker: SqliteBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await put_many(broker)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_jobs, "_merge", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        overwrite(path)
        await until(lambda: "disk full" in caplog.text)
        assert rescued_files(path) == []
        with pytest.raises(HeadwayError, match="damaged"):
            await broker.fail("job1", "why", 5.0)
    await until(lambda: broker._moved)
    assert len(rescued_files(path)) == 1


def test_what_is_kept_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_jobs, "KEPT", 100)
    kept, body = Kept(), b"x" * 40
    for id in "abc":
        kept.add(replace(job(id, background=True), body=body))
    assert [one.id for one in kept.jobs()] == ["a", "b"]
    kept.drop("a")
    kept.add(replace(job("d", background=True), body=body))
    kept.add(replace(job("e"), body=b""))  # its client waits for it, and is told
    assert [one.id for one in kept.jobs()] == ["b", "d"]


# ---- the write-ahead log


async def test_the_log_shrinks_after_a_reader(path: str, broker: SqliteBroker) -> None:
    """While a reader is in the middle of its rows the log grows; then it is truncated."""
    await put_many(broker)
    large = bytes(2**20)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        rows = reader.execute("SELECT id FROM jobs")
        rows.fetchone()
        for i in range(24):
            await broker.put(replace(job(f"large{i}"), body=large))
        assert health.log_bytes(path) > health.LOG_BOUND
        rows.close()
    await until(lambda: health.log_bytes(path) <= health.LOG_BOUND)


async def test_sqlite_shortens_the_log_itself(path: str) -> None:
    """A log that has grown is cut when it begins anew, without a watch."""
    writing, reading = open_file(path, "normal")
    with closing(writing), closing(reading):
        rows = reading.execute("SELECT 1 UNION SELECT name FROM sqlite_master")
        rows.fetchone()
        writing.execute("CREATE TABLE filler (content BLOB)")
        for _ in range(8):
            writing.execute("INSERT INTO filler VALUES (?)", [bytes(2**20)])
        assert health.log_bytes(path) > 1.5 * health.LOG_LIMIT
        rows.close()
        for _ in range(2):
            writing.execute("INSERT INTO filler VALUES (?)", [bytes(2**12)])
        assert health.log_bytes(path) <= health.LOG_LIMIT


async def test_a_log_that_was_cut_off_is_noticed(path: str, broker: SqliteBroker) -> None:
    for id in MANY[:5]:
        await broker.put(replace(job(id, background=True), body=BODY))
    os.truncate(f"{path}-wal", 0)
    await until(lambda: broker.problem())
    with pytest.raises(HeadwayError, match="headway queue recover"):
        await broker.put(job("late"))
