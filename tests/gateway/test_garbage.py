"""Full collections wait until few requests are open, and do not wait for ever."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped]
import pytest

from headway.gateway import tasks
from headway.gateway.http import garbage


class Cycle:
    """Refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def spared() -> Iterator[None]:
    before = gc.get_threshold()
    garbage.spare_old_objects()
    yield
    gc.set_threshold(*before)


def old_garbage() -> weakref.ref[Cycle]:
    """Make garbage that was seen alive by a full collection, so that only another one frees it."""
    cycle = Cycle()
    gc.collect()
    return weakref.ref(cycle)


def test_by_itself_python_collects_young_garbage_only(spared: None) -> None:
    old, young = old_garbage(), weakref.ref(Cycle())
    kept = [[i] for i in range(200_000)]  # would begin a full collection, as new objects outnumber old ones
    assert young() is None
    assert old() is not None
    assert len(kept) == 200_000


async def test_the_gateway_collects_old_garbage_when_it_is_calm(spared: None) -> None:
    old, asked, requests = old_garbage(), asyncio.Event(), 5000

    def open_requests() -> int:
        asked.set()
        return requests

    async with tasks.running(lambda: garbage.collect(open_requests, 0.001)):
        await asked.wait()
        await asyncio.sleep(0.01)
        assert old() is not None, "many are open"
        requests = 3
        freed = asyncio.Event()
        loop = asyncio.get_running_loop()
        cycle = old()
        assert cycle is not None
        weakref.finalize(cycle, loop.call_soon, freed.set)
        del cycle
        await asyncio.wait_for(freed.wait(), 20)


def test_freed_memory_is_returned() -> None:
    process = psutil.Process()
    blocks = [b"x%05d" % i * 1000 for i in range(10_000)]
    kept = blocks[::100]
    del blocks
    before = process.memory_info().rss
    garbage.collect_all()
    assert before - process.memory_info().rss > 30_000_000, "of 60 MB, with some in use above each part"
    assert len(kept) == 100


def test_it_is_not_put_off_for_ever() -> None:
    assert garbage.due(0, 0.0)
    assert not garbage.due(10_000, 60.0)
    assert garbage.due(10_000, 3600.0)
