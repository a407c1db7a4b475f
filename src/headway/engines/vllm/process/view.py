"""One vLLM instance as gateways see it: where it listens, what it serves, whether it answers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headway.config import Engine
from headway.engines.vllm.process.api import APIS
from headway.engines.vllm.process.connection import EngineConnection
from headway.engines.vllm.process.limits import instance_of
from headway.engines.vllm.process.tls import context_of
from headway.errors import EngineError
from headway.types import Leaving


class Models(Protocol):
    """The models of an instance. names: of all of them. current: the one that it serves, or is to serve."""

    names: tuple[str, ...]
    current: str

    @property
    def swaps(self) -> bool:
        """Return whether there are several models."""
        ...

    def unavailable(self, model: str) -> EngineError | None:
        """Return why a model is given up, None = it is not."""
        ...


class EngineView(EngineConnection, ABC):
    """An instance that requests can be sent to, supervised by this process or by another one.

    up: set while it answers. loading: the model that is being loaded, None = no swap is under way.
    prefix_caching: prefixes can be pinned in it, as is known once it is up.
    fatal: fields of requests that crash it (`fatal_fields.py`), as far as is known.
    instance: what it is, as it said when it was last up; as configured until then. about: the same for people.
    ahead: seconds by which the clock of its machine is ahead of this one's.
    restarts: how often it was started again. failure: why it is down, None = it is up or starting.
    tries: failures since it last came up. given_up: it is not started again.
    leaving: why it takes no new work, None = it does when it is up. stopped: it has ended, and is not started again.
    """

    models: Models

    def __init__(self, id: str, config: Engine, url: str, key: str | None) -> None:
        super().__init__(id, url.rstrip("/"), config.request_timeout_s, key, APIS[config.kind], context_of(id, config))
        self.config = config
        self.up = asyncio.Event()
        self.loading: str | None = None
        self.prefix_caching = False
        self.fatal: tuple[str, ...] = ()
        self.instance = instance_of(id, config.name, config, {})
        self.about = ""
        self.ahead = 0.0
        self.restarts = 0
        self.failure: EngineError | None = None
        self.tries, self.given_up = 0, False
        self.leaving: Leaving | None = None
        self.stopped = False

    @property
    def state(self) -> str:
        """Return its state in a word; a `failed` one is started again unless it is given up."""
        if self.leaving is not None:
            return "drained" if self.stopped else "draining"
        return "up" if self.up.is_set() else "starting" if self.failure is None else "failed"

    @property
    def serves(self) -> bool:
        """Return whether it is up and takes new work."""
        return self.up.is_set() and self.leaving is None

    def takes(self, model: str) -> bool:
        """Return whether a request for this model may be sent now; not from the order of a swap to its end."""
        return self.loading is None and self.leaving is None and model == self.models.current

    @abstractmethod
    def lost(self) -> None:
        """Treat the instance as down until it answers again, because a request has just failed on it."""


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
