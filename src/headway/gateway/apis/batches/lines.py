"""Checks a batch's input line by line, in a thread of its own, before any line is run."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Annotated, Any, Literal
from zlib import crc32

from pydantic import BaseModel, Field, TypeAdapter

from headway import clock
from headway.config import Key
from headway.errors import HeadwayError, RequestError
from headway.gateway.apis.api import Api
from headway.gateway.apis.batches.files import new_id
from headway.gateway.apis.responses.endpoints import ResponsesApi
from headway.gateway.apis.responses.translate import base_of, response_of
from headway.gateway.apis.state import AppState
from headway.gateway.parsing.fields import parse_as
from headway.gateway.parsing.requests import PATHS, Kind, ParsedRequest, read_json
from headway.store.batches.port import PIECE, BatchStore, pieces
from headway.store.batches.records import CANCELLED, EXPIRED, GOOD, Batch, EndedLine, Line, StoredFile, input_gone
from headway.store.queue.port import Job

log = logging.getLogger("headway.gateway")

_KEY = TypeAdapter(Key)
MOST_ERRORS = 50  # that a batch lists
_PAGE = 500  # lines that are stored at a time
RESPONSES = "/v1/responses"
_GENERATED: tuple[Kind, ...] = ("chat", "completions", "embeddings")
APIS: dict[str, Api] = {RESPONSES: ResponsesApi("chat"), **{PATHS[kind]: Api(kind) for kind in _GENERATED}}


class LineBody(BaseModel):
    """One line of the input."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512, strict=True)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def parse_line(state: AppState, batch: Batch, text: bytes, key: Key | None) -> tuple[LineBody, ParsedRequest]:
    """Parse one line as its endpoint would; RequestError says what is wrong with it.

    key: whose limits its claims must keep, None = no limits.
    """
    line = parse_as(LineBody, read_json(text))
    if line.url != batch.endpoint:
        raise RequestError(
            f"The url is {line.url[:64]!r}.",
            f"It must be the batch's endpoint, {batch.endpoint}.",
            param="url",
            code="invalid_url",
        )
    api = APIS[line.url]
    headers = {"x-llm-d-inference-objective": "batch"}
    try:
        parsed = state.parser.parse(
            api.kind, api.read(line.body), headers, key, tenant=batch.tenant, arrival=clock.now()
        )
    except HeadwayError:
        raise
    except Exception as error:  # a fault of ours fails this line, or its batch would be checked for ever
        log.exception("a line of batch %s cannot be parsed", batch.id)
        raise RequestError("The body cannot be read.", "Compare it with the API's reference.", param="body") from error
    if parsed.stream:
        raise RequestError(
            "A line of a batch cannot stream.", "Leave out stream.", param="body.stream", code="stream_unsupported"
        )
    return line, parsed


@dataclass(slots=True)
class LineCheck:
    """One check of all lines. stopped: set to end it early.

    problems: what is wrong, at most `MOST_ERRORS`, in OpenAI's shape.
    """

    state: AppState
    store: BatchStore
    batch: Batch
    stopped: threading.Event = field(default_factory=threading.Event)
    problems: list[dict[str, Any]] = field(default_factory=list)
    _lines: list[Line] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)
    _count: int = 0

    def run(self) -> bool:
        """Check and store all lines; False when it was stopped. Blocks for as long as it takes."""
        asyncio.run(self._run())
        return not self.stopped.is_set()

    async def _run(self) -> None:
        await self.store.clear_lines(self.batch.id)
        file = await self.store.file(self.batch.tenant, self.batch.input_file)
        try:
            if file is None:
                raise input_gone()
            await self._check_all(pieces(self.store, file))
        except RequestError as error:
            self._note(None, error)
        if not self.problems and not self._count:
            empty = RequestError("The input file has no lines.", "Send one or more.", code="empty_file")
            self._note(None, empty)
        await self._flush()

    async def _check_all(self, content: AsyncIterator[bytes]) -> None:
        key = key_of(self.batch)
        longest = self.state.config.server.max_body_kib * 1024
        async for number, start, text in numbered(content, longest):
            if self.stopped.is_set() or len(self.problems) >= MOST_ERRORS:
                return
            began = time.perf_counter()
            try:
                await self._check(number, start, text, longest, key)
            except HeadwayError as error:
                self._note(number, error)
            # The event loop waits for the interpreter meanwhile: leave it half of the time.
            await asyncio.sleep(time.perf_counter() - began)

    async def _check(self, number: int, start: int, text: bytes, longest: int, key: Key | None) -> None:
        if len(text) > longest:
            raise RequestError(
                f"The line has more than {longest} bytes.",
                "Send less, or raise server.max_body_kib.",
                code="line_too_long",
            )
        self._count += 1
        line, _ = parse_line(self.state, self.batch, text, key)
        digest = blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise RequestError(
                f"The custom_id {line.custom_id[:64]!r} is that of an earlier line.",
                "Give each line its own.",
                param="custom_id",
                code="duplicate_custom_id",
            )
        self._seen.add(digest)
        self._lines.append(Line(number, start, len(text), line.custom_id, crc32(text)))
        if len(self._lines) >= _PAGE:
            await self._flush()

    async def _flush(self) -> None:
        if not self.problems and not self.stopped.is_set():
            await self.store.add_lines(self.batch.id, self._lines)
        self._lines.clear()

    def _note(self, number: int | None, error: HeadwayError) -> None:
        self.problems.append(
            {"code": error.code or "invalid_request", "line": number, "message": str(error)[:500], "param": error.param}
        )


async def numbered(content: AsyncIterator[bytes], longest: int) -> AsyncIterator[tuple[int, int, bytes]]:
    """Yield number (from 1 on), start and text of each line that is not blank, from pieces of a file.

    Of a line with more than `longest` bytes there is only the beginning, one byte more than that.
    """
    number, start = 1, 0
    text, size = bytearray(), 0  # of the line that is being read
    async for piece in content:
        at = 0
        while at < len(piece):
            end = piece.find(b"\n", at) + 1
            part = piece[at : end or len(piece)]
            text += part[: longest + 1 - len(text)]
            at, size = at + len(part), size + len(part)
            if end:
                if text.strip():
                    yield number, start, bytes(text).rstrip(b"\r\n")
                number, start, size = number + 1, start + size, 0
                text.clear()
    if text.strip():
        yield number, start, bytes(text).rstrip(b"\r\n")


def key_of(batch: Batch) -> Key | None:
    """Return the key that made a batch, without its secret; None = there were no keys."""
    if batch.claims is None:
        return None
    return _KEY.validate_json(json.dumps({"key": "-" * 8} | json.loads(batch.claims)))


_PAGE_IN_MEMORY = 500  # lines in memory at a time, unless their answers are large
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
    while page := await store.ended_lines(id, after, _PAGE_IN_MEMORY):
        for line in page:
            yield line
        after = page[-1].number
