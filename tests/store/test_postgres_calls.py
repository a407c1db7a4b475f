"""The PostgreSQL broker at work: its sessions, the commits that calls share, the values that it holds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from tests.helpers import postgres as server
from tests.store.stores import gateways, job

from headway.errors import HeadwayError
from headway.store.queue import postgres as module
from headway.store.queue import postgres_calls as calls
from headway.store.queue import postgres_schema as schema_module
from headway.store.queue.port import Job
from headway.store.queue.postgres import PostgresBroker
from headway.store.queue.postgres_link import Address

# ---- sessions


async def test_sessions_are_set_up_so_that_a_commit_lasts_and_reads_are_fresh() -> None:
    address = server.fresh(server.private().url)
    user = "careless" + address.schema[-6:]
    server.run_sql(f"CREATE ROLE {user} LOGIN SUPERUSER PASSWORD 'careless-word'", url=address.url)
    for setting in ("synchronous_commit = off", "default_transaction_isolation = 'serializable'"):
        server.run_sql(f"ALTER ROLE {user} SET {setting}", url=address.url)
    own = replace(address, url=server.private().url_of(user, "careless-word"))
    connection = await own.connect("test")
    try:
        for name, value in (("synchronous_commit", "on"), ("default_transaction_isolation", "read committed")):
            assert await connection.fetchval(f"SHOW {name}") == value
    finally:
        await connection.close()


async def test_a_take_reads_no_job_that_is_held(address: Address, broker: PostgresBroker) -> None:
    connection = await address.connect("test")
    try:
        statement = schema_module.FREE.replace("{s}", address.schema)
        rows = await connection.fetch("EXPLAIN " + statement.replace("$1", "'A'::text").replace("$2", "10::bigint"))
    finally:
        await connection.close()
    plan = "\n".join(row[0] for row in rows)
    assert plan.count("using held on jobs") == 2
    assert "Seq Scan on jobs" not in plan
    assert "Bitmap" not in plan
    assert plan.count("Sort Key") == 1, "only the few first jobs are sorted"


async def test_a_trim_reads_kept_jobs_alone(address: Address, broker: PostgresBroker) -> None:
    connection = await address.connect("test")
    try:
        statement = schema_module.TOO_MUCH.replace("{s}", address.schema)
        rows = await connection.fetch("EXPLAIN " + statement.replace("$1", "1").replace("$2", "1"))
    finally:
        await connection.close()
    plan = "\n".join(row[0] for row in rows)
    assert "using kept on jobs" in plan
    assert "Seq Scan on jobs" not in plan


async def commits(address: Address) -> list[int]:
    """Return how many jobs each transaction has put."""
    connection = await address.connect("test")
    try:
        rows = await connection.fetch(f"SELECT count(*) FROM {address.schema}.jobs GROUP BY xmin::text")
    finally:
        await connection.close()
    return [count for (count,) in rows]


async def test_calls_that_come_together_share_commits(address: Address, broker: PostgresBroker) -> None:
    await asyncio.gather(*(broker.put(job(str(i))) for i in range(module.GROUP)))
    counts = await commits(address)
    assert len(counts) < module.GROUP / 4
    assert sum(counts) == module.GROUP


async def test_a_group_ends_with_its_bodies(address: Address, broker: PostgresBroker) -> None:
    await asyncio.gather(*(broker.put(replace(job(str(i)), body=bytes(3 * 2**20))) for i in range(20)))
    counts = await commits(address)
    assert max(counts) <= 3
    assert sum(counts) == 20


async def test_deadlocked_groups_are_tried_again_alone(broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, apply = list[bool](), broker._apply

    async def unlucky(group: list[Any], alone: bool, connection: Any) -> list[Any]:
        tries.append(alone)
        if len(tries) == 1:
            raise asyncpg.DeadlockDetectedError("deadlock detected")
        return await apply(group, alone, connection)

    monkeypatch.setattr(broker, "_apply", unlucky)
    await broker.put(job())
    assert tries == [False, True], "else it may meet the same rows again"


async def test_two_gateways_that_count_attempts_crosswise_both_succeed(
    address: Address, broker: PostgresBroker
) -> None:
    """Their groups lock the same rows in opposite orders."""
    async with gateways(lambda owner: PostgresBroker(address, owner), "B") as (other,):
        ids = [str(i) for i in range(40)]
        await asyncio.gather(*(broker.put(job(id)) for id in ids))
        for _ in range(5):
            await asyncio.gather(*(broker.attempt(id) for id in ids), *(other.attempt(id) for id in reversed(ids)))
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
        broker.put(job("a")), broker.put(bad), broker.put(job("b")), broker.get(bad.id), return_exceptions=True
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
