"""A FAKE paid API: OpenAI's routes alone, with a key, a name of its own for the model, and refusals on demand.

`POST /refuse/STATUS/SECONDS` lets it answer with that status, and with Retry-After if the seconds are not 0, until
`POST /refuse/200/0`. `GET /last` also lists the other routes that it was asked for (`strange`).
"""

from __future__ import annotations

import json

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from testing.fake_engine import NAME, FakeEngine, main

KEY, MODEL = "sk-fake-paid-1", "fake-large"
_FIELDS = frozenset(("model", "messages", "prompt", "max_tokens", "stream", "stream_options", "temperature"))


class PaidEngine(FakeEngine):
    """The ASGI app. Like strict servers it refuses (400) fields that are not OpenAI's."""

    status, retry_after = 200, 0
    strange: tuple[str, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        path = scope["path"]
        match path.strip("/").split("/"):
            case ["refuse", status, seconds]:
                self.status, self.retry_after = int(status), int(seconds)
                await Response()(scope, receive, send)
            case ["last"]:
                await JSONResponse(self._seen() | {"strange": self.strange})(scope, receive, send)
            case ["v1", "models" | "completions"] | ["v1", "chat", "completions"]:
                await self._api(scope, receive, send)
            case _:
                self.strange += (path,)
                await _refusal(404)(scope, receive, send)

    async def _api(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if headers.get(b"authorization") != f"Bearer {KEY}".encode():
            await _refusal(401)(scope, receive, send)
        elif scope["path"].endswith("models"):
            await JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})(scope, receive, send)
        else:
            await self._answer_or_refuse(scope, receive, send)

    async def _answer_or_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = json.loads(message["body"])
        self.last = {"body": body, "headers": {name.decode(): value.decode() for name, value in scope["headers"]}}
        if self.status != 200:
            self.asked += 1
            await _refusal(self.status, self.retry_after)(scope, receive, send)
        elif body["model"] != MODEL or not body.keys() <= _FIELDS:
            self.asked += 1
            await _refusal(400)(scope, receive, send)
        else:
            await super().__call__(scope, _first(message, receive), send)


def _first(message: Message, receive: Receive) -> Receive:
    """Return what receives a message that was taken already, and then the others."""
    taken = [message]

    async def again() -> Message:
        return taken.pop() if taken else await receive()

    return again


def _refusal(status: int, retry_after: int = 0) -> JSONResponse:
    error = {"message": f"{NAME}: refused", "type": "FakeError", "param": None, "code": status}
    return JSONResponse({"error": error}, status, {"retry-after": str(retry_after)} if retry_after else None)


if __name__ == "__main__":
    main(PaidEngine)
