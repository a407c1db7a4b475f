"""Which application run a request belongs to: headers, or the body's field `headway`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from headway.errors import RequestError
from headway.gateway.parsing.fields import Ms, milliseconds
from headway.policy.apps.run import CALL
from headway.stages import Stage

SESSION = "session"  # the application of runs that name none
LONGEST = 128  # characters of a name
APP, RUN, UNIT = "x-headway-app", "x-headway-run", "x-headway-unit"
FINAL, DEADLINE = "x-headway-run-final", "x-slo-run-ms"
# Headers by which agents name their sessions; the first one present is the run. In this order: general,
# Claude Code, opencode (two), Codex (now and before), LiteLLM.
_SESSIONS = (
    "x-session-id",
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-session-affinity",
    "session-id",
    "session_id",
    "x-litellm-session-id",
)
# The headers that are read, with their JSON types.
HEADERS: dict[str, str] = {
    **dict.fromkeys((APP, RUN, UNIT, *_SESSIONS), "string"),
    FINAL: "boolean",
    DEADLINE: "number",
}


def _printable(name: str) -> str:
    """Return a name; ValueError when a log line or a metric's label would not show it as it is."""
    if not name.isprintable():
        raise ValueError("must have printable characters only")
    return name


Name = Annotated[str, Field(min_length=1, max_length=LONGEST, strict=True), AfterValidator(_printable)]


class RunFields(BaseModel):
    """The body's field `headway`: what the headers say, for clients that cannot set headers."""

    model_config = ConfigDict(extra="forbid")

    app: Name | None = None
    run: Name | None = None
    unit: Name | None = None
    final: Annotated[bool, Field(strict=True)] | None = None
    slo_run_ms: Ms | None = None


_NONE = RunFields()


def stage_of(headers: Mapping[str, str], fields: RunFields | None) -> Stage | None:
    """Return the unit of a run that a request serves, None = it belongs to no run.

    Headers win over the body. A run without an application is one of `SESSION`; an application without a run
    makes each request a run of its own. RequestError for values that cannot be used.
    """
    body = fields or _NONE
    app = app_of(headers) or body.app
    run = name_in(headers, RUN) or body.run or _session(headers)
    unit = name_in(headers, UNIT) or body.unit
    final = _flag(headers) if FINAL in headers else body.final
    target = milliseconds(DEADLINE, headers[DEADLINE]) if DEADLINE in headers else body.slo_run_ms
    if app is None and run is None:
        if unit is None and final is None and target is None:
            return None
        raise RequestError(
            "A unit, an end or a deadline of a run is given, but no run.",
            f"Name the run ({RUN}) or its application ({APP}).",
            param=RUN,
        )
    seconds = None if target is None else target / 1000
    return Stage(app or SESSION, run or "", unit or CALL, seconds, bool(final))


def app_of(headers: Mapping[str, str]) -> str | None:
    """Return the application that headers name."""
    return name_in(headers, APP)


def _session(headers: Mapping[str, str]) -> str | None:
    """Return an agent's session, or its digest where it is not a valid name, as its user cannot change it."""
    session = next((headers[name] for name in _SESSIONS if headers.get(name)), None)
    if session is None or (len(session) <= LONGEST and session.isprintable()):
        return session
    return f"sha256:{hashlib.sha256(session.encode()).hexdigest()}"


def name_in(headers: Mapping[str, str], header: str) -> str | None:
    """Return a header's name, None if it is missing or empty; errors as `check_name`."""
    name = headers.get(header) or None
    if name is not None and not name.isascii():
        with suppress(UnicodeError):  # clients send UTF-8, and headers are read as Latin-1
            name = name.encode("latin-1").decode()
    if name is not None:
        check_name(name, f"The header {header}", header)
    return name


def check_name(name: str, what: str, param: str) -> None:
    """Raise RequestError unless a name is short enough, and shown by logs and metrics as it is."""
    if len(name) > LONGEST:
        raise RequestError(f"{what} has {len(name)} characters.", f"Use at most {LONGEST}.", param=param)
    if not name.isprintable():
        raise RequestError(f"{what} is {name!a}.", "Use printable characters only.", param=param)


def _flag(headers: Mapping[str, str]) -> bool:
    text = headers[FINAL].lower()
    if text not in ("true", "1", "false", "0"):
        raise RequestError(f"The header {FINAL} is {text[:40]!r}.", "It must be true or false.", param=FINAL)
    return text in ("true", "1")
