"""Batches in PostgreSQL: gateways that are paused, a server that hangs or ends, answers that are lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from headway.errors import HeadwayError, RequestError
from headway.gateway.apis.batches.lines import conclude
from headway.store.batches.port import PIECE, STALE_S
from headway.store.batches.postgres import PostgresStore
from headway.store.batches.records import CANCELLED, Line, StoredFile
from headway.store.queue.postgres import PostgresBroker
from headway.store.queue.postgres_link import Address
from tests.gateway.batch_stores import BATCH, FILE, ROOM, add, begun, content, custom_ids
from tests.helpers import postgres as server
from tests.helpers.postgres import succeeds

LEASE_S = 1.0


@pytest.fixture(scope="module")
def own() -> Iterator[server.PrivateServer]:
    """A server that the tests of this module stop and pause."""
    with server.own() as one:
        yield one


@pytest.fixture
def address(own: server.PrivateServer) -> Address:
    return replace(server.fresh(own.url), timeout_s=1.0)


@pytest.fixture
async def store(address: Address) -> AsyncIterator[PostgresStore]:
    one = await asyncio.to_thread(PostgresStore, address, LEASE_S)
    yield one
    await one.close()


@pytest.fixture
async def other(address: Address, store: PostgresStore) -> AsyncIterator[PostgresStore]:
    one = await asyncio.to_thread(PostgresStore, address, LEASE_S)
    yield one
    await one.close()


def sql(address: Address, statement: str, *values: Any) -> list[Any]:
    return server.run_sql(statement.replace("{s}", address.schema), *values, url=address.url)


def count(address: Address, table: str) -> int:
    return int(sql(address, f"SELECT count(*) FROM {{s}}.{table}")[0][0])


async def held(store: PostgresStore, seconds: float = 20.0) -> None:
    """Wait until a gateway holds."""
    deadline = time.monotonic() + seconds
    while not await succeeds(store.hold):
        assert time.monotonic() < deadline, "it does not come to hold"
        await asyncio.sleep(0.05)


# ---- one gateway holds


async def test_a_gateway_that_was_paused_changes_nothing_any_more(store: PostgresStore, other: PostgresStore) -> None:
    (line,) = await begun(store, 1)
    assert not await other.hold()
    await asyncio.sleep(LEASE_S + 0.2)
    assert await other.hold(), "the lease has ended"
    changes: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.record(BATCH.id, 1, True, b"late"),
        lambda: store.add_lines(BATCH.id, [replace(line, number=2)]),
        lambda: store.clear_lines(BATCH.id),
        lambda: store.close_lines(BATCH.id, CANCELLED),
        lambda: store.refuse(BATCH.id, [], 5.0),
        lambda: store.begin(BATCH.id, 5.0),
        lambda: store.finalize(BATCH.id, 5.0),
        lambda: store.end(BATCH.id, "completed", 5.0),
    ]
    for change in changes:
        with pytest.raises(HeadwayError, match="another gateway runs batches now") as caught:
            await change()
        assert caught.value.status == 503
    assert not await store.hold()
    assert [found.number for found in await other.open_lines(BATCH.id, 0, 9)] == [1]
    assert await other.record(BATCH.id, 1, True, b"in time")


async def test_a_gateway_that_is_paused_in_a_transaction_holds_up_no_other(
    store: PostgresStore, other: PostgresStore
) -> None:
    await begun(store, 1)

    async def paused(connection: asyncpg.Connection) -> None:
        await connection.execute("SELECT 1")
        await asyncio.sleep(4 * LEASE_S)

    late = asyncio.create_task(store._as_holder(paused))
    await held(other, 10)
    assert not late.done(), "it still has the lock, as far as it knows"
    with pytest.raises(HeadwayError, match="is out"):
        await late
    assert not await succeeds(store.hold)


async def test_of_two_that_wait_one_begins(store: PostgresStore, other: PostgresStore) -> None:
    for _ in range(5):
        assert sorted(await asyncio.gather(store.hold(), other.hold())) == [False, True]
        await asyncio.gather(store.release(), other.release())


async def test_a_holder_that_was_away_for_less_than_its_lease_goes_on(
    store: PostgresStore, other: PostgresStore, address: Address
) -> None:
    await begun(store, 2)
    sql(
        address,
        """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE application_name LIKE 'headway-batches-%'""",
    )
    assert await succeeds(store.hold)
    assert not await succeeds(other.hold)
    assert await store.record(BATCH.id, 1, True, b"x")


async def test_a_lease_that_ended_without_another_holder_goes_on(store: PostgresStore) -> None:
    await begun(store, 1)
    await asyncio.sleep(LEASE_S + 0.1)
    assert await store.record(BATCH.id, 1, True, b"x")
    assert await store.hold()


# ---- a server that ends, or hangs


async def test_calls_fail_while_the_server_is_away_then_succeed(
    own: server.PrivateServer, store: PostgresStore
) -> None:
    await begun(store, 2)
    await store.record(BATCH.id, 1, True, b"x")
    own.stop(signal.SIGQUIT)
    new = replace(FILE, id="file-2")
    calls: list[Awaitable[Any]] = [
        store.hold(),
        store.files("alpha", None, 9),
        store.begin_file(new),
        store.append(FILE.id, 0, b"x"),
        store.record(BATCH.id, 2, True, b"x"),
        store.add_batch(BATCH, 9),
        store.cancel("a", BATCH.id, 1.0),
    ]
    for call in calls:
        with pytest.raises(HeadwayError, match="The store of files and batches is out") as caught:
            await call
        assert caught.value.status == 503
        assert caught.value.kind == "server_error"
        assert str(own.port) not in str(caught.value), "it goes to clients"
    await store.discard(new.id)  # raises nothing
    own.start()
    await held(store)
    batch = await store.batch("alpha", BATCH.id)
    assert batch is not None
    assert batch.state == "in_progress"
    assert await store.record(BATCH.id, 2, True, b"y")
    assert [file.id for file in await store.files("alpha", None, 9)] == [FILE.id]


async def test_a_server_that_hangs_is_told_in_time(own: server.PrivateServer, store: PostgresStore) -> None:
    await add(store)
    own.pause()
    began = time.monotonic()
    try:
        calls = await asyncio.gather(*(store.file("alpha", FILE.id) for _ in range(9)), return_exceptions=True)
        assert [call.status for call in calls if isinstance(call, HeadwayError)] == [503] * 9
        assert time.monotonic() - began < 10
    finally:
        own.resume()
    assert await succeeds(lambda: content(store, FILE.id)) == b"x" * 10


async def test_closing_without_a_server_ends(own: server.PrivateServer, address: Address) -> None:
    store = await asyncio.to_thread(PostgresStore, address, 60.0)
    await begun(store, 1)
    own.stop()
    await asyncio.wait_for(store.close(), 20)
    with pytest.raises(HeadwayError, match="it is closed"):
        await store.hold()
    own.start()


# ---- answers that are lost


async def test_a_batch_whose_outcome_is_unknown_is_cancelled(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was told 503, and may send it again."""
    await add(store)
    server.lose(store, "_after_undo", monkeypatch)
    with pytest.raises(HeadwayError, match="is out"):
        await store.add_batch(BATCH, 9)
    (found,) = await succeeds(store.open_batches)
    assert found.state == "cancelling"


