"""What does Headway speak? OpenAI's API over HTTP; every error in OpenAI's shape, with the mend."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from headway import __version__
from headway.broker.port import Job
from headway.config import Config
from headway.errors import EngineError, HeadwayError, RequestError
from headway.serve.dispatcher import Dispatcher
from headway.serve.request_parsing import (
    HEADERS,
    ChatBody,
    CompletionBody,
    Kind,
    ParsedRequest,
    interpret,
    read_json,
    validate,
)
from headway.serve.streaming import ResponseStream, error_response
from headway.serve.tokens import TokenCounter

_STATUS = {"open": "queued", "done": "completed", "failed": "failed"}
Handler = Callable[[Request], Awaitable[Response]]


class AppState:
    """The endpoints' shared state: who may enter, what is served, how prompts are counted."""

    def __init__(self, config: Config, driver: Dispatcher) -> None:
        self.config, self.driver = config, driver
        self.models = {engine.name: engine for engine in config.engines}
        self.counters = {name: TokenCounter(engine.model) for name, engine in self.models.items()}
        self._keys = {_digest(key.key): key.tenant for key in config.keys}
        self.started = int(time.time())
        self._opened = False

    async def open(self) -> None:
        """Load the tokenizers and start the driver; a second call does nothing."""
        if not self._opened:
            self._opened = True
            for counter in self.counters.values():
                await counter.load()
            await self.driver.start()

    def tenant(self, request: Request) -> str:
        """Return whose request this is; 401 when keys are configured and none fits."""
        if not self._keys:
            return "default"
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        tenant = self._keys.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise RequestError(
                "This server wants an API key.", "Send `Authorization: Bearer KEY`.",
                status=401, code="invalid_api_key",
            )  # fmt: skip
        return tenant

    async def body(self, request: Request) -> bytes:
        """Read the body; 413 as soon as it is too long, whatever its declared length."""
        limit = self.config.server.max_body_kib * 1024
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise self._too_long(limit)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise self._too_long(limit)
            parts.append(part)
        return b"".join(parts)

    def _too_long(self, limit: int) -> RequestError:
        return RequestError(
            f"The body is larger than {limit} bytes.",
            "Send less, or raise server.max_body_kib.",
            status=413,
            code="body_too_large",
            headers={"connection": "close"},
        )

    async def ask(self, kind: Kind, request: Request) -> ParsedRequest:
        """Turn an HTTP request into what was asked, or refuse it before anything is stored."""
        arrival, tenant = time.time(), self.tenant(request)
        raw = read_json(await self.body(request))
        body = validate(kind, raw)
        engine = self.models.get(body.model)
        if engine is None:
            raise RequestError(
                f"The model {body.model[:100]!r} does not exist here.",
                f"Use one of {', '.join(sorted(self.models))}.",
                status=404, code="model_not_found", param="model",
            )  # fmt: skip
        tokens = await self.counters[body.model].count(body)
        asked = interpret(
            kind, raw, body, request.headers, self.config, tenant=tenant, arrival=arrival,
            prompt_tokens=tokens, max_model_len=engine.max_model_len,
        )  # fmt: skip
        self.driver.check_capacity(asked.request)
        return asked


def build(config: Config, driver: Dispatcher | None = None) -> FastAPI:
    """Return the ASGI app; its lifespan starts and stops the driver and its engines."""
    driver = driver or Dispatcher(config)
    door = AppState(config, driver)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await door.open()
        try:
            yield
        finally:
            await driver.stop()

    app = FastAPI(title="Headway", version=__version__, lifespan=lifespan)
    app.state.driver, app.state.door = driver, door
    _errors(app)
    _generation(app, door)
    _background(app, door)
    _status(app, door)
    return app


def _errors(app: FastAPI) -> None:
    @app.exception_handler(HeadwayError)
    async def ours(_: Request, error: HeadwayError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def theirs(request: Request, error: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path}: {error.detail}."
        wrapped = RequestError(what, "See /docs for what there is.", status=error.status_code)
        wrapped.headers = dict(error.headers or {})
        return error_response(wrapped)

    @app.exception_handler(RecursionError)
    async def deep(_: Request, error: RecursionError) -> JSONResponse:
        return error_response(RequestError("The body is nested too deeply.", "Send a flatter one."))

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> JSONResponse:
        mend = "This is a bug; its trace is in the log."
        return error_response(EngineError(f"Headway failed: {error!r}.", mend, status=500))


class _Plain(APIRoute):
    """A route whose calls FastAPI only lists in the schema: its own handling takes as long as our parsing."""

    def __init__(self, path: str, endpoint: Handler, **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (await endpoint(Request(scope, receive)))(scope, receive, send)

        self.app = app


def _schema(model: type[ChatBody] | type[CompletionBody]) -> dict[str, Any]:
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})  # FastAPI would not put them where references find them
    if "messages" in schema["properties"]:
        schema["properties"]["messages"]["items"] = parts["Message"]
    headers = [
        {"name": name, "in": "header", "required": False, "schema": {"type": kind}}
        for name, kind in HEADERS.items()
    ]
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, "parameters": headers}


def _answers(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"description": "An error in OpenAI's shape."} for code in codes}


