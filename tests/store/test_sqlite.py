"""The SQLite broker's file: what is refused, the migration of version 1, several gateways on one file."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.store.stores import FAR, job, take_ids

from headway import clock
from headway.config import Broker, Sqlite
from headway.errors import ConfigError, HeadwayError
from headway.store.queue import open_broker, sqlite_file
from headway.store.queue.memory import MemoryBroker
from headway.store.queue.sqlite import FREE, SqliteBroker
from headway.store.queue.sqlite_file import TOO_MUCH


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "jobs.db")


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as error:
        SqliteBroker(path, "A")
    assert error.value.hint
    assert error.value.param == "broker.sqlite.path"
    return str(error.value)


# ---- files that cannot be used


async def test_missing_directories_are_made_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "queue" / "jobs.db"
    await SqliteBroker(str(path), "A").close()
    assert [folder.stat().st_mode & 0o777 for folder in (path.parent, path.parent.parent)] == [0o700] * 2


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    assert "The broker cannot use /proc/nowhere/jobs.db" in refusal("/proc/nowhere/jobs.db")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "it is a directory" in refusal(str(tmp_path / "."))
    assert not Path(f"{tmp_path}.lock").exists()


def test_a_file_that_is_not_a_database_is_refused_and_left_alone(path: str) -> None:
    Path(path).write_text("[gateway]\nport = 8000\n" * 100)
    assert "not a database" in refusal(path)
    assert "not a database" in refusal(path)  # and not "locked": the lock was released
    assert Path(path).read_text().startswith("[gateway]")


def test_another_programs_database_is_left_alone(path: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")
    before = Path(path).read_bytes()
    assert "another program's" in refusal(path)
    assert Path(path).read_bytes() == before


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.0)


def test_a_file_that_another_program_locks_is_refused(path: str, impatient: None) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        assert "database is locked" in refusal(path)


def test_a_gateway_of_version_1_has_its_file_for_itself(path: str, impatient: None) -> None:
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "locked by another gateway" in refusal(path)
    assert not Path(path).exists()


def test_files_of_another_user_are_refused(path: str, other_user: Callable[[Path], None]) -> None:
    Path(f"{path}.lock").touch()
    other_user(Path(path).parent)
    assert f"{path}.lock is not a file of this user" in refusal(path)


async def test_no_other_user_can_read_the_file_or_hold_its_locks(path: str) -> None:
    for suffix in ("", ".lock", ".turn"):  # of an older Headway
        os.close(os.open(path + suffix, os.O_CREAT, 0o644))
    broker = SqliteBroker(path, "A")
    await broker.renew(FAR)
    modes = {file.name: file.stat().st_mode & 0o777 for file in Path(path).parent.iterdir()}
    assert modes == dict.fromkeys(["jobs.db", "jobs.db-shm", "jobs.db-wal", "jobs.db.lock", "jobs.db.turn"], 0o600)
    await broker.close()


# ---- a file without its content


async def test_an_empty_file_is_a_new_queue(path: str) -> None:
    os.mknod(path)
    broker = SqliteBroker(path, "B")
    await broker.renew(FAR)
    await broker.put(job())
    assert await broker.get("a") == job(owner="B")
    await broker.close()


@pytest.mark.parametrize("gone", [True, False])
def test_work_in_a_log_without_its_database_is_not_thrown_away(path: str, gone: bool) -> None:
    Path(f"{path}-wal").write_bytes(b"work")
    if not gone:
        Path(path).touch()
    said = refusal(path)
    assert f"is empty or missing, but {path}-wal is not" in said
    assert "move its log away" in said
    assert Path(f"{path}-wal").read_bytes() == b"work"


async def test_a_queue_that_was_emptied_is_refused_and_one_that_was_deleted_begins_anew(path: str) -> None:
    broker = SqliteBroker(path, "A")
    await broker.renew(FAR)
    await broker.put(job())
    await broker.close()
    os.truncate(path, 0)
    assert f"{path} is empty, but it was not" in refusal(path)
    os.remove(path)
    broker = SqliteBroker(path, "B")
    assert await broker.get("a") is None
    await broker.close()


# ---- several gateways


async def test_two_names_of_one_file_are_one_store(path: str, tmp_path: Path) -> None:
    (tmp_path / "alias.db").symlink_to(path)
    first, second = SqliteBroker(path, "A"), SqliteBroker(str(tmp_path / "alias.db"), "B")
    await first.renew(10.0)
    await first.put(job())
    assert second.path == first.path
    assert await second.get("a") == job(owner="A")
    await asyncio.gather(first.close(), second.close())


async def test_a_take_reads_no_job_that_is_held(path: str) -> None:
    broker = SqliteBroker(path, "A")
    with closing(sqlite3.connect(path)) as db:
        plan = db.execute(f"EXPLAIN QUERY PLAN {FREE}", {"owner": "A", "limit": 1}).fetchall()
    steps = [step for *_, step in plan]
    assert "SEARCH held USING INDEX held (owner=?)" in steps
    scanned = {step for step in steps if step.startswith("SCAN")}
    assert scanned == {"SCAN CONSTANT ROW", "SCAN leases", "SCAN free"}
    assert steps.count("USE TEMP B-TREE FOR ORDER BY") == 1, "only the few first jobs are sorted"
    await broker.close()


async def test_a_trim_reads_no_text(path: str) -> None:
    """Every column comes from the index: of the table, none is read."""
    broker = SqliteBroker(path, "A")
    with closing(sqlite3.connect(path)) as db:
        steps = [row[1:] for row in db.execute(f"EXPLAIN {TOO_MUCH}", [1, 1])]
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'jobs'").fetchone()
    (table,) = {cursor for code, cursor, page, *_ in steps if code == "OpenRead" and page == root}
    assert [step for step in steps if step[0] == "Column" and step[1] == table] == []
    await broker.close()


# ---- by configuration


async def test_open_broker_opens_what_is_configured(path: str) -> None:
    memory = open_broker(Broker("memory"))
    assert isinstance(memory, MemoryBroker)
    disk = open_broker(Broker(sqlite=Sqlite(path, "normal")), "A")
    assert isinstance(disk, SqliteBroker)
    assert disk.owner == "A"
    assert disk._db.execute("PRAGMA synchronous").fetchone() == (1,)
    await disk.close()


async def test_every_start_of_a_gateway_has_a_name_of_its_own(path: str) -> None:
    brokers = [open_broker(Broker(sqlite=Sqlite(path))) for _ in range(3)]
    assert len({broker.owner for broker in brokers}) == 3
    for i, broker in enumerate(brokers):
        await broker.renew(1.0)
        await broker.put(job(str(i)))
        await broker.close()
    last = open_broker(Broker(sqlite=Sqlite(path)))
    await last.renew(1.0)
    assert await take_ids(last) == ["0", "1", "2"]
    await last.close()


# ---- a file that goes away while it is used


@pytest.mark.parametrize("gone", ["", "-wal"])
async def test_a_deleted_file_is_told_before_anything_is_accepted(path: str, gone: str) -> None:
    broker = SqliteBroker(path, "A")
    await broker.renew(FAR)
    assert broker.problem() is None
    os.rename(path + gone, path + ".aside")
    assert "deleted, moved or replaced" in str(broker.problem())
    for call in (broker.put(job("b")), broker.renew(FAR)):
        with pytest.raises(HeadwayError, match="deleted, moved or replaced") as error:
            await call
        assert error.value.status == 503
        assert path not in str(error.value), "it goes to clients"
    os.rename(path + ".aside", path + gone)
    assert broker.problem() is None
    await broker.put(job("c"))
    await broker.close()


async def test_a_replaced_file_is_left_alone(path: str) -> None:
    broker = SqliteBroker(path, "A")
    await broker.renew(FAR)
    for suffix in ("", "-wal"):
        os.rename(path + suffix, f"{path}.aside{suffix}")
    other = SqliteBroker(path, "B")
    with pytest.raises(HeadwayError, match="deleted, moved or replaced"):
        await broker.put(job("a"))
    await other.renew(FAR)
    await other.put(job("b"))
    await broker.close()
    assert other.problem() is None
    assert await other.get("a") is None
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT id FROM jobs").fetchall() == [("b",)]
    await other.close()


async def test_leases_end_when_the_machine_boots(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their instants may come from a clock that was days ahead."""
    with monkeypatch.context() as patch:
        patch.setattr(clock, "boot", lambda: "the first")
        dead, other = SqliteBroker(path, "dead"), SqliteBroker(path, "other")
        for broker in (dead, other):
            await broker.renew(FAR)
        await dead.put(job())
        assert await take_ids(other) == []
    late = SqliteBroker(path, "late")
    await late.renew(FAR)
    assert await take_ids(late) == ["a"]
    again = SqliteBroker(path, "again")
    await again.renew(FAR)
    assert await take_ids(again) == [], "the lease of a gateway of this boot goes on"
    for broker in (again, late, other, dead):
        await broker.close()
