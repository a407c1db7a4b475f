"""The endpoints of files and batches, as OpenAI's."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from headway import clock
from headway.config import Key
from headway.errors import RequestError
from headway.gateway.apis.api import body_docs, error_docs, header_docs
from headway.gateway.apis.batches.files import ROOM, ExpiresAfter, Quota, Upload, new_id, too_large
from headway.gateway.apis.state import AppState, refuse_compressed, tenant_of
from headway.gateway.offload import offload
from headway.gateway.parsing.fields import parse_as
from headway.gateway.parsing.idempotency import HEADER, batch_id, reused
from headway.store.batches.port import PIECE, BatchStore, pieces
from headway.store.batches.records import Batch, StoredFile, no_file

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SHORTEST, _LONGEST = 60, 366 * 86400  # seconds of a window
_BYTES_LISTED = 200  # of one file or batch, about
_MOST_LISTED = {"files": 10_000, "batches": 100}
_ENDS = ("completed", "failed", "expired", "cancelled")
_BYTES = "application/octet-stream"
_Text = Annotated[str, Field(max_length=512)]
_KEY = TypeAdapter(Key)
T = TypeVar("T")


class BatchBody(BaseModel):
    """A new batch.

    completion_window: a whole number and a unit, s, m, h, d or w: a minute or more.
    """

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Annotated[str, Field(pattern=r"^[0-9]{1,9}[smhdw]$")]
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], _Text], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def output_expires_s(self) -> float | None:
        """Seconds after which its output and error files expire, None = never."""
        return None if self.output_expires_after is None else float(self.output_expires_after.seconds)


def add_batch_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints of files and batches."""
    _uploads(app, state)
    _files(app, state)
    _contents(app, state)
    _batches(app, state)
    _one_batch(app, state)


def _store(state: AppState) -> BatchStore:
    """Return the place of files and batches; 403 when there is none."""
    store = state.gateway.batches
    if store is None:
        raise RequestError(
            "There are no batches here: they need a queue that survives the gateway.",
            'Set broker.kind to "sqlite" or "postgres", and do not set batches.dir to "none".',
            status=403,
            code="batches_off",
        )
    return store


# ---- files


def _uploads(app: FastAPI, state: AppState) -> None:
    limits = state.config.batches
    quota = Quota(limits.tenant_mib * 2**20)

    @app.post("/v1/files", responses=error_docs(400, 401, 403, 408, 413, 415, 429, 503), openapi_extra=_FORM)
    async def upload(request: Request) -> Response:
        """Store a file of requests, one a line, for batches."""
        tenant, store = tenant_of(state.count_request(request)), _store(state)
        refuse_compressed(request)
        declared = request.headers.get("content-length", "0")
        size = int(declared) if declared.isdigit() and len(declared) < 19 else 0
        if size > limits.max_file_mib * 2**20 + ROOM:
            raise too_large(limits.max_file_mib)
        used = await store.used(tenant)
        quota.check(tenant, used, max(size - ROOM, 0))
        form = Upload(request.headers.get("content-type", ""), limits)
        file = StoredFile(new_id("file"), tenant, "", "batch", 0, clock.now())
        try:
            await store.begin_file(file)
            await _receive(request, form, store, file.id, quota, tenant, used)
            form.complete()
            now = clock.now()
            expires = None if form.expires_s is None else now + form.expires_s
            file = replace(file, name=form.name, size=form.size, created=now, expires=expires)
            await store.add_file(file, quota.most)
        except BaseException:
            await store.discard(file.id)
            raise
        return JSONResponse(_file_object(file))


async def _receive(
    request: Request, form: Upload, store: BatchStore, id: str, quota: Quota, tenant: str, used: int
) -> None:
    """Write a file as it comes; its tenant's quota counts it as long as it is not complete."""
    counted = received = written = 0
    try:
        async for part in request.stream():
            received += len(part)
            form.feed(part)
            if received > form.size + ROOM:
                raise RequestError("The form has too much data beside the file.", "Send purpose and file alone.")
            quota.add(tenant, form.size - counted)
            counted = form.size
            quota.check(tenant, used)
            if len(form.pending) >= PIECE:
                await store.append(id, written, form.take())
                written, used = form.size, await store.used(tenant)
        quota.check(tenant, used)
        await store.append(id, written, form.take())
    finally:
        quota.add(tenant, -counted)


async def _find_file(state: AppState, request: Request, id: str) -> tuple[BatchStore, StoredFile]:
    """Return a file of the request's tenant."""
    tenant, store = state.tenant(request), _store(state)
    return store, await _known(store, tenant, id)


async def _known(store: BatchStore, tenant: str, id: str) -> StoredFile:
    """Return a file of a tenant that has not expired; RequestError (404)."""
    file = await store.file(tenant, id)
    if file is None or (file.expires is not None and file.expires < clock.now()):
        raise no_file(id)
    return file


