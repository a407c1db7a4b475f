"""A part of a RabbitMQ server that nothing has used."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from headway.cluster.wire.connection import RabbitAddress
from tests.helpers import rabbitmq as server
from tests.wire.ends import clear


@pytest.fixture
async def address() -> AsyncIterator[RabbitAddress]:
    address = RabbitAddress(server.the_url(), f"test-{secrets.token_hex(6)}")
    yield address
    await clear(address)
