"""The interface of the stores of files, batches and their lines.

A `BatchStore` is one gateway's connection to a place that several gateways may share: a directory, or a
PostgreSQL database.

Guarantees, for any number of gateways:
  - A file whose `add_file` has returned, and a batch whose `add_batch` has, are kept.
  - A line ends once: its end, its answer and the batch's counts change in one transaction.
  - One gateway at a time runs batches, the one for which `hold` returns True.
  - What an upload leaves behind whose gateway was killed is deleted by `sweep`.

Methods may be called from any event loop. They raise HeadwayError (503) when the place is out; such a call
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
STALE_S = 3600.0  # an upload that has not grown for so long has been given up


class BatchStore(Protocol):
    """One gateway's connection to the store of files and batches."""

    @property
    def changed(self) -> asyncio.Event:
        """To be set when a batch was added or cancelled here."""

    def problem(self) -> str | None:
        """Return why nothing that is added now would be kept, None = it would. Cheap enough to ask often."""

    async def close(self) -> None:
        """Finish the calls that were made, let another gateway hold, and release files and threads."""

    # ---- files

    async def used(self, tenant: str) -> int:
        """Return the bytes of a tenant's files, and of uploads to other gateways as far as they are known."""

    async def begin_file(self, file: StoredFile) -> None:
        """Make room for the content of a file. Until it is added, or its batch ends, it is not listed."""

    async def append(self, id: str, at: int, content: bytes) -> None:
        """Add to the content of a file that was begun; at: the bytes that it has so far."""

    async def discard(self, id: str) -> None:
        """Delete a file that was begun and not added. Later, if the place is out."""

    async def add_file(self, file: StoredFile, most: int) -> None:
        """List a file that was begun and whose content is complete; all of it survives a loss of power.

        RequestError (413) if its tenant would have more than `most` bytes.
        """

    async def file(self, tenant: str, id: str) -> StoredFile | None:
        """Return a file of a tenant."""

    async def files(
        self, tenant: str, after: str | None, limit: int, *, newest: bool = True, purpose: str | None = None
    ) -> list[StoredFile]:
        """Return up to `limit` files of a tenant that come after one of them, in the order of their making.

        newest: the newest first.
        """

    def path(self, id: str) -> Path | None:
        """Return where the content of a file is on this machine, None = it is elsewhere."""

    async def read(self, id: str, start: int, size: int) -> bytes:
        """Return a part of a file. RequestError (404) when its content is gone."""

    async def delete_file(self, tenant: str, id: str) -> bool:
        """Delete a file; False when there is none. RequestError (409) while a batch reads it."""

    # ---- batches

    async def add_batch(self, batch: Batch, most: int, *, keyed: bool = False) -> bool:
        """Add a batch; False when there is one of its id, which stays as it is.

        keyed: its client can send it again under the same id, so it stays if the outcome is not known.
        RequestError: 404 when its file is gone, 429 when `most` of its tenant are open.
        """

    async def batch(self, tenant: str, id: str) -> Batch | None:
        """Return a batch of a tenant."""

    async def batches(self, tenant: str, after: str | None, limit: int) -> list[Batch]:
        """Return up to `limit` batches of a tenant that were made before one of them, the newest first."""

    async def open_batches(self) -> list[Batch]:
        """Return the batches that have not ended, the most urgent first."""

    async def cancel(self, tenant: str, id: str, now: float) -> bool:
        """Ask for the end of a batch; False when it ends or has ended already."""

    # ---- the gateway that runs batches

    async def hold(self) -> bool:
        """Become, or stay, the gateway that runs batches; False when another one is.

        To be called every second. After False the batches that this gateway was running are another one's:
        it stops them before it calls this again. The calls below are for the gateway that holds; from
        another one they fail (503) if they would change anything.
        """

    async def release(self) -> None:
        """Let another gateway hold."""

    async def sweep(self) -> None:
        """Delete what gateways left behind that were killed while they wrote or deleted a file."""

    async def clear_lines(self, id: str) -> None:
        """Forget lines of a batch whose check was cut short."""

    async def add_lines(self, id: str, lines: Sequence[Line]) -> None:
        """Add lines that are valid."""

    async def refuse(self, id: str, problems: Sequence[Mapping[str, Any]], now: float) -> None:
        """End a batch whose lines are wrong; it is cancelled if that was asked for meanwhile."""

    async def begin(self, id: str, now: float) -> int:
        """Begin to run a batch whose lines are all there; return how many they are."""

    async def open_lines(self, id: str, after: int, limit: int) -> list[Line]:
        """Return up to `limit` lines behind that number which have no end, in order."""

    async def record(self, id: str, number: int, good: bool, content: bytes) -> bool:
        """End a line with its line of the output (`good`) or error file; False when it has ended already.

        After a loss of power it may be open again; the broker has the answer then.
        """

    async def close_lines(self, id: str, end: int) -> int:
        """End all lines that have no end yet, without an answer; return how many."""

    async def ended_lines(self, id: str, after: int, limit: int) -> list[EndedLine]:
        """Return up to `limit` lines behind that number which have an end, in order.

        One at least if there is any, and no more than have `PIECE` bytes of answers.
        """

    async def finalize(self, id: str, now: float) -> str:
        """Take note that a batch's files are being written; return the state that it will have then."""

    async def end(
        self, id: str, state: str, now: float, *, output: StoredFile | None = None, error: StoredFile | None = None
    ) -> None:
        """End a batch: its files, whose content is complete, are listed and its lines forgotten."""


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
    """Return the error of a call that the place did not carry out (503)."""
    headers = None if retry_s is None else {"retry-after": str(retry_s)}
    return HeadwayError(f"{what} is out: {why}.", fix, status=503, kind="server_error", headers=headers)
