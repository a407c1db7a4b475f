"""A private PostgreSQL server for tests (`private.Private`), and schemas that nothing has used."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import asyncpg
import pytest

from headway.errors import HeadwayError
from headway.store.queue.postgres_link import Address
from testing.servers.postgres import PostgresServer as PrivateServer
from testing.servers.process import PASSWORD as PASSWORD
from tests.helpers.private import Private

URL = "HEADWAY_POSTGRES_URL"
_server = Private(PrivateServer, URL)
new, own, private, the_url = _server.new, _server.own, _server.private, _server.the_url
_used: list[str] = []  # schemas


def stop() -> None:
    """End what `private` has started, clear what is left in another server."""
    if URL in os.environ:
        for schema in _used:
            run_sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE", url=the_url())
    _server.stop()


def fresh(url: str | None = None) -> Address:
    """Return a schema that nothing has used, by default of the server to test with."""
    _used.append(f"test_{secrets.token_hex(6)}")
    return Address(url or the_url(), _used[-1], 10.0)


def run_sql(sql: str, *values: Any, url: str) -> list[Any]:
    """Run a statement in a session of its own, from any thread, and return its rows."""

    async def run() -> list[Any]:
        connection = await asyncpg.connect(url, timeout=10)
        try:
            return list(await connection.fetch(sql, *values))
        finally:
            await connection.close()

    return _apart(lambda: asyncio.run(run()))


def run_script(sql: str, *, url: str) -> None:
    """Run several statements in a session of its own."""

    async def run() -> list[Any]:
        connection = await asyncpg.connect(url, timeout=10)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()
        return []

    _apart(lambda: asyncio.run(run()))


async def succeeds(call: Callable[[], Awaitable[Any]], seconds: float = 20.0) -> Any:
    """Repeat a call until it is carried out; meanwhile it may fail with 503 only."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await call()
        except HeadwayError as error:
            if error.status != 503 or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.02)


def lose(owner: Any, work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the connection end between the next commit and the word of it.

    work: the owner's method that commits; its last argument is the connection.
    """
    carry_out, cuts = getattr(owner, work), iter([True])

    async def committed(*arguments: Any) -> Any:
        done = await carry_out(*arguments)
        if next(cuts, False):
            arguments[-1].terminate()
            raise ConnectionResetError
        return done

    monkeypatch.setattr(owner, work, committed)


def _apart(work: Callable[[], list[Any]]) -> list[Any]:
    """Return what work returns in a thread without an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
