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

from headway.engines.vllm.process.client import EngineGone
from headway.errors import EngineError, HeadwayError, RequestError
from headway.serve.dispatcher import Dispatcher, EngineResponse, InFlightRequest, tokens_made

log = logging.getLogger("headway.serve")
_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_USAGE = b'"choices":[]'  # vLLM's last event, which carries nothing but the usage
_ERROR = b'data: {"error"'
# What the broker and the metrics call an end by such an error.
_KINDS: dict[type[HeadwayError], tuple[str, str]] = {
    EngineGone: ("engine_gone", "failed"), RequestError: ("dropped", "refused"),
}  # fmt: skip


class ResponseStream(Response):
    """The answer to one accepted request."""

    def __init__(self, driver: Dispatcher, ticket: InFlightRequest, *, wants_usage: bool) -> None:
        super().__init__()
        self._driver, self._ticket, self._wants_usage = driver, ticket, wants_usage
        self._begun = self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the answer is complete or the client has left, whichever is first."""
        work = asyncio.create_task(self._serve(scope, receive, send))
        left = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() or self._ticket.closed:  # all was said: who leaves now has had the answer
                await work
            else:
                await _cancel(work)
                await self._driver.fail(self._ticket, "client_gone: disconnected", "cancelled")
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
        except HeadwayError as error:
            kind, outcome = _KINDS.get(type(error), ("internal", "failed"))
            await self._driver.fail(self._ticket, f"{kind}: {error.message}", outcome)
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
        elif not self._ended:
            event = b"data: " + json.dumps(error.body()).encode() + _END + _DONE
            await send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            log.error("request %s was answered, but not closed: %s", self._ticket.request.id, error)

    async def _pass_on(self, answer: EngineResponse, send: Send) -> None:
        headers = [
            (b"content-type", answer.content_type.encode()),
            (b"x-request-id", self._ticket.request.id.encode()),
        ]
        if not answer.streams:
            headers.append((b"content-length", b"%d" % len(answer.head)))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        self._begun = True
        await (self._stream(answer, send) if answer.streams else self._whole(answer, send))

    async def _whole(self, answer: EngineResponse, send: Send) -> None:
        await self._end(answer.head, send)
        if answer.status == 200:
            await self._driver.finish(self._ticket, tokens_made(answer.head))
        else:
            reason = answer.head.decode(errors="replace")[:500]
            await self._driver.fail(self._ticket, f"engine_refused: {reason}", "refused")

    async def _stream(self, answer: EngineResponse, send: Send) -> None:
        reader, chunk = _Events(self._wants_usage), answer.head
        while chunk:
            data = reader.feed(chunk)
            if reader.complete:
                await self._end(data + reader.rest, send)
                await self._driver.finish(self._ticket, reader.tokens)
                await _drain(answer)
                return
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            chunk = await answer.read()
        if not reader.broken:
            raise EngineGone(answer.engine, "its stream ended early")
        await self._end(b"" if reader.closed else _DONE, send)
        await self._driver.fail(self._ticket, "engine_failed: it said so in the stream")

    async def _end(self, last: bytes, send: Send) -> None:
        """Send the end of the answer. The books are closed after it, so that no client waits for the disk.

        A crash in between leaves an answered request open; the next start closes it as one whose client left.
        """
        await send({"type": "http.response.body", "body": last, "more_body": False})
        self._ended = True


class _Events:
    """Cuts a byte stream at event ends, counts tokens, and drops the usage event nobody asked for."""

    def __init__(self, wants_usage: bool) -> None:
        self._wants_usage = wants_usage
        self.rest = b""
        self._counted: int | None = None  # the engine's own count, once it has come
        self._events = 0
        self.closed = False  # the engine has said that no more will come
        self.broken = False  # the engine has said that something is wrong

    @property
    def tokens(self) -> int:
        return self._events if self._counted is None else self._counted

    @property
    def complete(self) -> bool:
        return self.closed and not self.broken

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes to pass on; an unfinished event is kept until its end comes."""
        data = self.rest + chunk if self.rest else chunk
        end = data.rfind(_END) + 2
        if end < 2:
            self.rest = data
            return b""
        whole, self.rest = data[:end], data[end:]
        self._events += whole.count(_END)
        if _USAGE in whole or _ERROR in whole or b"[DONE]" in whole:
            whole = b"".join(self._look(event + _END) for event in whole.split(_END)[:-1])
        return whole

    def _look(self, event: bytes) -> bytes:
        if event.startswith(b"data: [DONE]"):
            self.closed = True
        elif event.startswith(_ERROR):
            self.broken = True
        elif _USAGE in event:
            with suppress(ValueError, KeyError, TypeError):
                self._counted = int(json.loads(event[6:])["usage"]["completion_tokens"])
                return event if self._wants_usage else b""
        return event


def error_response(error: HeadwayError) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _drain(answer: EngineResponse) -> None:
    """Read to the very end, so that the connection to the engine can be used again."""
    with suppress(EngineGone):
        while await answer.read():
            pass


async def _left(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
