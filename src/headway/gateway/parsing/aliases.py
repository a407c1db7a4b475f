"""Aliases of models, for clients that send fixed model names."""

from __future__ import annotations

from collections.abc import Container, Mapping
from fnmatch import fnmatchcase

from headway.config import Config
from headway.errors import ConfigError, together

_PATTERN = frozenset("*?[")


def check_aliases(config: Config) -> None:
    """Raise ConfigError for aliases of what is not served, and for those that no request could mean."""
    served = {name for engine in config.engines for name in (*engine.served, *engine.adapters)}
    problems = {
        alias: "is the name of a model" if alias in served else f"stands for {model!r}, which is not served"
        for alias, model in config.aliases.items()
        if alias in served or model not in served
    }
    hint = f"Let another name stand for one of {', '.join(sorted(served))}."
    errors = [
        ConfigError(f"The alias {alias!r} {problem}.", hint, param="aliases")
        for alias, problem in problems.items()
    ]
    if errors:
        raise together(errors)


def exact(aliases: Mapping[str, str]) -> list[str]:
    """Return the aliases that are names, not patterns of names."""
    return [alias for alias in aliases if _PATTERN.isdisjoint(alias)]


def meant(aliases: Mapping[str, str], served: Container[str], name: str) -> str:
    """Return the model or adapter that a name stands for: itself, if it is served or nothing else fits.

    A whole name goes before patterns, of which the first one that fits counts.
    """
    if name in served:
        return name
    fits = (model for alias, model in aliases.items() if fnmatchcase(name, alias))
    return aliases.get(name) or next(fits, name)
