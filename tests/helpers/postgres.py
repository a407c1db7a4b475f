"""A private PostgreSQL server for tests, started when the first test asks for it.

With HEADWAY_POSTGRES_URL set, that server is used instead, by tests that do not stop it. Where there are no
binaries (`make postgres` installs Debian's), the tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import asyncpg
import pytest

from headway.bench.live.servers.postgres import PASSWORD as PASSWORD
from headway.bench.live.servers.postgres import Server as PrivateServer
from headway.broker.postgres_link import Address
from headway.errors import ConfigError

URL = "HEADWAY_POSTGRES_URL"
_used: list[str] = []  # schemas


def new() -> PrivateServer:
    """Return a server that is not started yet; without any to start the test is skipped."""
    try:
        return PrivateServer()
    except ConfigError as error:
        pytest.skip(f"{error}")


@cache
def private() -> PrivateServer:
    """Return the session's own server, started when it is first asked for."""
    server = new()
    server.start()
    return server


def stop() -> None:
    """End what `private` has started, clear what is left in another server."""
    if URL in os.environ:
        for schema in _used:
            run_sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE", url=the_url())
    if private.cache_info().currsize:
        private().remove()
        private.cache_clear()


def the_url() -> str:
    """Return the URL of the server to test with."""
    return os.environ.get(URL) or private().url


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


def _apart(work: Callable[[], list[Any]]) -> list[Any]:
    """Return what work returns in a thread without an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
