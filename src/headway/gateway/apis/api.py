"""An API of clients: how the body of a request is read, and how its answer is written."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from headway.config import Server
from headway.errors import EngineError, HeadwayError
from headway.gateway.apis.chat_stream import ChatStream
from headway.gateway.errors import error_response
from headway.gateway.offload import offload
from headway.gateway.parsing.requests import HEADERS, Kind, ParsedRequest, read_json
from headway.gateway.requests.streaming import DeferredResponse, ResponseStream
from headway.store.queue.port import Broker, Job

log = logging.getLogger("headway.gateway")


@dataclass(frozen=True, slots=True)
class Api:
    """OpenAI's API, which engines serve, too; subclasses translate APIs that they do not.

    kind: the engines' endpoint that answers. docs: of its route.
    """

    kind: Kind
    docs: Mapping[str, Any] = field(default_factory=dict)

    def most(self, server: Server) -> int:
        """Return the limit of a body's bytes."""
        return server.max_body_kib * 1024

    def decode(self, data: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return a body as it was sent; RequestError."""
        return read_json(data)

    def read(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the body for the engines' endpoint; RequestError for what has no place there."""
        return raw

    def goes_on(self, data: bytes) -> bool:
        """Tell whether a body may name earlier answers, without reading it."""
        return False

    def names(self, raw: dict[str, Any]) -> Mapping[str, str]:
        """Return the ids of what a body goes on from, by field; RequestError."""
        return {}

    async def earlier(self, names: Mapping[str, str], broker: Broker | None, tenant: str, most: int) -> Job | None:
        """Return what a body goes on from, None = it names nothing.

        RequestError: 404 for what is another tenant's, 413 beyond `most` bytes. broker: None = nothing is kept.
        """
        return None

    def recalled(self, raw: dict[str, Any], job: Job) -> dict[str, Any]:
        """Return a body with the earlier input and answers that it names."""
        return raw

    def completed(self, parsed: ParsedRequest, raw: dict[str, Any], *, keeps: bool) -> ParsedRequest:
        """Return a request with what its answer repeats of the body, and what is kept if the queue `keeps` any."""
        return parsed

    def writer(self, parsed: ParsedRequest) -> ChatStream | None:
        """Return what writes the answer, None = the engine's is passed on."""
        return None

    def queued(self, parsed: ParsedRequest, body: Mapping[str, Any]) -> Response:
        """Return the answer to a background request; body: in the shape of the Responses API."""
        return JSONResponse(body, 202)

    def error(self, error: HeadwayError) -> JSONResponse:
        """Return an error in this API's shape."""
        return error_response(error)


class TranslatedResponse(DeferredResponse):
    """An ASGI response that translates what a chat's response sends.

    An answer or an error is collected first; a stream is passed on as it comes.
    """

    def __init__(self, inner: ResponseStream, writer: ChatStream) -> None:
        super().__init__()
        self._inner, self._writer = inner, writer
        self._start: Message | None = None
        self._streams = False
        self._whole = bytearray()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the response is complete or the client has disconnected."""

        async def send_translated(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._begin(message, send)
            elif self._streams:
                body = self._writer.feed(message.get("body", b""))
                if not message.get("more_body"):
                    await self._keep()
                await send({**message, "body": body})
            else:
                self._whole += message.get("body", b"")
                if not message.get("more_body"):
                    await self._end(send)

        await self._inner.serve(scope, receive, send_translated)

    async def _keep(self) -> None:
        """Store the answer before its client has it whole, and may go on from it at another gateway."""
        if self._inner.keeps and (answer := self._writer.answer()) is not None:
            await self._inner.finish(answer)

    async def _begin(self, start: Message, send: Send) -> None:
        headers = [*start["headers"], *self._writer.headers]
        self._streams = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
        if self._streams:
            await send({**start, "headers": headers})
        else:
            kept = [(name, value) for name, value in headers if name != b"content-length"]
            self._start = {**start, "headers": kept}

    async def _end(self, send: Send) -> None:
        assert self._start is not None, "the start comes first"
        start, data = self._start, bytes(self._whole)
        try:
            body = await offload(len(data), lambda: self._writer.whole(start["status"], data))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            log.error("an engine's answer cannot be translated: %r", error)
            what = "The engine's answer is not a chat completion."
            fault = EngineError(what, "Its log may say more.", code="invalid_answer")
            body = self._writer.whole(fault.status, json.dumps(fault.body()).encode())
            start = {**start, "status": fault.status}
        await self._keep()
        headers = [*start["headers"], (b"content-length", b"%d" % len(body))]
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


# ---- documentation, for OpenAPI


def api_docs(
    name: str, schema: Mapping[str, Any], errors: Mapping[int | str, Any], description: str | None = None
) -> dict[str, Any]:
    """Return the documentation of the route of an API. errors: and other responses than a finished answer."""
    answer = {"description": "The answer; with `stream`, its events.", "content": {"text/event-stream": {}}}
    return {
        "name": name,
        "description": description,
        "responses": {200: answer, **errors},
        "openapi_extra": body_docs(schema) | {"parameters": header_docs()},
    }


def body_docs(schema: Mapping[str, Any], *, required: bool = True) -> dict[str, Any]:
    """Return the documentation of a JSON body for OpenAPI."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def header_docs(*names: str) -> list[dict[str, Any]]:
    """Return the documentation of these headers for OpenAPI; of all that scheduled requests may have."""
    return [
        {"name": name, "in": "header", "required": False, "schema": {"type": HEADERS[name]}}
        for name in names or HEADERS
    ]


def error_docs(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of error answers for OpenAPI."""
    return {code: {"description": "An error in OpenAI's shape."} for code in codes}


SCHEDULED = error_docs(400, 401, 403, 404, 413, 415, 422, 429, 502, 503, 504)  # of requests that are queued
