"""Calls that share a commit mean what they would in turn, ends that are stored together, too."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.stores import FAR, job

from headway.errors import HeadwayError
from headway.store.queue.memory import MemoryBroker
from headway.store.queue.port import Broker, Job
from headway.store.queue.sqlite import SqliteBroker

IDS = ("a", "b", "c", "quote'\"\\d\x01\U0001f600")
Call = Callable[[Broker], Coroutine[Any, Any, Any]]
CALLS: dict[str, Callable[[str, float], Call]] = {
    "done": lambda id, now: lambda broker: broker.done(id, None, now),
    "answered": lambda id, now: lambda broker: broker.done(id, b"r", now),
    "failed": lambda id, now: lambda broker: broker.fail(id, "why", now),
    "cancelled": lambda id, now: lambda broker: broker.cancel(id, now),
    "given back": lambda id, now: lambda broker: broker.give_back(id),
    "put": lambda id, now: lambda broker: _put(broker, id),
}
drawn = st.lists(
    st.tuples(st.sampled_from(["done"] * 6 + [*CALLS]), st.sampled_from(IDS), st.floats(2.0, 9.0)), max_size=30
)


async def _put(broker: Broker, id: str) -> bool:
    try:
        await broker.put(job(id))
    except HeadwayError:  # it is stored already
        return False
    return True


async def told(broker: Broker, calls: list[Call], *, at_once: bool) -> tuple[list[Any], list[Job | None]]:
    """Return the outcomes of calls, and the jobs after them."""
    await broker.renew(FAR)
    for id in IDS[1:]:
        await broker.put(job(id))
    try:
        outcomes = await asyncio.gather(*(call(broker) for call in calls)) if at_once else []
        for call in calls[len(outcomes) :]:
            outcomes.append(await call(broker))
        return outcomes, [await broker.get(id) for id in IDS]
    finally:
        await broker.close()


@given(drawn)
@settings(max_examples=20)
def test_at_once_is_as_in_turn(draws: list[tuple[str, str, float]]) -> None:
    calls = [CALLS[name](id, now) for name, id, now in draws]
    with tempfile.TemporaryDirectory() as folder:
        stored = asyncio.run(told(SqliteBroker(os.path.join(folder, "q"), "A"), calls, at_once=True))
    assert stored == asyncio.run(told(MemoryBroker("A"), calls, at_once=False))


async def test_many_ends_share_two_statements(tmp_path: Path) -> None:
    """What each statement costs is the interpreter's lock, so their number counts."""
    broker, statements = SqliteBroker(str(tmp_path / "q"), "A"), list[str]()
    await broker.renew(FAR)
    ids = [f"{number}" for number in range(200)]
    await asyncio.gather(*(broker.put(job(id)) for id in ids))
    broker._db.set_trace_callback(statements.append)
    assert all(await asyncio.gather(*(broker.done(id, None, 2.0) for id in ids)))
    broker._db.set_trace_callback(None)
    commits = statements.count("COMMIT")
    assert commits <= 20
    assert len(statements) == 4 * commits, "BEGIN and COMMIT among them"
    end = replace(job("7", owner="A"), state="done", body=b"", finished=2.0)
    assert await broker.get("7") == end
    await broker.close()


async def test_an_end_that_cannot_be_stored_fails_alone(tmp_path: Path) -> None:
    broker = SqliteBroker(str(tmp_path / "q"), "A")
    await broker.renew(FAR)
    await asyncio.gather(*(broker.put(job(id)) for id in "abcdef"))
    instants = {id: math.nan if id == "b" else 2.0 for id in "abcdef"}
    ends = (broker.done(id, None, now) for id, now in instants.items())
    a, b, *others = await asyncio.gather(*ends, return_exceptions=True)
    assert [a, *others] == [True] * 5
    assert isinstance(b, HeadwayError)
    left = await broker.get("b")
    assert left
    assert left.state == "open"
    await broker.close()
