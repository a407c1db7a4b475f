"""Headway's errors: what is wrong, and a hint what to do about it."""

from __future__ import annotations

from typing import Any


class HeadwayError(Exception):
    """An error that the user can act on.

    The command line prints message and hint and exits with 2; the gateway answers `status` with `body`.

    message: what is wrong.
    hint: what to do about it.
    param: the setting or request field that is wrong.
    code, kind: `code` and `type` of OpenAI's error object.
    headers: of the HTTP response.
    """

    status = 400
    kind = "invalid_request_error"

    def __init__(
        self,
        message: str,
        hint: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{message} {hint}")
        self.message, self.hint, self.param, self.code = message, hint, param, code
        self.status = status or self.status
        self.kind = kind or self.kind
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape: ``{"error": {message, type, param, code}}``."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class ConfigError(HeadwayError):
    """A configuration file, option or environment that cannot be used."""


class RequestError(HeadwayError):
    """A request that the gateway refuses; the client can correct it."""


class EngineError(HeadwayError):
    """An engine that did not start, died, or sent an invalid response."""

    status = 502
    kind = "server_error"
