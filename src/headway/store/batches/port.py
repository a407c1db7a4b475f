"""The interface of the stores of files, batches and their lines.

A `BatchStore` is one gateway's connection to a store that several gateways may share: a directory, or a
PostgreSQL database.

Guarantees, for any number of gateways:
  - A file is kept once `add_file` has returned, and a batch once `add_batch` has.
  - A line ends once: its end, its answer and the batch's counts change in one transaction.
  - One gateway at a time runs batches, the one for which `hold` returns True.
  - `sweep` deletes the remains of an upload whose gateway was killed.

Methods may be called from any event loop. They raise HeadwayError (503) when the store fails; such a call
may or may not have been carried out. Instants are those of `headway.clock`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headway.errors import HeadwayError
from headway.store.batches.records import Batch, EndedLine, Line, StoredFile, input_gone

PIECE = 2**18  # bytes of a file that are written and read at a time
STALE_S = 3600.0  # an upload that has not grown for this time was given up


class BatchStore(Protocol):
    """One gateway's connection to the store of files and batches."""

    @property
    def changed(self) -> asyncio.Event:
        """Return the event that callers set after they add or cancel a batch."""

    def problem(self) -> str | None:
        """Return why the store can keep nothing new now, None = it can. Cheap enough to call often."""

    async def close(self) -> None:
        """Finish pending calls, let another gateway run batches, and release files and threads."""

    # ---- files

    async def used(self, tenant: str) -> int:
        """Return the bytes of a tenant's files, and of uploads to other gateways as far as they are known."""

    async def begin_file(self, file: StoredFile) -> None:
        """Begin a file; it is not listed until it is added, or its batch ends."""

    async def append(self, id: str, at: int, content: bytes) -> None:
        """Add to the content of a file that was begun; at: the bytes that it has so far."""

    async def discard(self, id: str) -> None:
        """Delete a file that was begun and not added. Later, if the store fails."""

    async def add_file(self, file: StoredFile, most: int) -> None:
        """List a file that was begun and whose content is complete; all of it survives a loss of power.

        RequestError (413) if its tenant would have more than `most` bytes.
        """

    async def file(self, tenant: str, id: str) -> StoredFile | None:
        """Return a file of a tenant."""

    async def files(
        self,
        tenant: str,
        after: str | None,
        limit: int,
        *,
        newest: bool = True,
        purpose: str | None = None,
        now: float = 0.0,
    ) -> list[StoredFile]:
        """Return up to `limit` files of a tenant that come after the file `after`, in order of creation.

        newest: the newest first. now: those that expired before are left out.
        """

    def path(self, id: str) -> Path | None:
        """Return the path of a file's content on this machine, None = it is elsewhere."""

    async def read(self, id: str, start: int, size: int) -> bytes:
        """Return a part of a file. RequestError (404) when its content is gone."""

    async def expired(self, now: float, limit: int) -> list[StoredFile]:
        """Return up to `limit` files that expired before `now`, of all tenants, but for those that a batch reads."""

    async def delete_file(self, tenant: str, id: str) -> bool:
        """Delete a file; False when there is none. RequestError (409) while a batch reads it."""

    # ---- batches

    async def add_batch(self, batch: Batch, most: int, *, keyed: bool = False) -> bool:
        """Add a batch; False when its id exists; that batch is left unchanged.

        keyed: its client can send it again under the same id, so it is kept if the outcome is unknown.
        RequestError: 404 when its file is gone, 429 when `most` of its tenant are open.
        """

    async def batch(self, tenant: str, id: str) -> Batch | None:
        """Return a batch of a tenant."""

    async def batches(self, tenant: str, after: str | None, limit: int) -> list[Batch]:
        """Return up to `limit` batches of a tenant created before the batch `after`, the newest first."""

    async def open_batches(self) -> list[Batch]:
        """Return the batches that have not ended, the most urgent first."""

    async def cancel(self, tenant: str, id: str, now: float) -> bool:
        """Request the cancellation of a batch; False when it is ending or has ended."""

    # ---- the gateway that runs batches

    async def hold(self) -> bool:
        """Become, or stay, the gateway that runs batches; False when another one is.

        Call it every second. After False another gateway has the batches that this one was running: it stops
        them before it calls this again. The calls below are for the gateway that runs batches; from another
        one they fail (503) if they would change anything.
        """

    async def release(self) -> None:
        """Let another gateway run batches."""

    async def sweep(self) -> None:
        """Delete the remains of files that gateways were writing or deleting when they were killed."""

    async def clear_lines(self, id: str) -> None:
        """Delete the lines of a batch whose check was interrupted."""

    async def add_lines(self, id: str, lines: Sequence[Line]) -> None:
        """Add valid lines."""

    async def refuse(self, id: str, problems: Sequence[Mapping[str, Any]], now: float) -> None:
        """End a batch with invalid lines; it is cancelled if that was requested meanwhile."""

    async def begin(self, id: str, now: float) -> int:
        """Begin to run a batch whose lines are complete; return their number."""

    async def open_lines(self, id: str, after: int, limit: int) -> list[Line]:
        """Return up to `limit` open lines after the number `after`, in order."""

    async def record(self, id: str, number: int, good: bool, content: bytes) -> bool:
        """End a line with its line of the output (`good`) or error file; False when it has ended already.

        After a power loss it may be open again; the broker then has the answer.
        """

    async def close_lines(self, id: str, end: int) -> int:
        """End all open lines without an answer; return how many."""

    async def ended_lines(self, id: str, after: int, limit: int) -> list[EndedLine]:
        """Return up to `limit` ended lines after the number `after`, in order.

        Their answers have at most `PIECE` bytes together, unless the first alone has more.
        """

    async def finalize(self, id: str, now: float) -> str:
        """Note that a batch's files are being written; return the state in which it will end."""

    async def end(
        self, id: str, state: str, now: float, *, output: StoredFile | None = None, error: StoredFile | None = None
    ) -> None:
        """End a batch: list its files, whose content is complete, and delete its lines."""


async def pieces(store: BatchStore, file: StoredFile) -> AsyncIterator[bytes]:
    """Yield the content of a file. RequestError (404) when it is gone."""
    start = 0
    while start < file.size:
        piece = await store.read(file.id, start, PIECE)
        if not piece:
            raise input_gone()
        yield piece
        start += len(piece)


def out(what: str, why: object, fix: str, *, retry_s: int | None = None) -> HeadwayError:
    """Return the error of a call that the store did not carry out (503)."""
    headers = None if retry_s is None else {"retry-after": str(retry_s)}
    return HeadwayError(f"{what} is out: {why}.", fix, status=503, kind="server_error", headers=headers)
