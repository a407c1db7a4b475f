"""`POST /v1/backends/NAME`: executes a unit of a run outside the LLM on a backend of the configuration."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter as Counts
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import Counter

from headway.cluster.backends.port import Backend, UnitResult
from headway.config import Key
from headway.errors import RequestError
from headway.events import Prewarmed, RunEnded, UnitBegan, UnitEnded
from headway.gateway import tasks
from headway.gateway.apis.api import body_docs, error_docs
from headway.gateway.apis.runs import check_begins
from headway.gateway.apis.state import AppState, tenant_of
from headway.gateway.gateway import Gateway
from headway.gateway.parsing.fields import parse_as
from headway.gateway.parsing.run_identity import UNIT, RunFields, stage_of
from headway.stages import Resource, Stage

_GONE = 499  # status of a request whose client has left; it is not sent


class BackendBody(RunFields):
    """A unit to execute. input: what the backend takes; the other fields are those of `headway`."""

    input: Any


def add_backend_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoint of backends."""
    gateway = state.gateway
    units = Counter(
        "headway_backend_units", "Units that backends executed, by warm and cold start.",
        ["backend", "start"], registry=gateway.metrics.registry,
    )  # fmt: skip
    open_units = Counts[str]()  # by tenant

    @app.post(
        "/v1/backends/{name}", responses=error_docs(400, 401, 404, 413, 429, 502, 503, 504),
        openapi_extra=body_docs(BackendBody.model_json_schema()),
    )  # fmt: skip
    async def run(name: str, request: Request) -> Response:
        """Execute a unit on a backend, and return its output and whether the backend was warm."""
        key = state.count_request(request)
        tenant = tenant_of(key)
        if key is not None:
            _check_open(key, open_units[tenant])
        backend = _find(gateway, name)
        body = parse_as(BackendBody, await state.json(request))
        stage = stage_of(request.headers, body)
        if stage is not None and UNIT not in request.headers and body.unit is None:
            stage = replace(stage, unit=name)
        began, unit = time.monotonic(), _Unit(gateway, tenant, name, stage)
        if key is not None:
            _check_open(key, open_units[tenant])  # again: others' bodies were read meanwhile
        open_units[tenant] += 1
        try:
            ran = await _while_connected(request, unit.execute(backend, body.input))
        finally:
            open_units[tenant] -= 1
        if ran is None:
            return Response(status_code=_GONE)
        units.labels(name, "warm" if ran.warm else "cold").inc()
        return JSONResponse(
            {"id": f"unit-{uuid.uuid4().hex[:20]}", "object": "headway.unit", "backend": name,
             "warm": ran.warm, "waited_s": ran.waited, "seconds": time.monotonic() - began,
             "output": ran.output}
        )  # fmt: skip


class _Unit:
    """One execution. With a run it is a unit of it, from its beginning to its end."""

    def __init__(self, gateway: Gateway, tenant: str, backend: str, stage: Stage | None) -> None:
        self._dispatcher = gateway.dispatcher
        self._tenant, self._backend = tenant, backend
        self._stage = stage if stage is not None and stage.run else None

    async def execute(self, backend: Backend, input: Any) -> UnitResult:
        """Execute the unit, and report to the planner what it cost when the backend was cold."""
        self._begin()
        try:
            ran = await backend.run(self._tenant, input)
        finally:
            self._end()
        if ran.started is not None:
            self._dispatcher.notify(Prewarmed(Resource("backend", self._backend), ran.started))
        return ran

    def _begin(self) -> None:
        if self._stage is not None:
            key = self._tenant, self._stage.app, self._stage.run
            check_begins(self._dispatcher.runs.live(key))
            self._dispatcher.notify(UnitBegan(self._tenant, self._stage, self._backend))

    def _end(self) -> None:
        if self._stage is not None:
            self._dispatcher.notify(UnitEnded(self._tenant, self._stage))
            if self._stage.final:
                self._dispatcher.notify(RunEnded(self._tenant, self._stage.app, self._stage.run))


def _check_open(key: Key, units: int) -> None:
    """Refuse a unit beyond `keys.max_queued`, whether the others wait or are executed (429)."""
    if key.max_queued is not None and units >= key.max_queued:
        raise RequestError(
            f"{units} units of yours are open; at most {key.max_queued} may be (keys.max_queued).",
            "Send more when some have ended.",
            status=429,
            code="tenant_queue_full",
            kind="rate_limit_error",
        )


def _find(gateway: Gateway, name: str) -> Backend:
    """Return a backend of the configuration; 404 for any other."""
    backend = gateway.backends.get(name)
    if backend is None:
        known = ", ".join(gateway.backends)
        hint = f"Use one of {known}." if known else "Add a table [backends.NAME] to the configuration."
        raise RequestError(f"There is no backend {name[:64]!r}.", hint, status=404, code="backend_not_found")
    return backend


async def _while_connected(request: Request, execution: Coroutine[Any, Any, UnitResult]) -> UnitResult | None:
    """Execute while the client waits for it; None = it has left, and the execution was given up."""
    work, gone = asyncio.create_task(execution), asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        await tasks.cancel(work, gone)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
