"""`GET /`, `GET /admin`: the dashboard's pages. `GET /headway/live`: the data of the first one.

`GET /headway/explain`: the story of one request, for operators.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import time
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from headway.errors import RequestError
from headway.gateway.apis.api import error_docs
from headway.gateway.apis.dashboard.board import Board
from headway.gateway.apis.dashboard.explain import Explainer
from headway.gateway.apis.state import AppState
from headway.gateway.requests.streaming import HEAD
from headway.gateway.watch.history import FINEST, WINDOWS, HistoryView

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
