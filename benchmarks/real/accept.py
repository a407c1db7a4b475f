"""`headway bench accept`: rate of accepting requests, by queue and number of gateways, and costs of a backlog.

All requests are background requests, so each is on disk before it is accepted; the FAKE engines never answer,
so that only acceptance is measured. The processes and the clients share this machine's cores, so compare
requests per second of the gateways' CPU time.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.experiment import Result, bars_of, experiment
from benchmarks.real.attack_clients import say
from benchmarks.real.peers import HEADWAY, servers
from headway.config import Wire
from headway.errors import EngineError
from headway.whatif.output.results import Ask, Row
from headway.whatif.output.results import say as note
from testing.fake_engine import NAME
from testing.servers.parts import ClusterShape, HeadwayCluster, clusters

SQLITE = "sqlite, one process"
_CLIENTS = 32
_WARM_S = 1.0
_PATIENCE_S = 600.0  # until a controller knows the whole backlog
_HEARTBEAT_S = 10  # the default of `wire.connection.Address`
_MIB = 2**20
_DRAWN = ("accept.req_per_s", "accept.req_per_cpu_s")
_ROOM = 10_000_000  # queue limit, high enough never to be reached
WORKLOAD = (
    f"Background chat requests of some 200 bytes from {_CLIENTS} connections, accepted (202) and never "
    f"answered by the {NAME}. Parts are processes of their own with RabbitMQ and PostgreSQL on the same "
    "machine."
)
_NOTES = (
    "req_per_cpu_s: by the CPU time of the gateways alone (sqlite: of the whole process). takeover_s: from "
    "the kill of the controller that leads, with the backlog queued, until the standby leads and knows all "
    "of it.",
)
Body = dict[str, Any]
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AcceptSizes:
    """The size of the benchmark.

    seconds: duration of each measurement. grid: numbers of gateways and of RabbitMQ nodes. backlog: requests.
    """

    seconds: float
    grid: tuple[tuple[int, int], ...]
    backlog: int


QUICK = AcceptSizes(2.0, ((1, 1), (2, 1)), 3000)
WHOLE = AcceptSizes(15.0, ((1, 1), (2, 1), (4, 1), (1, 3), (2, 3)), 100_000)


@experiment("accept", "vllm", "Accepting requests")
def main(ask: Ask, backlog: int | None) -> Result:
    """Run the benchmark. backlog: requests in the backlog, instead of the default."""
    sizes = QUICK if ask.quick else WHOLE
    return result(measure(replace(sizes, backlog=backlog or sizes.backlog), note))


def result(rows: Sequence[Row]) -> Result:
    """Return the findings."""
    return Result(rows, WORKLOAD, lambda: {"accept": bars_of(rows, dict.fromkeys(_DRAWN))}, notes=_NOTES)


def measure(sizes: AcceptSizes, tick: Tick) -> list[Row]:
    """Measure acceptance with each queue and number of gateways, then build a backlog and kill the controller."""
    rows = list[Row]()
    tick(SQLITE)
    with _folder() as folder, servers(folder, "headway", _limits(), {"max_running": 1}) as (_, gateway):
        rows += _accepting(SQLITE, [gateway.port], [gateway.process], sizes.seconds)
    for gateways, nodes in sizes.grid:
        setting = f"PostgreSQL, RabbitMQ of {nodes}, gateways: {gateways}"
        tick(setting)
        with _folder() as folder, clusters(folder, _shape(gateways, nodes)) as made:
            ports = [part.port for part in made.gateways]
            rows += _accepting(setting, ports, [part.process for part in made.gateways], sizes.seconds)
    tick(f"a backlog of {sizes.backlog:,}")
    with _folder() as folder, clusters(folder, _shape(2, 1)) as made:
        rows += _backlog(made, sizes.backlog)
    return rows


def _shape(gateways: int, nodes: int) -> ClusterShape:
    """Return a cluster with Headway's default leases and heartbeats."""
    wire = Wire()
    return ClusterShape(
        nodes,
        gateways,
        controllers=2,
        engines=1,
        max_queued=_ROOM,
        max_running=1,
        lease_s=wire.lease_seconds,
        heartbeat_s=_HEARTBEAT_S,
    )


def _limits() -> dict[str, Any]:
    return {"max_queued": _ROOM, "class_share": 1.0}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headway-accept-") as folder:
        yield Path(folder)


# ---- accepting


def _accepting(setting: str, ports: Sequence[int], processes: Sequence[Any], seconds: float) -> list[Row]:
    """Send requests as fast as they are accepted; return rates and latencies."""
    asyncio.run(_send(ports, lambda count, spent: spent < _WARM_S))
    before = _cpu(processes)
    began = time.perf_counter()
    times = asyncio.run(_send(ports, lambda count, spent: spent < seconds))
    spent, cpu = time.perf_counter() - began, _cpu(processes) - before
    return [
        Row("accept.req_per_s", HEADWAY, setting, len(times) / spent, "req/s"),
        Row("accept.req_per_cpu_s", HEADWAY, setting, len(times) / cpu, "req/s of CPU"),
        Row("accept.ms.p50", HEADWAY, setting, float(np.quantile(times, 0.5)) * 1000, "ms"),
        Row("accept.ms.p99", HEADWAY, setting, float(np.quantile(times, 0.99)) * 1000, "ms"),
    ]


def _cpu(processes: Sequence[Any]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


async def _send(ports: Sequence[int], goes_on: Callable[[int, float], bool]) -> list[float]:
    """Send from all connections while `goes_on` is true; return the seconds that each request took.

    goes_on: called with the number of requests sent and the seconds since the start.
    """
    times, began, sent = list[float](), time.perf_counter(), 0
    body: Body = say(background=True, vllm_xargs={"fake_hold": "never"})

    async def client(session: aiohttp.ClientSession, port: int) -> None:
        nonlocal sent
        while goes_on(sent, time.perf_counter() - began):
            sent += 1
            at = time.perf_counter()
            async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
                if answer.status != 202:
                    text = await answer.text()
                    raise EngineError(f"A request was not accepted: {answer.status} {text}", "See its log.")
                await answer.read()
            times.append(time.perf_counter() - at)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(client(session, ports[i % len(ports)]) for i in range(_CLIENTS)))
    return times


# ---- a backlog


def _backlog(made: HeadwayCluster, count: int) -> list[Row]:
    """Queue many requests, then kill the leading controller."""
    setting = f"{count:,} queued"
    asyncio.run(_send([part.port for part in made.gateways], lambda sent, spent: sent < count))
    first = made.leader()
    _until_known(first, count)
    gateways = max(_rss(part.process) for part in made.gateways)
    rows = [
        Row("accept.rss_mb", HEADWAY, f"controller, {setting}", _rss(first.process), "MB"),
        Row("accept.rss_mb", HEADWAY, f"gateway with half of {setting}", gateways, "MB"),
    ]
    second = next(part for part in made.controllers if part is not first)
    began = time.perf_counter()
    first.kill()
    _until_known(second, count)
    rows.append(Row("accept.takeover_s", HEADWAY, setting, time.perf_counter() - began, "s"))
    return rows


def _until_known(part: Any, count: int) -> None:
    """Wait until a controller leads and knows `count` requests. Raise EngineError if it takes too long."""
    deadline = time.monotonic() + _PATIENCE_S
    while (said := part.says()).get("requests", 0) < count or not said.get("leads"):
        if time.monotonic() > deadline:
            raise EngineError(f"{part.name} does not learn of {count:,} requests: {said}", part.child.tail())
        time.sleep(0.05)


def _rss(process: Any) -> float:
    return float(process.memory_info().rss) / _MIB
