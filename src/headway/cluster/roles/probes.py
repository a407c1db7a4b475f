"""HTTP endpoints of a controller or an agent: health, readiness and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headway.gateway.watch.metrics import Metrics

State = Callable[[], tuple[bool, dict[str, Any]]]


def probes(state: State, metrics: Metrics) -> Starlette:
    """Return the application. state: whether the process is ready, and more about it."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        good, more = state()
        return JSONResponse({"ready": good, **more}, 200 if good else 503)

    async def page(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    return Starlette(routes=[Route("/health", health), Route("/ready", ready), Route("/metrics", page)])
