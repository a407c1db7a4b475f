"""The HTTP endpoints: OpenAI's API and Headway's own, every error in OpenAI's shape with a hint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from headway import __version__
from headway.config import Config
from headway.engines.vllm.process.connection import EngineGone
from headway.engines.vllm.process.limits import inside_of
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError, HeadwayError, RequestError
from headway.gateway.apis.anthropic.endpoints import DOCS as MESSAGES
from headway.gateway.apis.anthropic.endpoints import MessagesApi, add_message_endpoints
from headway.gateway.apis.api import SCHEDULED, Api, TranslatedResponse, api_docs, error_docs
from headway.gateway.apis.audio import audio_apis
from headway.gateway.apis.backends import add_backend_endpoints
from headway.gateway.apis.batches.endpoints import add_batch_endpoints
from headway.gateway.apis.dashboard.endpoints import add_dashboard_endpoints
from headway.gateway.apis.engines import add_engine_endpoints
from headway.gateway.apis.keys import add_key_endpoints
from headway.gateway.apis.oidc import TokenCheck
from headway.gateway.apis.responses.conversations import add_conversation_endpoints
from headway.gateway.apis.responses.endpoints import DOCS as RESPONSES
from headway.gateway.apis.responses.endpoints import (
    ResponsesApi,
    add_response_endpoints,
    background_response,
    response_to,
    waiting_for,
)
from headway.gateway.apis.runs import add_run_endpoints
from headway.gateway.apis.state import AppState
from headway.gateway.apis.tenants import add_tenant_endpoints
from headway.gateway.apis.tokens import add_token_endpoints
from headway.gateway.budget import Held
from headway.gateway.control.fleet import describe
from headway.gateway.errors import error_response
from headway.gateway.gateway import Gateway
from headway.gateway.in_flight import VIA
from headway.gateway.offload import offload
from headway.gateway.parsing.pooling import ENDPOINTS
from headway.gateway.parsing.requests import ChatBody, CompletionBody, Kind, ParsedRequest, PoolingBody
from headway.gateway.requests.streaming import ResponseStream
from headway.gateway.watch.audit import CODE, DETAIL, Audited
from headway.gateway.watch.collectors import relabelled
from headway.gateway.watch.metrics import Metrics
from headway.store.batches.sqlite_file import NAME
from headway.store.sqlite.health import log_bytes

log = logging.getLogger("headway.gateway")
_QUOTE = (400, 422)  # answers whose message may quote the body, and so a prompt: it is for the client alone
_FLOODS = (429, 503)  # answers that an overload brings by the thousand: counted, not logged
_ENGINE_S = 3.0  # for an engine's part of /metrics; Prometheus waits for 10 s
_LOGGED = 300  # characters of an error's message; part of it may be the client's
Handler = Callable[[Request], Awaitable[Response]]


def new_app() -> FastAPI:
    """Return an app without endpoints; `add_endpoints` adds them once the gateway is open."""
    # A redirect would lead to plain HTTP at the host that the client names.
    return FastAPI(
        title="Headway", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None, openapi_url=None
    )


def add_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoints of an open gateway."""
    if state.tokens is not None:
        app.add_middleware(TokenCheck, tokens=state.tokens)
    if state.gateway.audit.on:
        app.add_middleware(Audited, audit=state.gateway.audit)
    _errors(app, state.gateway.metrics)
    _apis(app, state)  # what is asked for most comes first: paths are tried in this order
    _status(app, state)
    _documentation(app, state)
    add_response_endpoints(app, state)
    add_conversation_endpoints(app, state)
    add_run_endpoints(app, state)
    add_backend_endpoints(app, state)
    add_batch_endpoints(app, state)
    add_message_endpoints(app, state)
    add_token_endpoints(app, state)
    _operations(app, state)
    add_engine_endpoints(app, state)
    add_key_endpoints(app, state)
    add_tenant_endpoints(app, state)
    add_dashboard_endpoints(app, state)


def _errors(app: FastAPI, metrics: Metrics) -> None:
    def answer(request: Request, error: HeadwayError) -> JSONResponse:
        metrics.error(error.status, error.kind)
        request.scope[CODE] = error.code
        if error.status not in _FLOODS:
            said = f"{error.code or error.kind} {error.param or ''}" if error.status in _QUOTE else error.message
            path, why = ascii(request.url.path), ascii(said[:_LOGGED])
            log.info("%s %s: %d, %s", request.method, path, error.status, why)
        shapes = (api.error for path, api in _APIS.items() if request.url.path.startswith(path))
        return next(shapes, error_response)(error)

    @app.exception_handler(HeadwayError)
    async def headway_error(request: Request, error: HeadwayError) -> JSONResponse:
        return answer(request, error)

    @app.exception_handler(HTTPException)
    async def http_exception(request: Request, error: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path}: {error.detail}."
        wrapped = RequestError(what, "/docs lists the endpoints.", status=error.status_code)
        wrapped.headers = dict(error.headers or {})
        return answer(request, wrapped)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        log.info("%s %s: the client left before its body was complete", request.method, request.url.path)
        return Response(status_code=400)  # which nobody reads

    @app.exception_handler(RecursionError)
    async def too_deep(request: Request, error: RecursionError) -> JSONResponse:
        return answer(request, RequestError("The body is nested too deeply.", "Send a flatter one."))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        hint = "This is a bug; its trace is in the log."
        return answer(request, EngineError(f"Headway failed: {error!r}.", hint, status=500))


