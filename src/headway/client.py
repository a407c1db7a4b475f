"""Application runs from a client: headers for the OpenAI SDK or LangChain, and reports of what is outside.

    with headway.run("kbqav", base_url="http://127.0.0.1:8000/v1", deadline=60) as run:
        client.chat.completions.create(..., extra_headers=run.unit("verify"))
        with run.outside("search", backend="web-search"):
            ...
        done = run.execute("python", {"code": code})  # on a backend of the gateway

A report that does not reach the gateway is logged as a warning and the application goes on: what the gateway
is told improves its order of work, and is not needed for an answer. Needs nothing but httpx.
"""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from headway.addresses import certificate_hint
from headway.errors import ConfigError, HeadwayError

_TIMEOUT_S = 5.0  # of a report
_EXECUTION_S = 600.0  # of a unit on a backend, its wait among them
_LONGEST = 128  # characters of a name, as the gateway allows
log = logging.getLogger("headway.client")


def run(
    app: str,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    deadline: float | None = None,
    id: str | None = None,
) -> Run:
    """Return a run of an application, for `with` or `async with`; its end is reported when the block ends.

    base_url: of the gateway, as the OpenAI SDK takes it (with /v1); None = $OPENAI_BASE_URL.
    api_key: None = $OPENAI_API_KEY, if set. deadline: seconds that the whole run may take.
    id: of the run, unique within the application; None = a new one.

    ConfigError for names that no header can carry, and without a base_url.
    """
    url = base_url or os.environ.get("OPENAI_BASE_URL")
    if not url:
        raise ConfigError("The address of the gateway is missing.", "Give base_url, or set OPENAI_BASE_URL.")
    if deadline is not None and not 0 < deadline <= 86_400:
        raise ConfigError(f"The deadline is {deadline} s.", "It must be more than 0 and at most a day.")
    key = api_key or os.environ.get("OPENAI_API_KEY")
    return Run(_named("app", app), _named("id", id or uuid.uuid4().hex), url.rstrip("/"), key, deadline)


