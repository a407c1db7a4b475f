"""Lines of output and error files, as OpenAI's, and the files themselves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from headway import clock
from headway.errors import HeadwayError
from headway.gateway.apis.batches.files import new_id
from headway.gateway.apis.responses.translate import base_of, response_of
from headway.gateway.parsing.requests import read_json
from headway.store.batches.port import PIECE, BatchStore
from headway.store.batches.records import CANCELLED, EXPIRED, GOOD, Batch, EndedLine, Line, StoredFile
from headway.store.queue.port import Job

_PAGE = 500  # lines in memory at a time, unless their answers are large
_UNANSWERED = {
    EXPIRED: {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    },
    CANCELLED: {"code": "batch_cancelled", "message": "The batch was cancelled before this request ended."},
}


def request_id(batch: Batch, number: int) -> str:
    """Return the id of a line's request: the same after a restart, so that the queue knows it again."""
    return f"{batch.id}-{number}"


def result_line(batch: Batch, line: Line, job: Job) -> tuple[bool, bytes]:
    """Return whether a request that has ended was answered, and its line of the output or error file."""
    if job.state == "done":
        return True, _with_response(batch, line, 200, job.result or b"null")
    code, _, message = (job.reason or "internal").partition(": ")
    return False, _line(batch, line, error={"code": code, "message": message or code})


def as_response(line: bytes, id: str, created: int, result: bytes) -> bytes:
    """Return the answer of a chat in the shape of the Responses API; line: the one that it answers."""
    base = base_of(read_json(line)["body"], id, created)
    return json.dumps(response_of(base, json.loads(result))).encode()


def error_line(batch: Batch, line: Line, error: HeadwayError) -> bytes:
    """Return the line of the error file of a request that was not accepted."""
    return _with_response(batch, line, error.status, json.dumps(error.body()).encode())


def _with_response(batch: Batch, line: Line, status: int, body: bytes) -> bytes:
    """Return a line with a response whose body is JSON, byte for byte but for the ends of its lines."""
    flat = body.replace(b"\n", b" ").replace(b"\r", b" ")  # JSON has none within its texts
    response = {"status_code": status, "request_id": request_id(batch, line.number), "body": None}
    before, _, after = _line(batch, line, response=response).partition(b'"body": null')
    return before + b'"body": ' + flat + after


def _line(
    batch: Batch, line: Line | EndedLine, *, response: dict[str, Any] | None = None, error: dict[str, str] | None = None
) -> bytes:
    id = f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}"
    # `custom_id` is the client's, and goes last: what is looked for in a line must not be found in it.
    fields = {"id": id, "response": response, "error": error, "custom_id": line.custom_id}
    return json.dumps(fields).encode()


async def conclude(store: BatchStore, batch: Batch) -> None:
    """Write the output and error files of a batch whose lines have all ended, and end it.

    Done again after a crash it has the same outcome; files that were written before are swept.
    """
    state = await store.finalize(batch.id, clock.now())
    output = await _write(store, batch, good=True)
    error = await _write(store, batch, good=False)
    await store.end(batch.id, state, clock.now(), output=output, error=error)


async def _write(store: BatchStore, batch: Batch, *, good: bool) -> StoredFile | None:
    """Write one of the two files; None when it would be empty."""
    kind = "output" if good else "error"
    name = f"{batch.id}_{kind}.jsonl"
    now, kept_s = clock.now(), batch.output_expires_s
    expires = None if kept_s is None else now + kept_s
    file = StoredFile(new_id("file"), batch.tenant, name, "batch_output", 0, now, expires)
    await store.begin_file(file)
    try:
        size = await _write_lines(store, file.id, batch, good)
    except BaseException:
        await store.discard(file.id)
        raise
    if not size:
        await store.discard(file.id)
        return None
    return replace(file, size=size)


async def _write_lines(store: BatchStore, id: str, batch: Batch, good: bool) -> int:
    """Write the content of one of the two files; return its bytes."""
    size, pending = 0, bytearray()
    async for line in _ended_lines(store, batch.id):
        if (line.ended == GOOD) == good:
            pending += line.content or _line(batch, line, error=_UNANSWERED[line.ended])
            pending += b"\n"
        if len(pending) >= PIECE:
            await store.append(id, size, bytes(pending))
            size += len(pending)
            pending.clear()
    if pending:
        await store.append(id, size, bytes(pending))
    return size + len(pending)


async def _ended_lines(store: BatchStore, id: str) -> AsyncIterator[EndedLine]:
    after = 0
    while page := await store.ended_lines(id, after, _PAGE):
        for line in page:
            yield line
        after = page[-1].number
