"""A PostgreSQL broker for the tests of it; a module with a server of its own has another `address`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.helpers import postgres as server
from tests.store.stores import FAR

from headway.store.queue.postgres import PostgresBroker
from headway.store.queue.postgres_link import Address


@pytest.fixture
def address() -> Address:
    return server.fresh()


@pytest.fixture
async def broker(address: Address) -> AsyncIterator[PostgresBroker]:
    broker = PostgresBroker(address, "A")
    await broker.renew(FAR)
    yield broker
    await broker.close()
