"""The gateway's log on stderr, as text or JSON, and the access log: a line per HTTP request."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.config import Log
from headway.gateway.http.connections import PROBES, TENANT
from headway.gateway.watch import json_log

ACCESS = "headway.access"
# Response headers that the access log repeats, with their names there.
_REPEATED = {b"x-request-id": "id", b"x-headway-class": "class", b"x-headway-dropped-reason": "reason"}
_LONGEST = 2000  # characters of a path
log = logging.getLogger(ACCESS)


def configure(settings: Log, *, quiet: bool = False) -> None:
    """Log to stderr: in colour on a terminal, else lines that nothing wraps, a hundred times as fast.

    quiet: nothing below warnings.
    """
    level = logging.WARNING if quiet else getattr(logging, settings.level.upper())
    if settings.format == "json":
        json_log.begin(level)
    elif sys.stderr.isatty():
        rich = RichHandler(console=Console(stderr=True), show_path=False)
        logging.basicConfig(level=level, format="%(message)s", handlers=[rich])
    else:
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")


class AccessLog:
    """ASGI middleware that logs every HTTP request except probes when its answer ends, complete or not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and log it."""
        if scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        began, status, size = time.perf_counter(), 0, 0
        logged: dict[str, str] = {}

        async def send_and_note(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                logged.update({_REPEATED[k]: v.decode("latin-1") for k, v in message["headers"] if k in _REPEATED})
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            client = scope.get("client")
            _write(
                {
                    "client": client[0] if client else "",
                    "method": scope["method"],
                    "path": scope["path"][:_LONGEST],
                    "status": status,
                    "bytes": size,
                    "ms": round(1000 * (time.perf_counter() - began), 1),
                    "tenant": scope.get(TENANT, ""),
                    **logged,
                }
            )


def _write(request: dict[str, Any]) -> None:
    """Write the line of a request; nothing in it can break a line of text."""
    path, what = ascii(request["path"])[1:-1], f"{request['status']} {request['bytes']} B {request['ms']} ms"
    more = [f"{name}={ascii(request[name])[1:-1]}" for name in ("id", "tenant", "class", "reason") if request.get(name)]
    text = " ".join([f'{request["client"]} "{request["method"]} {path}" {what}', *more])
    log.info("%s", text, extra={"request": request})
