"""A FAKE engine whose answers are set by a route: `POST /answers/TOKENS/DELAY`.

For benchmarks of gateways that do not forward `vllm_xargs`, which control the answers otherwise.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from testing.fake_engine import FakeEngine, main


class PacedEngine(FakeEngine):
    """The ASGI app; the last `POST /answers` sets `tokens` and `delay` (seconds per token)."""

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
