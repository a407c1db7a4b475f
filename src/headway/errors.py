"""Headway's errors: what is wrong, and a hint what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_LINES, _WIDTH = 10, 500  # of a message over HTTP: a long field may have a problem in each of its values


def shortened(message: str) -> str:
    """Return a message with its first lines, their first characters, and the number of lines left out."""
    lines = message.strip().split("\n")
    kept = [line if len(line) <= _WIDTH else f"{line[:_WIDTH]}..." for line in lines[:_LINES]]
    more = [f"... and {len(lines) - _LINES:,} more lines"] if len(lines) > _LINES else []
    return "\n".join([*kept, *more])


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep all fields when a worker process raises it."""
        return _restored, (type(self), self.args, self.__dict__)

    @property
    def client_message(self) -> str:
        """What clients get: the message, cut if it is long, and the hint."""
        return f"{shortened(self.message)} {self.hint}"

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape: ``{"error": {message, type, param, code}}``."""
        return {"error": {"message": self.client_message, "type": self.kind, "param": self.param, "code": self.code}}


class ConfigError(HeadwayError):
    """A configuration file, option or environment that cannot be used."""

    @property
    def parts(self) -> tuple[ConfigError, ...]:
        """The errors that it reports together: itself, if it is a single one."""
        return (self,)


class ConfigErrors(ConfigError):
    """Several errors of a configuration, so that one start reports them all."""

    def __init__(self, parts: Sequence[ConfigError]) -> None:
        lines = (f"{part.message} {part.hint}" for part in parts)
        super().__init__("\n".join(lines), f"Correct all {len(parts)}.", param=parts[0].param)
        self._parts = tuple(parts)

    @property
    def parts(self) -> tuple[ConfigError, ...]:
        return self._parts


def together(errors: Sequence[ConfigError]) -> ConfigError:
    """Return one error that reports all of them, each once; there is at least one."""
    parts = {part.message: part for error in errors for part in error.parts}
    return ConfigErrors(tuple(parts.values())) if len(parts) > 1 else next(iter(parts.values()))


def check_all(*checks: Callable[[], object]) -> None:
    """Run all checks; ConfigError with what each of them found."""
    found = list[ConfigError]()
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(error)
    if found:
        raise together(found)


class RequestError(HeadwayError):
    """A request that the gateway refuses; the client can correct it."""


class EngineError(HeadwayError):
    """An engine that did not start, died, or sent an invalid response."""

    status = 502
    kind = "server_error"


def _restored(kind: type[HeadwayError], args: tuple[Any, ...], fields: dict[str, Any]) -> HeadwayError:
    """Return an error that was pickled; kinds of errors have arguments of their own."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error
