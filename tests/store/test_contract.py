"""The contract of every broker: what is accepted is kept, ends once, and is held by one gateway."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.store.stores import FAR, STORES, Connect, gateways, job, take_ids

from headway.errors import HeadwayError
from headway.store.queue.keys import StoredKey
from headway.store.queue.port import AccountSpent, Broker, Charge


@pytest.fixture(params=STORES)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    return STORES[request.param](tmp_path)


@pytest.fixture
async def broker(connect: Connect) -> AsyncIterator[Broker]:
    async with gateways(connect, "A") as (broker,):
        yield broker


@pytest.fixture
async def two(connect: Connect) -> AsyncIterator[list[Broker]]:
    """Two gateways on one store, whose leases last until 10."""
    async with gateways(connect, "A", "B", until=10.0) as brokers:
        yield brokers


async def test_gateways_that_start_together_share_one_store(connect: Connect) -> None:
    owners = [str(i) for i in range(6)]
    brokers = await asyncio.gather(*(asyncio.to_thread(connect, owner) for owner in owners))
    await asyncio.gather(*(broker.renew(FAR) for broker in brokers))
    await asyncio.gather(*(broker.put(job(broker.owner)) for broker in brokers))
    found = await asyncio.gather(*(brokers[0].get(owner) for owner in owners))
    assert [one.owner for one in found if one] == owners
    await asyncio.gather(*(broker.close() for broker in brokers))


# ---- jobs


async def test_a_put_job_comes_back_as_it_was(broker: Broker) -> None:
    await broker.put(job(background=True, attempts=2))
    assert await broker.get("a") == job(background=True, attempts=2, owner="A")
    assert await broker.get("b") is None


async def test_changing_a_job_does_not_change_what_is_stored(two: list[Broker]) -> None:
    first, second = two
    mine = job()
    await first.put(mine)
    mine.attempts, mine.state = 7, "done"
    got = await first.get("a")
    assert got == job(owner="A")
    got.state = "done"
    for taken in await second.take(10.0, 1):
        taken.attempts = 9
    assert await first.get("a") == job(owner="B")


async def test_a_known_id_is_an_error_and_changes_nothing(broker: Broker) -> None:
    await broker.put(job())
    with pytest.raises(HeadwayError, match="'a' is stored already") as error:
        await broker.put(job(arrival=9.0))
    assert error.value.status == 409
    assert await broker.get("a") == job(owner="A")
    await broker.done("a", b"x", 2.0)
    with pytest.raises(HeadwayError, match="'a' is stored already"):
        await broker.put(job())
    got = await broker.get("a")
    assert got
    assert got.state == "done"


async def test_done_keeps_the_result_and_drops_the_body(broker: Broker) -> None:
    await broker.put(job())
    assert await broker.done("a", b"\x00answer", 5.0)
    end = replace(job(owner="A"), state="done", body=b"", result=b"\x00answer", finished=5.0)
    assert await broker.get("a") == end


async def test_fail_keeps_the_reason(broker: Broker) -> None:
    await broker.put(job())
    assert await broker.fail("a", "engine died", 5.0)
    end = replace(job(owner="A"), state="failed", body=b"", reason="engine died", finished=5.0)
    assert await broker.get("a") == end


@pytest.mark.parametrize("first", ["done", "fail"])
@pytest.mark.parametrize("second", ["done", "fail"])
async def test_a_job_ends_once(broker: Broker, first: str, second: str) -> None:
    end = {"done": lambda now: broker.done("a", b"r", now), "fail": lambda now: broker.fail("a", "r", now)}
    await broker.put(job())
    assert await end[first](2.0)
    ended = await broker.get("a")
    assert not await end[second](3.0)
    assert await broker.get("a") == ended


async def test_of_many_answers_at_once_one_counts(broker: Broker) -> None:
    await broker.put(job())
    won = await asyncio.gather(*(broker.done("a", b"%d" % i, 2.0) for i in range(20)))
    assert won.count(True) == 1
    got = await broker.get("a")
    assert got
    assert got.result == b"%d" % won.index(True)


async def test_any_gateway_cancels_an_open_job(two: list[Broker]) -> None:
    first, second = two
    for id in ("a", "b", "c"):
        await first.put(job(id))
    await first.give_back("b")
    assert await first.gone(["a", "b", "c", "z"]) == {"b": False}
    assert await second.gone(["a", "b", "c", "z"]) == {"a": False, "b": False, "c": False}
    assert await second.cancel("a", 3.0)
    assert await second.cancel("b", 4.0)
    assert not await second.cancel("a", 5.0)
    assert not await second.cancel("z", 5.0)
    ended = job("a", owner="A", state="failed", reason="cancelled", finished=3.0)
    assert await first.get("a") == replace(ended, body=b"")
    assert await first.gone(["a", "b", "c", "z"]) == {"a": True, "b": True}
    assert not await first.done("a", b"late", 6.0), "a job ends once"
    assert await take_ids(second, 10.0) == ["c"], "what was cancelled is not taken"
    assert await first.gone(["a", "b", "c"]) == {"a": True, "b": True, "c": False}
    assert await first.gone([]) == {}


async def test_of_an_answer_and_a_cancel_at_once_one_counts(two: list[Broker]) -> None:
    first, second = two
    for i in range(30):
        await first.put(job(f"j{i}"))
    ends = [end for i in range(30) for end in (first.done(f"j{i}", b"r", 2.0), second.cancel(f"j{i}", 2.0))]
    won = await asyncio.gather(*ends)
    for i in range(30):
        done, cancelled = won[2 * i : 2 * i + 2]
        got = await first.get(f"j{i}")
        assert got
        assert done != cancelled
        assert got.state == ("done" if done else "failed")


async def test_an_unknown_job_does_not_end_and_is_not_tried(broker: Broker) -> None:
    assert not await broker.done("a", None, 1.0)
    assert not await broker.fail("a", "why", 1.0)
    assert not await broker.give_back("a")
    with pytest.raises(HeadwayError, match="no job 'a'") as error:
        await broker.attempt("a")
    assert error.value.status == 404


async def test_attempts_are_counted(broker: Broker) -> None:
    await broker.put(job())
    assert sorted(await asyncio.gather(*(broker.attempt("a") for _ in range(5)))) == [1, 2, 3, 4, 5]
    got = await broker.get("a")
    assert got
    assert got.attempts == 5


async def test_forget_deletes_what_ended_before(broker: Broker) -> None:
    """In several transactions, the last one full."""
    await asyncio.gather(*(broker.put(job(str(i))) for i in range(1002)))
    await asyncio.gather(*(broker.done(str(i), b"r", float(i)) for i in range(1002)))
    await broker.put(job("open"))
    assert await broker.forget(1000.0) == 1000
    gone = [id for id in ("0", "999", "1000", "1001", "open") if await broker.get(id) is None]
    assert gone == ["0", "999"]
    assert await broker.forget(1000.0) == 0
    await broker.put(job("0"))  # a forgotten id is new again


async def test_a_job_that_has_ended_may_be_deleted(broker: Broker) -> None:
    for id in ("open", "done", "failed"):
        await broker.put(job(id))
    await broker.done("done", b"r", 1.0)
    await broker.fail("failed", "why", 1.0)
    assert [await broker.delete(id) for id in ("open", "done", "failed", "none")] == [False, True, True, False]
    assert await broker.get("open") is not None
    assert await broker.get("done") is None
    assert not await broker.delete("done")


async def test_a_result_is_amended_unless_it_has_changed_meanwhile(two: list[Broker]) -> None:
    first, second = two
    await first.put(job())
    assert not await first.amend("a", b"early", 1.0, 0)
    await first.done("a", b"r", 1.0)
    assert await second.amend("a", b"r2", 5.0, 0)
    assert not await first.amend("a", b"lost", 6.0, 0)
    assert await first.amend("a", b"r3", 7.0, 1)
    assert not await first.amend("z", b"r", 7.0, 0)
    got = await second.get("a")
    assert got is not None
    assert (got.result, got.finished, got.attempts, got.state) == (b"r3", 7.0, 2, "done")
    assert await first.forget(7.0) == 0
    assert await first.forget(7.5) == 1


async def test_the_oldest_answers_of_a_tenant_are_trimmed(two: list[Broker]) -> None:
    broker, other = two
    for number in range(4):
        for tenant in ("alpha", "beta"):
            await broker.put(replace(job(f"{tenant}{number}"), tenant=tenant, request="{}"))
            await broker.done(f"{tenant}{number}", b"x" * 98 if tenant == "alpha" else b"x", 10.0 - number)
    await broker.put(job("polled", background=True))
    await broker.done("polled", b"x" * 1000, 1.0)
    await broker.put(job("open"))
    assert await broker.trim(250) == 2
    assert [await other.get(f"alpha{number}") is not None for number in range(4)] == [True, True, False, False]
    left = [f"beta{number}" for number in range(4)] + ["polled", "open"]
    assert all([await other.get(id) for id in left])
    assert await broker.trim(250) == 0


async def test_what_failed_requests_and_background_ones_keep_is_trimmed(two: list[Broker]) -> None:
    broker, other = two
    request = '{"kept":"' + "é" * 46 + '"}'  # 103 bytes, 57 characters
    for id in ("done", "failed", "cancelled", "polled", "open"):
        background = id in ("done", "polled")
        await broker.put(replace(job(id, background=background), request="{}" if id == "polled" else request))
    await broker.done("done", b"r" * 97, 1.0)
    await broker.fail("failed", "why", 2.0)
    await broker.cancel("cancelled", 3.0)
    await broker.done("polled", b"r" * 1000, 0.0)
    assert await broker.trim(205) == 2
    assert [await other.get(id) is not None for id in ("done", "failed", "cancelled", "polled", "open")] == [
        False, False, True, True, True,
    ]  # fmt: skip


async def test_odd_text_survives(broker: Broker) -> None:
    odd = replace(job("quote'\x00\U0001f600"), tenant="", path="/ü", body=b"", arrival=1e300)
    await broker.put(odd)
    assert await broker.get(odd.id) == replace(odd, owner="A")
    await broker.done(odd.id, b"", 1.0)
    got = await broker.get(odd.id)
    assert got
    assert got.result == b""  # an empty answer is not a missing one


# ---- leases


async def test_without_a_lease_nothing_is_put_or_taken(connect: Connect) -> None:
    broker = connect("A")
    for call in (broker.put(job()), broker.take(FAR, 1)):
        with pytest.raises(HeadwayError, match="A has no lease") as error:
            await call
        assert error.value.status == 503
    assert await broker.get("a") is None
    await broker.close()


async def test_what_a_living_gateway_holds_is_its_own(two: list[Broker]) -> None:
    first, second = two
    await first.put(job())
    assert await take_ids(second, now=9.9) == []
    assert not await second.done("a", b"r", 1.0)
    assert not await second.fail("a", "why", 1.0)
    assert not await second.give_back("a")
    assert await first.get("a") == job(owner="A") == await second.get("a")
    assert await first.done("a", b"r", 1.0)


async def test_a_job_under_an_ended_lease_is_taken_over(two: list[Broker]) -> None:
    first, second = two
    await first.put(job(background=True))
    await first.attempt("a")
    await second.renew(20.0)
    assert await second.take(10.0, 1) == [job(background=True, attempts=1, owner="B")]
    assert not await first.done("a", b"late", 11.0)
    assert not await first.fail("a", "late", 11.0)
    assert not await first.give_back("a")
    assert await second.done("a", b"r", 12.0)


async def test_a_late_gateway_may_end_what_no_other_has_taken(two: list[Broker]) -> None:
    first, second = two
    await first.put(job("taken", 1.0))
    await first.put(job("kept", 2.0))
    assert await take_ids(second, now=10.0, limit=1) == ["taken"]
    assert not await first.done("taken", b"r", 11.0)
    assert await first.done("kept", b"r", 11.0)


async def test_renewing_keeps_every_job(two: list[Broker]) -> None:
    first, second = two
    for id in "abc":
        await first.put(job(id))
    assert await first.renew(20.0)
    assert await take_ids(second, now=19.0) == []
    assert sorted(await take_ids(second, now=20.0)) == ["a", "b", "c"]


async def test_renew_tells_whether_the_lease_was_in_force(connect: Connect) -> None:
    async with gateways(connect, "B") as (other,):
        broker = connect("A")
        assert not await broker.renew(10.0), "it begins"
        assert await broker.renew(20.0)
        await other.take(20.0, 1)
        assert not await broker.renew(30.0), "a take has found it ended"
        assert await broker.renew(40.0)
        await broker.close()


async def test_renewing_an_ended_lease_keeps_what_was_not_taken(two: list[Broker]) -> None:
    first, second = two
    for i, id in enumerate("abc"):
        await first.put(job(id, float(i)))
    await second.renew(FAR)
    assert await take_ids(second, now=10.0, limit=1) == ["a"]
    assert not await first.renew(30.0)
    assert await take_ids(second, now=29.0) == []
    assert await first.done("b", None, 21.0)


async def test_a_take_leaves_the_takers_own_jobs_alone(two: list[Broker]) -> None:
    first, _ = two
    await first.put(job())
    assert await take_ids(first, now=FAR) == []


async def test_a_taken_job_is_held_as_long_as_the_takers_lease(connect: Connect) -> None:
    async with gateways(connect, "A", "B", "C", until=10.0) as (first, second, third):
        await first.put(job())
        await second.renew(20.0)
        await third.renew(FAR)
        assert await take_ids(second, now=10.0) == ["a"]
        assert await take_ids(third, now=19.0) == []
        assert await take_ids(third, now=20.0) == ["a"]


async def test_what_is_given_back_is_free_at_once(two: list[Broker]) -> None:
    first, second = two
    await first.put(job())
    assert await first.give_back("a")
    assert await first.get("a") == job(owner=None)
    assert not await first.give_back("a")
    assert not await first.done("a", b"r", 1.0)
    assert await take_ids(second) == ["a"]
    assert await second.done("a", b"r", 1.0)


async def test_the_giver_may_take_it_again(broker: Broker) -> None:
    await broker.put(job())
    await broker.give_back("a")
    assert await take_ids(broker) == ["a"]


async def test_closing_ends_the_lease(connect: Connect) -> None:
    async with gateways(connect, "B") as (other,), gateways(connect, "A") as (broker,):
        for id in "ab":
            await broker.put(job(id))
        await broker.done("b", None, 1.0)
        await broker.close()
        assert await take_ids(other) == ["a"]


async def test_takes_are_by_arrival_then_put_whoever_left_the_jobs(connect: Connect) -> None:
    async with gateways(connect, "A", "B", until=10.0) as (first, second), gateways(connect, "C") as (third,):
        arrivals = {"new": 9.0, "tie 1": 5.0, "old": -1.0, "tie 2": 5.0, "ended": 0.0, "tie 3": 5.0}
        for i, (id, arrival) in enumerate(arrivals.items()):
            await (first, second)[i % 2].put(job(id, arrival))
        await second.done("tie 1", None, 9.0)
        await first.done("ended", None, 9.0)
        await first.give_back("tie 1")
        await second.give_back("tie 2")
        assert await take_ids(third, now=10.0) == ["old", "tie 2", "tie 3", "new"]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 50])
async def test_takes_page_through_everything(two: list[Broker], count: int) -> None:
    ids = [f"{i:03}" for i in range(count)]
    await asyncio.gather(*(two[0].put(job(id, arrival=float(id) // 20)) for id in ids))
    taken: list[str] = []
    while page := await take_ids(two[1], now=10.0, limit=7):
        assert len(page) <= 7
        taken += page
    assert taken == ids


async def test_no_job_is_taken_twice_by_takers_at_the_same_time(connect: Connect) -> None:
    async with gateways(connect, "A", until=0.0) as (first,), gateways(connect, *"BCD") as takers:
        ids = {str(i) for i in range(90)}
        await asyncio.gather(*(first.put(job(id)) for id in ids))
        pages = await asyncio.gather(*(taker.take(1.0, 4) for _ in range(10) for taker in takers))
        taken = [job.id for page in pages for job in page]
        assert len(taken) == len(ids)
        assert set(taken) == ids
        ends = await asyncio.gather(*(taker.done(id, b"r", 2.0) for id in taken for taker in (first, *takers)))
        assert sum(ends) == len(ids), "every job ends once"


async def test_forgetting_keeps_leases_that_protect_jobs(two: list[Broker]) -> None:
    first, second = two
    await first.put(job())
    await second.renew(20.0)
    await second.forget(15.0)
    assert await first.get("a") == job(owner="A")
    assert await take_ids(second, now=15.0) == ["a"]
    await second.forget(15.0)
    with pytest.raises(HeadwayError, match="A has no lease"):
        await first.put(job("b"))
    assert not await first.renew(30.0)
    await first.put(job("b"))


# ---- accounts


def charge(account: str, units: float, most: float, now: float) -> Charge:
    """Return a charge that counts for an hour."""
    return Charge(account, units, most, now, now - 3600.0)


async def test_an_account_holds_for_all_gateways_and_for_an_hour(two: list[Broker]) -> None:
    first, second = two
    assert await first.spend("a", charge("x", 0.6, 1.0, 10.0))
    assert not await second.spend("b", charge("x", 0.5, 1.0, 11.0))
    assert await second.spend("b", charge("y", 0.5, 1.0, 11.0)), "another account"
    assert await second.spend("b", charge("x", 0.25, 1.0, 11.0))
    await first.refund("x", "a", 0.35)
    assert await second.spend("b", charge("x", 0.5, 1.0, 12.0)), "the same request once more"
    assert not await first.spend("c", charge("x", 0.01, 1.0, 3609.0))
    assert await first.spend("c", charge("x", 0.25, 1.0, 3610.0)), "what the first one has cost is an hour old"
    assert not await first.spend("d", charge("x", 0.01, 1.0, 3611.0))
    assert await first.spend("d", charge("x", 1.0, 1.25, 3612.0))
    await second.refund("x", "nothing", 1.0)
    asked = [charge("x", 0.0, 0.0, 3612.0), charge("y", 0.0, 0.0, 4000.0), charge("z", 0.0, 0.0, 0.0)]
    assert await first.counted(asked) == {"x": 1.25}, "an account counts what is not too old"
    assert await second.counted([]) == {}


async def test_gateways_that_spend_at_once_do_not_exceed_it(two: list[Broker]) -> None:
    calls = [broker.spend(f"{i}{broker.owner}", charge("x", 1.0, 10.0, 5.0)) for i in range(10) for broker in two]
    assert sum(await asyncio.gather(*calls)) == 10


async def test_a_day_that_has_begun_for_one_gateway_has_begun_for_all(two: list[Broker]) -> None:
    """A gateway whose clock is behind gets no new budget for the old day. A refused charge does not begin a day."""
    ahead, behind = two

    async def put(broker: Broker, id: str, units: float, begin: float) -> bool:
        with suppress(AccountSpent):
            await broker.put(job(id), [Charge("x", units, 100.0, begin, begin - 1.0)])
            return True
        return False

    assert await put(ahead, "a", 60.0, 0.0)
    assert not await put(ahead, "b", 101.0, 100.0), "more than a whole day's"
    assert not await put(behind, "c", 60.0, 0.0), "the old day's budget is spent"
    assert await put(ahead, "d", 60.0, 100.0)
    assert await put(behind, "e", 40.0, 0.0)
    assert not await put(ahead, "f", 1.0, 100.0), "e counts for the new day"
    assert await counted(ahead, "x", 3699.0) == 100.0


async def test_a_job_is_put_with_its_charges_or_not_at_all(two: list[Broker]) -> None:
    first, second = two
    await first.put(job("a"), [charge("x", 3.0, 10.0, 1.0), charge("y", 6.0, 10.0, 1.0)])
    with pytest.raises(AccountSpent) as full:
        await second.put(job("b"), [charge("x", 3.0, 10.0, 1.0), charge("y", 6.0, 10.0, 1.0)])
    assert (full.value.status, full.value.account, full.value.counted) == (429, "y", 6.0)
    assert await second.get("b") is None
    with pytest.raises(HeadwayError, match="'a' is stored already"):
        await second.put(job("a"), [charge("x", 1.0, 10.0, 1.0)])
    await second.put(job("c"), [charge("x", 7.0, 10.0, 1.0)])
    puts = [broker.put(job(f"{i}{broker.owner}"), [charge("z", 1.0, 10.0, 1.0)]) for i in range(10) for broker in two]
    assert await asyncio.gather(*puts, return_exceptions=True) != [None] * 20
    assert len([id for broker in two for i in range(10) if await broker.get(id := f"{i}{broker.owner}")]) == 10


async def counted(broker: Broker, account: str, now: float = 2.0) -> float:
    """Return the units that are counted in an account: those that would refuse a put."""
    found = (await broker.counted([charge(account, 1.0, -1.0, now)])).get(account, 0.0)
    with pytest.raises(AccountSpent) as full:
        await broker.put(job("never"), [charge(account, 1.0, -1.0, now)])
    assert full.value.counted == found
    return found


async def test_an_ended_job_counts_with_what_it_used_once(two: list[Broker]) -> None:
    first, second = two
    for id in "abcdefg":
        await first.put(job(id, background=True), [charge("x", 10.0, 100.0, 1.0)])
    ends = (first.done(id, None, 2.0, {"x": 4.0}) for id in "abcde")  # together
    assert await asyncio.gather(*ends) == [True] * 5
    assert await first.done("f", b"result", 2.0, {"x": 9.0})
    assert await counted(second, "x") == 5 * 6.0 + 1.0 + 10.0
    assert not await first.done("f", b"result", 2.0, {"x": 0.0}), "it has ended, and was counted"
    assert not await second.fail("g", "why", 2.0, {"x": 10.0}), "the first one holds it"
    assert await counted(second, "x") == 41.0
    assert await second.cancel("g", 2.0)
    assert not await first.fail("g", "cancelled", 2.0, {"x": 8.0}), "it has ended, and was not counted"
    assert await counted(second, "x") == 33.0
    await first.put(job("h"), [charge("x", 10.0, 100.0, 3601.0)])
    assert await counted(second, "x", 3601.0) == 10.0, "all that ended is an hour old"


async def test_a_cancelled_job_that_no_gateway_holds_is_not_charged(two: list[Broker]) -> None:
    first, second = two
    for id in "abc":
        await first.put(job(id), [charge("x", 10.0, 100.0, 1.0)])
    assert await first.give_back("a")
    assert await second.cancel("a", 2.0, {"x": 10.0})
    assert await counted(second, "x") == 20.0
    assert await second.cancel("b", 2.0, {"x": 10.0})
    assert await counted(second, "x") == 20.0, "its gateway says what it has used"
    assert not await second.cancel("b", 1e12, {"x": 10.0}), "it has ended"
    assert await second.cancel("c", 1e12, {"x": 10.0}), "after the end of the first one's lease"
    assert await counted(second, "x") == 10.0


async def test_what_a_dead_gateway_s_job_was_charged_counts_until_it_ends(two: list[Broker]) -> None:
    first, second = two
    await first.put(job(background=True), [charge("x", 10.0, 10.0, 1.0)])
    assert await take_ids(second, now=10.0) == ["a"]
    assert not await first.done("a", b"r", 11.0, {"x": 10.0}), "the second one runs it"
    assert await counted(second, "x") == 10.0
    assert await second.done("a", b"r", 12.0, {"x": 7.0})
    assert await counted(second, "x") == 3.0


@pytest.mark.parametrize("closed", [True, False])
async def test_a_gateway_that_outlives_its_lease_says_what_its_job_used(two: list[Broker], closed: bool) -> None:
    first, second = two
    await first.put(job(), [charge("x", 10.0, 10.0, 1.0)])
    assert await take_ids(second, now=10.0) == ["a"]
    if closed:
        assert await second.fail("a", "client_gone", 11.0), "what its client got is not known there"
    assert await counted(second, "x") == 10.0
    for _ in range(2):  # again, as after an answer that was lost
        assert not await first.done("a", b"r", 12.0, {"x": 7.0})
        assert await counted(second, "x") == 3.0
    assert await second.fail("a", "client_gone", 11.0) is not closed
    assert await counted(second, "x") == 3.0


async def test_random_requests_of_two_gateways_and_their_deaths(connect: Connect) -> None:
    """No account counts more than its limit, nor less than what its requests used; what is left is what they used."""
    rng, open_, used = random.Random(0), dict[str, tuple[str, float]](), Counter[str]()
    async with gateways(connect, "B", until=FAR) as (second,):
        for life in range(3):
            async with gateways(connect, f"A{life}", until=FAR) as (first,):
                for i in range(40):
                    account, units, broker = rng.choice("xy"), rng.randint(1, 9), rng.choice((first, second))
                    with suppress(AccountSpent):
                        await broker.put(job(id := f"{life}-{i}", background=True), [charge(account, units, 60.0, 1.0)])
                        open_[id] = account, units
                    for id in rng.sample([*open_], min(len(open_), rng.randint(0, 2))):
                        account, units = open_[id]
                        unused = rng.randint(0, int(units))
                        holds = (await broker.get(id)).owner == broker.owner  # type: ignore[union-attr]
                        assert await broker.done(id, None, 2.0, {account: unused}) == holds
                        if holds:
                            used[account] += units - unused
                            del open_[id]
                    for name in "xy":
                        charged = sum(units for account, units in open_.values() if account == name)
                        assert await counted(second, name) == used[name] + charged <= 60
            await second.take(3.0, 100)  # the first one is gone
        for id, (account, units) in open_.items():
            assert await second.fail(id, "gone", 4.0, {account: units})
        assert [await counted(second, name) for name in "xy"] == [used["x"], used["y"]]


async def test_an_account_outlives_its_gateway(connect: Connect) -> None:
    async with gateways(connect, "A") as (broker,):
        assert await broker.spend("a", charge("x", 0.6, 1.0, 10.0))
    async with gateways(connect, "B") as (broker,):
        assert not await broker.spend("b", charge("x", 0.6, 1.0, 11.0))


# ---- API keys


def key(id: str = "k", **more: Any) -> StoredKey:
    return StoredKey(id, b"\x00\xff" * 16, '{"tenant": "t"}', 1.0, **more)


async def test_a_stored_key_comes_back_everywhere_in_the_order_of_changes(two: list[Broker]) -> None:
    first, second = two
    assert await second.keys(0) == []
    await first.put_keys([key("a"), key("b", expires=9.5)], 0.0)
    assert await second.keys(0) == [key("a", changed=1), key("b", expires=9.5, changed=2)]
    assert await second.keys(2) == []
    await second.put_keys([key("a", expires=4.0)], 0.0)
    assert await first.keys(2) == [key("a", expires=4.0, changed=3)]
    assert [one.id for one in await first.keys(0)] == ["b", "a"]


async def test_a_revocation_stays(broker: Broker) -> None:
    await broker.put_keys([key()], 0.0)
    await broker.put_keys([key(revoked=5.0)], 0.0)
    await broker.put_keys([key(expires=7.0), key(revoked=6.0)], 0.0)
    assert [one.revoked for one in await broker.keys(0)] == [5.0]


async def test_a_new_key_with_the_id_of_another_is_refused(broker: Broker) -> None:
    await broker.put_keys([key("a")], 0.0)
    with pytest.raises(HeadwayError, match="stored already"):
        await broker.put_keys([key("b"), replace(key("a"), digest=b"another"), key("a", revoked=5.0)], 0.0)
    assert await broker.keys(0) == [key("a", changed=1)]


async def test_ended_keys_are_forgotten_and_no_change_has_the_number_of_another(broker: Broker) -> None:
    await broker.put_keys([key("old", revoked=5.0), key("older", expires=6.0), key("lasts")], 0.0)
    (last,) = [one.changed for one in await broker.keys(2)]
    await broker.put_keys([key("lasts", revoked=8.0)], 7.0)
    assert [one.id for one in await broker.keys(0)] == ["lasts"]
    await broker.put_keys([key("new")], 9.0)
    assert [(one.id, one.changed > last + 1) for one in await broker.keys(0)] == [("new", True)]


async def test_keys_of_two_gateways_at_once_are_all_seen(two: list[Broker]) -> None:
    for turn in range(5):
        await asyncio.gather(*(one.put_keys([key(f"{turn} {one.owner}")], 0.0) for one in two))
    seen, after = list[str](), 0
    while found := await two[0].keys(after):
        seen.append(found[0].id)
        after = found[0].changed
    assert len(set(seen)) == len(seen) == 10
