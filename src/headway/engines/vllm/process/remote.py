"""An instance that another process supervises and reports on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway.config import Engine
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError


@dataclass(slots=True)
class KnownModels:
    """The models of such an instance. given_up: those that it cannot load, and why."""

    names: tuple[str, ...]
    current: str
    given_up: Mapping[str, str] = field(default_factory=dict)

    @property
    def swaps(self) -> bool:
        """Return whether there are several models."""
        return len(self.names) > 1

    def unavailable(self, model: str) -> EngineError | None:
        """Return why a model is given up, None = it is not."""
        why = self.given_up.get(model)
        return None if why is None else EngineError(why, "Look into the log of its agent.")


class RemoteEngine(EngineView):
    """An instance on any machine. on_lost: called when a request failed on it and it does not answer."""

    models: KnownModels

    def __init__(self, id: str, config: Engine, on_lost: Callable[[str], None]) -> None:
        super().__init__(id, config, "http://unknown.invalid", None)
        self.models = KnownModels(tuple(config.served), config.name)
        self._on_lost = on_lost

    def moved(self, url: str, key: str | None) -> None:
        """Take note of where it listens, and of what it asks for."""
        self.url = url.rstrip("/")
        self.use_key(key)

    def lost(self) -> None:
        self.up.clear()
        self._on_lost(self.id)
