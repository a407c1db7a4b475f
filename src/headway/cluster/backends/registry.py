"""Makes the backends that a configuration names, and closes them with the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from headway.cluster.backends.containers import check_docker
from headway.cluster.backends.model import Model
from headway.cluster.backends.port import Backend
from headway.cluster.backends.sandbox import Sandboxes, check_namespaces
from headway.config import Backend as Settings
from headway.errors import ConfigError
from headway.plugins import attribute
from headway.policy.apps.graph import LLM


def make(name: str, settings: Settings, share: float = 1.0) -> Backend:
    """Return a backend that has no process yet; ConfigError for settings that cannot be used.

    share: one tenant's share of the workers, and of the waiting places, that others leave.
    """
    if name == LLM:
        raise ConfigError(f"backends.{name}: this name is the LLM's.", "Choose another.", param=f"backends.{name}")
    if settings.kind == "sandbox":
        return Sandboxes(name, settings, share)
    if settings.kind == "model":
        return Model(name, settings, share)
    return _plugin(name, settings)


def _plugin(name: str, settings: Settings) -> Backend:
    try:
        made = attribute(settings.kind)
    except ImportError as error:
        raise ConfigError(
            f"backends.{name}.kind is {settings.kind!r}, which cannot be imported: {error}.",
            'Use "sandbox", "model", or "module:Class" of a module on PYTHONPATH.',
            param=f"backends.{name}.kind",
        ) from error
    backend: Backend = made(name, settings)
    return backend


@asynccontextmanager
async def opened(settings: Mapping[str, Settings], share: float = 1.0) -> AsyncIterator[dict[str, Backend]]:
    """Make all backends, check that they can work here, and close them at the end; share: as in `make`."""
    backends = {name: make(name, one, share) for name, one in settings.items()}
    for name, one in settings.items():
        if one.kind == "sandbox" and one.isolation == "namespaces":
            await asyncio.to_thread(check_namespaces, name)
        if one.kind == "sandbox" and one.isolation == "docker":
            await asyncio.to_thread(check_docker, name, one.image)
    try:
        yield backends
    finally:
        await asyncio.gather(*(backend.close() for backend in backends.values()))
