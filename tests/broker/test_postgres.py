"""The PostgreSQL broker's own behaviour: opening, several schemas, values, commits that calls share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from tests.broker.stores import FAR, gateways, job, take_ids
from tests.helpers import postgres as server

from headway import clock
from headway.broker import open_broker
from headway.broker import postgres as module
from headway.broker import postgres_calls as calls
from headway.broker import postgres_schema as schema_module
from headway.broker.port import Job
from headway.broker.postgres import PostgresBroker
from headway.broker.postgres_link import Address
from headway.config import Broker, Postgres
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError, HeadwayError


@pytest.fixture
def address() -> Address:
    return server.fresh()


@pytest.fixture
async def broker(address: Address) -> AsyncIterator[PostgresBroker]:
    broker = PostgresBroker(address, "A")
    await broker.renew(FAR)
    yield broker
    await broker.close()


def refusal(address: Address, **more: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        PostgresBroker(address, "A", **more)
    assert server.PASSWORD not in str(caught.value)
    return caught.value


def sql(address: Address, statement: str, *values: Any) -> list[Any]:
    return server.run_sql(statement.replace("{s}", address.schema), *values, url=address.url)


# ---- opening


def test_a_server_that_is_not_there(address: Address) -> None:
    port = free_port()
    seen = refusal(replace(address, url=f"postgresql://u:{server.PASSWORD}@127.0.0.1:{port}/postgres"))
    assert f"PostgreSQL (127.0.0.1:{port}/postgres) cannot be reached" in seen.message
    assert "Start it" in seen.hint


def test_a_wrong_password_is_told_without_it() -> None:
    own = server.private()
    address = replace(server.fresh(), url=own.url_of("headway", "very-wrong"))
    seen = refusal(address)
    assert "password authentication failed" in seen.message
    assert "Correct the password" in seen.hint
    assert "very-wrong" not in str(seen) + repr(address)
    assert seen.param == "broker.postgres.url"


def test_a_database_that_is_missing() -> None:
    own = server.private()
    seen = refusal(replace(server.fresh(), url=own.url_of("headway", server.PASSWORD, "nowhere")))
    assert 'database "nowhere" does not exist' in seen.message
    assert "createdb" in seen.hint


@pytest.mark.parametrize("url", ["mysql://u:correct-horse@h/db", "postgresql://u:correct-horse@h:port/db"])
def test_what_is_no_url_is_not_quoted(url: str) -> None:
    seen = refusal(Address(url, "headway", 5.0))
    assert "no URL of a PostgreSQL server" in seen.message
    assert "postgresql://USER" in seen.hint


def test_a_server_that_does_not_answer_in_time() -> None:
    own = server.Server()
    own.start()
    try:
        own.pause()
        began = time.monotonic()
        seen = refusal(Address(own.url, "headway", 0.5))
        assert time.monotonic() - began < 5
        assert "cannot be reached: no answer in time" in seen.message
    finally:
        own.resume()
        own.remove()


def test_rights_that_are_missing() -> None:
    own = server.private()
    owner, guest = server.fresh(own.url), own.url_of("guest", "guests-word")
    sql(owner, "DO $$ BEGIN CREATE ROLE guest LOGIN PASSWORD 'guests-word';"
        " EXCEPTION WHEN duplicate_object THEN NULL; END $$")  # fmt: skip
    seen = refusal(replace(owner, url=guest))
    assert "permission denied for database" in seen.message
    assert "GRANT CREATE" in seen.hint
    asyncio.run(PostgresBroker(owner, "A").close())
    assert "permission denied for schema" in refusal(replace(owner, url=guest)).message
    sql(owner, "GRANT USAGE ON SCHEMA {s} TO guest")
    sql(owner, "GRANT SELECT ON ALL TABLES IN SCHEMA {s} TO guest")
    assert "may not change the tables" in refusal(replace(owner, url=guest)).message
    sql(owner, "GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {s} TO guest")
    asyncio.run(one_job(replace(owner, url=guest)))


async def one_job(address: Address) -> None:
    async with gateways(lambda owner: PostgresBroker(address, owner), "A") as (broker,):
        await broker.put(job())
        assert await broker.done("a", b"r", 1.0)
        assert await broker.forget(2.0) == 1


def test_a_newer_schema_is_refused(address: Address) -> None:
    asyncio.run(PostgresBroker(address, "A").close())
    sql(address, "UPDATE {s}.headway_meta SET version = 9")
    seen = refusal(address)
    assert seen.message == f"The schema {address.schema} has version 9; this Headway knows 1."
    assert "another schema" in seen.hint


def test_another_programs_schema_is_refused_and_left_alone(address: Address) -> None:
    sql(address, "CREATE SCHEMA {s}")
    sql(address, "CREATE TABLE {s}.orders ()")
    seen = refusal(address)
    assert "another program's tables, such as orders" in seen.message
    tables = sql(address, "SELECT tablename FROM pg_tables WHERE schemaname = $1", address.schema)
    assert [row[0] for row in tables] == ["orders"]


def test_a_schema_that_postgresql_keeps_for_itself(address: Address) -> None:
    seen = refusal(replace(address, schema="pg_mine"))
    assert "unacceptable schema name" in seen.message
    assert "broker.postgres.schema" in seen.hint


def test_a_database_that_cannot_hold_every_text() -> None:
    own = server.private()
    address = server.fresh(own.url)
    sql(address, "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    seen = refusal(replace(address, url=own.url_of("headway", server.PASSWORD, "latin")))
    assert "encoding LATIN1" in seen.message
    assert "--encoding=UTF8" in seen.hint


def test_a_clock_that_is_minutes_off(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda: now() - 300)
    seen = refusal(address, most_apart_s=10.0)
    assert "300.0 s behind PostgreSQL's" in seen.message
    assert "Synchronize" in seen.hint
    monkeypatch.setattr(clock, "now", now)
    asyncio.run(PostgresBroker(address, "A", most_apart_s=10.0).close())


async def test_gateways_that_start_together_make_one_schema(address: Address) -> None:
    owners = [str(i) for i in range(6)]
    brokers = await asyncio.gather(*(asyncio.to_thread(PostgresBroker, address, owner) for owner in owners))
    await asyncio.gather(*(broker.renew(FAR) for broker in brokers))
    await asyncio.gather(*(broker.put(job(broker.owner)) for broker in brokers))
    found = await asyncio.gather(*(brokers[0].get(owner) for owner in owners))
    assert [one.owner for one in found if one] == owners
    await asyncio.gather(*(broker.close() for broker in brokers))


async def test_open_broker_opens_what_is_configured(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_URL", address.url)
    config = Broker("postgres", postgres=Postgres("env:SOME_URL", address.schema))
    first, second = open_broker(config), open_broker(config)
    assert isinstance(first, PostgresBroker)
    assert first.on_disk
    assert first.owner != second.owner
    await first.renew(FAR)
    await first.put(job())
    assert await second.get("a") == job(owner=first.owner)
    await asyncio.gather(first.close(), second.close())
    monkeypatch.delenv("SOME_URL")
    with pytest.raises(ConfigError, match="SOME_URL, which is not set"):
        open_broker(config)


async def test_two_schemas_are_two_queues(broker: PostgresBroker) -> None:
    await broker.put(job())
    await broker.give_back("a")
    async with gateways(lambda owner: PostgresBroker(server.fresh(), owner), "A") as (other,):
        assert await other.get("a") is None
        assert await take_ids(other) == []
        await other.put(job(arrival=9.0))
    assert await take_ids(broker) == ["a"]


# ---- sessions


async def test_sessions_are_set_up_so_that_a_commit_lasts_and_reads_are_fresh() -> None:
    address = server.fresh(server.private().url)
    user = "careless" + address.schema[-6:]
    sql(address, f"CREATE ROLE {user} LOGIN SUPERUSER PASSWORD 'careless-word'")
    for setting in ("synchronous_commit = off", "default_transaction_isolation = 'serializable'"):
        sql(address, f"ALTER ROLE {user} SET {setting}")
    own = replace(address, url=server.private().url_of(user, "careless-word"))
    connection = await own.connect("test")
    try:
        for name, value in (
            ("synchronous_commit", "on"),
            ("default_transaction_isolation", "read committed"),
        ):
            assert await connection.fetchval(f"SHOW {name}") == value
    finally:
        await connection.close()


async def test_a_take_reads_no_job_that_is_held(address: Address, broker: PostgresBroker) -> None:
    connection = await address.connect("test")
    try:
        statement = schema_module.FREE.replace("{s}", address.schema)
        rows = await connection.fetch(
            "EXPLAIN " + statement.replace("$1", "'A'::text").replace("$2", "10::bigint")
        )
    finally:
        await connection.close()
    plan = "\n".join(row[0] for row in rows)
    assert plan.count("using held on jobs") == 2
    assert "Seq Scan on jobs" not in plan
    assert "Bitmap" not in plan
    assert plan.count("Sort Key") == 1, "only the few first jobs are sorted"


async def test_calls_that_come_together_share_commits(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    apply = broker._apply

    async def counted(group: list[Any], connection: Any) -> list[Any]:
        groups.append(len(group))
        return await apply(group, connection)

    monkeypatch.setattr(broker, "_apply", counted)
    before = await xids(broker)
    await asyncio.gather(*(broker.put(job(str(i))) for i in range(module.GROUP)))
    assert len(groups) < module.GROUP / 4
    assert await xids(broker) - before <= len(groups) + 8, "a group is one transaction"
    assert len([1 for i in range(module.GROUP) if await broker.get(str(i))]) == module.GROUP


async def xids(broker: PostgresBroker) -> int:
    """Return how many transactions that write the server has begun."""
    return int(await _aside("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"))


async def _aside(statement: str) -> Any:
    connection = await asyncpg.connect(server.the_url())
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def test_a_group_ends_with_its_bodies(broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GROUP_BYTES", 100)
    sizes: list[int] = []
    apply = broker._apply

    async def counted(group: list[Any], connection: Any) -> list[Any]:
        sizes.append(len(group))
        return await apply(group, connection)

    monkeypatch.setattr(broker, "_apply", counted)
    await asyncio.gather(*(broker.put(replace(job(str(i)), body=b"x" * 40)) for i in range(20)))
    assert max(sizes) <= 3
    assert sum(sizes) == 20


async def test_deadlocked_groups_are_tried_again(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [asyncpg.DeadlockDetectedError("deadlock detected")] * 2
    apply = broker._apply

    async def unlucky(group: list[Any], connection: Any) -> list[Any]:
        if failures:
            raise failures.pop()
        return await apply(group, connection)

    monkeypatch.setattr(broker, "_apply", unlucky)
    await broker.put(job())
    assert failures == []
    assert await broker.get("a") == job(owner="A")


async def test_two_gateways_that_count_attempts_crosswise_both_succeed(
    address: Address, broker: PostgresBroker
) -> None:
    """Their groups lock the same rows in opposite orders."""
    async with gateways(lambda owner: PostgresBroker(address, owner), "B") as (other,):
        ids = [str(i) for i in range(40)]
        await asyncio.gather(*(broker.put(job(id)) for id in ids))
        for _ in range(5):
            await asyncio.gather(
                *(broker.attempt(id) for id in ids), *(other.attempt(id) for id in reversed(ids))
            )
        jobs = await asyncio.gather(*(broker.get(id) for id in ids))
        assert {one.attempts for one in jobs if one} == {10}


# ---- values


@pytest.mark.parametrize(
    "bad",
    [
        job("x", arrival=float("nan")),
        job("\ud800"),
        replace(job("x"), request='{"a": "\udfff"}'),
        job("x", attempts=2**70),
        job("x" * 10_000_000),
    ],
    ids=["nan", "surrogate", "surrogate in json", "attempts", "long id"],
)
async def test_a_value_that_cannot_be_stored_hurts_its_caller_only(broker: PostgresBroker, bad: Job) -> None:
    if len(bad.id) > 9:
        bad = replace(bad, id="".join(chr(0x4E00 + i * 7919 % 20_000) for i in range(9000)))  # no pattern
    ends = await asyncio.gather(
        broker.put(job("a")),
        broker.put(bad),
        broker.put(job("b")),
        broker.get(bad.id),
        return_exceptions=True,
    )
    assert isinstance(ends[1], HeadwayError)
    assert (ends[0], ends[1].status, ends[2]) == (None, 400, None)
    assert ends[3] is None or (isinstance(ends[3], HeadwayError) and ends[3].status == 400)
    assert len(str(ends[1])) < 300, "the value is not quoted"
    assert [one.owner for id in "ab" if (one := await broker.get(id))] == ["A", "A"]
    with pytest.raises(HeadwayError, match="NaN"):
        await broker.take(float("nan"), 1)
    with pytest.raises(HeadwayError, match="NaN"):
        await broker.done("a", None, float("nan"))


@pytest.mark.parametrize("instant", [float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 0.1])
async def test_odd_instants_survive(broker: PostgresBroker, instant: float) -> None:
    await broker.put(job(arrival=instant))
    await broker.done("a", None, instant)
    got = await broker.get("a")
    assert got
    assert (got.arrival, got.finished) == (instant, instant)


@pytest.mark.parametrize("text", ["\0", "\ufdd0", "\ufdd00", "\ufdd01\0\ufdd0\0", "a\0b", "\U0010ffff\ufeff"])
async def test_texts_that_postgresql_has_no_character_for_survive(broker: PostgresBroker, text: str) -> None:
    odd = replace(job(text), tenant=text, path=text, request=text)
    await broker.put(odd)
    assert await broker.get(text) == replace(odd, owner="A")
    await broker.give_back(text)
    assert await broker.take(0.0, 1) == [replace(odd, owner="A")]
    await broker.fail(text, text, 1.0)
    got = await broker.get(text)
    assert got
    assert got.reason == text


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent(broker: PostgresBroker) -> None:
    large = bytes(calls.LARGEST + 1)  # zeros that take no memory
    for call in (broker.put(replace(job(), body=large)), broker.done("a", large, 1.0)):
        with pytest.raises(HeadwayError, match="larger than 512 MiB") as error:
            await call
        assert error.value.status == 400
    await broker.put(job())


async def test_large_bodies_survive(broker: PostgresBroker) -> None:
    body = bytes(range(256)) * 65536  # 16 MiB, more than a group's
    await asyncio.gather(*(broker.put(replace(job(id), body=body)) for id in "abc"))
    await broker.give_back("b")
    (taken,) = await broker.take(0.0, 9)
    assert taken.body == body
    assert await broker.done("b", body, 1.0)
    got = await broker.get("b")
    assert got
    assert (got.body, got.result) == (b"", body)
