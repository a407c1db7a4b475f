"""A private RabbitMQ server for tests, started when the first test asks for it.

With HEADWAY_RABBITMQ_URL set, that server is used instead, by tests that do not stop it. Where there is no
server to start (`make rabbitmq` installs Debian's), the tests are skipped.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

from headway.bench.live.servers.rabbitmq import Server as PrivateServer
from headway.errors import ConfigError

URL = "HEADWAY_RABBITMQ_URL"


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
    """End what `private` has started."""
    if private.cache_info().currsize:
        private().remove()
        private.cache_clear()


def the_url() -> str:
    """Return the URL of the server to test with."""
    return os.environ.get(URL) or private().url
