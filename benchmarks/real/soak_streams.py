"""Part "streams" of `headway bench soak`: thousands of streams open at once on one gateway."""

from __future__ import annotations

import asyncio
import json
import resource
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.real.attack_clients import request, say
from benchmarks.real.health_watch import HealthSeen, health_watch
from benchmarks.real.peers import Peer, servers
from headway.errors import EngineError
from headway.whatif.output.results import Row
from testing.fake_engine import WORD

_OTHER_FILES = 400  # open files beside the two per stream, those of the short chats included
_TOKENS, _GROUPS = 4, 50
_AT_ONCE = 100  # connections being opened at a time
_PATIENCE = 400.0  # seconds until all are open, and until all have ended
_MARK = f'"content":"{WORD}"'.encode()
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Streams:
    """The outcome.

    count: streams open at once. reset: streams that missed tokens or their end. seen: latencies of the short
    chats sent meanwhile.
    """

    count: int
    reset: int
    seen: HealthSeen

    def rows(self) -> list[Row]:
        """Return the part's figures."""
        setting = f"{self.count:,} streams at once"
        times = np.array(self.seen.health) * 1000
        return [
            Row("soak.reset", "headway", setting, float(self.reset), "streams"),
            Row("soak.rss_mb", "headway", setting, max(self.seen.rss) / 1e6, "MB"),
            Row("soak.short_ms.p99", "headway", setting, float(np.quantile(times, 0.99)), "ms"),
            Row("soak.short_ms.max", "headway", setting, float(times.max()), "ms"),
            Row("soak.shorts", "headway", setting, float(len(self.seen.health)), "chats"),
        ]


def allowed(wanted: int) -> int:
    """Return the number of streams, at most `wanted`, that the limit of open files allows at two per stream."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return min(wanted, (most - _OTHER_FILES) // 2)


def measure(folder: Path, wanted: int, period: float) -> Streams:
    """Open the wanted or allowed number of streams, and let each have its tokens, one every `period` seconds."""
    count = allowed(wanted)
    limits = {"max_connections": count + 64, "max_queued": count + 64, "max_queued_mib": 1024}
    short = json.dumps(say())
    with (
        servers(folder, server=limits, engines={"max_running": count + 64}) as (engine, gateway),
        health_watch(gateway.port, gateway.process.pid, short) as watch,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        streams = runner.run(_opened(gateway, engine, count, period))
        with watch.watching() as seen:
            runner.run(_ended(engine, streams, period))
    return Streams(count, sum(not stream.whole for stream in streams), seen)


class _Stream(asyncio.Protocol):
    """A client that requests a stream and keeps the received bytes."""

    def __init__(self, ask: bytes) -> None:
        self._ask, self._data = ask, bytearray()
        self.over = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._ask)

    def data_received(self, data: bytes) -> None:
        self._data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()

    @property
    def whole(self) -> bool:
        """True if all tokens and the end have arrived."""
        return self._data.count(_MARK) == _TOKENS and self._data.endswith(_END)


async def _opened(gateway: Peer, engine: Peer, count: int, period: float) -> list[_Stream]:
    """Open streams and wait until all are in the engine; each is held until its group is released."""
    loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> _Stream:
        slow = {"fake_tokens": _TOKENS, "fake_delay": period, "fake_hold": f"group-{number % _GROUPS}"}
        ask = request("/v1/chat/completions", say(stream=True, vllm_xargs=slow))
        async with gate:
            _, made = await loop.create_connection(lambda: _Stream(ask), "127.0.0.1", gateway.port)
        return made

    made = await asyncio.gather(*(one(number) for number in range(count)))
    deadline = loop.time() + _PATIENCE
    while (inside := await asyncio.to_thread(_open, engine)) < count:
        if loop.time() > deadline or any(stream.over.is_set() for stream in made):
            raise EngineError(f"Only {inside} of {count} streams are open.", "See the log of the gateway.")
        await asyncio.sleep(0.5)
    return list(made)


async def _ended(engine: Peer, streams: list[_Stream], period: float) -> None:
    """Release the groups evenly over a period, and wait until all streams have ended."""
    for group in range(_GROUPS):
        await asyncio.to_thread(_post, f"http://127.0.0.1:{engine.port}/release/group-{group}")
        await asyncio.sleep(period / _GROUPS)
    async with asyncio.timeout(_PATIENCE):
        for stream in streams:
            await stream.over.wait()


def _open(engine: Peer) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/last", timeout=60) as answer:
        return int(json.load(answer)["open"])


def _post(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()
