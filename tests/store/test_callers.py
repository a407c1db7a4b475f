"""Callers of a durable broker, whose calls run in a thread of its own: cancelled, gone, or late."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from tests.store.stores import FAR, STORES, Connect, gateways, job, take_ids

from headway.errors import HeadwayError


@pytest.fixture(params=[kind for kind in STORES if kind != "memory"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    return STORES[request.param](tmp_path)


async def test_close_carries_out_what_was_asked(connect: Connect) -> None:
    broker, ids = connect("A"), [f"{i:03}" for i in range(600)]  # more than two commits take
    await broker.renew(1.0)
    puts = [asyncio.create_task(broker.put(job(id))) for id in ids]
    await asyncio.sleep(0)
    await asyncio.gather(broker.close(), *puts)
    async with gateways(connect, "B") as (other,):
        assert await take_ids(other, limit=1000) == ids


async def test_a_closed_broker_says_so(connect: Connect) -> None:
    broker = connect("A")
    await broker.renew(FAR)
    await broker.close()
    await broker.close()
    for late in (broker.put(job()), broker.get("a"), broker.take(1.0, 1)):
        with pytest.raises(HeadwayError, match="it is closed") as error:
            await late
        assert error.value.status == 503


async def test_a_cancelled_caller_delays_no_other(connect: Connect) -> None:
    async with gateways(connect, "A") as (broker,):
        tasks = [asyncio.create_task(broker.put(job(str(i)))) for i in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends].count(type(None)) == 9
        # Calls keep their order, so a caller that gives up can close what may have been stored.
        await broker.fail("3", "cancelled", 1.0)
        stored = await broker.get("3")
        assert stored is None or stored.state == "failed"


def test_callers_of_a_dead_loop_delay_no_other(connect: Connect) -> None:
    broker = connect("A")

    async def leave() -> None:
        await broker.renew(FAR)
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
