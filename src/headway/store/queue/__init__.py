"""Durable storage of accepted requests, shared by gateways through leases (after QLM, section 3)."""

from __future__ import annotations

import os
import secrets
import socket

from headway.config import Broker as BrokerConfig
from headway.store.queue.memory import MemoryBroker
from headway.store.queue.port import Broker
from headway.store.queue.sqlite import SqliteBroker

__all__ = ["MemoryBroker", "SqliteBroker", "open_broker"]


def open_broker(config: BrokerConfig, owner: str | None = None) -> Broker:
    """Open the broker of the configured kind for the gateway `owner`.

    Without `owner` the gateway gets a unique name, another one after each restart.
    Raises ConfigError when the broker cannot be opened.
    """
    owner = owner or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    match config.kind:
        case "memory":
            return MemoryBroker(owner)
        case "sqlite":
            sqlite = config.sqlite
            return SqliteBroker(
                str(sqlite.file), owner, synchronous=sqlite.synchronous, max_log_bytes=sqlite.max_log_mib * 2**20
            )
        case "postgres":
            return _postgres(config, owner)


def _postgres(config: BrokerConfig, owner: str) -> Broker:
    from headway.store.queue.postgres import PostgresBroker  # asyncpg is loaded where it is needed
    from headway.store.queue.postgres_link import address_of, most_apart_s

    return PostgresBroker(address_of(config.postgres), owner, most_apart_s=most_apart_s(config))
