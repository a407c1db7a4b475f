"""The interface of backends outside the LLM, and of resources that are kept warm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headway.errors import HeadwayError


class BackendError(HeadwayError):
    """A backend that did not start, died or failed; the client's input is not to blame."""

    status = 502
    kind = "server_error"


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What an execution gave.

    output: a JSON value.
    warm: the backend was ready when it was asked for.
    waited: seconds until it was ready, waiting for a place included.
    started: seconds that starting it took, None = it was not started for this execution.
    """

    output: Any
    warm: bool
    waited: float
    started: float | None = None


@dataclass(frozen=True, slots=True)
class HeldWorker:
    """Something that is kept warm until `release`.

    used: is set when something has used it.
    release: lets it go; it may be called when it was used, too.
    fresh: it was cold, and was warmed now.
    """

    used: asyncio.Event
    release: Callable[[], Awaitable[None]]
    fresh: bool = True


class Backend(Protocol):
    """One entry of `[backends]` in the configuration.

    A class that is named there as `module:Class` is called with the entry's name and settings
    (`headway.config.Backend`). All methods run on the gateway's event loop and must not block it. One that
    raises fails with it: ConfigError from the constructor for settings that cannot be used, RequestError for
    an input that the client can correct, BackendError otherwise.
    """

    @property
    def shared(self) -> bool:
        """Tell whether one warm instance serves any number of units, so that a second is not warmed."""
        ...

    async def warm(self) -> HeldWorker | None:
        """Make it ready before it is needed; None when the pool is full or there is nothing to warm."""
        ...

    async def run(self, tenant: str, input: Any) -> UnitResult:
        """Execute a unit. input: the JSON value that the client sent."""
        ...

    async def close(self) -> None:
        """End all its processes; the gateway stops."""
        ...
