"""Stores of every version that Headway has had open with this one, and nothing is lost; newer ones are left alone.

`versions/` has a store of each kind as its first Headway made it, with rows in all tables, and some later ones.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import postgres as server
from tests.store.stores import FAR, gateways, job
from tests.store.test_postgres_crash import succeeds

from headway.cli.doctor import _queue_server
from headway.cluster.wire.codec import VERSION as WIRE_VERSION
from headway.config import Broker as BrokerConfig
from headway.config import Postgres
from headway.errors import ConfigError
from headway.store.batches.directory import DirectoryStore
from headway.store.batches.port import BatchStore, pieces
from headway.store.batches.postgres import PostgresStore
from headway.store.batches.postgres_session import BATCHES
from headway.store.batches.sqlite_file import VERSIONS as BATCH_VERSIONS
from headway.store.journal.reader import read
from headway.store.journal.rows import VERSIONS as JOURNAL_VERSIONS
from headway.store.journal.writer import PATTERN
from headway.store.queue.keys import StoredKey
from headway.store.queue.port import Broker, Charge
from headway.store.queue.postgres import PostgresBroker
from headway.store.queue.postgres_link import Address
from headway.store.queue.postgres_schema import JOBS
from headway.store.queue.sqlite import SqliteBroker
from headway.store.queue.sqlite_file import VERSIONS as QUEUE_VERSIONS
from headway.store.queue.sqlite_jobs import recover_jobs
from headway.store.versions import Versions

FOLDER = Path(__file__).parent / "versions"
Open = Callable[[str], Broker]


def script(name: str) -> str:
    return (FOLDER / f"{name}.sql").read_text()


def old_file(name: str, path: Path) -> Path:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(script(name))
    return path


def old_schema(*names: str) -> Address:
    address = server.fresh()
    for name in names:
        server.run_script(script(name).replace("{s}", address.schema), url=address.url)
    return address


def shape(path: Path) -> list[Any]:
    """Return the marks of a file, and its tables and indexes with their columns."""
    with closing(sqlite3.connect(path)) as db:
        marks = db.execute("SELECT * FROM pragma_application_id, pragma_user_version").fetchall()
        columns = """SELECT entry.type, entry.tbl_name, entry.name, field.name, field.type, field."notnull", field.pk
            FROM sqlite_master AS entry LEFT JOIN pragma_table_info(entry.name) AS field ON entry.type = 'table'"""
        return [marks, sorted(map(str, db.execute(columns)))]


# ---- steps


STEPS = Versions(param="p", made=2, script="two", steps={1: "to 2", 2: "to 3", 3: "to 4"})


@pytest.mark.parametrize(
    ("found", "scripts"), [(None, ["two", "to 3", "to 4"]), (1, ["to 2", "to 3", "to 4"]), (3, ["to 4"]), (4, [])]
)
def test_a_store_takes_the_steps_that_it_lacks(found: int | None, scripts: list[str]) -> None:
    assert STEPS.latest == 4
    assert STEPS.scripts(found, "It") == scripts
    words = {None: "its tables are made at the start", 4: "schema version 4"}
    assert STEPS.at_start(found, "It") == words.get(found, f"schema version {found}, upgraded to 4 at the start")


def test_no_step_leads_back() -> None:
    with pytest.raises(ConfigError, match="It has schema version 5; this Headway knows 4") as newer:
        STEPS.scripts(5, "It")
    assert "restore the backup" in newer.value.hint
    assert newer.value.param == "p"
    with pytest.raises(ConfigError, match="schema version 0, from which this Headway cannot upgrade"):
        STEPS.scripts(0, "It")


def test_the_guide_has_todays_versions() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "upgrade.md").read_text()
    stores = {
        'queue, `broker.kind = "sqlite"`': QUEUE_VERSIONS,
        'queue, `broker.kind = "postgres"`': JOBS.versions,
        "files and batches in a directory": BATCH_VERSIONS,
        "files and batches in PostgreSQL": BATCHES.versions,
        "journal": JOURNAL_VERSIONS,
    }
    rows = [[cell.strip() for cell in line.split("|")] for line in guide.splitlines() if line.startswith("| ")]
    now = {row[1]: row[3] for row in rows if row[1] in stores and row[3].isdigit()}
    assert now == {name: str(versions.latest) for name, versions in stores.items()}
    assert f"(now {WIRE_VERSION};" in guide


# ---- the queue


async def check_jobs(open_broker: Open) -> None:
    """Every job is as it was, and the open ones can be taken and ended; so can a new one."""
    async with gateways(open_broker, "A") as (broker,):
        done, failed = await broker.get("done"), await broker.get("failed")
        assert done
        assert failed
        assert (done.state, done.result, done.finished, done.arrival) == ("done", b"\x01", 5.0, 1.0)
        assert (failed.state, failed.reason, failed.finished) == ("failed", "why", 6.0)
        early, late = await broker.take(0.0, 9)
        assert (early.id, early.body, early.background, early.owner) == ("early", b"\x03", False, "A")
        assert (late.id, late.body, late.background, late.attempts, late.tenant) == ("late", b"\x02", True, 2, "t")
        assert await broker.done("late", b"r", 8.0)
        await broker.put(job("new"))
        assert await broker.spend("new", Charge("paid", 1.0, 9.0, 5.0, 0.0))
        assert not await broker.spend("newer", Charge("paid", 8.5, 9.0, 5.0, 0.0))
        await broker.put_keys([StoredKey("k", b"digest", "{}", 1.0)], 0.0)
        assert [key.id for key in await broker.keys(0)] == ["k"]


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
async def test_a_queue_file_keeps_its_jobs(tmp_path: Path, version: int) -> None:
    path = old_file(f"queue-{version}", tmp_path / "queue.sqlite")
    await check_jobs(lambda owner: SqliteBroker(str(path), owner))
    if version >= 3:
        async with gateways(lambda owner: SqliteBroker(str(path), owner), "B") as (broker,):
            assert not await broker.spend("more", Charge("paid", 6.0, 9.0, 5.0, 0.0)), "2.5 before, 1 since"
            assert await broker.spend("more", Charge("paid", 5.5, 9.0, 5.0, 0.0))
    new = tmp_path / "new.sqlite"
    await SqliteBroker(str(new), "A").close()
    assert shape(path) == shape(new)


def test_an_upgrade_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = old_file("queue-1", tmp_path / "queue.sqlite")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE leases (mine TEXT)")
    before = shape(path)
    with pytest.raises(ConfigError, match="already exists"):
        SqliteBroker(str(path), "A")
    assert shape(path) == before


async def test_a_gateway_of_the_version_before_goes_on_writing(tmp_path: Path) -> None:
    path = old_file("queue-3", tmp_path / "queue.sqlite")
    with closing(sqlite3.connect(path, isolation_level=None)) as older:
        async with gateways(lambda owner: SqliteBroker(str(path), owner), "A") as (broker,):
            older.execute(
                "INSERT INTO jobs (id, state, owner, tenant, path, arrival, background, attempts, request, body)"
                " VALUES ('its', 'open', 'idle', 't', '/p', 9.0, 1, 0, '{}', x'04')"
            )
            its = await broker.get("its")
            assert its
            assert (its.owner, its.body) == ("idle", b"\x04")


def test_queues_in_postgresql_keep_their_jobs() -> None:
    address = old_schema("postgres-queue-1")
    assert doctor_says(address) == f"schema version 1, upgraded to {JOBS.versions.latest} at the start"
    asyncio.run(check_jobs(lambda owner: PostgresBroker(address, owner)))
    assert version_of(address, "headway_meta") == JOBS.versions.latest
    assert doctor_says(address) == f"schema version {JOBS.versions.latest}"
    assert doctor_says(server.fresh()) == "its tables are made at the start"


def doctor_says(address: Address) -> str:
    postgres = Postgres(url=address.url, schema=address.schema)
    return _queue_server(BrokerConfig(kind="postgres", postgres=postgres)).found.partition("; ")[2]


async def test_gateways_that_start_together_upgrade_once() -> None:
    address = await asyncio.to_thread(old_schema, "postgres-queue-1")
    brokers = await asyncio.gather(*(asyncio.to_thread(PostgresBroker, address, owner) for owner in "ABCD"))
    assert [await broker.renew(FAR) for broker in brokers] == [False] * 4
    assert len(await brokers[0].take(0.0, 9)) == 2
    await asyncio.gather(*(broker.close() for broker in brokers))


def version_of(address: Address, meta: str) -> int:
    return int(server.run_sql(f"SELECT version FROM {address.schema}.{meta}", url=address.url)[0][0])


# ---- files and batches


async def check_batches(store: BatchStore) -> None:
    file = await store.file("alpha", "file-1")
    assert file
    assert b"".join([piece async for piece in pieces(store, file)]) == b"content"
    (batch,) = await store.open_batches()
    assert (batch.id, batch.state, batch.total, batch.completed) == ("batch-1", "in_progress", 2, 1)
    assert await store.hold()
    (line,) = await store.open_lines("batch-1", 0, 9)
    assert (line.number, line.custom_id, line.checksum) == (2, "two", None)
    await store.record("batch-1", 2, True, b"other")
    assert [(end.number, end.content) for end in await store.ended_lines("batch-1", 0, 9)] == [
        (1, b"answer"),
        (2, b"other"),
    ]


async def test_a_directory_of_batches_keeps_them(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "files").mkdir(parents=True)
    (old / "files" / "file-1").write_bytes(b"content")
    old_file("batches-1", old / "batches.sqlite")
    for folder in (old, new):
        store = DirectoryStore(folder)
        if folder is old:
            await check_batches(store)
        await store.close()
    assert shape(old / "batches.sqlite") == shape(new / "batches.sqlite")


async def test_batches_in_postgresql_are_kept() -> None:
    address = await asyncio.to_thread(old_schema, "postgres-queue-1", "postgres-batches-1")
    store = await asyncio.to_thread(PostgresStore, address, 30.0)
    await check_batches(store)
    await store.close()
    assert version_of(address, "batches_meta") == BATCHES.versions.latest
    assert version_of(address, "headway_meta") == JOBS.versions.latest


# ---- newer stores


def refused(open_store: Callable[[], Any], param: str) -> None:
    with pytest.raises(ConfigError, match="a newer one has used it") as newer:
        open_store()
    assert "Use that Headway or a newer one" in newer.value.hint
    assert newer.value.param == param


@pytest.mark.parametrize("kind", ["queue", "batches"])
def test_a_newer_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    versions = {"queue": QUEUE_VERSIONS, "batches": BATCH_VERSIONS}[kind]
    (tmp_path / "files").mkdir()
    path = old_file(f"{kind}-1", tmp_path / f"{kind}.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {versions.latest + 1}")
        db.execute("PRAGMA journal_mode = delete")
    before = path.read_bytes()
    opens = {"queue": lambda: SqliteBroker(str(path), "A"), "batches": lambda: DirectoryStore(tmp_path)}
    refused(opens[kind], versions.param)
    assert path.read_bytes() == before


def test_a_newer_file_that_is_damaged_is_not_recovered(tmp_path: Path) -> None:
    """This Headway would leave out the tables that it does not know."""
    path = old_file("queue-3", tmp_path / "queue.sqlite")
    old_file("queue-3", tmp_path / "queue.sqlite.rescued-1")
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {QUEUE_VERSIONS.latest + 1}")
    refused(lambda: recover_jobs(str(path)), QUEUE_VERSIONS.param)
    assert sorted(file.name for file in tmp_path.iterdir() if "rescued" in file.name) == ["queue.sqlite.rescued-1"]


@pytest.mark.parametrize("meta", ["headway_meta", "batches_meta"])
def test_a_newer_schema_is_left_alone(meta: str) -> None:
    address = old_schema("postgres-queue-1", "postgres-batches-1")
    server.run_sql(f"UPDATE {address.schema}.{meta} SET version = 99", url=address.url)
    refused(lambda: PostgresStore(address, 30.0), "broker.postgres.schema")
    assert version_of(address, meta) == 99
    tables = server.run_sql("SELECT tablename FROM pg_tables WHERE schemaname = $1", address.schema, url=address.url)
    assert "spent" not in {row[0] for row in tables}, "it was not upgraded by half"


async def test_a_gateway_whose_schema_was_upgraded_connects_again() -> None:
    """A newer one upgrades it while this one runs; then the server ends its connections."""
    address = await asyncio.to_thread(server.fresh)
    async with gateways(lambda owner: PostgresBroker(address, owner), "A") as (broker,):
        await broker.put(job())
        server.run_sql(f"UPDATE {address.schema}.headway_meta SET version = 99", url=address.url)
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'headway-write-%'"
        server.run_sql(end, url=address.url)
        await succeeds(lambda: broker.done("a", b"r", 1.0))


# ---- the journal


def test_a_journal_of_the_first_version_is_read(tmp_path: Path) -> None:
    old_file("journal-1", tmp_path / PATTERN.replace("*", "0000000000000001-1"))
    found = read(tmp_path)
    assert not found.damaged
    (row,) = found.requests
    assert (row.id, row.weight, row.soft, row.line, row.found, row.itl, row.share) == (
        "r",
        1.0,
        None,
        0,
        None,
        None,
        None,
    )
    assert (found.refusals[0].count, found.stays[0].id, found.engines["e0"].down) == (3, "r", None)