class _PlainRoute(APIRoute):
    """A route in FastAPI's schema without FastAPI's handling, which takes as long as our parsing."""

    def __init__(self, path: str, endpoint: Handler, **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (await endpoint(Request(scope, receive)))(scope, receive, send)

        self.app = app


def _schema(model: type[ChatBody] | type[CompletionBody]) -> dict[str, Any]:
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})  # FastAPI would not put them where references find them
    if model is PoolingBody:  # which fields have the texts depends on the endpoint
        del schema["properties"]["prompt"]
        schema["required"] = []
    if "messages" in schema["properties"]:
        schema["properties"]["messages"]["items"] = parts["ChatMessage"]
    schema["properties"]["headway"] = parts["RunFields"]
    return schema


def _docs(kind: Kind, model: type[ChatBody] | type[CompletionBody]) -> dict[str, Any]:
    queued = {"description": "A background response, to be fetched from /v1/responses."}
    return api_docs(kind, _schema(model), {202: queued, **SCHEDULED})


# The APIs of clients by path; those that are asked for most come first.
_APIS: dict[str, Api] = {
    "/v1/chat/completions": Api("chat", _docs("chat", ChatBody)),
    "/v1/completions": Api("completions", _docs("completions", CompletionBody)),
    **{path: Api(kind, _docs(kind, PoolingBody)) for path, kind in ENDPOINTS.items()},
    **audio_apis(),
    "/v1/responses": ResponsesApi("chat", RESPONSES),
    "/v1/messages": MessagesApi("chat", MESSAGES),
}


def _apis(app: FastAPI, state: AppState) -> None:
    gateway = state.gateway

    async def background(api: Api, parsed: ParsedRequest, held: Held) -> Response:
        request = parsed.request
        reason = gateway.dispatcher.control.unavailability_reason(request.model)
        earlier = await gateway.background.accept(parsed, held)
        body = background_response(request.id, "queued", request.arrival) | waiting_for(reason)
        if earlier is not None:
            body = await offload(len(earlier.request), partial(response_to, earlier))
        return api.queued(parsed, body)

    def endpoint(api: Api) -> Handler:
        async def handle(request: Request) -> Response:
            with gateway.bodies.hold() as held:
                parsed = await state.receive(api, request, held)
                if parsed.background:
                    return await background(api, parsed, held)
                in_flight = await gateway.path.accept(parsed, held, request.scope.get(VIA))
            keeps = parsed.kept is not None
            stream = ResponseStream(gateway.path, in_flight, wants_usage=parsed.wants_usage, keeps=keeps)
            writer = api.writer(parsed)
            return stream if writer is None else TranslatedResponse(stream, writer)

        return handle

    for path, api in _APIS.items():
        app.router.add_api_route(
            path, endpoint(api), methods=["POST"], response_model=None, route_class_override=_PlainRoute, **api.docs
        )


