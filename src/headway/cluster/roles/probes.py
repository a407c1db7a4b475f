"""HTTP endpoints of a controller or an agent: health, readiness and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headway.errors import HeadwayError
from headway.gateway.apis.access import Access
from headway.gateway.errors import error_response
from headway.gateway.watch.metrics import Metrics

State = Callable[[], tuple[bool, dict[str, Any]]]


def probes(state: State, metrics: Metrics, access: Access) -> Starlette:
    """Return the application.

    state: returns whether the process is ready, and details. access: decides which requests see these and metrics.
    """

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        is_ready, details = state()
        details = details if access.tells_status(request) else {}
        return JSONResponse({"ready": is_ready, **details}, 200 if is_ready else 503)

    async def page(request: Request) -> Response:
        access.check_status(request)
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeadwayError), "registered for these alone"
        return error_response(error)

    routes = [Route("/health", health), Route("/ready", ready), Route("/metrics", page)]
    return Starlette(routes=routes, exception_handlers={HeadwayError: refused})
