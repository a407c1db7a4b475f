"""Which requests vLLM's API server answers: those with the secret that the gateway and its engine share.

vLLM's own check (`--api-key`) covers /v1 only, neither Headway's control nor, say, /tokenize or /metrics. On
loopback every local user could reach those.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hmac import compare_digest
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

SECRET = "HEADWAY_ENGINE_SECRET"  # set for the engines that Headway starts
_KEY = "VLLM_API_KEY"


class Guard:
    """ASGI middleware. In an engine that Headway started it guards all paths but /health.

    In one that Headway attaches to it guards /headway, by vLLM's own keys if it has any.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._secret = os.environ.get(SECRET)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        if scope["type"] != "lifespan" and not self._is_allowed(scope):
            response = JSONResponse({"error": "Unauthorized"}, 401)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._secret is not None:
            return path == "/health" or _has_secret(scope, [self._secret])
        keys = getattr(scope["app"].state, "headway_keys", [])
        return not keys or not path.startswith("/headway/") or _has_secret(scope, keys)


def keep_keys(state: Any, args: Any) -> None:
    """Note vLLM's own keys, in the app's state, where the guard looks for them."""
    state.headway_keys = [key for key in (args.api_key or [os.environ.get(_KEY)]) if key]


def _has_secret(scope: Scope, secrets: Iterable[str]) -> bool:
    """Return whether a request carries one of the secrets."""
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = header.partition(b" ")
    # All are compared, so that the time taken does not reveal which one is near.
    matches = [compare_digest(token.strip(), secret.encode()) for secret in secrets]
    return scheme.lower() == b"bearer" and any(matches)