def _generation(app: FastAPI, door: AppState) -> None:
    def endpoint(kind: Kind) -> Handler:
        async def handle(request: Request) -> Response:
            asked = await door.ask(kind, request)
            ticket = await door.driver.accept(asked)
            if asked.background:
                return JSONResponse(_response(asked.request.id, "queued", asked.request.arrival), 202)
            return ResponseStream(door.driver, ticket, wants_usage=asked.wants_usage)

        handle.__name__ = kind
        return handle

    errors = _answers(202, 400, 401, 404, 413, 429, 502, 503)
    routes: tuple[tuple[str, Kind, type[ChatBody] | type[CompletionBody]], ...] = (
        ("/v1/chat/completions", "chat", ChatBody),
        ("/v1/completions", "completions", CompletionBody),
    )
    for path, kind, model in routes:
        app.router.add_api_route(
            path, endpoint(kind), methods=["POST"], openapi_extra=_schema(model), responses=errors,
            response_model=None, route_class_override=_Plain,
        )  # fmt: skip


def _background(app: FastAPI, door: AppState) -> None:
    async def find(request: Request, id: str) -> Job:
        tenant = door.tenant(request)
        job = await door.driver.broker.get(id)
        if job is None or job.tenant != tenant or not job.background:
            raise RequestError(
                f"There is no background response {id[:64]!r}.",
                "It may have been forgotten (broker.keep_hours).", status=404, code="not_found",
            )  # fmt: skip
        return job

    @app.get("/v1/responses/{id}", responses=_answers(401, 404))
    async def retrieve(id: str, request: Request) -> Response:
        """Return a background response: its status, and the answer once it is complete."""
        job = await find(request, id)
        body = _response(job.id, _STATUS[job.state], job.arrival, job.reason)
        if job.result is not None:
            body["response"] = read_json(job.result)
        return JSONResponse(body)

    @app.post("/v1/responses/{id}/cancel", responses=_answers(401, 404, 409))
    async def cancel(id: str, request: Request) -> Response:
        """Give up a background response that is not complete yet."""
        job = await find(request, id)
        if not await door.driver.cancel(job.id):
            job = await find(request, id)  # it may have ended in between
            raise RequestError(
                f"{id} is {_STATUS[job.state]} already.", "Only unfinished ones can be cancelled.", status=409
            )
        return JSONResponse(_response(job.id, "cancelled", job.arrival))


def _response(id: str, status: str, arrival: float, reason: str | None = None) -> dict[str, Any]:
    if reason == "cancelled":
        status, reason = "cancelled", None
    error = {"code": "server_error", "message": reason} if reason else None
    return {"id": id, "object": "response", "status": status, "created_at": int(arrival), "background": True,
            "error": error}  # fmt: skip


def _status(app: FastAPI, door: AppState) -> None:
    driver = door.driver

    @app.get("/v1/models", responses=_answers(401))
    async def models(request: Request) -> Response:
        """List the models served here."""
        door.tenant(request)
        data = [
            {"id": name, "object": "model", "created": door.started, "owned_by": "headway",
             "max_model_len": engine.max_model_len}
            for name, engine in door.models.items()
        ]  # fmt: skip
        return JSONResponse({"object": "list", "data": data})

    @app.get("/health")
    async def health() -> Response:
        """Tell that this process lives."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses=_answers(503))
    async def ready() -> Response:
        """Tell whether requests can be answered now: every model has an instance that is up."""
        engines = {id: _engine(engine) for id, engine in driver.engines.items()}
        up = {engine.config.name for engine in driver.engines.values() if engine.up.is_set()}
        return JSONResponse({"ready": up >= set(door.models), "engines": engines},
                            200 if up >= set(door.models) else 503)  # fmt: skip

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return Prometheus metrics: Headway's, and each engine's with an instance label."""
        await _gauge(driver)
        pages = {id: await engine.metrics() for id, engine in driver.engines.items() if engine.up.is_set()}
        return PlainTextResponse(driver.metrics.render(pages), media_type="text/plain; version=0.0.4")

    @app.post("/headway/control/{engine}", responses=_answers(400, 401, 404, 502, 503))
    async def control(engine: str, request: Request) -> Response:
        """Pass a message to a running scheduler (state, urgency, pause, resume) and return its state."""
        door.tenant(request)
        if engine not in driver.engines:
            known = ", ".join(driver.engines)
            raise RequestError(f"There is no engine {engine[:64]!r}.", f"Use one of {known}.", status=404)
        return JSONResponse(await driver.engines[engine].control(read_json(await door.body(request))))


def _engine(engine: Any) -> dict[str, Any]:
    failure = engine.failure
    return {"model": engine.config.name, "up": engine.up.is_set(), "restarts": engine.restarts,
            "error": str(failure) if failure else None}  # fmt: skip


async def _gauge(driver: Dispatcher) -> None:
    """Bring the gauges up to date; what engines count is asked of the schedulers themselves."""
    metrics = driver.metrics
    metrics.queued.set(driver.controller.queued)
    metrics.running.set(len(driver.controller.requests) - driver.controller.queued)
    for id, engine in driver.engines.items():
        metrics.up.labels(id).set(engine.up.is_set())
        if engine.up.is_set():
            try:
                state = await engine.control({"op": "state"})
                metrics.evictions.labels(id).set(state["counters"]["evictions"])
                metrics.counted(id, state["counters"])
            except (HeadwayError, KeyError, TypeError):
                continue  # an engine without our scheduler has no such figure


def _digest(key: str) -> bytes:
    """Keys are compared by digest, so that timing tells nothing about them."""
    return hashlib.sha256(key.encode()).digest()
