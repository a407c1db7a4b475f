"""`POST /v1/messages` and `/v1/messages/count_tokens`, as clients of Anthropic's API expect them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from headway.errors import HeadwayError
from headway.gateway.apis.anthropic.events import MessageEvents
from headway.gateway.apis.anthropic.translate import chat_of, error_body, error_of, message_of
from headway.gateway.apis.state import AppState, header_docs
from headway.gateway.apis.translated import TranslatedResponse
from headway.gateway.requests.streaming import ResponseStream

PATH = "/v1/messages"
_TEXT = {"type": "string"}
_SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["model", "messages", "max_tokens"],
    "properties": {
        "model": _TEXT, "max_tokens": {"type": "integer", "minimum": 1},
        "messages": {"type": "array", "minItems": 1, "items": {
            "type": "object", "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["user", "assistant"]},
                "content": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
            },
        }},
        "system": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
        "stream": {"type": "boolean"}, "stop_sequences": {"type": "array", "items": _TEXT},
        "temperature": {"type": "number"}, "top_p": {"type": "number"}, "top_k": {"type": "integer"},
        "tools": {"type": "array", "items": {"type": "object"}}, "tool_choice": {"type": "object"},
        "metadata": {"type": "object"}, "service_tier": _TEXT, "thinking": {"type": "object"},
    },
}  # fmt: skip
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": "An error in Anthropic's shape."}
    for code in (400, 401, 403, 404, 413, 415, 429, 502, 503, 504)
}
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The message; with `stream`, its events.", "content": {"text/event-stream": {}}},
}


def add_message_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints."""
    gateway = state.gateway

    @app.post(PATH, responses={**_ANSWERS, **_ERRORS}, openapi_extra=_BODY | {"parameters": header_docs()})
    async def messages(request: Request) -> Response:
        """Answer a message: a chat, scheduled as all chats."""
        with gateway.bodies.hold() as held:
            parsed = await state.parse("chat", request, held, chat_of)
            in_flight = await gateway.path.accept(parsed, held)
            inner = ResponseStream(gateway.path, in_flight, wants_usage=parsed.wants_usage)
            id, asked = in_flight.id, parsed.request
            events = MessageEvents(id, asked.adapter or asked.model, asked.prompt_tokens)
            headers = ((b"request-id", id.encode()),)
            return TranslatedResponse(inner, events, partial(_translated, id), headers)

    @app.post(f"{PATH}/count_tokens", responses=_ERRORS, openapi_extra=_BODY)
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a message's prompt."""
        state.tenant(request)
        data = await state.body(request)
        prompt = await state.prompt("chat", data, lambda raw: chat_of({"max_tokens": 1, **raw}))
        return JSONResponse({"input_tokens": prompt.tokens})


def message_error(error: HeadwayError) -> JSONResponse:
    """Return an error in Anthropic's shape."""
    return JSONResponse(error_of(error), error.status, headers=error.headers)


def _translated(id: str, status: int, data: bytes) -> bytes:
    told = json.loads(data)
    if status == 200:
        return json.dumps(message_of(told, id)).encode()
    error = told.get("error", told)  # vLLM's older shape has its fields at the top
    return json.dumps(error_body(status, str(error.get("message", error)))).encode()
