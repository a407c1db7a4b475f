"""`headway bench soak`: the gateway's endurance under many streams, kills, requests and generated calls.

Each part starts private gateways in front of a FAKE engine (`fake_engine.py`), whose answers say nothing about
an engine: the benchmark measures lost requests, wrong answers and memory of the gateway.
"""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console
from rich.progress import Progress

from benchmarks.experiment import Result, bars_of, experiment
from benchmarks.real import soak_calls, soak_kills
from benchmarks.real.attack_clients import request, say
from benchmarks.real.health_watch import HealthSeen, health_watch
from benchmarks.real.peers import Peer, servers
from benchmarks.real.responses import count_response, read_response
from headway.errors import ConfigError, EngineError
from headway.whatif.load import prompts
from headway.whatif.output.results import Ask, Grid, Row, show
from testing.fake_engine import NAME, WORD

_CLIENTS = 32
_TEXTS = 500
_SETTLED_S = 2.0  # idle time before memory is measured


def measure_requests(folder: Path, total: int, seed: int, tick: Callable[[int], None]) -> list[Row]:
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


def measure_streams(folder: Path, wanted: int, period: float) -> Streams:
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


# Upper bounds by row id; the other rows have no goal.
GOALS = {
    "soak.reset": 0.0,
    "soak.rss_mb": 400.0,
    "soak.short_ms.p99": 50.0,
    "soak.lost": 0.0,
    "soak.twice": 0.0,
    "soak.rss_growth_mb": 5.0,
    "soak.5xx": 0.0,
    "soak.undocumented": 0.0,
}
WORKLOAD = (
    f"Headway's gateway (sqlite broker, synchronous = full) in front of a {NAME}: streams that are all open "
    "at once; kills with full disks, clock jumps, engine hangs and faults of the queue's file among them; "
    "short chats as fast as they are answered; calls that schemathesis makes up from /openapi.json."
)
_NOTES = (
    "reset: streams without all of their tokens and their end. short_ms: of chats, one after the other, "
    "while the streams are open. lost: accepted requests without an answer. twice: requests with two ends. "
    "recomputed: computations by the engine beyond the first of a request. rss_growth_mb: resident memory "
    "at the end minus that after the first tenth. 5xx: except 502 and 503. undocumented: answers that the "
    "schema does not have.",
)
_PERIOD_S = 15.0  # time between two tokens of a stream


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of each part."""

    streams: int = 10_000
    kills: int = 200
    requests: int = 200_000
    calls: int = 10_000
    period: float = _PERIOD_S

    def of(self, part: str) -> int:
        """Return the size of a part, in the part's unit."""
        return int(getattr(self, part))


QUICK = Sizes(streams=300, kills=2, requests=2000, calls=150, period=1.0)
Part = Callable[[Path, Sizes, int, Callable[[int], None]], list[Row]]


def _streams(folder: Path, sizes: Sizes, seed: int, tick: Callable[[int], None]) -> list[Row]:
    measured = measure_streams(folder, sizes.streams, sizes.period)
    tick(sizes.streams)
    return measured.rows()


def _kills(folder: Path, sizes: Sizes, seed: int, tick: Callable[[int], None]) -> list[Row]:
    return soak_kills.measure(folder, sizes.kills, seed, tick).rows()


PARTS: dict[str, Part] = {
    "streams": _streams,
    "kills": _kills,
    "requests": lambda folder, sizes, *more: measure_requests(folder, sizes.requests, *more),
    "calls": lambda folder, sizes, *more: soak_calls.measure(folder, sizes.calls, *more),
}


@experiment("soak", "vllm", "The gateway's endurance")
def main(ask: Ask, only: Sequence[str] = ()) -> Result:
    """Measure the named parts; () = all."""
    for name in only:
        if name not in PARTS:
            raise ConfigError(f"There is no part {name!r}.", f"Use some of {', '.join(PARTS)}.", param="only")
    return result(measure(only or tuple(PARTS), QUICK if ask.quick else Sizes(), ask.seed))


def measure(names: Sequence[str], sizes: Sizes, seed: int) -> list[Row]:
    """Measure the parts one after the other, each with a separate folder and servers."""
    rows = list[Row]()
    with Progress(console=Console(stderr=True)) as progress:
        for name in names:
            task = progress.add_task(name, total=sizes.of(name))
            with tempfile.TemporaryDirectory(prefix=f"headway-soak-{name}-") as folder:
                rows += PARTS[name](Path(folder), sizes, seed, partial(progress.advance, task))
    return rows


# ---- the report


def result(rows: list[Row]) -> Result:
    """Return the findings, with a line per figure and its goal beside it."""
    lines = [
        [row.setting, row.id, show(row.ours), show(GOALS[row.id]) if row.id in GOALS else "", row.unit] for row in rows
    ]
    header = ("setting", "figure", "value", "goal, at most", "unit")
    grid = Grid(header, [lines], ("value", "goal, at most"))
    drawn: dict[str, float | None] = {row.id: GOALS[row.id] for row in rows if GOALS.get(row.id)} or {rows[0].id: None}
    return Result(rows, WORKLOAD, lambda: {"soak": bars_of(rows, drawn)}, grid, _NOTES)
