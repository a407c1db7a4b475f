"""`/v1/conversations`: items that responses go on from and are added to, kept by the queue.

A conversation is a job that is done, with its items as the result; each change counts an attempt, so that of two
changes at the same time neither is lost. Like an answer it is forgotten `broker.keep_hours` after its last change.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from headway import clock
from headway.errors import HeadwayError, RequestError
from headway.gateway.apis.api import body_docs, error_docs
from headway.gateway.apis.responses.kept import CONVERSATIONS, find, items_in, news_in
from headway.gateway.apis.responses.translate import chat_of
from headway.gateway.apis.state import AppState, tenant_of
from headway.gateway.offload import offload
from headway.gateway.parsing.fields import parse_as
from headway.store.queue.port import Broker, Job

log = logging.getLogger("headway.gateway")
_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
_Items = Annotated[list[dict[str, Any]], Field(max_length=20)]
_ERRORS = error_docs(400, 401, 403, 404, 413, 415, 429, 503)
_TRIES = 100  # of a change, when others come in between
Change = Callable[[dict[str, Any]], dict[str, Any]]


class ConversationBody(BaseModel):
    """A new conversation, or a change of its metadata."""

    model_config = ConfigDict(extra="forbid")
    items: _Items | None = None
    metadata: _Metadata | None = None


class ItemsBody(BaseModel):
    """Items to add to a conversation."""

    model_config = ConfigDict(extra="forbid")
    items: _Items


class Page(BaseModel):
    """The part of a list of items that a query asks for. after: the id of the item before it, in this order."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class Conversations:
    """The conversations of a queue. most: bytes that one may have before more is added to it."""

    def __init__(self, broker: Broker, most: int) -> None:
        self.broker, self._most = broker, most

    async def begin(self, tenant: str, items: list[Any], metadata: dict[str, str]) -> Job:
        """Store a new conversation."""
        now, id = clock.now(), f"conv_{secrets.token_hex(16)}"
        await self.broker.put(Job(id, tenant, CONVERSATIONS, b"", "{}", now))
        await self.broker.done(id, json.dumps({"items": items, "metadata": metadata}).encode(), now)
        return await self.find(id, tenant)

    async def find(self, id: str, tenant: str) -> Job:
        """Return a tenant's conversation; RequestError (404)."""
        return await find(self.broker, id, tenant, "conversation")

    async def change(self, id: str, tenant: str, change: Change) -> Job:
        """Replace what a conversation has; RequestError: 404, 413 when it is full, 409 when others never pause."""
        for _ in range(_TRIES):
            job = await self.find(id, tenant)
            content = job.result or b"{}"
            if len(content) > self._most:
                raise RequestError(f"{id} is full.", "Begin a new conversation.", status=413)
            new = await offload(len(content), partial(_changed, content, change))
            if await self.broker.amend(id, new, clock.now(), job.attempts):
                return await self.find(id, tenant)
        raise RequestError(f"{id} is being changed.", "Try again.", status=409)

    async def extend(self, id: str) -> None:
        """Add input and answer of a response to its conversation, once; HeadwayError (5xx) while the broker is out."""
        try:
            job = await self.broker.get(id)
            if job is None or job.result is None:
                log.error("the response %s has no answer to add to its conversation", id)
                return
            name, more = await offload(len(job.request) + len(job.result), partial(news_in, job))
            await self.change(name, job.tenant, partial(_with_news, more))
        except Exception as error:  # whatever it is, the end of the response stays stored
            if isinstance(error, HeadwayError) and error.status >= 500:
                raise  # it is tried again
            log.exception("the response %s is not added to its conversation", id)


def _changed(content: bytes, change: Change) -> bytes:
    return json.dumps(change(json.loads(content))).encode()


def _with_items(more: list[Any], content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "items": [*content["items"], *more]}


def _with_news(more: list[Any], content: dict[str, Any]) -> dict[str, Any]:
    return content if more[-1] in content["items"] else _with_items(more, content)


