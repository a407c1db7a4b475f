"""LoRA adapters: loaded into the engines' memory before a unit needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping

from headway.cluster.backends.port import HeldWorker
from headway.engines.vllm.process.view import EngineView
from headway.gateway.control.prewarm import Warmer
from headway.stages import Prewarm
from headway.types import Request


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
