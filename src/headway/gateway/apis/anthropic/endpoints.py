"""`POST /v1/messages` and `/v1/messages/count_tokens`, as clients of Anthropic's API expect them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from headway.errors import HeadwayError
from headway.gateway.apis.anthropic.events import MessageEvents
from headway.gateway.apis.anthropic.translate import chat_of, error_body
from headway.gateway.apis.api import Api, api_docs, body_docs
from headway.gateway.apis.state import AppState
from headway.gateway.parsing.requests import ParsedRequest, read_json

_TEXT = {"type": "string"}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages", "max_tokens"],
    "properties": {
        "model": _TEXT,
        "max_tokens": {"type": "integer", "minimum": 1},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["user", "assistant"]},
                    "content": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
                },
            },
        },
        "system": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
        "stream": {"type": "boolean"},
        "stop_sequences": {"type": "array", "items": _TEXT},
        "temperature": {"type": "number"},
        "top_p": {"type": "number"},
        "top_k": {"type": "integer"},
        "tools": {"type": "array", "items": {"type": "object"}},
        "tool_choice": {"type": "object"},
        "metadata": {"type": "object"},
        "service_tier": _TEXT,
        "thinking": {"type": "object"},
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": "An error in Anthropic's shape."}
    for code in (400, 401, 403, 404, 413, 415, 429, 502, 503, 504)
}
DOCS = api_docs("messages", _SCHEMA, _ERRORS, "Answer a message: a chat, scheduled as all chats.")


class MessagesApi(Api):
    """Anthropic's Messages API."""

    def read(self, raw: dict[str, Any]) -> dict[str, Any]:
        return chat_of(raw)

    def writer(self, parsed: ParsedRequest) -> MessageEvents:
        request = parsed.request
        return MessageEvents(request.id, request.adapter or request.model, request.prompt_tokens)

    def error(self, error: HeadwayError) -> JSONResponse:
        return JSONResponse(error_body(error.status, error.client_message), error.status, headers=error.headers)


def add_message_endpoints(app: FastAPI, state: AppState) -> None:
    """Add what Anthropic's API has beside messages."""

    @app.post("/v1/messages/count_tokens", responses=_ERRORS, openapi_extra=body_docs(_SCHEMA))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a message's prompt."""
        state.count_request(request)

        def count(data: bytes) -> Response:
            prompt = state.parser.prompt("chat", chat_of({"max_tokens": 1, **read_json(data)}))
            return JSONResponse({"input_tokens": prompt.tokens})

        return await state.work(request, count)
