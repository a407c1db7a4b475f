"""`/v1/headway/engines`: lists the engines, adds, drains, removes and replaces them; for operators."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from headway.config import Engine, parse
from headway.errors import RequestError
from headway.gateway.apis.api import body_docs, error_docs
from headway.gateway.apis.state import AppState
from headway.gateway.parsing.fields import parse_as
from headway.gateway.watch.audit import DETAIL

PATH = "/v1/headway/engines"
_ONCE = ("id", "count")  # settings that belong to an engine's place, and cannot change while it is replaced
_REFUSALS = error_docs(400, 401, 403, 404, 409, 413, 415, 429, 504)


class RollBody(BaseModel):
    """Engines to be replaced. engines: their ids; unset, all. set: settings of `[[engines]]` that change in each."""

    model_config = ConfigDict(extra="forbid")

    engines: list[str] | None = None
    set: dict[str, Any] = Field(default_factory=dict)


def add_engine_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints of engines."""

    @app.get(PATH, responses=error_docs(400, 401, 403))
    async def engines(request: Request) -> Response:
        """List the engines: state, models, requests inside, and why one has failed."""
        state.check_operator(request)
        return _listed(state, request)

    @app.post(PATH, status_code=202, responses=_REFUSALS, openapi_extra=body_docs(TypeAdapter(Engine).json_schema()))
    async def add(request: Request) -> Response:
        """Add an engine, given the settings of its table in `[[engines]]`; with `count`, several.

        agent: that starts it, where agents have the engines and there are several.
        """
        state.check_operator(request)
        body = await state.json(request)
        engines = parse({"engines": [body]}, "the body", checked=False).engines  # by `change`, with all others
        added = await state.gateway.fleet.change(engines, agent=request.query_params.get("agent"))
        return _listed(state, request, added)

    _add_orders(app, state)


def _add_orders(app: FastAPI, state: AppState) -> None:
    @app.post(
        f"{PATH}/roll",
        status_code=202,
        responses=_REFUSALS,
        openapi_extra=body_docs(RollBody.model_json_schema(), required=False),
    )
    async def roll(request: Request) -> Response:
        """Replace engines, one after the other, each when all others are at work.

        force=true: also if requests wait for a model that no engine has afterwards; these end with 503.
        """
        state.check_operator(request)
        body, fleet = parse_as(RollBody, await state.json(request, b"{}")), state.gateway.fleet
        ids = list(filter(fleet.has_begun, fleet.settings)) if body.engines is None else body.engines
        settings = {id: changed(one, body.set) for id, one in fleet.settings.items() if id in ids}
        fleet.check_known(ids, stays=True)
        await fleet.change(roll=settings, force=_flag(request, "force"))
        return _listed(state, request, ids)

    @app.post(f"{PATH}/{{id}}/drain", status_code=202, responses=_REFUSALS)
    async def drain(id: str, request: Request) -> Response:
        """Drain an engine: it takes no new work, ends what is inside it, and stops. It stays in the list.

        force=true: also if requests wait for a model that no other engine has; these go on waiting.
        """
        state.check_operator(request)
        await state.gateway.fleet.drain(id, force=_flag(request, "force"))
        return _listed(state, request, [id])

    @app.delete(f"{PATH}/{{id}}", status_code=202, responses=_REFUSALS)
    async def remove(id: str, request: Request) -> Response:
        """Drain an engine, then forget it.

        now=true: stop it at once; its streams end as if it had died. force=true: also if requests wait for a model
        that no other engine has; these end with 503.
        """
        state.check_operator(request)
        await state.gateway.fleet.change(remove=[id], now=_flag(request, "now"), force=_flag(request, "force"))
        return _listed(state, request, [id])


def changed(engine: Engine, settings: dict[str, Any]) -> Engine:
    """Return an engine with other settings; ConfigError for one that is unknown, invalid or cannot change."""
    for name in settings:
        if name in _ONCE:
            problem = f"{name} belongs to an engine's place, and cannot change."
            raise RequestError(problem, "Add another engine, and remove this one.", param=name)
    own = asdict(engine) | ({"cards": None} if "gpus" in settings else {})
    return parse({"engines": [own | settings]}, "the body", checked=False).engines[0]


def _listed(state: AppState, request: Request, ids: Collection[str] | None = None) -> Response:
    """Return the state of engines; 202 for some of them, which an order concerned."""
    request.scope[DETAIL] = ", ".join(ids or ())
    data = [one for one in state.gateway.fleet.listed() if ids is None or one["id"] in ids]
    return JSONResponse({"object": "list", "data": data}, 200 if ids is None else 202)


def _flag(request: Request, name: str) -> bool:
    """Return a query parameter that is true or false; 400 for anything else."""
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise RequestError(f"{name} is {text[:20]!r}.", "Use true or false.", param=name)
    return text == "true"