def _documentation(app: FastAPI, state: AppState) -> None:
    @app.get("/openapi.json", include_in_schema=False)
    async def schema(request: Request) -> Response:
        state.check_reader(request)
        return JSONResponse(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        state.check_reader(request)
        return get_swagger_ui_html(openapi_url="/openapi.json", title=app.title)


def _status(app: FastAPI, state: AppState) -> None:
    engines = state.gateway.dispatcher.engines

    @app.get("/v1/models", responses=error_docs(401))
    async def models(request: Request) -> Response:
        """List the models served here."""
        state.tenant(request)
        data = [state.models.describe(name) for name in state.models.names]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{id:path}", responses=error_docs(401, 404))
    async def model(request: Request, id: str) -> Response:
        """Describe a model served here; without a name, as `/v1/models`."""
        if not id:
            return await models(request)
        state.tenant(request)
        return JSONResponse(state.models.describe(id))

    @app.get("/health")
    async def health() -> Response:
        """Answer as long as this process lives."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses=error_docs(503))
    async def ready(request: Request) -> Response:
        """Return 200 when requests can be answered and their ends stored.

        Every model has an instance that is up or can load it. Balancers have no key: why it is not ready is
        for operators, where the gateway's state is theirs alone.
        """
        good = state.ready
        body: dict[str, Any] = {"ready": good}
        if (operator := state.is_operator(request)) or state.tells_status(request):
            described = {id: _engine(engine, operator) for id, engine in engines.items()}
            body |= {**state.storage(), "engines": described}
            if operator and state.tokens is not None:
                body["issuer"] = state.tokens.problem
        return JSONResponse(body, 200 if good else 503)


def _operations(app: FastAPI, state: AppState) -> None:
    gateway, engines = state.gateway, state.gateway.dispatcher.engines

    @app.get("/metrics", responses=error_docs(401, 403), response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return Prometheus metrics: Headway's, and each engine's with an instance label.

        What an engine does not report within three seconds is missing: headway_engine_scraped is 0.
        """
        state.check_status(request)
        _update_gauges(gateway)
        pages = dict(await asyncio.gather(*(_scrape(gateway, engine) for engine in engines.values())))
        size = sum(len(page) for page in pages.values())
        families = await offload(size, lambda: relabelled(pages))
        return PlainTextResponse(gateway.metrics.render(families), media_type="text/plain; version=0.0.4")

    @app.post("/headway/control/{engine}", responses=error_docs(400, 401, 403, 404, 502, 503))
    async def control(engine: str, request: Request) -> Response:
        """Pass a message to a running scheduler (state, urgency, pause, resume) and return its state.

        For operators: it concerns the requests of all tenants.
        """
        state.check_operator(request)
        if engine not in engines:
            known = ", ".join(engines)
            raise RequestError(f"There is no engine {engine[:64]!r}.", f"Use one of {known}.", status=404)
        message = await state.json(request)
        request.scope[DETAIL] = str(message.get("op"))
        return JSONResponse(await engines[engine].control(message))


def _engine(engine: EngineView, to_operator: bool) -> dict[str, Any]:
    hidden = "It has failed. The gateway's log says why; so does this answer to the operator's key."
    told = describe(engine)
    return told if to_operator or told["error"] is None else told | {"error": hidden}


def _sqlite_files(config: Config) -> dict[str, Path]:
    """Return where accepted work is kept in SQLite, by what it is."""
    files = {"queue": config.broker.sqlite.file} if config.broker.kind == "sqlite" else {}
    if config.batches_dir is not None:
        files["batches"] = config.batches_dir / NAME
    return files


def _update_gauges(gateway: Gateway) -> None:
    """Bring the gauges up to date, but for what the engines know."""
    metrics, controller = gateway.metrics, gateway.dispatcher.control.controller
    metrics.queued.set(controller.queued)
    metrics.set_plan(controller.planner.gauges)
    metrics.shares(controller.attainment.accounts)
    metrics.running.set(len(controller.requests) - controller.queued)
    metrics.runs.count(gateway.dispatcher.runs)
    for store, file in _sqlite_files(gateway.config).items():
        metrics.logs.labels(store).set(log_bytes(str(file)))
    engines, control = gateway.dispatcher.engines, gateway.dispatcher.control
    serving = {id: engine.models.current for id, engine in engines.items() if engine.up.is_set()}
    metrics.models(serving, {model: control.queued(model) for model in gateway.counters})


async def _scrape(gateway: Gateway, engine: EngineView) -> tuple[str, str]:
    """Return an engine's id and its own page, which is empty when it is down or does not answer in time."""
    metrics, up, page = gateway.metrics, engine.up.is_set(), ""
    state: Mapping[str, Any] | None = None
    if up:
        page, state = await asyncio.gather(engine.metrics(_ENGINE_S), _update_counters(metrics, engine))
    metrics.set_totals(engine.id, {"restarts": engine.restarts})
    metrics.up.labels(engine.id).set(up)
    metrics.state(engine.id, engine.state)
    metrics.scraped.labels(engine.id).set(state is not None and bool(page))
    metrics.inside(engine.id, None if state is None else inside_of(state, page))
    metrics.kv(engine.id, (state or {}).get("settings", {}).get("kv"))
    if engine.id not in gateway.dispatcher.engines:  # it was removed meanwhile
        metrics.forget_engine(engine.id)
    return engine.id, page


async def _update_counters(metrics: Metrics, engine: EngineView) -> Mapping[str, Any] | None:
    """Take over the counters of the scheduler inside an engine; return its state.

    None when it does not answer in time; empty without Headway's scheduler, or when its state is malformed.
    """
    try:
        state = await engine.control({"op": "state", "jobs": False}, _ENGINE_S)
        metrics.evictions.labels(engine.id).set(state["counters"]["evictions"])
        metrics.set_totals(engine.id, state["counters"])
    except EngineGone:
        return None
    except (HeadwayError, KeyError, TypeError, ValueError, AttributeError):
        return {}
    return state
