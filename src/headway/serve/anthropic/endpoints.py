"""`POST /v1/messages` and `/v1/messages/count_tokens`, as clients of Anthropic's API expect them."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from headway.errors import HeadwayError
from headway.serve.anthropic.events import MessageEvents
from headway.serve.anthropic.translate import chat_of, error_body, error_of, message_of
from headway.serve.app_state import AppState
from headway.serve.offload import offload
from headway.serve.requests import InFlightRequest
from headway.serve.streaming import ResponseStream

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
    for code in (400, 401, 403, 404, 413, 429, 502, 503, 504)
}
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The message; with `stream`, its events.", "content": {"text/event-stream": {}}},
}


def add_message_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints."""
    gateway = state.gateway

    @app.post(PATH, responses={**_ANSWERS, **_ERRORS}, openapi_extra=_BODY)
    async def messages(request: Request) -> Response:
        """Answer a message: a chat, scheduled as all chats."""
        with gateway.bodies.hold() as held:
            parsed = await state.parse("chat", request, held, chat_of)
            in_flight = await gateway.path.accept(parsed, held)
            inner = ResponseStream(gateway.path, in_flight, wants_usage=parsed.wants_usage)
            return _Translated(inner, in_flight)

    @app.post(f"{PATH}/count_tokens", responses=_ERRORS, openapi_extra=_BODY)
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a message's prompt."""
        state.tenant(request)
        raw = await state.json(request)
        prompt = await state.prompt("chat", chat_of({"max_tokens": 1, **raw}))
        return JSONResponse({"input_tokens": prompt.tokens})


def message_error(error: HeadwayError) -> JSONResponse:
    """Return an error in Anthropic's shape."""
    return JSONResponse(error_of(error), error.status, headers=error.headers)


class _Translated(Response):
    """The response to a chat, as that to a message."""

    def __init__(self, inner: ResponseStream, in_flight: InFlightRequest) -> None:
        super().__init__()
        self._inner, self._in_flight = inner, in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the response is complete or the client has disconnected."""
        request = self._in_flight.request
        model = request.adapter or request.model
        translator = _Translator(request.id, MessageEvents(request.id, model, request.prompt_tokens), send)
        await self._inner(scope, receive, translator.send)


class _Translator:
    """Takes what a chat's response sends: holds an answer until it is whole, passes a stream on."""

    def __init__(self, id: str, events: MessageEvents, send: Send) -> None:
        self._id, self._events, self._send = id, events, send
        self._start: Message | None = None
        self._streams = False
        self._whole = bytearray()

    async def send(self, message: Message) -> None:
        """Translate and send a message of ASGI."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._streams:
            await self._send({**message, "body": self._events.feed(message.get("body", b""))})
        else:
            self._whole += message.get("body", b"")
            if not message.get("more_body"):
                await self._end()

    async def _begin(self, start: Message) -> None:
        headers = [*start["headers"], (b"request-id", self._id.encode())]
        self._streams = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
        if self._streams:
            await self._send({**start, "headers": headers})
        else:
            kept = [(name, value) for name, value in headers if name != b"content-length"]
            self._start = {**start, "headers": kept}

    async def _end(self) -> None:
        assert self._start is not None, "the start comes first"
        status, data = self._start["status"], bytes(self._whole)
        body = await offload(len(data), lambda: _translated(status, data, self._id))
        headers = [*self._start["headers"], (b"content-length", b"%d" % len(body))]
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _translated(status: int, data: bytes, id: str) -> bytes:
    told = json.loads(data)
    if status == 200:
        return json.dumps(message_of(told, id)).encode()
    error = told.get("error", told)  # vLLM's older shape has its fields at the top
    return json.dumps(error_body(status, str(error.get("message", error)))).encode()
