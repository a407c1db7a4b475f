"""Part "requests" of `headway bench soak`: growth of the gateway's memory with the requests it has served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.real.peers import Peer, servers
from benchmarks.real.responses import count_response, read_response
from headway.whatif.load import prompts
from headway.whatif.output.results import Row

_CLIENTS = 32
_TEXTS = 500
_SETTLED_S = 2.0  # idle time before memory is measured


def measure(folder: Path, total: int, seed: int, tick: Callable[[int], None]) -> list[Row]:
    """Send short chats as fast as they are answered; compare memory after the first tenth and at the end.

    tick: called with the number of new answers.
    """
    first, rng = total // 10, np.random.default_rng([seed, 11])
    with servers(folder) as (_, gateway), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        asks = [gateway.request(text, max_tokens=16) for text in prompts.generate(_TEXTS, (24, 48), rng)]
        runner.run(_send(gateway, asks, first, tick))
        before, began = _settled(gateway), time.perf_counter()
        runner.run(_send(gateway, asks, total - first, tick))
        seconds = time.perf_counter() - began
        after = _settled(gateway)
    setting = f"{total:,} requests"
    return [
        Row("soak.rss_growth_mb", "headway", setting, (after - before) / 1e6, "MB"),
        Row("soak.rss_first_mb", "headway", setting, before / 1e6, "MB"),
        Row("soak.req_per_s", "headway", setting, (total - first) / seconds, "req/s"),
    ]


def _settled(gateway: Peer) -> int:
    time.sleep(_SETTLED_S)
    return int(gateway.process.memory_info().rss)


async def _send(gateway: Peer, asks: list[bytes], total: int, tick: Callable[[int], None]) -> None:
    """Send `total` requests over a few connections. Raise EngineError for an invalid answer."""
    numbers = count()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=2**22)
        try:
            while (number := next(numbers)) < total:
                writer.write(asks[number % len(asks)])
                count_response(await read_response(reader), False)
                tick(1)
        finally:
            writer.close()

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
