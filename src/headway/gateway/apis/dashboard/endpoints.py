"""`GET /`, `GET /admin`: the dashboard's pages. `GET /headway/live`: the data of the first one.

`GET /headway/explain`: the story of one request, for operators.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import math
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from headway import __version__, clock
from headway.engines.vllm.process.limits import inside_of
from headway.engines.vllm.process.view import EngineView
from headway.errors import HeadwayError, RequestError
from headway.gateway.apis.api import error_docs
from headway.gateway.apis.state import AppState
from headway.gateway.control.targets import describe
from headway.gateway.gateway import Gateway
from headway.gateway.in_flight import RequestState
from headway.gateway.requests.streaming import HEAD
from headway.gateway.watch.history import FINEST, WINDOWS, HistoryView, RatePair, figures

_EVERY_S = 1.0
_ENGINE_S = 1.0  # for an engine to say how it is


@dataclass(slots=True)
class _Line:
    """Requests of a class. oldest: seconds that the first of those that wait has waited."""

    waiting: int = 0
    inside: int = 0
    oldest: float = 0.0

    def add(self, other: _Line) -> None:
        self.waiting += other.waiting
        self.inside += other.inside
        self.oldest = max(self.oldest, other.oldest)


Lines = dict[RatePair, _Line]


class Board:
    """Makes snapshots as long as there are viewers.

    viewers: with the operator's key (True) and without.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._lock = asyncio.Lock()
        self._taken_at, self._shared, self._lines = -_EVERY_S, dict[str, Any](), Lines()
        self._texts: dict[HistoryView, bytes] = {}
        self.viewers = Counter[bool]()

    async def events(self, stopping: asyncio.Event, operator: bool, view: HistoryView) -> AsyncIterator[bytes]:
        """Yield a snapshot a second, as server-sent events, until the gateway stops.

        operator: the viewer has the operator's key.
        """
        self.viewers[operator] += 1
        try:
            while not stopping.is_set():
                yield b"data: " + await self.snapshot(view) + b"\n\n"
                try:
                    async with asyncio.timeout(_EVERY_S):
                        await stopping.wait()
                except TimeoutError:
                    continue
        finally:
            self.viewers[operator] -= 1

    async def snapshot(self, view: HistoryView) -> bytes:
        """Return the latest snapshot as JSON, at most a second old; engines are asked once for all views."""
        async with self._lock:
            now = clock.now()
            if now - self._taken_at >= 0.9 * _EVERY_S:
                self._shared = await self._take(now)
                self._texts.clear()
                self._taken_at = now
            if view not in self._texts:
                self._texts[view] = json.dumps(self._shared | self._view_fields(view)).encode()
            return self._texts[view]

    async def _take(self, now: float) -> dict[str, Any]:
        """Return what all views have in common, and count the requests of each pair."""
        gateway = self._gateway
        engines = gateway.dispatcher.engines
        self._lines, inside = self._count(now)
        states = await asyncio.gather(*(_engine(one, inside[id]) for id, one in engines.items()))
        gateway.metrics.history.note(clock.now())
        return {
            "version": __version__,
            "recipe": gateway.config.recipe,
            "at": clock.shown(now),
            "classes": {name: describe(tier) for name, tier in gateway.config.classes.items()},
            "tenants": gateway.metrics.history.tenants,
            "engines": dict(zip(engines, states, strict=True)),
        }

    def _view_fields(self, view: HistoryView) -> dict[str, Any]:
        """Return what one view shows."""
        now, gateway = clock.now(), self._gateway
        data = figures(gateway.metrics.history, view, now)
        names = [name for name in gateway.config.classes if view.tier in (None, name)]
        lines = {name: _Line() for name in names}
        for pair, line in self._lines.items():
            if view.shows(pair):
                lines.setdefault(pair.tier, _Line()).add(line)
        return data | {
            "ends": [clock.shown(end) for end in data["ends"]],
            "attained": {name: asdict(one) for name, one in data["attained"].items()},
            "lines": {name: asdict(line) for name, line in lines.items()},
            "late": [late.shown() for late in gateway.late.latest(view, now)],
        }

    def _count(self, now: float) -> tuple[Lines, dict[str, int]]:
        """Return the requests by pair, and how many are in each engine."""
        lines, inside = defaultdict[RatePair, _Line](_Line), defaultdict[str, int](int)
        pair_of = self._gateway.metrics.history.pair
        for one in self._gateway.dispatcher.in_flight.values():
            line = lines[pair_of(one.request.tier, one.request.tenant)]
            if one.state in (RequestState.SENT, RequestState.ANSWERING):
                line.inside += 1
                inside[one.sends[-1][1]] += 1
            else:
                line.waiting += 1
                line.oldest = max(line.oldest, now - one.request.arrival)
        return lines, inside


