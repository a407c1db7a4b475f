"""Which requests vLLM's API server answers: those with the secret that the gateway and its engine share.

vLLM's own check (`--api-key`) covers /v1 only, neither Headway's control nor, say, /tokenize or /metrics. On
loopback every local user could reach those.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from hmac import compare_digest
from threading import Thread
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


PARENT = "HEADWAY_PARENT"  # the process that has started this engine
GRACE_S = 10.0  # between the end of that process and SIGKILL
_LOOK_S = 1.0


def end_with_parent(grace_s: float = GRACE_S) -> None:
    """End this process and its group `grace_s` seconds after the process that has started it, at the latest.

    The kernel sends an engine SIGTERM when the process that started it dies (`process/launch.py`). vLLM's API server
    then waits for its open requests, and one that asks an engine core which has ended is never answered.

    It does nothing without HEADWAY_PARENT, or in a process that leads no group: others started that.
    """
    parent = os.environ.get(PARENT)
    if parent is not None and os.getpgrp() == os.getpid():
        Thread(target=_watch, args=(int(parent), grace_s), name="headway-orphan", daemon=True).start()


def _watch(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    time.sleep(grace_s)
    os.killpg(os.getpgrp(), signal.SIGKILL)
