"""A queue's file that is damaged while it is used: nothing more is accepted, and nothing accepted is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.helpers.damage import alter, overwrite, read_by_another
from tests.store.stores import FAR, job, take_ids

from headway.errors import ConfigError, HeadwayError
from headway.store.queue import sqlite_jobs
from headway.store.queue.keys import StoredKey
from headway.store.queue.port import Charge
from headway.store.queue.sqlite import SqliteBroker
from headway.store.queue.sqlite_file import open_file
from headway.store.queue.sqlite_jobs import Kept, recover_jobs
from headway.store.sqlite import health
from headway.store.sqlite.rescue import _rescued_files as rescued_files

MANY = [f"job{i}" for i in range(40)]
BODY = b'{"prompt": "%s"}' % (b"word " * 1000)  # more than a page

VERSION_2 = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL, owner TEXT, tenant TEXT NOT NULL,
    path TEXT NOT NULL, arrival REAL NOT NULL, background INTEGER NOT NULL, attempts INTEGER NOT NULL,
    finished REAL, reason TEXT, request TEXT NOT NULL, body BLOB NOT NULL, result BLOB,
    CHECK ((state = 'open') = (finished IS NULL))
);
CREATE INDEX held ON jobs (owner, arrival, seq) WHERE state = 'open';
CREATE INDEX closed ON jobs (finished) WHERE finished IS NOT NULL;
CREATE TABLE leases (owner TEXT PRIMARY KEY, until REAL NOT NULL, ended INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO jobs VALUES
    (3, 'ended', 'done', NULL, 't', '/p', 1.0, 0, 0, 5.0, NULL, '{}', x'', x'01'),
    (4, 'old', 'open', NULL, 't', '/p', 4.0, 1, 2, NULL, NULL, '{}', x'02', NULL);
PRAGMA application_id = 1212438361;
PRAGMA user_version = 2;
"""
pytestmark = pytest.mark.usefixtures("watched_closely")
SAVED = "what the queue has is saved in"  # logged once it has moved


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "jobs.db")


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
    await broker.renew(FAR)
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
    await until(lambda: SAVED in caplog.text)
    assert "is damaged" in caplog.text

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
    monkeypatch.undo()  # the watch looks every two seconds again
    await put_many(broker)
    overwrite(path)
    forget_pages(broker)
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
    assert len(taken) == still_open <= total
    assert {one.body for one in taken} == {BODY}, "what holds garbage is not run"
    await again.close()


@pytest.mark.parametrize("rescued", [True, False])
async def test_what_was_spent_still_counts(path: str, caplog: pytest.LogCaptureFixture, *, rescued: bool) -> None:
    """In the file that a gateway goes on with, and after recovery, also where no gateway rescued anything."""
    broker = SqliteBroker(path, "A")
    await broker.renew(FAR)
    assert await broker.spend("a", Charge("paid", 2.0, 5.0, 10.0, 0.0))
    key = StoredKey("k", b"digest", '{"tenant": "t"}', 1.0, revoked=3.0)
    await broker.put_keys([key], 0.0)
    await put_many(broker)
    spent = 2.0
    if rescued:
        overwrite(path, 200_000)
        await until(lambda: SAVED in caplog.text)
        assert not await broker.spend("b", Charge("paid", 4.0, 5.0, 11.0, 0.0))
        assert await broker.spend("b", Charge("paid", 1.0, 5.0, 11.0, 0.0))
        spent = 3.0
        assert await broker.keys(0) == [replace(key, changed=1)]
        with pytest.raises(HeadwayError, match="damaged"):
            await broker.put_keys([key], 0.0)
    await broker.close()
    overwrite(path, 200_000)
    assert recover_jobs(path)
    again = SqliteBroker(path, "B")
    assert not await again.spend("c", Charge("paid", 5.1 - spent, 5.0, 12.0, 0.0))
    assert await again.spend("c", Charge("paid", 5.0 - spent, 5.0, 12.0, 0.0))
    assert await again.keys(0) == [replace(key, changed=1)]
    await again.close()


