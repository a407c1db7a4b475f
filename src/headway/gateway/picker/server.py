"""The gRPC server of the picker: Envoy's external processing, and gRPC's health checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc.aio
from starlette.types import ASGIApp

from headway.addresses import netloc
from headway.config import Config, Tls
from headway.errors import ConfigError, RequestError
from headway.gateway.apis.state import AppState
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
_ADDRESS_S = 5.0  # for which the address of a name counts
log = logging.getLogger("headway.gateway")


@asynccontextmanager
async def picking(config: Config, app: ASGIApp, state: AppState) -> AsyncIterator[None]:
    """Serve proxies at `picker.port` until the block ends; then requests in progress have `server.drain_s`.

    app: serves requests over HTTP, too. ConfigError when the port is taken.
    """
    picker, server = _Picker(config, app, state), grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(picker.handlers)
    address = netloc(config.server.host, config.picker.port or 0)
    try:
        if config.server.tls.cert is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(config.server.tls))
    except RuntimeError as error:
        raise ConfigError(f"The picker cannot listen at {address}: {error}.", "Set another picker.port.") from error
    await server.start()
    log.info("the picker listens at %s", address)
    try:
        yield
    finally:
        drain = config.server.drain_s
        await server.stop(None if drain == "streams" else drain)


def _credentials(tls: Tls) -> Any:
    """Return credentials whose certificate is read for each new connection, as its files may change."""

    def read() -> Any:
        try:
            pair = Path(str(tls.key)).read_bytes(), Path(str(tls.cert)).read_bytes()
        except OSError as error:
            log.error("the picker's certificate stays as it is: %s", error)
            return None
        return grpc.ssl_server_certificate_configuration([pair])

    return grpc.dynamic_ssl_server_credentials(read(), read, False)


class _Picker:
    """Serves the calls."""

    def __init__(self, config: Config, app: ASGIApp, state: AppState) -> None:
        self._config, self._app, self._state = config, app, state
        self._open = 0
        self._found: dict[str, tuple[float, str]] = {}  # host and port -> until when, and the address

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
        """Answer a health check: alive, or ready as `/ready` is."""
        if request.service not in ("", "liveness", "readiness", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        alive = request.service == "liveness"
        ready = self._state.ready and not self._state.stopping.is_set()
        return HealthCheckResponse(status=SERVING if alive or ready else NOT_SERVING)

    async def _process(self, requests: Any, context: Any) -> None:
        limit, engines = self._config.picker.max_streams, self._state.gateway.dispatcher.engines
        pool = Pool(engines, await self._addresses(), self._restricts)
        exchange = Exchange(context, pool, self._config.server)
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
            await exchange.serve(self._app)
        finally:
            self._open -= 1

    async def _addresses(self) -> dict[str, str]:
        """Return IP address and port of each engine by id, of those whose names are known now."""
        found = {}
        for id, engine in self._state.gateway.dispatcher.engines.items():
            if not engine.config.overflow and (address := await self._address(engine.url)) is not None:
                found[id] = address
        return found

    async def _address(self, url: str) -> str | None:
        loop, parts = asyncio.get_running_loop(), urlsplit(url)
        until, address = self._found.get(parts.netloc, (0.0, ""))
        if until > loop.time():
            return address
        if parts.hostname is None:  # it has not been started yet
            return None
        if address:  # for those that ask while it is looked up
            self._found[parts.netloc] = loop.time() + _ADDRESS_S, address
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            (*_, (host, *_)), *_ = await loop.getaddrinfo(parts.hostname, port)
        except OSError as error:
            log.warning("the address of %s cannot be looked up: %s", parts.hostname, error)
            return address or None
        address = netloc(str(host), port)
        self._found[parts.netloc] = loop.time() + _ADDRESS_S, address
        return address
