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
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from headway import clock
from headway.errors import HeadwayError, RequestError
from headway.gateway.apis.api import body_docs, error_docs
from headway.gateway.apis.responses.kept import CONVERSATIONS, find, items_in, output_of
from headway.gateway.apis.responses.translate import chat_of
from headway.gateway.apis.state import AppState, tenant_of
from headway.gateway.in_flight import kept_in
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
        """Add input and answer of a response to its conversation."""
        try:
            job = await self.broker.get(id)
            kept = None if job is None else kept_in(job)
            if job is None or kept is None or job.result is None:
                return
            more = [*kept["input"][len(kept["input"]) - kept["own"] :], *output_of(job)]
            await self.change(kept["conversation"], job.tenant, partial(_with_items, more))
        except HeadwayError as error:
            log.error("the response %s is not added to its conversation: %s", id, error)


def _changed(content: bytes, change: Change) -> bytes:
    return json.dumps(change(json.loads(content))).encode()


def _with_items(more: list[Any], content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "items": [*content["items"], *more]}


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
        return _described(await kept.begin(tenant, _checked(body.items or []), body.metadata or {}))

    @app.get(f"{CONVERSATIONS}/{{id}}", responses=error_docs(401, 404))
    async def retrieve(id: str, request: Request) -> Response:
        """Describe a conversation."""
        return _described(await kept.find(id, state.tenant(request)))

    @app.post(f"{CONVERSATIONS}/{{id}}", responses=_ERRORS, openapi_extra=docs)
    async def update(id: str, request: Request) -> Response:
        """Replace the metadata of a conversation."""
        tenant = _counted(state, request)
        body = parse_as(ConversationBody, await state.json(request))
        return _described(await kept.change(id, tenant, lambda now: {**now, "metadata": body.metadata or {}}))

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
        """Return all items of a conversation, the newest first; `order=asc`: the oldest first."""
        job = await kept.find(id, state.tenant(request))
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"The order is {order[:64]!r}.", "Use asc or desc.", param="order")
        found = await offload(len(job.result or b""), partial(items_in, job))
        return items_response(found if order == "asc" else found[::-1])

    @app.post(path, responses=_ERRORS, openapi_extra=body_docs(ItemsBody.model_json_schema()))
    async def add(id: str, request: Request) -> Response:
        """Add items to a conversation."""
        tenant = _counted(state, request)
        body = parse_as(ItemsBody, await state.json(request))
        await kept.change(id, tenant, partial(_with_items, _checked(body.items)))
        return items_response(body.items)


def items_response(items: list[Any]) -> Response:
    """Return a list of items as OpenAI's API has them."""
    first, last = (items[0].get("id"), items[-1].get("id")) if items else (None, None)
    return JSONResponse({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})


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


def _described(job: Job) -> Response:
    metadata = json.loads(job.result or b"{}").get("metadata", {})
    created = int(clock.shown(job.arrival))
    return JSONResponse({"id": job.id, "object": "conversation", "created_at": created, "metadata": metadata})