def _files(app: FastAPI, state: AppState) -> None:
    @app.get("/v1/files", responses=error_docs(400, 401, 403, 503), openapi_extra=_query("files"))
    async def files(request: Request) -> Response:
        """List the tenant's files, the newest first."""
        tenant, store = state.tenant(request), _store(state)
        limit, query = _limit(request, "files", 10_000), request.query_params
        newest = query.get("order", "desc")
        if newest not in ("asc", "desc"):
            raise RequestError(f"The order is {newest[:64]!r}.", "Use asc or desc.", param="order")
        stored = await store.files(
            tenant,
            query.get("after"),
            limit + 1,
            newest=newest == "desc",
            purpose=query.get("purpose"),
            now=clock.now(),
        )
        return await _list(stored, _file_object, limit)

    @app.get("/v1/files/{id}", responses=error_docs(401, 403, 404, 503))
    async def file(id: str, request: Request) -> Response:
        """Describe a file."""
        _, stored = await _find_file(state, request, id)
        return JSONResponse(_file_object(stored))


def _contents(app: FastAPI, state: AppState) -> None:
    @app.get(
        "/v1/files/{id}/content", responses={**_CONTENT, **error_docs(401, 403, 404, 503)}, response_class=FileResponse
    )
    async def content(id: str, request: Request) -> Response:
        """Return what is in a file."""
        store, stored = await _find_file(state, request, id)
        path = store.path(stored.id)
        if path is None:
            return await _stream_file(store, stored)
        if not path.is_file():
            raise no_file(id)
        return FileResponse(path, media_type=_BYTES, filename=stored.name)

    @app.delete("/v1/files/{id}", responses=error_docs(401, 403, 404, 409, 503))
    async def delete(id: str, request: Request) -> Response:
        """Delete a file that no batch reads."""
        store, stored = await _find_file(state, request, id)
        if not await store.delete_file(stored.tenant, stored.id):
            raise no_file(id)
        return JSONResponse({"id": stored.id, "object": "file", "deleted": True})


async def _stream_file(store: BatchStore, file: StoredFile) -> Response:
    """Return a response with the content of a file, a piece at a time; its first one is there already."""
    content = pieces(store, file)
    first = await anext(content, b"")

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in content:
            yield piece

    name = f"attachment; filename*=utf-8''{quote(file.name)}"
    headers = {"content-length": str(file.size), "content-disposition": name}
    return StreamingResponse(all_pieces(), media_type=_BYTES, headers=headers)


def _file_object(file: StoredFile) -> dict[str, Any]:
    created = int(clock.shown(file.created))
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": created,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "expires_at": None if file.expires is None else int(clock.shown(file.expires)),
        "status_details": None,
    }


# ---- batches


async def _find_batch(state: AppState, request: Request, id: str) -> tuple[BatchStore, Batch]:
    """Return a batch of the request's tenant."""
    tenant, store = state.tenant(request), _store(state)
    batch = await store.batch(tenant, id)
    if batch is None:
        raise RequestError(
            f"There is no batch {id[:64]!r}.", "GET /v1/batches lists them.", status=404, code="not_found"
        )
    return store, batch


def _batches(app: FastAPI, state: AppState) -> None:
    @app.post(
        "/v1/batches",
        responses=error_docs(400, 401, 403, 404, 413, 415, 422, 429, 503),
        openapi_extra=body_docs(BatchBody.model_json_schema()) | {"parameters": header_docs(HEADER)},
    )
    async def create(request: Request) -> Response:
        """Begin a batch: its lines are checked, then run behind interactive work until the window ends."""
        key, store = state.count_request(request), _store(state)
        tenant = tenant_of(key)
        body = parse_as(BatchBody, await state.json(request))
        id = batch_id(tenant, request.headers)
        if id is not None and (earlier := await store.batch(tenant, id)) is not None:
            return _repeat_response(earlier, body)
        state.gateway.path.check_queue()
        batch = await _new_batch(body, store, tenant, id)
        if key is not None:
            # Without defaults, so that an older gateway, which does not know all of them, reads it.
            claims = _KEY.dump_json(key, exclude={"key"}, exclude_defaults=True).decode()
            batch = replace(batch, claims=claims)
        if not await store.add_batch(batch, state.config.batches.max_open, keyed=id is not None):
            _, earlier = await _find_batch(state, request, batch.id)
            return _repeat_response(earlier, body)
        store.changed.set()
        return JSONResponse(_batch_object(batch))

    @app.get("/v1/batches", responses=error_docs(400, 401, 403, 503), openapi_extra=_query("batches"))
    async def batches(request: Request) -> Response:
        """List the tenant's batches, the newest first."""
        tenant, store = state.tenant(request), _store(state)
        limit = _limit(request, "batches", 20)
        stored = await store.batches(tenant, request.query_params.get("after"), limit + 1)
        return await _list(stored, _batch_object, limit)


