"""Checks a request's class, SLO and priority against the limits of its API key (`[[keys]]`)."""

from __future__ import annotations

from headway.config import Key
from headway.errors import RequestError
from headway.types import Request


def check_claims(key: Key, request: Request, priority: int | None) -> None:
    """Raise RequestError (403) for a claim beyond the key's limits.

    priority: that the request asks for itself, None = it has its class's.
    """
    if key.classes is not None and request.tier not in key.classes:
        raise _refusal(
            f"This API key may not use the class {request.tier!r}",
            f"Set service_tier to one of {', '.join(key.classes)}",
            "keys.classes",
            "service_tier",
        )
    for name, seconds in _targets(request):
        least = getattr(key, f"{name}_ms")
        if seconds is not None and least is not None and seconds * 1000 < least:
            raise _refusal(
                f"This API key may not ask for a {name} of {seconds * 1000:g} ms, by its SLO or its class",
                f"Ask for {least:g} ms or more",
                f"keys.{name}_ms",
            )
    if key.priority is not None and priority is not None and priority < key.priority:
        raise _refusal(
            f"This API key may not ask for the priority {priority}",
            f"Use {key.priority} or a higher number",
            "keys.priority",
            "priority",
        )


def _targets(request: Request) -> list[tuple[str, float | None]]:
    """Return the SLOs in seconds; the deadline of its run counts as an e2e."""
    slo, stage = request.slo, request.stage
    run = stage.target if stage else None
    return [("ttft", slo.ttft), ("tpot", slo.tpot), ("e2e", slo.e2e), ("e2e", run)]


def _refusal(what: str, hint: str, setting: str, param: str | None = None) -> RequestError:
    return RequestError(
        f"{what} ({setting}).",
        f"{hint}, or ask the operator for more.",
        status=403,
        kind="permission_error",
        code="beyond_key",
        param=param,
    )
