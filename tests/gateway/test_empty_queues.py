"""Queues of a connection behave as those they stand for."""

from __future__ import annotations

import asyncio
from collections import deque
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.gateway.http.empty_queues import Event, Flow, Pipeline


async def test_an_event_lets_all_go_that_wait_for_it() -> None:
    event, passed = Event(), list[int]()

    async def one(number: int) -> None:
        await event.wait()
        passed.append(number)

    for turn in (1, 2):
        tasks = [asyncio.create_task(one(number)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert passed == [1, 2] * (turn - 1), "none before it is set"
        event.set()
        await asyncio.gather(*tasks[1:])
        assert passed == [1, 2] * turn
        await one(1)
        passed.pop()
        event.clear()
        assert not event.is_set()


async def test_a_writer_waits_while_the_client_takes_nothing() -> None:
    flow = Flow(Mock(asyncio.Transport))
    await flow.drain()
    flow.pause_writing()
    waits = asyncio.create_task(flow.drain())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waits), 0.01)
    flow.resume_writing()
    await waits


@given(st.lists(st.one_of(st.integers(), st.sampled_from(["pop", "popleft"]))))
def test_a_pipeline_has_the_two_ends_of_a_deque(steps: list[int | str]) -> None:
    ours, theirs = Pipeline[int](), deque[int]()
    for step in steps:
        if isinstance(step, int):
            ours.appendleft(step)
            theirs.appendleft(step)
        elif theirs:
            assert getattr(ours, step)() == getattr(theirs, step)()
        assert list(ours) == list(theirs)
        assert bool(ours) == bool(theirs)
