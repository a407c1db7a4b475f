"""Opens the store of files and batches that the configuration names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.config import Broker, Config
from headway.store.batches.directory import DirectoryStore
from headway.store.batches.port import BatchStore


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[BatchStore | None]:
    """Open the store of files and batches until the block ends; None = batches are off."""
    opening = asyncio.ensure_future(asyncio.to_thread(_open, config))
    try:
        yield await asyncio.shield(opening)
    finally:  # also after a signal while it is being opened
        if (store := await opening) is not None:
            await store.close()


def _open(config: Config) -> BatchStore | None:
    if config.batches_dir is not None:
        return DirectoryStore(config.batches_dir, config.broker.sqlite.max_log_mib * 2**20)
    if config.batches_in_postgres:
        return _postgres(config.broker)
    return None


def _postgres(broker: Broker) -> BatchStore:
    from headway.store.batches.postgres import PostgresStore
    from headway.store.queue.postgres_link import address_of  # asyncpg is loaded where it is needed

    return PostgresStore(address_of(broker.postgres), broker.lease_seconds)
