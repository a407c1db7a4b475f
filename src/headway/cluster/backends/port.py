"""The interface of backends outside the LLM, and of resources that are kept warm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headway.errors import HeadwayError


class BackendError(HeadwayError):
    """A backend did not start, died or failed; the client's input is not to blame."""

    status = 502
    kind = "server_error"


@dataclass(frozen=True, slots=True)
class UnitResult:
    """The result of executing a unit.

    output: a JSON value.
    warm: the backend was ready when it was asked for.
    waited: seconds until it was ready, waiting for a place included.
    started: seconds of its start, None = it was not started for this execution.
    """

    output: Any
    warm: bool
    waited: float
    started: float | None = None


@dataclass(frozen=True, slots=True)
class HeldWorker:
    """A worker that is kept warm until `release`.

    used: set once a unit has used the worker.
    release: ends the hold; it may be called after use, too.
    fresh: the worker was cold before.
    """

    used: asyncio.Event
    release: Callable[[], Awaitable[None]]
    fresh: bool = True


class Backend(Protocol):
    """One entry of `[backends]` in the configuration.

    Headway calls a class named there as `module:Class` with the entry's name and settings
    (`headway.config.Backend`). All methods run on the gateway's event loop and must not block it. They raise
    RequestError for an input that the client can correct and BackendError otherwise; the constructor raises
    ConfigError for settings that cannot be used.
    """

    @property
    def shared(self) -> bool:
        """Tell whether one warm instance serves any number of units, so that a second is not warmed."""
        ...

    async def warm(self) -> HeldWorker | None:
        """Make a worker ready ahead of time; None when the pool is full or there is nothing to warm."""
        ...

    async def run(self, tenant: str, input: Any) -> UnitResult:
        """Execute a unit. input: the JSON value that the client sent."""
        ...

    async def close(self) -> None:
        """End all its processes, when the gateway stops."""
        ...
