"""The gRPC server of the picker: Envoy's external processing, and gRPC's health checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from starlette.types import ASGIApp

from headway.addresses import netloc
from headway.config import Config, Tls
from headway.errors import ConfigError, RequestError
from headway.gateway import tasks
from headway.gateway.apis.state import AppState
from headway.gateway.http.tls import Certificate
from headway.gateway.picker.addresses import Addresses
from headway.gateway.picker.exchange import Exchange, Pool
from headway.gateway.picker.messages import (
    NOT_SERVING,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)

SERVICE, HEALTH = "envoy.service.ext_proc.v3.ExternalProcessor", "grpc.health.v1.Health"
_DRAIN_S = 10.0**9  # the gateway itself ends requests after server.drain_s
_LAST_WORDS_S = 1.0  # to finish calls whose requests have ended
log = logging.getLogger("headway.gateway")


@asynccontextmanager
async def picking(
    config: Config, app: ASGIApp, state: AppState, in_progress: set[asyncio.Task[None]]
) -> AsyncIterator[None]:
    """Serve proxies at `picker.port` until the block ends; accept no new calls once the gateway is stopping.

    app: that also serves requests over HTTP. in_progress: tasks of requests, also of those from proxies; the gateway
    awaits or cancels them before the block ends. ConfigError when the port is taken.
    """
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    address = netloc(config.server.host, config.picker.port or 0)
    try:
        if config.server.tls.cert is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(config.server.tls))
    except RuntimeError as error:
        raise ConfigError(f"The picker cannot listen at {address}: {error}.", "Set another picker.port.") from error
    picker = _Picker(config, app, state, in_progress)
    server.add_generic_rpc_handlers(picker.handlers)
    await server.start()
    log.info("the picker listens at %s", address)

    async def drain() -> None:
        await state.stopping.wait()
        await server.stop(_DRAIN_S)

    try:
        async with tasks.running(picker.addresses.follow, drain):
            yield
    finally:
        await server.stop(_LAST_WORDS_S)


def _credentials(tls: Tls) -> Any:
    """Return credentials that read the certificate for each new connection, because its files may change.

    While certificate and key do not match, as one is replaced after the other, the previous pair stays in use.
    """
    certificate = Certificate(tls)

    def read() -> Any:
        pair = certificate.read()
        return None if pair is None else grpc.ssl_server_certificate_configuration([pair])

    return grpc.dynamic_ssl_server_credentials(read(), read, False)


class _Picker:
    """Handlers of the gRPC calls."""

    def __init__(self, config: Config, app: ASGIApp, state: AppState, in_progress: set[asyncio.Task[None]]) -> None:
        self._config, self._app, self._state, self._in_progress = config, app, state, in_progress
        engines = state.gateway.dispatcher.engines
        self.addresses, self._open = Addresses(engines), 0
        self._pool = Pool(engines, self.addresses, self._restricts)

    def _restricts(self) -> bool:
        return self._state.gateway.dispatcher.control.controller.planner.restricts

    @property
    def handlers(self) -> tuple[Any, ...]:
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        methods = {SERVICE: {"Process": process}, HEALTH: {"Check": check}}
        return tuple(grpc.method_handlers_generic_handler(name, some) for name, some in methods.items())

    async def _check(self, request: Any, context: Any) -> Any:
        """Answer a health check: whether the gateway is alive, or ready as in `/ready`."""
        if request.service not in ("", "liveness", "readiness", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        alive = request.service == "liveness"
        ready = self._state.ready and not self._state.stopping.is_set()
        return HealthCheckResponse(status=SERVING if alive or ready else NOT_SERVING)

    async def _process(self, requests: Any, context: Any) -> None:
        limit, exchange = self._config.picker.max_streams, Exchange(context, self._pool, self._config.server)
        if self._open >= limit:
            headers = {"retry-after": "1"}
            what, hint = f"{limit} requests are open (picker.max_streams).", "Try again in 1 s."
            full = RequestError(
                what, hint, status=429, kind="rate_limit_error", code="too_many_streams", headers=headers
            )
            await exchange.refuse(full)
            return
        self._open += 1
        try:
            await exchange.serve(self._app, self._in_progress)
        finally:
            self._open -= 1
