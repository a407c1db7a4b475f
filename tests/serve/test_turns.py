"""Streams go on in turns, so a request that comes meanwhile does not wait for all of them."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from headway.serve.turns import Turns


async def stream(turns: Turns, number: int, served: list[int]) -> None:
    await turns.take()
    served.append(number)


async def test_so_many_go_on_in_one_iteration_in_their_order() -> None:
    turns, served = Turns(8), list[int]()
    streams = [asyncio.create_task(stream(turns, number, served)) for number in range(50)]
    counts = [0]
    while len(served) < 50:
        await asyncio.sleep(0)
        counts.append(len(served))
    assert max(after - before for before, after in pairwise(counts)) == 8
    assert len(counts) < 12, "no iteration is left out"
    assert served == list(range(50))
    await asyncio.gather(*streams)


@pytest.mark.parametrize("waiting", [100, 1000])
async def test_a_request_passes_them(waiting: int) -> None:
    turns, served = Turns(8), list[int]()
    streams = [asyncio.create_task(stream(turns, number, served)) for number in range(waiting)]
    for _ in range(6):  # a request's iterations
        await asyncio.sleep(0)
    assert len(served) <= 6 * 8
    await asyncio.gather(*streams)
    assert len(served) == waiting


async def test_streams_that_wait_go_before_new_ones() -> None:
    turns, served = Turns(1), list[int]()
    early = [asyncio.create_task(stream(turns, number, served)) for number in range(3)]
    await asyncio.sleep(0)
    late = asyncio.create_task(stream(turns, 3, served))
    await asyncio.gather(*early, late)
    assert served == [0, 1, 2, 3]


async def test_a_stream_whose_client_has_left_takes_no_turn() -> None:
    turns, served = Turns(1), list[int]()
    streams = [asyncio.create_task(stream(turns, number, served)) for number in range(4)]
    await asyncio.sleep(0)
    streams[1].cancel()
    streams[2].cancel()
    await asyncio.wait(streams, timeout=1)
    assert served == [0, 3]


async def test_all_turns_come_back() -> None:
    turns = Turns(2)
    for _ in range(5):
        async with asyncio.timeout(1):
            for _ in range(3):
                await turns.take()
        await asyncio.sleep(0)
