"""The kinds of broker that the contract tests run on: a new kind is one more entry of STORES.

A store is opened once per test; `connect(owner)` then returns one gateway's broker on it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.helpers import postgres as server

from headway.store.queue.memory import MemoryBroker, MemoryStore
from headway.store.queue.port import Broker, Job
from headway.store.queue.postgres import PostgresBroker
from headway.store.queue.sqlite import SqliteBroker

Connect = Callable[[str], Broker]
FAR = 1e9  # an instant after all others in these tests


def memory(folder: Path) -> Connect:
    store = MemoryStore()
    return lambda owner: MemoryBroker(owner, store)


def sqlite(folder: Path) -> Connect:
    return lambda owner: SqliteBroker(str(folder / "jobs.db"), owner, synchronous="normal")


def postgres(folder: Path) -> Connect:
    address = server.fresh()
    return lambda owner: PostgresBroker(address, owner)


STORES: dict[str, Callable[[Path], Connect]] = {"memory": memory, "sqlite": sqlite, "postgres": postgres}


@asynccontextmanager
async def gateways(connect: Connect, *owners: str, until: float = FAR) -> AsyncIterator[list[Broker]]:
    """Connect gateways whose leases have begun; close them at the end."""
    brokers = [connect(owner) for owner in owners]
    try:
        for broker in brokers:
            await broker.renew(until)
        yield brokers
    finally:
        for broker in brokers:
            await broker.close()


def job(id: str = "a", arrival: float = 1.0, **more: Any) -> Job:
    body = b'{"prompt": "\x00\xff"}'
    return Job(id, "tenant", "/v1/chat/completions", body, '{"model": "m"}', arrival, **more)


async def take_ids(broker: Broker, now: float = 0.0, limit: int = 100) -> list[str]:
    return [job.id for job in await broker.take(now, limit)]
