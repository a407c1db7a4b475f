"""Opens the place of files and batches that the configuration names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.config import Config
from headway.serve.batches.directory import DirectoryStore
from headway.serve.batches.port import BatchStore


@asynccontextmanager
async def opened(config: Config) -> AsyncIterator[BatchStore | None]:
    """Open the place of files and batches until the block ends; None = there are no batches."""
    store = await asyncio.to_thread(_open, config)
    try:
        yield store
    finally:
        if store is not None:
            await store.close()


def _open(config: Config) -> BatchStore | None:
    if config.batches_dir is not None:
        return DirectoryStore(config.batches_dir)
    return None
