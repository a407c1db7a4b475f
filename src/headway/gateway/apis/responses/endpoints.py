"""`/v1/responses`: create, retrieve, cancel and delete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from headway import clock
from headway.errors import RequestError
from headway.gateway.apis.api import SCHEDULED, Api, api_docs, error_docs
from headway.gateway.apis.responses.conversations import page_of
from headway.gateway.apis.responses.events import IGNORED, ResponseEvents
from headway.gateway.apis.responses.kept import earlier, echo_of, kept_of, names_in, recalled
from headway.gateway.apis.responses.translate import base_of, chat_of, ignored_in, response_of
from headway.gateway.apis.state import AppState
from headway.gateway.http.connections import TENANT
from headway.gateway.in_flight import is_kept, kept_in
from headway.gateway.offload import offload
from headway.gateway.parsing.requests import PATHS, ParsedRequest
from headway.gateway.watch.audit import CONTENT
from headway.store.queue.port import Broker, Job

_STATUS = {"open": "queued", "done": "completed", "failed": "failed"}
_BACKGROUND_FIELDS = ("id", "created_at", "status", "error", "waiting_for")  # of a response in the background
_PAST = (b'"previous_response_id"', b'"conversation"')
_TEXT = {"type": "string"}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": _TEXT,
        "instructions": _TEXT,
        "stream": {"type": "boolean"},
        "background": {"type": "boolean"},
        "input": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
        "max_output_tokens": {"type": "integer", "minimum": 1},
        "temperature": {"type": "number"},
        "top_p": {"type": "number"},
        "tools": {"type": "array", "items": {"type": "object"}},
        "text": {"type": "object"},
        "reasoning": {"type": "object"},
        "metadata": {"type": "object"},
        "service_tier": _TEXT,
        "user": _TEXT,
    },
}
DOCS = api_docs("create", _SCHEMA, SCHEDULED, "Answer a response: a chat, scheduled as all chats.")


class ResponsesApi(Api):
    """OpenAI's Responses API."""

    def read(self, raw: dict[str, Any]) -> dict[str, Any]:
        return chat_of(raw)

    def goes_on(self, data: bytes) -> bool:
        return any(name in data for name in _PAST)  # one that is written with escapes is refused by `chat_of`

    def names(self, raw: dict[str, Any]) -> Mapping[str, str]:
        return names_in(raw)

    async def earlier(self, names: Mapping[str, str], broker: Broker | None, tenant: str, most: int) -> Job | None:
        return await earlier(names, broker, tenant, most)

    def recalled(self, raw: dict[str, Any], job: Job) -> dict[str, Any]:
        return recalled(raw, job)

    def completed(self, parsed: ParsedRequest, raw: dict[str, Any], *, keeps: bool) -> ParsedRequest:
        kept = kept_of(raw, background=parsed.background) if keeps else None
        echo = echo_of(raw) | {"store": parsed.background or kept is not None}
        return replace(parsed, echo=echo, kept=kept)

    def writer(self, parsed: ParsedRequest) -> ResponseEvents:
        request = parsed.request
        base = _echo(parsed) | {"id": request.id, "created_at": int(clock.shown(request.arrival))}
        return ResponseEvents(base, ignored=ignored_in(parsed.echo["tools"]))

    def queued(self, parsed: ParsedRequest, body: Mapping[str, Any]) -> Response:
        answer = _echo(parsed) | {name: body[name] for name in _BACKGROUND_FIELDS if name in body}
        ignored = ignored_in(parsed.echo["tools"])
        return JSONResponse(answer, headers={IGNORED: ignored} if ignored else None)


def _echo(parsed: ParsedRequest) -> dict[str, Any]:
    return {**parsed.echo, "model": parsed.request.adapter or parsed.request.model}


# ---- background