def _one_batch(app: FastAPI, state: AppState) -> None:
    @app.get("/v1/batches/{id}", responses=error_docs(401, 403, 404, 503))
    async def batch(id: str, request: Request) -> Response:
        """Describe a batch: its state, its files, how many of its lines have ended."""
        _, stored = await _find_batch(state, request, id)
        return JSONResponse(_batch_object(stored))

    @app.post("/v1/batches/{id}/cancel", responses=error_docs(401, 403, 404, 409, 503))
    async def cancel(id: str, request: Request) -> Response:
        """Cancel a batch: what was answered is kept, what was not is not run any more."""
        store, stored = await _find_batch(state, request, id)
        if not await store.cancel(stored.tenant, id, clock.now()):
            store, stored = await _find_batch(state, request, id)
            if stored.cancelling is None or stored.ended is not None:
                raise RequestError(
                    f"{id} is {stored.state} already.", "Only unfinished ones can be cancelled.", status=409
                )
        store.changed.set()
        _, stored = await _find_batch(state, request, id)
        return JSONResponse(_batch_object(stored))


def _repeat_response(earlier: Batch, body: BatchBody) -> Response:
    """Answer a batch that was sent again under its idempotency key; 422 when the key was another batch's."""
    metadata = None if earlier.metadata is None else json.loads(earlier.metadata)
    parameters = body.endpoint, body.input_file_id, body.completion_window, body.metadata, body.output_expires_s
    if parameters != (earlier.endpoint, earlier.input_file, earlier.window, metadata, earlier.output_expires_s):
        raise reused()
    return JSONResponse(_batch_object(earlier))


async def _new_batch(body: BatchBody, store: BatchStore, tenant: str, id: str | None) -> Batch:
    """Return a new batch, with `id` if there is one; RequestError for a bad window or file."""
    seconds = int(body.completion_window[:-1]) * _UNITS[body.completion_window[-1]]
    if not _SHORTEST <= seconds <= _LONGEST:
        raise RequestError(
            f"The completion_window is {body.completion_window!r}.",
            "Give 1m to 366d, such as 24h.",
            param="completion_window",
            code="invalid_completion_window",
        )
    file = await _known(store, tenant, body.input_file_id)
    if file.purpose != "batch":
        raise RequestError(
            f"The file {file.id} has the purpose {file.purpose!r}.",
            'Upload one with the purpose "batch".',
            param="input_file_id",
            code="invalid_purpose",
        )
    now = clock.now()
    metadata = None if body.metadata is None else json.dumps(body.metadata)
    return Batch(
        id or new_id("batch"), tenant, body.endpoint, file.id, body.completion_window, now, now + seconds, metadata,
        output_expires_s=body.output_expires_s,
    )  # fmt: skip


def _batch_object(batch: Batch) -> dict[str, Any]:
    ends = {f"{state}_at": batch.ended if batch.state == state else None for state in _ENDS}
    times = {
        "created_at": batch.created,
        "in_progress_at": batch.began,
        "expires_at": batch.due,
        "finalizing_at": batch.finalizing,
        "cancelling_at": batch.cancelling,
        **ends,
    }
    errors = None if batch.errors is None else {"object": "list", "data": json.loads(batch.errors)}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.state,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        **{name: None if at is None else int(clock.shown(at)) for name, at in times.items()},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": None if batch.metadata is None else json.loads(batch.metadata),
    }


# ---- lists


def _limit(request: Request, what: str, default: int) -> int:
    text, most = request.query_params.get("limit", str(default)), _MOST_LISTED[what]
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= most:
        raise RequestError(f"The limit is {text[:64]!r}.", f"Use 1 to {most}.", param="limit")
    return int(text)


async def _list(items: Sequence[T], describe: Callable[[T], dict[str, Any]], limit: int) -> Response:
    """Return a page of a list, of which one more than fits was looked up."""

    def page() -> Response:
        data = [describe(item) for item in items[:limit]]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        more = len(items) > limit
        return JSONResponse({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more})

    return await offload(_BYTES_LISTED * len(items), page)


# ---- OpenAPI


def _query(what: str) -> dict[str, Any]:
    kinds: dict[str, Any] = {"after": {"type": "string"}}
    kinds["limit"] = {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED[what]}
    if what == "files":
        kinds |= {"order": {"enum": ["asc", "desc"]}, "purpose": {"type": "string"}}
    return {
        "parameters": [{"name": name, "in": "query", "required": False, "schema": kind} for name, kind in kinds.items()]
    }


_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "additionalProperties": False,
                    "properties": {
                        "purpose": {"enum": ["batch"]},
                        "file": {"type": "string", "format": "binary"},
                        "expires_after[anchor]": {"enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
                    },
                }
            }
        },
    }
}
_CONTENT: dict[int | str, dict[str, Any]] = {200: {"description": "The file.", "content": {_BYTES: {}}}}