async def test_a_job_that_ended_beside_the_damaged_file_is_charged_once(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = "budget of alpha: tokens per day"
    broker = SqliteBroker(path, "A")
    await broker.renew(FAR)
    await broker.put(job("charged", background=True), [Charge(name, 8.0, 100.0, 10.0, 0.0)])
    await put_many(broker)
    overwrite(path, 200_000)
    await until(lambda: SAVED in caplog.text)
    assert await broker.done("charged", b"r", 11.0, {name: 3.0})
    await broker.close()
    assert recover_jobs(path)
    again = SqliteBroker(path, "B")
    assert not await again.spend("c", Charge(name, 96.0, 100.0, 12.0, 0.0))
    assert await again.spend("c", Charge(name, 95.0, 100.0, 12.0, 0.0))
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
        await until(lambda: rescued_files(path) == [])  # between two tries
        with pytest.raises(HeadwayError, match="damaged"):
            await broker.fail("job1", "why", 5.0)
    await until(lambda: SAVED in caplog.text)
    assert len(rescued_files(path)) == 1


def test_what_is_kept_in_memory_is_bounded() -> None:
    kept, body = Kept(100), b"x" * 40
    for id in "abc":
        kept.add(replace(job(id, background=True), body=body))
    assert [one.id for one in kept.jobs()] == ["a", "b"]
    kept.drop("a")
    kept.add(replace(job("d", background=True), body=body))
    kept.add(replace(job("e"), body=b""))  # its client waits for it, and is told
    assert [one.id for one in kept.jobs()] == ["b", "d"]


# ---- a changed byte within a value


async def with_marks(broker: SqliteBroker) -> None:
    """Put jobs whose bodies and requests say which they are, into the file; one that is done has an answer."""
    for id in ("one", "two", "ended"):
        text = f'{{"request": "{id}"}}'
        await broker.put(replace(job(id, background=True), request=text, body=BODY + f"body {id}".encode()))
    await broker.done("ended", b"answer to ended", 5.0)
    await broker.renew(FAR)
    with closing(sqlite3.connect(broker.path)) as db:
        assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)


def forget_pages(broker: SqliteBroker) -> None:
    """Let the broker read the disk again."""
    for name in ("_view", "_db"):
        getattr(broker, name).execute("PRAGMA shrink_memory")


ALTERED = {
    "body": (b"body one", b"bodY one", "one"),
    "request": (b'"request": "one"', b'"request": "onE"', "one"),
    "no text": (b'"request": "one"', b'"request": "on\xff"', "one"),
    "answer": (b"answer to ended", b"answer 2o ended", "ended"),
}


