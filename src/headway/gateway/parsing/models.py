"""The models that requests name: those of the engines, their adapters, and aliases of both."""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from headway.config import Config, Engine
from headway.engines.vllm.process.view import EngineView
from headway.errors import ConfigError, RequestError, together
from headway.gateway.parsing.tokens import TokenCounter

_PATTERN = frozenset("*?[")


def served_names(config: Config) -> set[str]:
    """Return the names of the models and adapters of a configuration."""
    return {name for engine in config.fleet for name in (*engine.served, *engine.adapters)}


def check_aliases(config: Config) -> None:
    """Raise ConfigError for aliases of what is not served, and for those that no request could mean."""
    served = served_names(config)
    problems = {
        alias: "is the name of a model" if alias in served else f"stands for {model!r}, which is not served"
        for alias, model in config.aliases.items()
        if alias in served or model not in served
    }
    hint = f"Let another name stand for one of {', '.join(sorted(served))}."
    errors = [
        ConfigError(f"The alias {alias!r} {problem}.", hint, param="aliases") for alias, problem in problems.items()
    ]
    if errors:
        raise together(errors)


def unserved(prices: Iterable[str], served: Collection[str]) -> str:
    """Return a warning of prices of what is not served, empty if there are none. served: models and adapters."""
    if not (names := sorted(set(prices) - set(served))):
        return ""
    tables = ", ".join(f"[prices.{name}]" for name in names)
    return f"{tables}: no model or adapter has that name; served here: {', '.join(sorted(served))}"


def resolve_alias(aliases: Mapping[str, str], served: Container[str], name: str) -> str:
    """Return the model or adapter that a name stands for: itself, if it is served or nothing else fits.

    A whole name goes before patterns, of which the first one that fits counts.
    """
    if name in served:
        return name
    fits = (model for alias, model in aliases.items() if fnmatchcase(name, alias))
    return aliases.get(name) or next(fits, name)


def check_adapters(engines: Sequence[Engine]) -> None:
    """Raise ConfigError where a request could reach an engine that does not have its adapter."""
    bases: dict[str, str] = {}
    for engine in engines:
        for name in engine.adapters:
            if engine.models:
                raise ConfigError(
                    f"The engine of {engine.name} has adapters and models, but adapters fit one model only.",
                    "Give the models, or the adapters, an engine of their own.",
                    param="engines.adapters",
                )
            if bases.setdefault(name, engine.name) != engine.name or any(name in e.served for e in engines):
                raise ConfigError(
                    f"An adapter of {engine.name} and another model have the same name {name!r}.",
                    "Give it another.",
                    param="engines.adapters",
                )
    for engine in engines:
        missing = [name for name, base in bases.items() if base == engine.name and name not in engine.adapters]
        if missing:
            raise ConfigError(
                f"Not all engines of {engine.name} have the adapter {missing[0]!r}.",
                "Give all engines of a model the same adapters.",
                param="engines.adapters",
            )


def shared_adapters(engines: Sequence[Engine]) -> dict[str, str]:
    """Return the adapters that all engines of their model have, each with that model."""
    return {
        name: engine.name
        for engine in engines
        for name in engine.adapters
        if all(name in other.adapters for other in engines if other.name == engine.name)
    }


@dataclass(frozen=True, slots=True)
class Served:
    """A model, or an adapter of it, as it is served now.

    engine: of the configuration. engines: that have the model.
    """

    model: str
    adapter: str | None
    engine: Engine
    engines: Sequence[EngineView]
    counter: TokenCounter

    @property
    def context(self) -> int:
        """Tokens that all engines have room for, as far as they report it."""
        instances = [view.instance for view in self.engines]
        reported = [one for one in instances if "max_model_len" not in one.assumed]
        return min(one.max_model_len for one in reported or instances)

    @property
    def max_running(self) -> int:
        """Requests that the engine with the most room runs at a time."""
        return max(view.instance.max_running for view in self.engines)


class ServedModels:
    """The models of a configuration, with the engines that have them; made anew when engines come or go.

    engines: those that stay. counters: by model. own: names of models and adapters, without aliases.
    """

    def __init__(self, config: Config, engines: Iterable[EngineView], counters: Mapping[str, TokenCounter]) -> None:
        self._aliases, self._counters = config.aliases, dict(counters)
        self._views = [view for view in engines if not view.config.overflow]
        self._adapters = shared_adapters(config.fleet)
        self.engines = {name: engine for engine in config.fleet for name in engine.served}
        self.own = {*self.engines, *self._adapters}
        self.names = (*self.engines, *self._adapters, *filter(_PATTERN.isdisjoint, config.aliases))
        self._started = int(time.time())

    def own_name(self, name: Any) -> Any:
        """Return the own name of the model that a body names; where there is one model, it may name none."""
        if name is None:  # as vLLM allows
            return next(iter(self.engines)) if len(self.engines) == 1 else ""
        return resolve_alias(self._aliases, self.own, name) if isinstance(name, str) else name

    def find(self, name: Any) -> Served:
        """Return a model, an adapter or an alias as it is served. RequestError (404) when it is not."""
        own = str(self.own_name(name))
        adapter = own if own in self._adapters else None
        model = self._adapters.get(own, own)
        if model not in self.engines:
            raise RequestError(
                f"The model {own[:100]!r} does not exist here.",
                f"Use one of {', '.join(sorted(self.names))}." if self.names else "No engine is left; add one.",
                status=404,
                code="model_not_found",
                param="model",
            )
        engines = [view for view in self._views if model in view.config.served]
        return Served(model, adapter, self.engines[model], engines, self._counters[model])

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max((self.find(name).context for name in self.engines), default=0)

    def describe(self, name: str) -> dict[str, Any]:
        """Return what OpenAI's API says of a model, an adapter or an alias; errors as `find`."""
        served, own = self.find(name), self.own_name(name)
        parent = served.model if name == served.adapter else own
        base = {} if parent == name else {"parent": parent}
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "headway",
            "max_model_len": served.context,
        } | base