async def _engine(engine: EngineView, inside: int) -> dict[str, Any]:
    """Return the state of an engine. None = not reported, or it is down.

    inside: requests sent to it. computing, paused, waiting: of all requests that it has. kv: share in use.
    """
    instance = engine.instance
    fields: dict[str, Any] = {
        "model": engine.models.current,
        "models": list(engine.models.names),
        "loading": engine.loading,
        "up": engine.up.is_set(),
        "state": engine.state,
        "restarts": engine.restarts,
        "inside": inside,
        "computing": None,
        "paused": None,
        "waiting": None,
        "batch": instance.max_running,
        "assumed": instance.assumed,
        "kv": None,
        "evictions": None,
    }
    if not engine.up.is_set():
        return fields
    try:
        state, page = await engine.control({"op": "state", "jobs": False}, _ENGINE_S), ""
    except HeadwayError:  # attached to a vLLM without Headway's scheduler
        state, page = {}, await engine.metrics(_ENGINE_S)
    if (counts := inside_of(state, page)) is not None:
        fields |= asdict(counts)
    try:
        used = 1 - int(state["blocks_free"]) / max(int(state["blocks_total"]), 1)
        fields["kv"] = min(max(used, 0.0), 1.0)
        fields["evictions"] = int(state["counters"]["evictions"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return fields  # another make, or a malformed state
    return fields


_SECONDS = 60.0  # for one story
_SLACK_S = 60.0  # of the journal before a request arrived: it may go by another reading of the clock
_NICE = 10  # what serves goes first
_REFUSED = 2  # exit status of a command that refuses its input
log = logging.getLogger("headway.gateway")


class Explainer:
    """Explains one request at a time from the journal in a folder, None = there is none, by `headway explain`.

    That runs in a separate process: it reads the journal and computes for a second or more, which the gateway's
    requests should not notice, and the gateway imports nothing of what explains.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._lock = folder, asyncio.Lock()

    async def story(self, id: str, since: float) -> dict[str, Any]:
        """Return a request's story as JSON has it, without the path of the journal.

        RequestError for a request that is not in it.

        since: an instant before its arrival, by the machine's clock.
        """
        if self._folder is None:
            raise RequestError("This gateway keeps no journal.", "Set journal.dir.", status=404)
        if self._lock.locked():
            raise RequestError(
                "Another request is being explained.",
                "Try again in a few seconds.",
                status=503,
                kind="server_error",
                code="busy",
            )
        start = datetime.fromtimestamp(since - _SLACK_S, UTC).isoformat()
        async with self._lock:
            status, stdout, stderr = await _run(
                "explain", "--json", "--journal", str(self._folder), "--since", start, "--", id
            )
        if status == 0:
            story: dict[str, Any] = json.loads(stdout)
            del story["run"]
            return story
        fields = dict(line.split(":", 1) for line in stderr.decode(errors="replace").splitlines() if ":" in line)
        if status == _REFUSED and "error" in fields:
            hint = "The id is in the answer's x-request-id; the journal has it some seconds after the end."
            message = fields["error"].strip().replace(str(self._folder), "its folder")
            raise RequestError(message, hint, status=404, param="id")
        log.error("headway explain ended with status %s: %s", status, stderr[-2000:].decode(errors="replace"))
        raise RequestError(
            "The request cannot be explained.", "The gateway's log says why.", status=500, kind="server_error"
        )


async def _run(*args: str) -> tuple[int | None, bytes, bytes]:
    """Run a `headway` command; return its status, None when it took too long, and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headway.cli",
        *args,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | {"COLUMNS": "10000", "NO_COLOR": "1"},  # an error is one line
    )
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    try:
        async with asyncio.timeout(_SECONDS):
            stdout, stderr = await process.communicate()
        return process.returncode, stdout, stderr
    except TimeoutError:
        return None, b"", b"it took too long"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


_MOST_VIEWERS = 32  # with the operator's key, and as many without: these cannot take its places
_LONGEST_ID, _DAY_S, _MOST_DAYS = 512, 86400.0, 3650
_PART = re.compile(r"/\* (\w+\.(?:css|js)) \*/")  # placeholder in a page for the text of a file
# A page loads nothing, runs no script except the one with this digest, and cannot be embedded in other pages.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_dashboard_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the pages and their events."""
    board, explainer = Board(state.gateway), Explainer(state.gateway.config.journal_dir)
    _add_pages(app)

    @app.get("/headway/live", include_in_schema=False)  # its answer has no end
    async def live(request: Request) -> Response:
        """Stream what the page shows: a server-sent event a second, each with all of it."""
        state.check_status(request)
        view = view_of(request)
        operator = state.is_operator(request)
        if (viewers := board.viewers[operator]) >= _MOST_VIEWERS:
            raise RequestError(
                f"{viewers} viewers look at the dashboard already.",
                "Close one of them.",
                status=503,
                kind="server_error",
                code="too_many_viewers",
            )
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        if HEAD in request.scope:
            return Response(media_type="text/event-stream", headers=headers)
        events = board.events(state.stopping, operator, view)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    @app.get("/headway/explain", responses=error_docs(400, 401, 403, 404, 503))
    async def explain(request: Request) -> Response:
        """Explain the request `id` as `headway explain --json` does.

        since: seconds since the epoch, before it arrived; by default 24 hours ago.
        """
        (state.check_operator if state.config.closed else state.check_status)(request)
        story = await explainer.story(*_explain_query(request))
        return JSONResponse(story, headers={"cache-control": "no-store"})


def _explain_query(request: Request) -> tuple[str, float]:
    """Return the id of the request to explain, and an instant before its arrival."""
    query, now = request.query_params, time.time()
    try:
        since = float(query.get("since", now - _DAY_S))
    except ValueError:
        since = math.nan
    if not now - _MOST_DAYS * _DAY_S <= since <= now + _DAY_S:
        raise RequestError("since is not a time.", "Give seconds since the epoch.", param="since")
    if not (id := query.get("id", "").strip()) or len(id) > _LONGEST_ID or "\0" in id:
        raise RequestError("id is not the id of a request.", "Give its x-request-id.", param="id")
    return id, since


def _add_pages(app: FastAPI) -> None:
    dashboard, admin = _page("page.html"), _page("admin.html")

    @app.get("/", include_in_schema=False)
    async def show_dashboard() -> Response:
        """Return the overview page; it contains no data of this gateway."""
        return HTMLResponse(**dashboard)

    @app.get("/admin", include_in_schema=False)
    async def show_admin() -> Response:
        """Return the page of tenants, keys and engines; it contains no data of this gateway."""
        return HTMLResponse(**admin)


def _page(name: str) -> dict[str, Any]:
    """Return a page with the text of its style and script files, and its headers."""
    folder = files("headway.gateway.apis.dashboard")
    page = _PART.sub(lambda part: folder.joinpath(part[1]).read_text("utf-8"), folder.joinpath(name).read_text("utf-8"))
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    headers = {
        "content-security-policy": _POLICY.format(digest=digest),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return {"content": page, "headers": headers}


def view_of(request: Request) -> HistoryView:
    """Return the view that a request asks for; 400 for an unknown window."""
    query = request.query_params
    if (window := query.get("window", FINEST)) not in WINDOWS:
        raise RequestError(f"There is no window {window[:64]!r}.", f"Use one of {', '.join(WINDOWS)}.", param="window")
    return HistoryView(window, query.get("class") or None, query.get("tenant") or None)
