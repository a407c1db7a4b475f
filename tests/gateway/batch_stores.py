"""The kinds of batch store that the contract tests run on: a new kind is one more entry of STORES.

A place is made once per test; `connect()` then returns one gateway's store on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headway.store.batches.directory import DirectoryStore
from headway.store.batches.port import BatchStore, pieces
from headway.store.batches.postgres import PostgresStore
from headway.store.batches.records import Batch, Line, StoredFile
from headway.store.queue.port import Job
from tests.helpers import postgres as server

Connect = Callable[[], BatchStore]
FILE = StoredFile("file-1", "alpha", "x.jsonl", "batch", 10, 1.0)
BATCH = Batch("batch_1", "alpha", "/v1/chat/completions", "file-1", "24h", 1.0, 90.0)
ROOM = 10**9


def directory(folder: Path) -> Connect:
    return lambda: DirectoryStore(folder / "batches")


def postgres(folder: Path) -> Connect:
    address = server.fresh()
    return lambda: PostgresStore(address, 30.0)


STORES: dict[str, Callable[[Path], Connect]] = {"directory": directory, "postgres": postgres}


async def add(store: BatchStore, file: StoredFile = FILE, content: bytes = b"x" * 10) -> None:
    """Upload a file."""
    await store.begin_file(file)
    await store.append(file.id, 0, content)
    await store.add_file(replace(file, size=len(content)), ROOM)


async def begun(store: BatchStore, count: int) -> list[Line]:
    """Hold, and begin a batch of so many lines."""
    assert await store.hold()
    await add(store)
    await store.add_batch(BATCH, 1)
    lines = [Line(number, number * 10, 9, f"c{number}") for number in range(1, count + 1)]
    await store.add_lines(BATCH.id, lines)
    assert await store.begin(BATCH.id, 2.0) == count
    return lines


def job(line: Line, good: bool) -> Job:
    """Return the ended job of a line; the answer has ends of lines, as some engines write them."""
    found = Job(f"batch_1-{line.number}", "alpha", "", b"", "", 1.0, state="done" if good else "failed")
    return replace(found, result=b'{\n "x": 1\r\n}') if good else replace(found, reason="dropped: late")


async def content(store: BatchStore, id: str | None, tenant: str = "alpha") -> bytes:
    """Return what is in a file; nothing when there is none."""
    file = await store.file(tenant, id) if id is not None else None
    if file is None:
        return b""
    return b"".join([piece async for piece in pieces(store, file)])


async def custom_ids(store: BatchStore, file: str | None) -> list[str]:
    """Return the `custom_id`s of a file's lines."""
    return [json.loads(line)["custom_id"] for line in (await content(store, file)).splitlines()]