def add_conversation_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints of conversations."""
    kept = Conversations(state.gateway.broker, state.config.server.max_body_kib * 1024)
    state.gateway.path.answered = kept.extend
    _whole(app, state, kept)
    _items(app, state, kept)


def _whole(app: FastAPI, state: AppState, kept: Conversations) -> None:
    docs = body_docs(ConversationBody.model_json_schema(), required=False)

    @app.post(CONVERSATIONS, responses=_ERRORS, openapi_extra=docs)
    async def create(request: Request) -> Response:
        """Begin a conversation, with items that it has from the beginning."""
        tenant = _counted(state, request)
        body = parse_as(ConversationBody, await state.json(request, b"{}"))
        state.gateway.path.check_queue()
        return await _described(await kept.begin(tenant, _checked(body.items or []), body.metadata or {}))

    @app.get(f"{CONVERSATIONS}/{{id}}", responses=error_docs(401, 404))
    async def retrieve(id: str, request: Request) -> Response:
        """Describe a conversation."""
        return await _described(await kept.find(id, state.tenant(request)))

    @app.post(f"{CONVERSATIONS}/{{id}}", responses=_ERRORS, openapi_extra=docs)
    async def update(id: str, request: Request) -> Response:
        """Replace the metadata of a conversation."""
        tenant = _counted(state, request)
        body = parse_as(ConversationBody, await state.json(request))
        return await _described(await kept.change(id, tenant, lambda now: {**now, "metadata": body.metadata or {}}))

    @app.delete(f"{CONVERSATIONS}/{{id}}", responses=error_docs(401, 404))
    async def delete(id: str, request: Request) -> Response:
        """Delete a conversation; its responses are kept for their time."""
        job = await kept.find(id, state.tenant(request))
        await kept.broker.delete(job.id)
        return JSONResponse({"id": job.id, "object": "conversation.deleted", "deleted": True})


def _items(app: FastAPI, state: AppState, kept: Conversations) -> None:
    path = f"{CONVERSATIONS}/{{id}}/items"

    @app.get(path, responses=error_docs(400, 401, 404))
    async def items(id: str, request: Request) -> Response:
        """Return a page of the items of a conversation: `limit`, `after`, `order`."""
        job = await kept.find(id, state.tenant(request))
        return await page_of(request, len(job.result or b""), partial(items_in, job))

    @app.post(path, responses=_ERRORS, openapi_extra=body_docs(ItemsBody.model_json_schema()))
    async def add(id: str, request: Request) -> Response:
        """Add items to a conversation."""
        tenant = _counted(state, request)
        body = parse_as(ItemsBody, await state.json(request))
        await kept.change(id, tenant, partial(_with_items, _checked(body.items)))
        return _listed(body.items)


async def page_of(request: Request, size: int, items: Callable[[], list[Any]]) -> Response:
    """Return the page of a list of items, the oldest first, that a request asks for; RequestError.

    size: bytes that `items` reads. An item that came without an id has its place as one.
    """
    page = parse_as(Page, request.query_params)

    def response() -> Response:
        found = [one if one.get("id") else one | {"id": f"item_{place}"} for place, one in enumerate(items())]
        found = found if page.order == "asc" else found[::-1]
        if page.after is not None:
            at = next((at for at, one in enumerate(found, 1) if one["id"] == page.after), None)
            if at is None:
                raise RequestError(f"There is no item {page.after[:64]!r}.", "Send the id of one.", param="after")
            found = found[at:]
        return _listed(found[: page.limit], more=len(found) > page.limit)

    return await offload(size, response)


def _listed(items: list[Any], *, more: bool = False) -> Response:
    first, last = (items[0].get("id"), items[-1].get("id")) if items else (None, None)
    return JSONResponse({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more})


def _counted(state: AppState, request: Request) -> str:
    """Return the tenant of a request that changes a conversation; 403 where none are kept."""
    tenant = tenant_of(state.count_request(request))
    if not state.config.broker.keeps:
        raise RequestError(
            "There are no conversations here: they need a queue that survives the gateway.",
            'Set broker.kind to "sqlite" or "postgres", and broker.keep_responses to true.',
            status=403,
            code="conversations_off",
        )
    return tenant


def _checked(items: list[Any]) -> list[Any]:
    """Return items that a response can go on from; RequestError for others."""
    if items:
        chat_of({"input": items})
    return items


async def _described(job: Job) -> Response:
    content = job.result or b"{}"
    metadata = (await offload(len(content), partial(json.loads, content))).get("metadata", {})
    created = int(clock.shown(job.arrival))
    return JSONResponse({"id": job.id, "object": "conversation", "created_at": created, "metadata": metadata})
