"""What may fail around a PostgreSQL broker: gateways are killed, a server dies, hangs or comes back.

The server syncs its log (fsync is on); what is killed here are processes, so that this shows that no call
returns before its commit.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.helpers import postgres as server
from tests.helpers.postgres import succeeds
from tests.store.killed import PUTTERS, Place, grown, kill_one_of_two, killed, rounds, states
from tests.store.stores import FAR, gateways, job, take_ids

from headway.errors import HeadwayError
from headway.store.postgres.link import Address, Lost
from headway.store.queue.port import Charge
from headway.store.queue.postgres import PostgresBroker


@pytest.fixture(scope="module")
def own() -> Iterator[server.PrivateServer]:
    """A server that the tests of this module stop, kill and pause."""
    with server.own() as one:
        yield one


@pytest.fixture
def address(own: server.PrivateServer) -> Address:
    return replace(server.fresh(url=own.url), timeout_s=1.0)


# ---- kill -9 of gateways


def test_what_was_printed_survives_kill_9(tmp_path: Path) -> None:
    rounds(Place("postgres", server.the_url(), server.fresh().schema), tmp_path)


def test_a_gateway_is_killed_beside_one_that_goes_on(tmp_path: Path) -> None:
    place = Place("postgres", server.the_url(), server.fresh().schema)
    end_lease = f"UPDATE {place.schema}.leases SET until = 5 WHERE owner = 'killed'"
    kill_one_of_two(place, tmp_path, lambda: server.run_sql(end_lease, url=place.where))


# ---- a server that is restarted, killed, paused


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["restart", "crash"])
def test_a_server_goes_in_mid_work(own: server.PrivateServer, tmp_path: Path, how: int) -> None:
    """Every call that returned has its place afterwards; what failed with 503 is there once or not at all."""
    place, said = Place("postgres", own.url, server.fresh(url=own.url).schema), tmp_path / "said"
    with killed(place, said, "g"):
        for _ in range(2):
            time.sleep(0.1)
            own.stop(how)
            time.sleep(0.3)
            own.start()
            grown(said)
    printed = states(said)
    refused = {id for id, state in printed.items() if state == "refused"}
    assert refused, "the server was not missed"
    asyncio.run(audit_refused(place, refused))
    everything = said.read_text().splitlines()
    # The put of some that were refused has returned before: these are owed an end like all others.
    accepted = {line.split()[1] for line in everything if line.startswith("open ")}
    asyncio.run(audit_accepted(place, accepted, printed))


async def audit_refused(place: Place, refused: set[str]) -> None:
    broker = place.connect("reader")
    for id in refused:
        found = await broker.get(id)
        assert found is None or found.owner == "g"
    await broker.close()


async def audit_accepted(place: Place, accepted: set[str], printed: dict[str, str]) -> None:
    broker = place.connect("after")
    await broker.renew(FAR)
    taken = [one.id for one in await broker.take(10.0, 100_000)]
    assert len(taken) == len(set(taken))
    for id in accepted:
        found = await broker.get(id)
        assert found is not None, f"{id} was accepted and is lost"
        assert (found.state == "open") == (id in taken)
        if printed[id] in ("done", "failed"):
            assert found.state == printed[id]
    assert len(set(taken) - accepted) <= PUTTERS, "puts that failed are undone"
    await broker.close()


async def test_calls_fail_while_the_server_is_away_then_succeed(
    own: server.PrivateServer, broker: PostgresBroker
) -> None:
    await broker.put(job("before"))
    assert broker.problem() is None
    own.stop()
    for call in (broker.put(job("b")), broker.get("before"), broker.renew(FAR), broker.take(1.0, 1)):
        with pytest.raises(HeadwayError, match="The broker is out") as error:
            await call
        assert error.value.status == 503
        assert str(own.port) not in str(error.value), "it goes to clients"
    assert broker.problem()
    own.start()
    await succeeds(lambda: broker.put(job("after")))
    assert await succeeds(lambda: broker.get("before")) == job("before", owner="A")
    assert broker.problem() is None, "both connections are up again"
    assert await broker.get("b") is None


async def test_a_server_that_hangs_is_told_in_time(own: server.PrivateServer, broker: PostgresBroker) -> None:
    await broker.put(job("before"))
    own.pause()
    began = time.monotonic()
    try:
        with pytest.raises(HeadwayError, match="The broker is out"):
            await broker.put(job("hung"))
        assert time.monotonic() - began < 10
    finally:
        own.resume()
    assert await succeeds(lambda: broker.attempt("before")) == 1
    assert await broker.get("hung") is None, "a put that failed is undone"
    await broker.put(job("hung"))


async def test_closing_without_a_server_ends(own: server.PrivateServer, address: Address) -> None:
    broker = PostgresBroker(address, "A")
    await broker.renew(10.0)
    await broker.put(job())
    own.stop()
    await asyncio.wait_for(broker.close(), 20)
    own.start()
    async with gateways(lambda owner: PostgresBroker(address, owner), "B") as (other,):
        assert await take_ids(other, now=9.0) == [], "its lease goes on, since it could not be ended"
        assert await take_ids(other, now=10.0) == ["a"]


async def test_tables_that_are_gone_are_told_and_not_made_anew(
    own: server.PrivateServer, address: Address, broker: PostgresBroker
) -> None:
    """An empty database behind the address, after a failover to a wrong place, must not look like a queue."""
    await broker.put(job())
    server.run_sql(f"ALTER SCHEMA {address.schema} RENAME TO aside_{address.schema}", url=own.url)
    own.stop()
    own.start()
    await asyncio.sleep(0.5)
    with pytest.raises(HeadwayError, match="The broker is out"):
        await broker.put(job("b"))
    assert broker.problem()
    server.run_sql(f"ALTER SCHEMA aside_{address.schema} RENAME TO {address.schema}", url=own.url)
    await succeeds(lambda: broker.put(job("b")))
    assert await broker.get("a") == job(owner="A")


# ---- answers that are lost


async def test_a_put_whose_outcome_is_unknown_is_undone(
    broker: PostgresBroker, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.put(job("known"))
    server.lose(broker, "_apply", monkeypatch)
    puts = (broker.put(job("lost")), broker.put(job("known")))
    ends = await asyncio.gather(*puts, return_exceptions=True)
    assert [end.status for end in ends if isinstance(end, HeadwayError)] == [503, 503]
    await succeeds(lambda: broker.put(job("next")))
    found = [await broker.get(id) for id in ("lost", "known", "next")]
    assert [one is not None for one in found] == [False, True, True]
    rows = server.run_sql(f"SELECT id FROM {address.schema}.jobs ORDER BY seq", url=address.url)
    assert [row[0] for row in rows] == ["known", "next"]


async def test_a_put_that_is_undone_costs_nothing(
    broker: PostgresBroker, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.lose(broker, "_apply_charged", monkeypatch)
    with pytest.raises(HeadwayError, match="The broker is out"):
        await broker.put(job("lost"), [Charge("x", 3.0, 10.0, 1.0, 0.0)])
    await succeeds(lambda: broker.put(job("next"), [Charge("x", 4.0, 10.0, 1.0, 0.0)]))
    rows = server.run_sql(f"SELECT id, units FROM {address.schema}.spent", url=address.url)
    assert [tuple(row) for row in rows] == [("next", 4.0)]


async def test_a_put_that_another_gateway_has_closed_costs_nothing(
    broker: PostgresBroker, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client got a 503; then the server was away for longer than the lease of its gateway."""
    await broker.renew(10.0)
    server.lose(broker, "_apply_charged", monkeypatch)
    with pytest.raises(HeadwayError, match="The broker is out"):
        await broker.put(job("lost"), [Charge("x", 3.0, 10.0, 1.0, 0.0)])
    async with gateways(lambda owner: PostgresBroker(address, owner), "B") as (other,):
        assert await take_ids(other, now=10.0) == ["lost"]
        assert await other.fail("lost", "client_gone", 11.0)
        await succeeds(lambda: broker.put(job("next"), [Charge("x", 4.0, 10.0, 1.0, 0.0)]))
        rows = server.run_sql(f"SELECT id, units FROM {address.schema}.spent", url=address.url)
        assert [tuple(row) for row in rows] == [("next", 4.0)]


