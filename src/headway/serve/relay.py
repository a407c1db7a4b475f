"""How do tokens get from the engine to the client? Straight through, as they come.

An ASGI response that waits for its ticket's turn, opens the engine's stream and passes its bytes on. It
looks into them only as far as needed to know when the answer is complete and how many tokens it had. A
client that leaves ends the engine's work.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from headway.engines.vllm.client import EngineGone
from headway.errors import EngineError, HeadwayError
from headway.serve.driver import Answer, Driver, Ticket, tokens_made

log = logging.getLogger("headway.serve")
_END = b"\n\n"
_USAGE = b'"choices":[]'  # vLLM's last event, which carries nothing but the usage
_ERROR = b'data: {"error"'


class Relay(Response):
    """The answer to one accepted request."""

    def __init__(self, driver: Driver, ticket: Ticket, *, wants_usage: bool) -> None:
        super().__init__()
        self._driver, self._ticket, self._wants_usage = driver, ticket, wants_usage
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the answer is complete or the client has left, whichever is first."""
        work = asyncio.create_task(self._serve(scope, receive, send))
        left = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await _cancel(work)
                await self._driver.fail(self._ticket, "client_gone: disconnected", "cancelled")
            else:
                await work
        except asyncio.CancelledError:
            await _cancel(work)
            await self._driver.fail(self._ticket, "gateway_stopped")
            raise
        finally:
            await _cancel(left)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._driver.begin(self._ticket)
            try:
                await self._pass_on(answer, send)
            finally:
                await answer.close()
        except EngineGone as error:
            await self._driver.fail(self._ticket, f"engine_gone: {error.message}")
            await self._say(error, scope, receive, send)
        except Exception as error:  # whatever it was, the request gets its end and the client an answer
            log.exception("request %s failed", self._ticket.request.id)
            await self._driver.fail(self._ticket, f"internal: {error!r}")
            wrapped = EngineError(
                f"Headway failed: {error!r}.", "This is a bug; its trace is in the log.", status=500
            )
            await self._say(wrapped, scope, receive, send)

    async def _say(self, error: HeadwayError, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client: with a status when nothing was sent yet, else as the stream's last event."""
        if not self._begun:
            await error_response(error)(scope, receive, send)
            return
        event = b"data: " + json.dumps(error.body()).encode() + _END + b"data: [DONE]" + _END
        await send({"type": "http.response.body", "body": event, "more_body": False})

    async def _pass_on(self, answer: Answer, send: Send) -> None:
        headers = [
            (b"content-type", answer.content_type.encode()),
            (b"x-request-id", self._ticket.request.id.encode()),
        ]
        streams = "event-stream" in answer.content_type
        if not streams:
            headers.append((b"content-length", str(len(answer.head)).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        self._begun = True
        await (self._stream(answer, send) if streams else self._whole(answer, send))

    async def _whole(self, answer: Answer, send: Send) -> None:
        """The client has its answer before the books are closed, but not before they are sure to be."""
        if answer.status == 200:
            await self._driver.finish(self._ticket, tokens_made(answer.head))
        else:
            reason = answer.head.decode(errors="replace")[:500]
            await self._driver.fail(self._ticket, f"engine_refused: {reason}", "refused")
        await send({"type": "http.response.body", "body": answer.head, "more_body": False})

    async def _stream(self, answer: Answer, send: Send) -> None:
        reader = _Events(self._wants_usage)
        await _body(send, reader.feed(answer.head))
        async for chunk in answer.rest():
            await _body(send, reader.feed(chunk))
        if reader.complete:
            await self._driver.finish(self._ticket, reader.tokens)
        else:
            await self._driver.fail(self._ticket, "engine_gone: the stream ended early")
        await send({"type": "http.response.body", "body": reader.rest, "more_body": False})


class _Events:
    """Cuts a byte stream at event ends, counts tokens, and drops the usage event nobody asked for."""

    def __init__(self, wants_usage: bool) -> None:
        self._wants_usage = wants_usage
        self.rest = b""
        self.tokens = 0
        self.complete = False
        self._broken = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes to pass on; an unfinished event is kept until its end comes."""
        data = self.rest + chunk if self.rest else chunk
        end = data.rfind(_END) + 2
        if end < 2:
            self.rest = data
            return b""
        whole, self.rest = data[:end], data[end:]
        self.tokens += whole.count(_END)  # replaced by the engine's own count when that comes
        if _USAGE in whole or _ERROR in whole or b"[DONE]" in whole:
            whole = b"".join(self._look(event + _END) for event in whole.split(_END)[:-1])
        return whole

    def _look(self, event: bytes) -> bytes:
        if event.startswith(b"data: [DONE]"):
            self.complete = not self._broken
        elif event.startswith(_ERROR):
            self._broken = True
        elif _USAGE in event:
            with suppress(ValueError, KeyError, TypeError):
                self.tokens = int(json.loads(event[6:])["usage"]["completion_tokens"])
                return event if self._wants_usage else b""
        return event


def error_response(error: HeadwayError) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _body(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _left(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