async def test_a_file_whose_outcome_is_unknown_is_not_listed(
    store: PostgresStore, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.begin_file(FILE)
    await store.append(FILE.id, 0, b"x" * 10)
    server.lose(store, "_after_undo", monkeypatch)
    with pytest.raises(HeadwayError, match="is out"):
        await store.add_file(FILE, ROOM)
    await store.discard(FILE.id)
    assert await succeeds(lambda: store.files("alpha", None, 9)) == []
    await store.hold()
    await store.sweep()
    assert (count(address, "files"), count(address, "chunks")) == (0, 0)


async def test_a_line_whose_end_is_unknown_has_it_once(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await begun(store, 1)
    server.lose(store, "_after_undo", monkeypatch)
    with pytest.raises(HeadwayError, match="is out"):
        await store.record(BATCH.id, 1, True, b"first")
    assert not await succeeds(lambda: store.record(BATCH.id, 1, True, b"again"))
    batch = await store.batch("alpha", BATCH.id)
    assert batch is not None
    assert (batch.completed, batch.failed) == (1, 0)


async def test_the_end_of_a_batch_that_is_lost_counts(
    store: PostgresStore, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(store, 1)
    await store.close_lines(BATCH.id, CANCELLED)
    whole, seen = store.end, list[Any]()

    async def end(*args: Any, **named: Any) -> None:
        seen.append(named["error"])
        server.lose(store, "_after_undo", monkeypatch)
        await whole(*args, **named)

    store.end = end  # type: ignore[method-assign]
    with pytest.raises(HeadwayError, match="is out"):
        await conclude(store, BATCH)
    assert await succeeds(store.open_batches) == []
    assert await custom_ids(store, seen[0].id) == ["c1"]
    await held(store)
    await store.sweep()
    assert count(address, "lines") == 0
    assert await custom_ids(store, seen[0].id) == ["c1"]
    with pytest.raises(HeadwayError, match="ended already"):
        await whole(BATCH.id, "completed", 9.0)


# ---- what is left behind


async def test_what_killed_gateways_left_is_swept(store: PostgresStore, address: Address) -> None:
    await add(store)
    for name in ("file-dead", "file-alive", "file-deleted"):
        await store.begin_file(replace(FILE, id=name))
        await store.append(name, 0, b"x" * 3 * PIECE)
    await store.add_file(replace(FILE, id="file-deleted", size=3 * PIECE), ROOM)
    old = "clock_timestamp() - make_interval(secs => $1)"
    sql(address, f"UPDATE {{s}}.files SET grown = {old} WHERE id = 'file-dead'", STALE_S + 1)
    sql(address, "UPDATE {s}.files SET state = 'gone' WHERE id = 'file-deleted'")
    assert await store.hold()
    await store.sweep()
    left = {row[0] for row in sql(address, "SELECT id FROM {s}.files")}
    assert left == {FILE.id, "file-alive"}
    assert {row[0] for row in sql(address, "SELECT DISTINCT file FROM {s}.chunks")} == left
    with pytest.raises(HeadwayError, match="given up"):
        await store.append("file-dead", 3 * PIECE, b"x")


async def test_uploads_to_other_gateways_count(store: PostgresStore, other: PostgresStore) -> None:
    await store.begin_file(FILE)
    await store.append(FILE.id, 0, b"x" * 9000)
    assert (await store.used("alpha"), await other.used("alpha")) == (0, 9000)
    assert await other.used("beta") == 0
    await store.discard(FILE.id)
    assert await other.used("alpha") == 0


async def test_two_uploads_do_not_exceed_the_limit_together(store: PostgresStore, other: PostgresStore) -> None:
    files = [StoredFile(f"file-{i}", "alpha", "x", "batch", 6000, 1.0) for i in range(2)]
    for one, file in zip((store, other), files, strict=True):
        await one.begin_file(file)
        await one.append(file.id, 0, b"x" * 6000)
    ends = await asyncio.gather(
        *(one.add_file(file, 10_000) for one, file in zip((store, other), files, strict=True)), return_exceptions=True
    )
    assert sorted(type(end) for end in ends if end is not None) == [RequestError]


async def test_a_file_that_is_deleted_while_a_batch_is_made_of_it(store: PostgresStore, other: PostgresStore) -> None:
    for i in range(10):
        file, batch = replace(FILE, id=f"file-{i}"), replace(BATCH, id=f"b{i}", input_file=f"file-{i}")
        await add(store, file)
        ends = await asyncio.gather(
            store.add_batch(batch, 99), other.delete_file("alpha", file.id), return_exceptions=True
        )
        made, deleted = await other.batch("alpha", batch.id), await store.file("alpha", file.id) is None
        assert (made is None) == deleted, ends


async def test_what_waits_for_no_disk_leaves_the_rest_durable(store: PostgresStore) -> None:
    await begun(store, 1)
    await store.record(BATCH.id, 1, True, b"x")
    assert await store.value("SHOW synchronous_commit") == "on"


# ---- tables


async def test_a_queue_that_was_made_before_gets_the_tables(address: Address) -> None:
    await (await asyncio.to_thread(PostgresBroker, address, "A")).close()
    for _ in range(2):
        store = await asyncio.to_thread(PostgresStore, address, LEASE_S)
        assert await store.open_batches() == []
        await store.close()


async def test_gateways_that_start_together_make_them_once(address: Address) -> None:
    stores = await asyncio.gather(*(asyncio.to_thread(PostgresStore, address, LEASE_S) for _ in range(6)))
    assert [await store.hold() for store in stores].count(True) == 1
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_closed_store_leaves_no_session(address: Address) -> None:
    store = await asyncio.to_thread(PostgresStore, address, LEASE_S)
    await store.begin_file(FILE)
    await store.close()
    found = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'headway-batches-%'"
    deadline = time.monotonic() + 5
    while sql(address, found)[0][0]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_many_lines_are_closed_and_deleted_in_parts(store: PostgresStore, address: Address) -> None:
    lines = [Line(number, number * 10, 9, f"c{number}") for number in range(1, 2501)]
    assert await store.hold()
    await add(store)
    await store.add_batch(BATCH, 1)
    await store.add_lines(BATCH.id, lines)
    assert await store.begin(BATCH.id, 2.0) == 2500
    assert await store.close_lines(BATCH.id, CANCELLED) == 2500
    await conclude(store, BATCH)
    batch = await store.batch("alpha", BATCH.id)
    assert batch is not None
    assert batch.failed == 2500
    assert await custom_ids(store, batch.error_file) == [line.custom_id for line in lines]
    assert count(address, "lines") == 0


async def test_a_slow_server_gets_smaller_parts(store: PostgresStore, address: Address) -> None:
    """60 lines of 10 ms each are not done within 0.4 s, 30 are; one that takes longer alone is an error."""
    sql(
        address,
        "CREATE FUNCTION {s}.slow() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_sleep(0.01); RETURN coalesce(new, old); END'",
    )
    sql(
        address,
        "CREATE TRIGGER slow BEFORE INSERT OR UPDATE OR DELETE ON {s}.lines FOR EACH ROW EXECUTE FUNCTION {s}.slow()",
    )
    await store.close()
    impatient = await asyncio.to_thread(PostgresStore, replace(address, timeout_s=0.4), LEASE_S)
    try:
        assert await impatient.hold()
        await add(impatient)
        await impatient.add_batch(BATCH, 1)
        await impatient.add_lines(BATCH.id, [Line(number, number * 10, 9, "c") for number in range(1, 61)])
        assert await impatient.begin(BATCH.id, 2.0) == 60
        assert await impatient.close_lines(BATCH.id, CANCELLED) == 60
        await impatient.clear_lines(BATCH.id)
        assert count(address, "lines") == 0
        sql(
            address,
            "CREATE OR REPLACE FUNCTION {s}.slow() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_sleep(1); RETURN new; END'",
        )
        with pytest.raises(HeadwayError, match="is slow") as error:
            await impatient.add_lines(BATCH.id, [Line(1, 10, 9, "c"), Line(2, 20, 9, "c")])
        assert error.value.status == 503
    finally:
        await impatient.close()