async def test_what_a_lost_take_took_is_taken_again(broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a living gateway would hold jobs that it does not know of."""
    for id in "abc":
        await broker.put(job(id))
        await broker.give_back(id)
    server.lose(broker, "_apply", monkeypatch)
    with pytest.raises(HeadwayError, match="The broker is out"):
        await broker.take(1.0, 2)
    assert await succeeds(lambda: take_ids(broker)) == ["a", "b", "c"]


async def test_taken_jobs_that_cannot_be_read_are_taken_again(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.put(job())
    await broker.give_back("a")
    with monkeypatch.context() as patch:

        async def unread(connection: asyncpg.Connection, taken: list[int]) -> list[Any]:
            raise Lost("taken jobs cannot be read")

        patch.setattr(broker, "_bodies", unread)
        with pytest.raises(HeadwayError, match="taken jobs cannot be read"):
            await broker.take(1.0, 1)
    assert await take_ids(broker) == ["a"]


async def test_after_a_lost_renewal_the_lease_may_have_begun_anew(
    broker: PostgresBroker, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await broker.renew(10.0)
    async with gateways(lambda owner: PostgresBroker(address, owner), "B") as (other,):
        await other.take(10.0, 1)  # ends the lease
        server.lose(broker, "_apply", monkeypatch)
        with pytest.raises(HeadwayError, match="The broker is out"):
            await broker.renew(20.0)
        assert not await succeeds(lambda: broker.renew(20.0)), "the lost one would have said so"
        assert await broker.renew(30.0)


async def test_a_session_that_was_given_up_commits_nothing_after_the_next_has_begun(
    broker: PostgresBroker, address: Address
) -> None:
    """Its put waits for a lock while the gateway gives it up, and would come after the calls made later."""
    aside = await asyncpg.connect(address.url)
    try:
        transaction = aside.transaction()
        await transaction.start()
        await aside.execute(f"LOCK TABLE {address.schema}.jobs IN EXCLUSIVE MODE")
        late = asyncio.create_task(broker.put(job("late")))
        await asyncio.sleep(0.3)
        broker._loop.call_soon_threadsafe(broker._writer.drop, "given up by the test")
        with pytest.raises(HeadwayError, match=r"given up|has ended"):
            await late
        await asyncio.sleep(0.5)
        await transaction.rollback()
        await succeeds(lambda: broker.put(job("next")))
        await asyncio.sleep(0.2)
        assert await broker.get("late") is None
    finally:
        await aside.close()


async def test_lost_sessions_are_ended(broker: PostgresBroker, address: Address) -> None:
    """What they are sent may arrive late, over a network that was cut."""
    (name,) = [
        row[0]
        for row in server.run_sql(
            "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'headway-write-%'",
            url=address.url,
        )
    ]
    lost = await asyncpg.connect(address.url, server_settings={"application_name": name})
    broker._loop.call_soon_threadsafe(broker._writer.drop, "given up by the test")
    await succeeds(lambda: broker.put(job()))
    with pytest.raises((asyncpg.PostgresConnectionError, asyncpg.AdminShutdownError, asyncpg.InterfaceError)):
        await lost.fetch("SELECT 1")


async def test_a_closed_broker_leaves_no_session(address: Address) -> None:
    broker = PostgresBroker(address, "A")
    await broker.renew(FAR)
    await broker.close()
    ended = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'headway-%'"
    assert server.run_sql(ended, url=address.url)[0][0] == 0