async def _find(state: AppState, request: Request, id: str) -> Job:
    """Return a kept response of the request's tenant; the operator's key finds those of all."""
    if operator := state.is_operator(request):
        state.check_operator(request)  # so that it is in the audit log
        request.scope[CONTENT] = True
    tenant = None if operator else state.tenant(request)
    job = await state.gateway.broker.get(id)
    kept = job is not None and (job.background or is_kept(job))
    if job is None or not kept or (tenant is not None and job.tenant != tenant):
        raise RequestError(
            f"No response {id[:64]!r} is kept.",
            'Those with "background": true, and others of /v1/responses without "store": false, are kept for some'
            " time (broker.keep_hours, broker.keep_responses).",
            status=404,
            code="not_found",
        )
    if operator:
        request.scope[TENANT] = job.tenant  # for the audit log
    return job


def add_response_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints of kept responses."""
    broker = state.gateway.broker

    @app.get("/v1/responses/{id}", responses=error_docs(401, 404))
    async def retrieve(id: str, request: Request) -> Response:
        """Return a response: its status, and the answer once it is complete."""
        job = await _find(state, request, id)
        if job.result is not None and not job.background:
            return Response(job.result, media_type="application/json")
        waits = waiting_for(state.gateway.dispatcher.state(job.id)) if job.state == "open" else {}
        return await offload(len(job.request) + len(job.result or b""), partial(_retrieved, job, waits))

    @app.get("/v1/responses/{id}/input_items", responses=error_docs(400, 401, 404))
    async def input_items(id: str, request: Request) -> Response:
        """Return a page of the input of a response, with all that it went on from: `limit`, `after`, `order`."""
        job = await _find(state, request, id)
        return await page_of(request, len(job.request), lambda: (kept_in(job) or {"input": []})["input"])

    @app.post("/v1/responses/{id}/cancel", responses=error_docs(401, 404, 409))
    async def cancel(id: str, request: Request) -> Response:
        """Cancel a background response that is not complete yet, whichever gateway runs it."""
        job = await _find(state, request, id)
        if not job.background or not await state.gateway.background.cancel(job.id):
            job = await _find(state, request, id)  # it may have ended in between
            raise RequestError(
                f"{id} is {_STATUS[job.state]} already, or not in the background.",
                "Only unfinished background responses can be cancelled.",
                status=409,
            )
        return JSONResponse(background_response(job.id, "cancelled", job.arrival))

    @app.delete("/v1/responses/{id}", responses=error_docs(401, 404, 409))
    async def delete(id: str, request: Request) -> Response:
        """Delete a response that has ended, with its input."""
        job = await _find(state, request, id)
        if not await broker.delete(job.id) and await broker.get(job.id) is not None:
            raise RequestError(f"{id} has not ended yet.", "Cancel it first.", status=409)
        return JSONResponse({"id": job.id, "object": "response", "deleted": True})


def background_response(id: str, status: str, arrival: float, reason: str | None = None) -> dict[str, Any]:
    """Return what a background response is, without its answer."""
    if reason == "cancelled":
        status, reason = "cancelled", None
    code = "rate_limit_exceeded" if reason and reason.startswith("dropped:") else "server_error"
    error = {"code": code, "message": reason} if reason else None
    raw = {"background": True, "model": None}
    return base_of(raw, id, int(clock.shown(arrival))) | {"status": status, "error": error}


def response_to(job: Job) -> dict[str, Any]:
    """Return what a job's response is, without its answer."""
    told = background_response(job.id, _STATUS[job.state], job.arrival, job.reason)
    base: dict[str, Any] = (kept_in(job) or {}).get("base", {} if job.background else {"background": False})
    return told | base | {name: told[name] for name in _BACKGROUND_FIELDS if name in told and name != "waiting_for"}


def _retrieved(job: Job, waits: dict[str, str]) -> Response:
    """Return a response with its engine's answer, as it was stored; that of a chat in `output`, too."""
    body, path, result = response_to(job) | waits, job.path, job.result
    if result is None:
        return JSONResponse(body)
    if path == PATHS["chat"]:
        # One that was cut at its most tokens is completed, too: clients poll for that word.
        body = response_of(body, json.loads(result)) | {"status": body["status"]}
    whole = bytes(JSONResponse(body).body)[:-1] + b',"response":' + result + b"}"
    return Response(whole, media_type="application/json")


def waiting_for(reason: str | None) -> dict[str, str]:
    """Return what a queued response waits for, as a field of its body."""
    return {} if reason is None else {"waiting_for": reason}
