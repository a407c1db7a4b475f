"""The audit log: who did what. A line of JSON for each act of an operator, and for each refusal of an API key.

Lines are appended (O_APPEND), by several gateways to one file if they share it. An act is on the disk before its answer
goes out; a refusal is written at once and not synced. Nothing of a request's body is in it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway import private
from headway.errors import ConfigError
from headway.gateway.http.connections import TENANT

ACTOR = "headway.actor"  # in the scope of a request: who sent it, the name of a key or "operator"
OPERATOR = "headway.operator"  # in the scope of what an operator does that only operators may
DETAIL = "headway.detail"  # in the scope of a request: what it concerns, besides its path
CODE = "headway.code"  # in the scope of a request that is refused: the error's code
_READS = ("GET", "HEAD", "OPTIONS")
_LONGEST = 500  # characters of a text
_REFUSALS = 100  # that are listed in a second; further ones are counted
_PENDING = 10_000  # lines that wait for a disk
log = logging.getLogger("headway.gateway")


def check_writable(path: str) -> None:
    """Raise ConfigError if lines could not be appended to a file; creates no file."""
    file = Path(path).expanduser()
    place = file if file.exists() else file.parent
    if file.is_dir() or not os.access(place, os.W_OK):
        raise _unusable(path, f"{place} cannot be written" if place.exists() else f"{place} does not exist")


def _unusable(path: str, why: str | None) -> ConfigError:
    fix = "Name a file in a directory that exists and that this user may write to."
    return ConfigError(f"The audit log cannot use {path}: {why}.", fix, param="audit.path")


class AuditLog:
    """Appends lines to a file, on a thread; without a path it does nothing. ConfigError if it cannot be opened.

    A file that was renamed, as logrotate does, is left at the next line, and a new one is begun.
    """

    def __init__(self, path: str | None, registry: CollectorRegistry) -> None:
        self.on = path is not None
        self._path = Path(path or "").expanduser()
        self._lines = deque[bytes]()
        self._second, self._listed, self._unlisted = 0, 0, 0
        self._file: int | None = None
        self._torn = self._failing = False
        self._thread = ThreadPoolExecutor(1, "headway-audit")
        self._lost = Counter("headway_audit_lost", "Lines that the audit log lost.", registry=registry)
        if path is not None:
            try:
                self._opened()
            except OSError as error:
                raise _unusable(path, error.strerror) from error

    def note(self, act: str, actor: str, target: str, outcome: int | str, **more: Any) -> None:
        """Add a line; `flush` writes it. actor: the name of a key or a subject, never a key. outcome: or its status."""
        if not self.on:
            return
        now = datetime.now(UTC)
        time = now.isoformat(timespec="milliseconds")
        line = {"time": time, "act": act, "actor": actor, "target": target, "outcome": outcome}
        line |= {name: value for name, value in more.items() if value}
        short = {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in line.items()}
        self._lines.append(json.dumps(short).encode() + b"\n")
        if len(self._lines) > _PENDING:
            self._lines.popleft()
            self._lost.inc()

    def lists_refusal(self) -> bool:
        """Tell whether another refusal is listed in this second, and count it; a flood becomes one line."""
        if (second := int(monotonic())) != self._second:
            if self._unlisted:
                self.note("refusals", "", "", "not listed", count=self._unlisted)
            self._second, self._listed, self._unlisted = second, 0, 0
        self._listed += 1
        self._unlisted += (more := self._listed > _REFUSALS)
        return not more

    async def flush(self, *, sync: bool) -> None:
        """Write what there is; sync: and wait until it is on the disk. What the disk refuses is kept."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, sync)

    async def close(self) -> None:
        """Write what is left, and close the file."""
        if self.on:
            self._second = 0
            self.lists_refusal()  # notes those that are not listed
            await self.flush(sync=True)
            self._thread.shutdown()
            if self._file is not None:
                os.close(self._file)

    def _write(self, sync: bool) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        data = (b"\n" if self._torn else b"") + b"".join(lines)
        try:
            file = self._opened()
            if data and os.write(file, data) < len(data):
                raise OSError("the disk took a part of it only")
            if sync:
                os.fsync(file)
        except OSError as error:
            self._lines.extendleft(reversed(lines))
            if not self._failing:
                log.error("the audit log %s cannot be written: %s", self._path, error)
            self._torn = self._failing = True
            return
        self._torn = self._failing = False

    def _opened(self) -> int:
        """Return the descriptor of the file that the path names now."""
        if self._file is not None:
            mine, there = os.fstat(self._file), self._path.stat() if self._path.exists() else None
            if there is not None and (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                return self._file
            os.close(self._file)
            self._file = None
        self._file = private.opened(self._path, os.O_WRONLY | os.O_APPEND)
        return self._file


class Audited:
    """ASGI middleware that notes operators' acts and refused keys in the audit log, before their answers go out.

    It goes by what the checks of keys leave in the scope, so that it sees every route there is.
    """

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        self._app, self._audit = app, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and note it if it is one of these."""

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._note(scope, message["status"], message["headers"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:  # becomes a 500 outside
            await self._note(scope, 500, [])
            raise

    async def _note(self, scope: Scope, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        refused = status in (401, 403) or (status == 429 and (b"x-headway-dropped-reason", b"budget") in headers)
        acts = scope.get(OPERATOR, False) and scope["method"] not in _READS
        if not acts and not (refused and self._audit.lists_refusal()):
            return
        route, client = scope.get("route"), scope.get("client")
        query = scope["query_string"].decode("latin-1") if acts else ""  # another one may hold anything
        target = f"{scope['path']}?{query}" if query else scope["path"]
        self._audit.note(
            f"{scope['method']} {getattr(route, 'path', scope['path'])}",
            scope.get(ACTOR, ""),
            target,
            status,
            code=scope.get(CODE),
            tenant=scope.get(TENANT),
            detail=scope.get(DETAIL),
            source=client[0] if client else "",
        )
        await self._audit.flush(sync=acts)
