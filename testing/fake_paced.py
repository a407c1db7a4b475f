"""The FAKE engine with a route that sets its answers: `POST /answers/TOKENS/DELAY`.

For benchmarks of gateways that do not pass `vllm_xargs` on, which otherwise say how a request is answered.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from testing.fake_engine import FakeEngine, main


class PacedEngine(FakeEngine):
    """The ASGI app: `tokens` and `delay` (seconds per token) are those of the last `POST /answers`."""

    __slots__ = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"].strip("/").split("/"):
            case ["answers", tokens, delay]:
                self.tokens, self.delay = int(tokens), float(delay)
                headers = [(b"content-length", b"0")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            case _:
                await super().__call__(scope, receive, send)


if __name__ == "__main__":
    main(PacedEngine)