class Run:
    """A run of an application. app, id: its names. deadline: seconds that it may take, None = no deadline."""

    def __init__(self, app: str, id: str, url: str, key: str | None, deadline: float | None) -> None:
        self.app, self.id, self.deadline = app, id, deadline
        self._base = url
        self._url = f"{url}/runs/{quote(id, safe='')}"
        self._auth = {} if key is None else {"authorization": f"Bearer {key}"}

    def headers(self) -> dict[str, str]:
        """Return the headers that make a request one of this run."""
        headers = {"x-headway-app": self.app, "x-headway-run": self.id}
        if self.deadline is not None:
            headers["x-slo-run-ms"] = f"{self.deadline * 1000:g}"
        return headers

    def unit(self, name: str, *, final: bool = False) -> dict[str, str]:
        """Return the headers of a request of one unit; final: the run ends with it."""
        headers = self.headers() | {"x-headway-unit": _named("unit", name)}
        return headers | {"x-headway-run-final": "true"} if final else headers

    def outside(self, unit: str, *, backend: str = "tool") -> Outside:
        """Return a unit outside the LLM, for `with` or `async with`, which reports its start and end.

        backend: what serves it, by a name that runs share: a tool, a sandbox's image, a model.
        """
        return Outside(self, _named("unit", unit), _named("backend", backend))

    def execute(
        self, backend: str, input: Any, *, unit: str | None = None, timeout_s: float = _EXECUTION_S
    ) -> Executed:
        """Execute a unit on a backend of the gateway (`[backends.NAME]`), and wait for its output.

        input: what the backend takes, as JSON. unit: None = named like the backend.

        The gateway reports the unit's start and end itself. HeadwayError with the gateway's message and
        status when it refuses, and with status 502 when it cannot be reached in time: unlike a report, the
        application needs the answer.
        """
        url, headers = self._backend(backend, unit)
        try:
            answer = httpx.post(url, json={"input": input}, headers=headers, timeout=timeout_s)
        except (httpx.HTTPError, OSError) as error:  # OSError: the file in SSL_CERT_FILE is unreadable
            raise _unreached(url, error) from error
        return _executed(answer)

    async def execute_async(
        self, backend: str, input: Any, *, unit: str | None = None, timeout_s: float = _EXECUTION_S
    ) -> Executed:
        """Do as `execute` without blocking the event loop."""
        url, headers = self._backend(backend, unit)
        try:
            async with httpx.AsyncClient(timeout=timeout_s) as client:
                answer = await client.post(url, json={"input": input}, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            raise _unreached(url, error) from error
        return _executed(answer)

    def _backend(self, backend: str, unit: str | None) -> tuple[str, dict[str, str]]:
        """Return the address of a backend, and the headers of a unit on it."""
        headers = self.unit(backend if unit is None else unit) | self._auth
        return f"{self._base}/backends/{quote(_named('backend', backend), safe='')}", headers

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.report("end", {"app": self.app})

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.report_async("end", {"app": self.app})

    # ---- reports

    def report(self, what: str, body: dict[str, Any]) -> None:
        """Post a report; one that fails is logged."""
        try:
            answer = httpx.post(f"{self._url}/{what}", json=body, headers=self._auth, timeout=_TIMEOUT_S)
        except (httpx.HTTPError, OSError) as error:
            self._failed(what, _why(error))
        else:
            self._check(what, answer)

    async def report_async(self, what: str, body: dict[str, Any]) -> None:
        """Post a report without blocking the event loop; one that fails is logged."""
        try:
            async with httpx.AsyncClient(headers=self._auth, timeout=_TIMEOUT_S) as client:
                answer = await client.post(f"{self._url}/{what}", json=body)
        except (httpx.HTTPError, OSError) as error:
            self._failed(what, _why(error))
        else:
            self._check(what, answer)

    def _check(self, what: str, answer: httpx.Response) -> None:
        # Without a request a run has not begun, so there is nothing to end.
        if answer.is_error and not (what == "end" and answer.status_code == 404):
            self._failed(what, answer.text[:500])

    def _failed(self, what: str, reason: object) -> None:
        log.warning("run %s of %s: %s/%s was not taken: %s", self.id, self.app, self._url, what, reason)


@dataclass(frozen=True, slots=True)
class Executed:
    """What a backend of the gateway answered.

    output: of the unit. warm: the backend was ready. waited_s: before it began. seconds: in the gateway.
    """

    output: Any
    warm: bool
    waited_s: float
    seconds: float


class Outside:
    """A unit outside the LLM; its start and its end are reported, also when the block raises."""

    def __init__(self, run: Run, unit: str, backend: str) -> None:
        self._run = run
        self._body = {"app": run.app, "unit": unit, "backend": backend}

    def __enter__(self) -> None:
        self._run.report("units", self._body | {"state": "started"})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.report("units", self._body | {"state": "ended"})

    async def __aenter__(self) -> None:
        await self._run.report_async("units", self._body | {"state": "started"})

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._run.report_async("units", self._body | {"state": "ended"})


def _executed(answer: httpx.Response) -> Executed:
    """Return what the gateway answered; HeadwayError for an error."""
    if answer.is_error:
        raise HeadwayError(
            f"The gateway answered {answer.status_code}: {answer.text[:500]}",
            "Its message says what to change.",
            status=answer.status_code,
        )
    body = answer.json()
    return Executed(body["output"], body["warm"], body["waited_s"], body["seconds"])


def _unreached(url: str, error: Exception) -> HeadwayError:
    hint = "Check the gateway's address, or give the unit a longer timeout."
    return HeadwayError(f"{url} gave no answer: {_why(error)}", hint, status=502)


def _why(error: Exception) -> str:
    """Return an error's text, with a hint if a certificate is not trusted."""
    tls = isinstance(error, OSError) or "SSL" in str(error)
    return f"{type(error).__name__} {error}{f'. {certificate_hint()}' * tls}"


def _named(what: str, name: str) -> str:
    if not name or len(name) > _LONGEST or not name.isascii() or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"The {what} is {name[:80]!r}, which no header can carry.",
            f"Use 1 to {_LONGEST} ASCII characters without control characters or spaces at its ends.",
        )
    return name
