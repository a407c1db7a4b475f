"""The IP addresses of engines for a proxy; host names are resolved in the background."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from urllib.parse import urlsplit

from headway.addresses import netloc
from headway.engines.vllm.process.view import EngineView

_EVERY_S = 5.0  # between two rounds; also the time limit of one name
Resolve = Callable[[str], Awaitable[str]]  # a name -> its IP address; OSError or UnicodeError
log = logging.getLogger("headway.gateway")


async def _resolved(name: str) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


class Addresses(Mapping[str, str]):
    """IP address and port of each engine by its id, of engines whose address is known and that a proxy may use.

    A name that can no longer be resolved keeps its address.

    engines: of the gateway, by id. resolve: the system's resolver by default.
    """

    def __init__(self, engines: Mapping[str, EngineView], resolve: Resolve = _resolved) -> None:
        self._engines, self._resolve = engines, resolve
        self._ips: dict[str, str | None] = {}  # by name, None = unknown
        self._failing = set[str]()  # names
        self._new = asyncio.Event()  # there is a name to be resolved for the first time

    def __getitem__(self, id: str) -> str:
        engine = self._engines[id]
        url = urlsplit(engine.url)
        if url.hostname is None or engine.config.overflow:  # None = it has not started yet
            raise KeyError(id)
        if url.hostname not in self._ips and not _is_ip(url.hostname):
            self._new.set()
        ip = url.hostname if _is_ip(url.hostname) else self._ips.get(url.hostname)
        if ip is None:
            raise KeyError(id)
        return netloc(ip, url.port or (443 if url.scheme == "https" else 80))

    def __iter__(self) -> Iterator[str]:
        return (id for id in self._engines if id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    async def follow(self) -> None:
        """Resolve all names every 5 s, and at once when there is a new one, until cancelled."""
        while True:
            self._new.clear()
            await self.resolve()
            try:
                async with asyncio.timeout(_EVERY_S):
                    await self._new.wait()
            except TimeoutError:
                continue

    async def resolve(self) -> None:
        """Resolve the names of all engines concurrently."""
        hosts = {urlsplit(one.url).hostname for one in self._engines.values() if not one.config.overflow}
        names = {host for host in hosts if host is not None and not _is_ip(host)}
        self._ips = {name: ip for name, ip in self._ips.items() if name in names}
        await asyncio.gather(*map(self._resolve_one, names))

    async def _resolve_one(self, name: str) -> None:
        try:
            async with asyncio.timeout(_EVERY_S):
                self._ips[name] = await self._resolve(name)
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            self._ips.setdefault(name, None)
            if name not in self._failing:
                log.warning("the name %s of an engine cannot be resolved: %r", name, error)
            self._failing.add(name)
        else:
            self._failing.discard(name)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
