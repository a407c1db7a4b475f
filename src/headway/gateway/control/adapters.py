"""LoRA adapters: loaded into the engines' memory before a unit needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence

from headway.cluster.backends.port import Held
from headway.config import Engine
from headway.engines.vllm.process.view import EngineView
from headway.errors import ConfigError
from headway.gateway.control.prewarm import Warmer
from headway.stages import Prewarm
from headway.types import Request


def base_models(engines: Sequence[Engine]) -> dict[str, str]:
    """Return the adapters by name, each with the model that it adapts.

    ConfigError where a request could reach an engine that does not have its adapter.
    """
    bases: dict[str, str] = {}
    for engine in engines:
        for name in engine.adapters:
            if engine.models:
                raise ConfigError(
                    f"The engine of {engine.name} has adapters and models, but adapters fit one model only.",
                    "Give the models, or the adapters, an engine of their own.", param="engines.adapters",
                )  # fmt: skip
            if bases.setdefault(name, engine.name) != engine.name or any(name in e.served for e in engines):
                raise ConfigError(
                    f"An adapter of {engine.name} and another model have the same name {name!r}.",
                    "Give it another.", param="engines.adapters",
                )  # fmt: skip
    for engine in engines:
        missing = [
            name for name, base in bases.items() if base == engine.name and name not in engine.adapters
        ]
        if missing:
            raise ConfigError(
                f"Not all engines of {engine.name} have the adapter {missing[0]!r}.",
                "Give all engines of a model the same adapters.", param="engines.adapters",
            )  # fmt: skip
    return bases


class AdapterWarmer(Warmer):
    """Loads adapters on every engine that has them.

    A warm adapter stays until others are used more recently: vLLM has nothing that takes a pin back.
    """

    def __init__(self, engines: Mapping[str, EngineView]) -> None:
        self._engines = engines
        self._held: dict[str, asyncio.Event] = {}

    def key(self, command: Prewarm) -> Hashable | None:
        name = command.resource.name
        return name if self._able(name) else None

    def used(self, request: Request) -> None:
        """Note that an adapter has been used."""
        if request.adapter in self._held:
            self._held[request.adapter].set()

    async def warm(self, command: Prewarm) -> Held | None:
        """Load an adapter where it is not in memory. EngineError when an engine cannot."""
        name = command.resource.name
        resident = await asyncio.gather(*(engine.load_adapter(name) for engine in self._able(name)))
        if not resident:
            return None
        used = self._held[name] = asyncio.Event()

        async def release() -> None:
            self._held.pop(name, None)

        return Held(used, release, fresh=not all(resident))

    def _able(self, name: str) -> list[EngineView]:
        return [e for e in self._engines.values() if e.up.is_set() and name in e.config.adapters]
