"""Files, batches and their lines as they are stored, and the errors that clients see."""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import RequestError

LEAST_BYTES = 4096  # least size of a file in its tenant's quota: its row and its disk block
# Ended batches of a tenant are kept: the newest ones, and all that ended recently. By default (broker.keep_hours)
# that is longer than the queue keeps the requests of their lines, whose ids follow from the batch's.
MOST_ENDED, ENDED_KEPT_S = 10_000, 30 * 86400.0
FORGOTTEN = 1000  # batches deleted at a time
GOOD, BAD, EXPIRED, CANCELLED = range(1, 5)  # ends of a line; 0 = it has none


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a tenant.

    purpose: "batch" or "batch_output". size: bytes. created: instant. expires: instant from which it is gone.
    """

    id: str
    tenant: str
    name: str
    purpose: str
    size: int
    created: float
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch.

    Attributes:
        input_file, output_file, error_file: ids of files
        window: as the client wrote it; due: the instant at which it ends
        metadata: the client's, as JSON
        claims: rights of the key that made it (`Key` without its secret), as JSON; None = there are no keys
        state: "validating", "in_progress", "finalizing" or "cancelling", then how it ended: "completed",
            "failed", "expired" or "cancelled"
        began, finalizing, cancelling, ended: instants at which the state changed
        errors: problems of its lines, as JSON
        total, completed, failed: numbers of lines
        output_expires_s: seconds after which its files expire, None = never
    """

    id: str
    tenant: str
    endpoint: str
    input_file: str
    window: str
    created: float
    due: float
    metadata: str | None = None
    claims: str | None = None
    state: str = "validating"
    began: float | None = None
    finalizing: float | None = None
    cancelling: float | None = None
    ended: float | None = None
    errors: str | None = None
    output_file: str | None = None
    error_file: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a batch's input: its number from 1 on, its place in the file, and its `custom_id`.

    checksum: CRC-32 of its text when it was checked, None = not known.
    """

    number: int
    start: int
    size: int
    custom_id: str
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class EndedLine:
    """A line that has ended. content: its line in the output or error file, None = it was not answered."""

    number: int
    custom_id: str
    ended: int
    content: bytes | None


def no_room(most: int) -> RequestError:
    """Return the error of a tenant whose files would exceed its limit (413)."""
    return RequestError(
        f"Your files may have {most / 2**20:g} MiB in all (batches.tenant_mib).",
        "Delete files that are not needed any more.",
        status=413,
        code="files_full",
        headers={"connection": "close"},
    )


def no_file(id: str) -> RequestError:
    """Return the error of a file that a tenant does not have (404)."""
    return RequestError(f"There is no file {id[:64]!r}.", "GET /v1/files lists them.", status=404, code="not_found")


def input_gone() -> RequestError:
    """Return the error of a file whose content is gone (404)."""
    return RequestError(
        "The content of the file is gone.", "Upload it again, for a new batch.", status=404, code="input_file_gone"
    )


def input_changed() -> RequestError:
    """Return the error of a line whose text is not the one that was checked (409)."""
    return RequestError(
        "The line has changed on the disk since it was checked.",
        "Upload the file again and create a new batch.",
        status=409,
        code="input_changed",
    )


def in_use(batch: str) -> RequestError:
    """Return the error of a file that cannot be deleted yet (409)."""
    return RequestError(
        f"The batch {batch} reads this file.", "Cancel it first, or wait for its end.", status=409, code="file_in_use"
    )


def too_many_open(count: int, most: int) -> RequestError:
    """Return the error of a tenant with too many open batches (429)."""
    return RequestError(
        f"{count} of your batches are open; at most {most} may be.",
        "Wait until one ends (batches.max_open).",
        status=429,
        kind="rate_limit_error",
        code="too_many_batches",
    )
