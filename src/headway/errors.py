"""Errors that a person can act on: each states what is wrong and how to fix it."""

from __future__ import annotations

from typing import Any


class HeadwayError(Exception):
    """An error a person can act on.

    ``message`` says what is wrong, ``fix`` what to do about it. The command line prints both and exits
    with 2; the gateway answers ``status`` with OpenAI's error shape (`body`).
    """

    status = 400
    kind = "invalid_request_error"

    def __init__(
        self,
        message: str,
        fix: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{message} {fix}")
        self.message, self.fix, self.param, self.code = message, fix, param, code
        self.status = status or self.status
        self.kind = kind or self.kind
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's API words it: ``{"error": {message, type, param, code}}``."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class ConfigError(HeadwayError):
    """A configuration file, option or environment that cannot be used."""


class RequestError(HeadwayError):
    """A request that the gateway refuses and the client can correct."""


class EngineError(HeadwayError):
    """An engine that did not start, died, or answered nonsense."""

    status = 502
    kind = "server_error"
