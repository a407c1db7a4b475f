"""`/v1/headway/tenants`: requests, limits, budgets and promises by tenant; for operators."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from headway import clock
from headway.config import Key
from headway.config.keys import OTHER
from headway.errors import HeadwayError
from headway.gateway.apis.api import error_docs
from headway.gateway.apis.dashboard.endpoints import view_of
from headway.gateway.apis.state import AppState
from headway.gateway.bill import OpenAccount, Unit, limit_of, open_accounts
from headway.gateway.in_flight import RequestState
from headway.gateway.watch.history import ANSWERED, FAILED, IN, KEPT, OUT, OWED, HistoryView

PATH = "/v1/headway/tenants"
_MOST = 64  # tenants in an answer
_COUNTS = {"answered": ANSWERED, "failed": FAILED, "tokens_in": IN, "tokens_out": OUT, "owed": OWED, "kept": KEPT}
_ANSWER_S = 5.0  # how long to wait for the store
_LIMITS = "max_queued", "requests_per_min", "tokens_per_min"
Window = Mapping[str, Mapping[str, int]]  # counts (`_COUNTS`) by tenant


def add_tenant_endpoints(app: FastAPI, state: AppState) -> None:
    """Add the endpoint that lists tenants."""

    @app.get(PATH, responses=error_docs(400, 401, 403, 503))
    async def tenants(request: Request) -> Response:
        """List up to 64 tenants, those with most requests first, and the sum of the others.

        name: part of their names, case-insensitive. window: 10m, 1h, 6h or 24h. Budgets cover all gateways that share
        the store, all other figures this gateway. A tenant's window is null if it is counted with the others, and its
        budgets are null while the store does not answer. Tenants without a key and beyond the first 64 seen are listed
        only while they have requests.
        """
        state.check_operator(request)
        view, part = HistoryView(view_of(request).window), request.query_params.get("name", "").casefold()
        window, (waiting, inside) = _window(state, view), _requests(state)
        busy, idle = _found(state, part, window, waiting + inside)
        shown = [*busy, *islice(idle, max(_MOST - len(busy), 0))][:_MOST]
        rest = set(busy[_MOST:])
        valid = {name: _keys(state, name) for name in shown}
        kept = {name: state.limits_of_tokens(name) for name in shown}  # of an ended key, if none is valid
        keys = {name: valid[name] or [key for key in [kept[name]] if key is not None] for name in shown}
        budgets, problem = await _budgets(state, keys)
        uncounted = None if OTHER in window else dict.fromkeys(_COUNTS, 0)  # (other) may include its figures
        data = [
            _limits(state, name, keys[name])
            | {"keys": len(valid[name])}
            | {"waiting": waiting[name], "inside": inside[name], "budgets": None if budgets is None else budgets[name]}
            | {"window": window.get(name, uncounted)}
            for name in shown
        ]
        others = {
            "tenants": len(busy) + len(idle) - len(shown),
            "waiting": sum(waiting[name] for name in rest),
            "inside": sum(inside[name] for name in rest),
            "window": _sum(window.get(name, {}) for name in (*rest, *([] if part else [OTHER]))),
        }
        body = {"object": "list", "data": data, "others": others, "window_s": view.seconds, "budgets_problem": problem}
        return JSONResponse(body, headers={"cache-control": "no-store"})


def _found(
    state: AppState, part: str, window: Window, requests: Mapping[str, int]
) -> tuple[list[str], Collection[str]]:
    """Return the tenants whose names contain `part`: those with figures, then those that only have keys.

    The former are sorted by their requests now, then by those in the window.
    """

    def busy(name: str) -> tuple[int, int, str]:
        return -requests.get(name, 0), -window.get(name, {}).get("answered", 0), name

    active = {*requests, *window, *state.gateway.metrics.history.partial} - {OTHER}
    found = sorted((name for name in active if part in name.casefold()), key=busy)
    return found, [name for name in state.by_tenant if name not in active and (not part or part in name.casefold())]


def _requests(state: AppState) -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of waiting requests and of those inside engines, by tenant."""
    waiting, inside = Counter[str](), Counter[str]()
    for one in state.gateway.dispatcher.in_flight.values():
        sent = one.state in (RequestState.SENT, RequestState.ANSWERING)
        (inside if sent else waiting)[one.request.tenant] += 1
    return waiting, inside


def _window(state: AppState, view: HistoryView) -> Window:
    """Return the counts of a window; a tenant that is partly counted among the others is counted there as a whole."""
    history, now = state.gateway.metrics.history, clock.now()
    history.note(now)
    pairs, table = history.table(view, now)
    rows = table.counts.sum(axis=1).tolist()
    counts = defaultdict[str, list[Mapping[str, int]]](list)
    for pair, row in zip(pairs, rows, strict=True):
        tenant = OTHER if pair.tenant in history.partial else pair.tenant
        counts[tenant].append({name: row[place] for name, place in _COUNTS.items()})
    return {tenant: _sum(of) for tenant, of in counts.items()}


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found = [*counts]
    return {name: sum(one.get(name, 0) for one in found) for name in _COUNTS}


def _keys(state: AppState, tenant: str) -> list[Key]:
    """Return the valid keys of a tenant."""
    now = clock.now()
    return [one.key for one in state.by_tenant.get(tenant, ()) if one.key is not None and one.until > now]


def _limits(state: AppState, tenant: str, keys: Sequence[Key]) -> dict[str, Any]:
    """Return a tenant's name, usage of the last minute, and highest limits of its keys; None = no limit."""
    limits = {name: [getattr(key, name) for key in keys] for name in _LIMITS}
    most = {name: None if not keys or None in of else max(of) for name, of in limits.items()}
    minute = state.gateway.path.usage.used(tenant, clock.now())
    return {"id": tenant, "object": "headway.tenant", "limits": most, "last_minute": minute}


async def _budgets(
    state: AppState, keys: Mapping[str, Sequence[Key]]
) -> tuple[dict[str, list[dict[str, Any]]] | None, str | None]:
    """Return the usage of tenants' budgets, or None and the reason why it is unknown. keys: by tenant."""
    now = datetime.now(UTC)
    nothing: dict[Unit, float] = {"tokens": 0.0, "cost": 0.0}
    budgets = {name: dict.fromkeys(budget for key in of for budget in key.budgets) for name, of in keys.items()}
    accounts = {name: open_accounts(name, of, nothing, now) for name, of in budgets.items()}
    charges = [one.charge for of in accounts.values() for one in of]
    try:
        async with asyncio.timeout(_ANSWER_S):
            counted = await state.gateway.broker.counted(charges) if charges else {}
    except (HeadwayError, TimeoutError) as error:
        why = error.message if isinstance(error, HeadwayError) else f"the store has not answered for {_ANSWER_S:.0f} s."
        return None, f"Budgets are not known: {why}"
    return {name: [_budget(one, counted.get(one.name, 0.0)) for one in of] for name, of in accounts.items()}, None


def _budget(account: OpenAccount, used: float) -> dict[str, Any]:
    """Return the usage of a budget; soft, hard: the lowest and highest limit, as keys may have different ones."""

    def limits(*, soft: bool) -> list[float]:
        found = [limit_of(one) for one in account.limits if one.soft is soft]
        return sorted({min(found), max(found)}) if found else []

    return {
        "unit": account.unit,
        "per": account.limits[0].per,
        "used": used,
        "soft": limits(soft=True),
        "hard": limits(soft=False),
        "resets_at": account.end.timestamp(),
    }
