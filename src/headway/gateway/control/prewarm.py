"""Carries out a planner's warm-ups (`Prewarm`) beside the requests.

Each warm-up is its own task: it makes its resource ready, reports to the planner how long that took
(`Prewarmed`), and keeps it until a unit has used it or is not expected any more. What goes wrong is logged
and counted, and no request notices.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

from headway import clock
from headway.cluster.backends.port import Backend, HeldWorker
from headway.engines.vllm.process.view import EngineView
from headway.errors import HeadwayError
from headway.events import Prewarmed
from headway.gateway import tasks
from headway.gateway.watch.run_metrics import PrewarmMetrics
from headway.stages import Prewarm
from headway.types import Request

_MOST = 256  # warm-ups at a time, those that wait to be used included
log = logging.getLogger("headway.gateway")


class Warmer(Protocol):
    """Warms one kind of resource."""

    def key(self, command: Prewarm) -> Hashable | None:
        """Return the key of all commands that one warm-up serves; None = nothing to warm."""
        ...

    async def warm(self, command: Prewarm) -> HeldWorker | None:
        """Warm a resource; None = it cannot be done now. HeadwayError when it fails."""
        ...

    def used(self, request: Request) -> None:
        """A request has its first token: it has used what was warm for its unit."""
        return


class Warmups:
    """The warm-ups under way and what they keep warm; `close` lets go of everything.

    warmers: by kind of resource; what has none is skipped. report: notifies the planner.
    """

    def __init__(self, report: Callable[[Prewarmed], None], metrics: PrewarmMetrics) -> None:
        self.warmers: dict[str, Warmer] = {}
        self._report, self._metrics = report, metrics
        self._until: dict[Hashable, float] = {}  # of the warm-ups under way
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, command: Prewarm) -> None:
        """Carry out a warm-up soon; one that is under way for the same serves this one, too."""
        kind = command.resource.kind
        warmer = self.warmers.get(kind)
        key = None if warmer is None else warmer.key(command)
        if warmer is None or key is None:
            self._metrics.begun(kind, "skipped")
        elif (kind, key) in self._until:
            self._until[kind, key] = max(self._until[kind, key], command.until)
            self._metrics.begun(kind, "kept")
        elif len(self._until) >= _MOST:
            self._metrics.begun(kind, "skipped")
        else:
            self._until[kind, key] = command.until
            task = asyncio.create_task(self._carry_out(warmer, command, (kind, key)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def used(self, request: Request) -> None:
        """A request has its first token."""
        for warmer in self.warmers.values():
            warmer.used(request)

    async def close(self) -> None:
        """Let go of everything; warm-ups under way are given up."""
        await tasks.cancel(*self._tasks)

    async def _carry_out(self, warmer: Warmer, command: Prewarm, key: Hashable) -> None:
        kind, name = command.resource.kind, command.resource.name
        try:
            began = time.monotonic()
            held = await warmer.warm(command)
            if held is None:
                self._metrics.begun(kind, "skipped")
            else:
                await self._keep(held, command, key, time.monotonic() - began)
        except HeadwayError as error:
            log.warning("%s %r is not warm: %s", kind, name, error)
            self._metrics.begun(kind, "failed")
        except Exception:
            log.exception("%s %r is not warm", kind, name)
            self._metrics.begun(kind, "failed")
        finally:
            del self._until[key]

    async def _keep(self, held: HeldWorker, command: Prewarm, key: Hashable, took: float) -> None:
        """Keep a resource warm until it is used or the last command's time is over.

        took: seconds that warming took, reported to the planner if the resource was cold.
        """
        kind, began = command.resource.kind, time.monotonic()
        try:
            self._metrics.begun(kind, "warmed" if held.fresh else "kept")
            if held.fresh:
                self._metrics.took(kind, took)
                self._report(Prewarmed(command.resource, took))
            while not held.used.is_set() and (left := self._until[key] - clock.now()) > 0:
                try:
                    await asyncio.wait_for(held.used.wait(), left)
                except TimeoutError:
                    continue  # another command may have moved the end meanwhile
            self._metrics.ended(kind, held.used.is_set(), time.monotonic() - began)
        finally:
            try:
                await held.release()
            except HeadwayError as error:
                log.warning("a warm resource is not released: %s", error)


class BackendWarmer(Warmer):
    """Warms the backends outside the LLM."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self._number = itertools.count()

    def key(self, command: Prewarm) -> Hashable | None:
        """Return one key for all commands where one instance serves any number of units, else always new."""
        name = command.resource.name
        backend = self._backends.get(name)
        if backend is None:
            return None
        return name if backend.shared else (name, next(self._number))

    async def warm(self, command: Prewarm) -> HeldWorker | None:
        return await self._backends[command.resource.name].warm()


class AdapterWarmer(Warmer):
    """Loads adapters on every engine that has them.

    A warm adapter stays until others are used more recently: vLLM cannot unpin one.
    """

    def __init__(self, engines: Mapping[str, EngineView]) -> None:
        self._engines = engines
        self._held: dict[str, asyncio.Event] = {}

    def key(self, command: Prewarm) -> Hashable | None:
        name = command.resource.name
        return name if self._engines_with(name) else None

    def used(self, request: Request) -> None:
        """Note that an adapter has been used."""
        if request.adapter in self._held:
            self._held[request.adapter].set()

    async def warm(self, command: Prewarm) -> HeldWorker | None:
        """Load an adapter where it is not in memory. EngineError when an engine cannot."""
        name = command.resource.name
        resident = await asyncio.gather(*(engine.load_adapter(name) for engine in self._engines_with(name)))
        if not resident:
            return None
        used = self._held[name] = asyncio.Event()

        async def release() -> None:
            self._held.pop(name, None)

        return HeldWorker(used, release, fresh=not all(resident))

    def _engines_with(self, name: str) -> list[EngineView]:
        return [e for e in self._engines.values() if e.serves and name in e.config.adapters]
