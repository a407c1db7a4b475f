"""The PostgreSQL server of the queue, as the configuration names it."""

from __future__ import annotations

from urllib.parse import urlsplit

from headway.addresses import is_host
from headway.config import Broker, Postgres
from headway.config.keys import reveal
from headway.store.postgres.link import Address, explained
from headway.store.postgres.schema import URL


def address_of(settings: Postgres) -> Address:
    """Return the address that a configuration names. ConfigError when the URL is not where it says."""
    assert settings.url is not None, "the configuration is checked when it is read"
    address = Address(reveal(settings.url, URL), settings.schema, settings.timeout_s)
    with explained(address.place):
        for place in urlsplit(address.url).netloc.rpartition("@")[2].split(","):
            # asyncpg takes a port modulo 65,536.
            if (host := urlsplit(f"//{place}")).port == 0 or (host.hostname and not is_host(host.hostname)):
                raise ValueError(place)
    return address


def most_apart_s(config: Broker) -> float:
    """Return the seconds that clocks may be apart before gateways would take each other's work."""
    return config.lease_seconds / 3
