"""What has been promised?"""

from __future__ import annotations

from headway.broker.memory import MemoryBroker
from headway.broker.port import Broker
from headway.broker.sqlite import SqliteBroker
from headway.errors import ConfigError

KINDS = ("memory", "sqlite")

__all__ = ["KINDS", "MemoryBroker", "SqliteBroker", "open_broker"]


def open_broker(kind: str, path: str | None, synchronous: str) -> Broker:
    """Return the broker of that kind: "memory" (path and synchronous are not used) or "sqlite".

    Raises ConfigError when there is no such kind, or when sqlite's file cannot be used.
    """
    if kind not in KINDS:
        raise ConfigError(f"There is no broker {kind!r}.", f"Use one of: {', '.join(KINDS)}.", param="kind")
    if kind == "memory":
        return MemoryBroker()
    if not path:
        raise ConfigError("The sqlite broker has no file.", "Set the path of its file.", param="path")
    return SqliteBroker(path, synchronous=synchronous)
