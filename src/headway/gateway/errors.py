"""Errors that the gateway answers with, in OpenAI's shape: refused requests (429), and requests cut short."""

from __future__ import annotations

from starlette.responses import JSONResponse

from headway.errors import EngineError, HeadwayError, RequestError
from headway.types import QueueLimit, Reject, Shortfall

_WHAT = {
    "queue_full": "The queue is full (server.max_queued).",
    "saturated": "All engines of this model are saturated.",
}
_TARGETS = {"ttft": "The first token", "e2e": "The answer"}
_OTHER = "use a class without drop to be served late"


def error_response(error: HeadwayError) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


def stopped() -> EngineError:
    """Return the error for clients whose requests are cut short because the gateway stops."""
    hint = "Send the request again in a moment."
    return EngineError("The gateway is being stopped.", hint, status=503, code="gateway_stopped")


def refusal(reject: Reject) -> RequestError:
    """Return the 429 that says why, and when to try again if that may help."""
    seconds = None if reject.retry_after is None else f"{reject.retry_after:.0f}"
    what, hint = _what(reject), f"Try again in {seconds} s."
    if reject.limit is not None:
        hint = f"Wait for some of their answers before you send more; the next may end in {seconds} s."
    elif seconds is None:
        hint = f"Ask for less or allow more time, or {_OTHER}."
    elif reject.shortfall is not None:
        hint = f"Try again in {seconds} s, or {_OTHER}."
    headers = {"x-headway-dropped-reason": reject.reason}
    # OpenAI's clients retry every 429 by themselves unless this header forbids it.
    headers |= {"x-should-retry": "false"} if seconds is None else {"retry-after": seconds}
    return RequestError(what, hint, code=reject.reason, status=429, kind="rate_limit_error", headers=headers)


def _what(reject: Reject) -> str:
    if reject.shortfall is not None:
        return _late(reject.shortfall)
    return _WHAT[reject.reason] if reject.limit is None else _many(reject.limit)


def _many(limit: QueueLimit) -> str:
    of = "of yours" if limit.tier is None else f"of yours in the class {limit.tier}"
    return f"{limit.waiting} answers {of} wait; at most {limit.most} may wait now ({limit.setting})."


def _late(shortfall: Shortfall) -> str:
    return (
        f"{_TARGETS[shortfall.target]} would take {shortfall.needed:.3g} s or more; "
        f"{shortfall.promised:g} s were promised."
    )
