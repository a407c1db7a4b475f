"""`POST /v1/messages` and `/v1/messages/count_tokens`, as clients of Anthropic's API expect them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from headway.errors import HeadwayError
from headway.gateway.apis.anthropic.translate import chat_of, error_body, message_of, stop_of, usage_of
from headway.gateway.apis.api import Api, api_docs, body_docs
from headway.gateway.apis.chat_stream import ChatStream, complete, thought_of
from headway.gateway.apis.state import AppState
from headway.gateway.parsing.requests import ParsedRequest, read_json

# Type of a block -> type of its deltas, and the field that they have their text in.
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}

_STATUS = {"rate_limit_error": 429, "invalid_request_error": 400}  # of Headway's errors, by type


@dataclass(slots=True)
class _Block:
    """A content block: what it begins with, its text so far, and how many parts of that are sent."""

    begin: dict[str, Any]
    parts: list[str] = field(default_factory=list)
    sent: int = 0
    begun: bool = False


class MessageEvents(ChatStream):
    """Translates the bytes of a chat's stream, however they are cut.

    A chat may write several tool calls at once, but content blocks may not interleave: what comes for another
    block waits until the one that is open is over.

    id: of the request. model: its name. input_tokens: of its prompt.
    """

    def __init__(self, id: str, model: str, input_tokens: int) -> None:
        super().__init__()
        self._head: dict[str, Any] = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": input_tokens, "output_tokens": 0},
        }
        self._begun = self._calls = False
        self._index = -1  # of the block that is open
        # By type and number of the tool call: the one that is open, then those that wait.
        self._blocks: dict[tuple[str, int], _Block] = {}
        self._ended: set[int] = set()  # tool calls that are over
        self._reason: tuple[str, str | None] = ("end_turn", None)
        self._usage = dict(self._head["usage"])
        self.headers = ((b"request-id", id.encode()),)

    def whole(self, status: int, data: bytes) -> bytes:
        body = json.loads(data)
        if status == 200:
            return json.dumps(message_of(body, self._head["id"])).encode()
        error = body.get("error", body)  # vLLM's older shape has its fields at the top
        return json.dumps(error_body(status, str(error.get("message", error)))).encode()

    def _fail(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        code = error.get("code")  # vLLM's is the status; Headway's is a word
        status = code if isinstance(code, int) else _STATUS.get(str(error.get("type")), 500)
        yield _sse("error", error_body(status, str(error.get("message"))))

    def _chunk(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._begin()
        if usage := chunk.get("usage"):
            self._usage = usage_of(usage)
        for choice in chunk.get("choices") or ():
            yield from self._delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self._reason = stop_of(choice, self._calls)

    def _begin(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield _sse("message_start", {"message": self._head})

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        if thought := thought_of(delta):
            yield from self._grow(0, {"type": "thinking", "thinking": "", "signature": ""}, thought)
        if delta.get("content"):
            yield from self._grow(0, {"type": "text", "text": ""}, delta["content"])
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            number = int(call.get("index", 0))
            self._calls = True
            begin = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
            if number not in self._ended:
                yield from self._grow(number, begin, function.get("arguments") or "")

    def _grow(self, number: int, begin: dict[str, Any], text: str) -> Iterator[bytes]:
        """Add to a block, which begins if it has not."""
        block = self._blocks.setdefault((begin["type"], number), _Block(begin))
        if text:
            block.parts.append(text)
        yield from self._flow()

    def _flow(self, *, end: bool = False) -> Iterator[bytes]:
        """Yield what may be sent of the blocks. end: nothing more comes."""
        while self._blocks:
            (kind, number), block = next(iter(self._blocks.items()))
            if not block.begun:
                block.begun, self._index = True, self._index + 1
                yield _sse("content_block_start", {"index": self._index, "content_block": block.begin})
            if more := "".join(block.parts[block.sent :]):
                name, place = _DELTAS[kind]
                yield _sse("content_block_delta", {"index": self._index, "delta": {"type": name, place: more}})
                block.sent = len(block.parts)
            over = len(self._blocks) > 1 and (kind != "tool_use" or complete(block.parts))
            if not (end or over):
                return
            del self._blocks[kind, number]
            if kind == "tool_use":
                self._ended.add(number)
            yield _sse("content_block_stop", {"index": self._index})

    def _finish(self) -> Iterator[bytes]:
        yield from self._begin()
        yield from self._flow(end=True)
        reason, word = self._reason
        fields = {"delta": {"stop_reason": reason, "stop_sequence": word}}
        yield _sse("message_delta", fields | {"usage": self._usage})
        yield _sse("message_stop", {})


def _sse(kind: str, body: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n".encode()


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
