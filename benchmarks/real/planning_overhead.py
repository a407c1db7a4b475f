"""Latency of the gateway while its planner works in the background (`gateway/control/control.py`).

A gateway in front of a FAKE engine gets 500 requests/s. A quarter are chats, which wait for a plan; the
others need none: GET /v1/models, a refused request, the poll of a background response. The rows give the
latency of those others, with a planner that spends 200 ms on every plan and with one that answers immediately.
Goal: p99 with the slow planner at most 5 ms higher.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.real.peers import servers
from headway.errors import EngineError
from headway.policy.core.cluster import Cluster
from headway.policy.recipes.default import DEFAULT
from headway.ports import Planner
from headway.types import Plan, Send
from headway.whatif.output.results import Row

_RATE = 500.0  # requests per second
_CHAT = "/v1/chat/completions"
_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 4}
_SETTING = f"{_RATE:.0f} req/s"
# Positions in the cycle of `_CALLS`. A poll reads the queue's file, in a thread.
_KINDS = {_SETTING: (1, 2, 3), f"{_SETTING}, from memory": (1, 2), f"{_SETTING}, from the file": (3,)}


class ByArrival(Planner):
    """Sends queued requests by arrival to the first instance with a free slot."""

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return sends that fill the dispatch windows."""
        backlog = cluster.backlog
        free = {name: one.window - len(cluster.inside(name)) for name, one in cluster.instances.items()}
        sends = []
        for row in sorted(backlog.rows().tolist(), key=lambda row: int(backlog.serial[row])):
            name = next((name for name, slots in free.items() if slots > 0), None)
            if name is not None and not backlog.sent[row]:
                free[name] -= 1
                sends.append(Send(str(backlog.keys[row]), name))
        return Plan(sends)


class Deliberate(ByArrival):
    """Sends by arrival, too, but makes every plan on a snapshot, outside the event loop."""

    def __init__(self) -> None:
        self._ready = Plan(final=True)

    @property
    def thinks(self) -> bool:
        return True

    def make(self, cluster: Cluster, now: float) -> Plan:
        """Return the plan; it may take long."""
        return super().plan(cluster, now)

    def deliberate(self, cluster: Cluster, now: float) -> Callable[[], object] | None:
        """Return a function that makes the next plan, or None if no request waits."""
        if all(cluster.backlog.sent[cluster.backlog.rows()]):
            return None
        snapshot = cluster.snapshot()
        return lambda: replace(self.make(snapshot, now), based_on=snapshot.version, final=True)

    def conclude(self, result: object, cluster: Cluster, now: float) -> None:
        """Keep a finished plan for the next call of `plan`."""
        assert isinstance(result, Plan)
        self._ready = result

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return the finished plan once; the controller carries out the parts that are still valid."""
        ready, self._ready = self._ready, Plan(final=True)
        return ready


class Sleeping(Deliberate):
    """Spends 200 ms on every plan."""

    def make(self, cluster: Cluster, now: float) -> Plan:
        """Return the plan after 200 ms."""
        time.sleep(0.2)
        return super().make(cluster, now)


AT_ONCE = replace(DEFAULT["vllm"], name="by-arrival", planner=ByArrival)
SLEEPING = replace(DEFAULT["vllm"], name="by-arrival-sleeping", planner=Sleeping)
_CALLS: tuple[tuple[str, str, Any, int], ...] = (
    ("POST", _CHAT, {"model": "smollm2", **_BODY}, 200),
    ("GET", "/v1/models", None, 200),
    ("POST", _CHAT, {"model": "unknown", **_BODY}, 404),
    ("GET", "/v1/responses/{id}", None, 200),
)
_SYSTEMS = {"answers at once": "AT_ONCE", "thinks": "SLEEPING"}


def planning_rows(duration: float) -> list[Row]:
    """Return planning.p50_ms and planning.p99_ms of requests that need no plan, for both planners.

    duration: seconds of load per planner.
    """
    rows = []
    for system, recipe in _SYSTEMS.items():
        with (
            tempfile.TemporaryDirectory(prefix="headway-planning-") as folder,
            servers(Path(folder), f"{__name__}:{recipe}") as (_, gateway),
        ):
            seconds = asyncio.run(_load(f"http://127.0.0.1:{gateway.port}", duration))
        for setting, kinds in _KINDS.items():
            some = np.concatenate([seconds[kind :: len(_CALLS)] for kind in kinds])
            for label, p in (("p50", 0.5), ("p99", 0.99)):
                value = float(np.quantile(some, p)) * 1000
                rows.append(Row(f"planning.{label}_ms", system, setting, value, "ms"))
    return rows


async def _load(url: str, duration: float) -> list[float]:
    """Send requests at a steady rate, in the cycle of `_CALLS`; return the seconds that each took."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        id = await _background(session)
        await _send(session, 1.0, id)  # warms caches up
        return await _send(session, duration, id)


async def _background(session: aiohttp.ClientSession) -> str:
    body = {"model": "smollm2", **_BODY, "background": True}
    async with session.post(_CHAT, json=body) as response:
        return str((await response.json())["id"])


async def _send(session: aiohttp.ClientSession, duration: float, id: str) -> list[float]:
    loop, sent = asyncio.get_running_loop(), []
    began = loop.time()
    for number in range(int(duration * _RATE)):
        await asyncio.sleep(began + number / _RATE - loop.time())
        method, path, body, expected = _CALLS[number % len(_CALLS)]
        sent.append(asyncio.create_task(_call(session, method, path.format(id=id), body, expected)))
    return await asyncio.gather(*sent)


async def _call(session: aiohttp.ClientSession, method: str, path: str, body: Any, expected: int) -> float:
    began = time.perf_counter()
    async with session.request(method, path, json=body) as response:
        text = await response.text()
    if response.status != expected:
        raise EngineError(f"{method} {path} returned {response.status}: {text[:200]}.", "This is a bug.")
    return time.perf_counter() - began
