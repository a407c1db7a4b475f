"""The response to a chat in the shape of another API, whose endpoint translated the request."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from headway.errors import EngineError
from headway.gateway.offload import offload
from headway.gateway.requests.streaming import LateResponse, ResponseStream

Whole = Callable[[int, bytes], bytes]
log = logging.getLogger("headway.gateway")


class Events(Protocol):
    """Translates a chat's stream."""

    def feed(self, data: bytes) -> bytes:
        """Return the events for some bytes of the stream."""


class TranslatedResponse(LateResponse):
    """An ASGI response that translates what a chat's response sends.

    An answer or an error is held until it is whole (`whole`: status, body -> body), a stream goes on as it
    comes. headers: more of them.
    """

    def __init__(
        self,
        inner: ResponseStream,
        events: Events,
        whole: Whole,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__()
        self._inner, self._events, self._translate, self._more = inner, events, whole, headers
        self._start: Message | None = None
        self._streams = False
        self._whole = bytearray()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the response is complete or the client has disconnected."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._begin(message, send)
            elif self._streams:
                await send({**message, "body": self._events.feed(message.get("body", b""))})
            else:
                self._whole += message.get("body", b"")
                if not message.get("more_body"):
                    await self._end(send)

        await self._inner.serve(scope, receive, sending)

    async def _begin(self, start: Message, send: Send) -> None:
        headers = [*start["headers"], *self._more]
        self._streams = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
        if self._streams:
            await send({**start, "headers": headers})
        else:
            kept = [(name, value) for name, value in headers if name != b"content-length"]
            self._start = {**start, "headers": kept}

    async def _end(self, send: Send) -> None:
        assert self._start is not None, "the start comes first"
        status, data = self._start["status"], bytes(self._whole)
        start = self._start
        try:
            body = await offload(len(data), lambda: self._translate(status, data))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            log.error("an engine's answer cannot be translated: %r", error)
            fault = EngineError(
                "The engine's answer is not a chat completion.",
                "Its log may say more.",
                code="invalid_answer",
            )
            body = self._translate(fault.status, json.dumps(fault.body()).encode())
            start = {**start, "status": fault.status}
        headers = [*start["headers"], (b"content-length", b"%d" % len(body))]
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
