"""Endpoints of application runs: progress, units outside the LLM, the end; the applications that run."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from headway import clock
from headway.errors import RequestError
from headway.events import RunEnded, UnitBegan, UnitEnded
from headway.gateway.apis.api import body_docs, error_docs
from headway.gateway.apis.state import AppState, tenant_of
from headway.gateway.parsing.fields import parse_as
from headway.gateway.parsing.run_identity import APP, SESSION, Name, app_of, check_name
from headway.policy.apps.account import MOST_OUTSIDE, EndedRun
from headway.policy.apps.demand import SHARED
from headway.policy.apps.graph import LLM
from headway.policy.apps.run import PLAIN, Key, Run
from headway.stages import Stage


class EndBody(BaseModel):
    """The end of a run; app: its application, "session" if it named none."""

    model_config = ConfigDict(extra="forbid")

    app: Name | None = None


class UnitBody(EndBody):
    """A unit outside the LLM.

    backend: what serves it: a tool, a sandbox's image, a model; units of one backend can be warmed alike.
    """

    unit: Name
    state: Literal["started", "ended"]
    backend: Name = "tool"


def add_run_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints of runs and applications."""
    _reports(app, state)
    _states(app, state)


def _reports(app: FastAPI, state: AppState) -> None:
    dispatcher = state.gateway.dispatcher

    @app.post(
        "/v1/runs/{id:path}/end",
        responses=error_docs(400, 401, 404, 429),
        openapi_extra=body_docs(EndBody.model_json_schema(), required=False),
    )
    async def end(id: str, request: Request) -> Response:
        """End a run: at once, or with its last request in progress. Ending it again changes nothing."""
        tenant = tenant_of(state.count_request(request))
        key = _key(tenant, request, id, parse_as(EndBody, await state.json(request, b"{}")).app)
        _find_run(state, key)
        dispatcher.notify(RunEnded(*key))
        return JSONResponse(_describe(state, key))

    @app.post(
        "/v1/runs/{id:path}/units",
        responses=error_docs(400, 401, 404, 409, 429),
        openapi_extra=body_docs(UnitBody.model_json_schema()),
    )
    async def unit(id: str, request: Request) -> Response:
        """Report that a unit outside the LLM has started, which may begin the run, or that it has ended."""
        tenant = tenant_of(state.count_request(request))
        body = parse_as(UnitBody, await state.json(request, b"{}"))
        key = _key(tenant, request, id, body.app)
        stage = Stage(key[1], key[2], body.unit)
        if body.state == "started":
            _check_backend(body)
            check_begins(dispatcher.runs.live(key))
            dispatcher.notify(UnitBegan(key[0], stage, body.backend))
        else:
            _check_ended(_find_run(state, key), body)
            dispatcher.notify(UnitEnded(key[0], stage))
        return JSONResponse(_describe(state, key))


def _states(app: FastAPI, state: AppState) -> None:
    planner, runs = state.gateway.dispatcher.control.controller.planner, state.gateway.dispatcher.runs

    @app.get("/v1/apps", responses=error_docs(401))
    async def apps(request: Request) -> Response:
        """List the tenant's applications: live runs, and runs that their demand graphs have learned from."""
        tenant = state.tenant(request)
        live, learned = runs.live_by_app(tenant), dict[str, int]()
        if planner.knowledge is not None:
            graphs = planner.knowledge.graphs
            for owner in (SHARED, tenant):  # the tenant's own graph goes before the shared one
                learned |= {app: graph.runs for (of, app), graph in graphs.items() if of == owner}
        names = sorted(name for name in {*live, *learned} if not name.startswith(PLAIN))
        data = [
            {"id": name, "object": "headway.app", "live_runs": live.get(name, 0), "learned_runs": learned.get(name, 0)}
            for name in names
        ]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/runs/{id:path}", responses=error_docs(400, 401, 404), openapi_extra=_QUERY)
    async def show(id: str, request: Request) -> Response:
        """Return a run: its units so far, what they took, what is expected to come, its deadline."""
        key = _key(state.tenant(request), request, id, request.query_params.get("app"))
        _find_run(state, key)
        return JSONResponse(_describe(state, key))


# ---- what a call is about


def _key(tenant: str, request: Request, id: str, app: str | None) -> Key:
    check_name(id, "The run's id", "id")
    if app is not None:
        check_name(app, "The application's name", "app")
    return tenant, app_of(request.headers) or app or SESSION, id


def _find_run(state: AppState, key: Key) -> Run | EndedRun:
    """Return a run that is live or remembered; 404 for any other."""
    runs = state.gateway.dispatcher.runs
    run = runs.live(key) or runs.ended(key)
    if run is None:
        raise RequestError(
            f"There is no run {key[2][:64]!r} of the application {key[1][:64]!r}.",
            f"Name its application (app, or the header {APP}); a run begins with its first request, and is "
            "forgotten some time after its end.",
            status=404,
            code="run_not_found",
        )
    return run


def _check_backend(body: UnitBody) -> None:
    if body.backend == LLM:
        raise RequestError(
            f"The backend {LLM!r} is for requests to this gateway.",
            "Name the unit in the request (x-headway-unit), or another backend.",
            param="backend",
        )


def check_begins(run: Run | None) -> None:
    """Refuse a unit that begins outside the LLM while too many of its run are in progress."""
    if run is not None and run.outside >= MOST_OUTSIDE:
        raise RequestError(
            f"{MOST_OUTSIDE} units of this run are in progress.",
            "Report the end of those that have ended.",
            param="state",
            code="too_many_units",
        )


def _check_ended(run: Run | EndedRun, body: UnitBody) -> None:
    if isinstance(run, EndedRun) or (body.unit, True) not in run.open:
        raise RequestError(
            f"No unit {body.unit!r} of this run is in progress.",
            'Report its start first (state "started").',
            status=409,
            param="unit",
            code="unit_not_started",
        )


# ---- descriptions of runs


def _describe(state: AppState, key: Key) -> dict[str, Any]:
    dispatcher, now = state.gateway.dispatcher, clock.now()
    run, ended = dispatcher.runs.live(key), dispatcher.runs.ended(key)
    body: dict[str, Any] = {"id": key[2], "object": "headway.run", "app": key[1]}
    if run is None:
        assert ended is not None
        deadline = _deadline_fields(ended.began, ended.target)
        return body | deadline | {"status": "ended", "outcome": ended.outcome, "seconds": ended.seconds}
    visits: list[dict[str, Any]] = [
        {
            "unit": visit.unit,
            "backend": visit.backend,
            "in_progress": visit.inside,
            "requests": visit.requests,
            "prompt_tokens": visit.prompt,
            "output_tokens": visit.output,
            "seconds": visit.seconds,
        }
        for visit in run.visits
    ]
    rest = dispatcher.control.controller.planner.run_rest(*key, now)
    status = "ending" if run.final else "live"
    took = {name: sum(visit[name] for visit in visits) for name in ("prompt_tokens", "output_tokens", "seconds")}
    return (
        body
        | _deadline_fields(run.began, run.target)
        | {
            "status": status,
            "outcome": None,
            "seconds": now - run.began,
            "units": visits,
            "units_left_out": run.steps - len(visits),
            "attained": took,
            "expected_rest_s": rest,
        }
    )


def _deadline_fields(began: float, target: float | None) -> dict[str, Any]:
    created = clock.shown(began)
    due = None if target is None else created + target
    return {"created_at": int(created), "slo_run_ms": None if target is None else target * 1000, "due_at": due}


# ---- OpenAPI


_QUERY = {"parameters": [{"name": "app", "in": "query", "required": False, "schema": {"type": "string"}}]}