@pytest.mark.parametrize("what", ALTERED)
@pytest.mark.parametrize("in_memory", [True, False])
async def test_what_was_altered_is_not_served(
    path: str, broker: SqliteBroker, what: str, in_memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    old, new, id = ALTERED[what]
    await with_marks(broker)
    if not in_memory:
        await broker.close()
        broker = SqliteBroker(path, "A")
        await broker.renew(FAR)
    alter(path, old, new)
    forget_pages(broker)
    assert health.examine(path) is None, "SQLite finds nothing"
    with pytest.raises(HeadwayError, match="headway queue recover") as refused:
        await broker.get(id)
    assert refused.value.status == 503
    assert "onE" not in str(refused.value), "it goes to clients of any tenant"
    assert caplog.text.count("nothing is accepted any more") == 1
    with pytest.raises(HeadwayError, match="headway queue recover"):
        await broker.put(job("late"))

    await until(lambda: SAVED in caplog.text)
    found, other = await broker.get(id), await broker.get("two")
    assert other
    assert other.body == BODY + b"body two"
    assert found
    if id == "one" and in_memory:
        assert (found.state, found.body) == ("open", BODY + b"body one")
        assert await broker.done("one", b"r", 6.0)
    else:
        assert (found.state, found.body, found.result, found.reason) == ("failed", b"", None, sqlite_jobs.ALTERED)
    await broker.close()

    done = recover_jobs(path)
    assert done
    assert done.counts == (3, 2 if id == "ended" else 1)
    again = SqliteBroker(path, "B")
    found = await again.get(id)
    assert found
    assert found.state == ("done" if id == "one" and in_memory else "failed")
    await again.close()


async def test_what_was_altered_is_not_taken(path: str, caplog: pytest.LogCaptureFixture) -> None:
    first = SqliteBroker(path, "A")
    await first.renew(FAR)
    await with_marks(first)
    await first.close()
    alter(path, b"body one", b"bodY one")
    broker = SqliteBroker(path, "B")
    await broker.renew(FAR)
    with pytest.raises(HeadwayError, match="the content of the job one has changed"):
        await broker.take(0.0, 9)
    await until(lambda: SAVED in caplog.text)
    assert await broker.take(FAR, 9) == []
    await broker.close()
    assert recover_jobs(path)
    again = SqliteBroker(path, "C")
    await again.renew(FAR)
    assert await take_ids(again) == ["two"]
    await again.close()


async def test_an_end_elsewhere_counts_before_that_of_an_altered_job(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One gateway had the job in memory and answered it; another one found it altered."""
    first, other = SqliteBroker(path, "A"), SqliteBroker(path, "B")
    await first.renew(FAR)
    await other.renew(FAR)
    await with_marks(first)
    alter(path, b"body one", b"bodY one")
    files = list[str]()
    for broker in (other, first):
        forget_pages(broker)
        with pytest.raises(HeadwayError, match="has changed"):
            await broker.get("one")
        await until(lambda: SAVED in caplog.text)
        caplog.clear()
        files += [file for file in rescued_files(path) if file not in files]
    assert await first.done("one", b"r", 6.0)
    await first.close()
    await other.close()
    for number, file in enumerate(files):
        os.rename(file, file.replace("rescued-", f"rescued-{number}"))
    assert recover_jobs(path)
    again = SqliteBroker(path, "C")
    found = await again.get("one")
    assert found
    assert (found.state, found.result) == ("done", b"r")
    await again.close()


async def test_an_older_file_has_no_checksums_and_is_used_and_recovered(path: str) -> None:
    """Gateways of version 2 may go on writing to it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(VERSION_2)
    broker = SqliteBroker(path, "A")
    await broker.renew(FAR)
    old, ended = await broker.take(0.0, 9), await broker.get("ended")
    assert [(one.id, one.body) for one in old] == [("old", b"\x02")]
    assert ended
    assert ended.result == b"\x01"
    await broker.put(job("new"))
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute("SELECT id FROM jobs WHERE body_sum IS NOT NULL").fetchall() == [("new",)]
        db.execute("UPDATE jobs SET state = 'done', finished = 9.0, body = x'', result = x'03' WHERE id = 'new'")
    new = await broker.get("new")
    assert new
    assert new.result == b"\x03"
    await broker.close()

    os.remove(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(VERSION_2)
    shutil.copy(path, f"{path}.rescued-1")
    done = recover_jobs(path)
    assert done
    assert (done.counts, done.unreadable) == ((2, 1), 0)


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


async def test_a_log_that_cannot_shrink_is_bounded(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Background jobs are refused first, then all new ones; what was accepted ends."""
    broker, large = SqliteBroker(path, "A", max_log_bytes=20 * 2**20), bytes(2**20)
    await broker.renew(FAR)
    with read_by_another(path) as process:
        for i in range(20):
            await broker.put(replace(job(f"{i}", background=True), body=large))
        with pytest.raises(HeadwayError, match="no background work: its write-ahead log has 20 MiB") as refused:
            await broker.put(job("late", background=True))
        assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "10")
        await until(lambda: "no background work is accepted" in caplog.text)
        with pytest.raises(HeadwayError, match=rf"open transaction of \S+ \(process {process}\)"):
            await broker.put(job("late", background=True))
        assert broker.problem() is None
        for i in range(20, 40):
            await broker.put(replace(job(f"{i}"), body=large))
        with pytest.raises(HeadwayError, match=r"takes nothing: its write-ahead log has 40 MiB") as refused:
            await broker.put(job("late"))
        assert refused.value.code == "queue_unavailable"
        assert "40 MiB" in str(broker.problem())
        assert await broker.done("1", large, 5.0)
        assert [one.id for one in await broker.take(0.0, 1)] == []
    await until(lambda: broker.problem() is None and health.log_bytes(path) <= health.LOG_BOUND)
    await broker.put(job("late", background=True))
    assert caplog.text.count("no background work is accepted") == 1
    await broker.close()


def test_programs_that_read_are_told_as_far_as_the_system_does(path: str, tmp_path: Path) -> None:
    writing, reading = open_file(path, "normal")
    with closing(writing), closing(reading):
        reading.execute("BEGIN")
        reading.execute("SELECT * FROM jobs").fetchall()
        assert health.readers(path) == [], "it is this process"
        with read_by_another(path) as process:
            (told,) = health.readers(path)
            assert told.endswith(f"(process {process})")
            assert health.readers(path, locks=tmp_path / "none") == []


async def test_a_log_that_was_cut_off_is_noticed(path: str, broker: SqliteBroker) -> None:
    for id in MANY[:5]:
        await broker.put(replace(job(id, background=True), body=BODY))
    os.truncate(f"{path}-wal", 0)
    await until(lambda: broker.problem())
    with pytest.raises(HeadwayError, match="headway queue recover"):
        await broker.put(job("late"))
