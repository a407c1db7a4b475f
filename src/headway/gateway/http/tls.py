"""TLS of the gateway's port: its certificate, reloaded whenever its files change, and handshakes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from headway.config import Tls
from headway.errors import ConfigError
from headway.gateway import tasks
from headway.gateway.http.connections import Connections, Limit

_LOOK_S = 1.0
log = logging.getLogger("headway.gateway")


class Certificate:
    """The certificate of a context that serves connections. ConfigError when its files cannot be used."""

    def __init__(self, tls: Tls) -> None:
        self._files = str(tls.cert), str(tls.key)
        self._seen = self._marks()
        self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self.context.set_alpn_protocols(["http/1.1"])

    async def follow(self) -> None:
        """Take over changed files for new connections; one that cannot be used changes nothing."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if (marks := self._marks()) != self._seen:
                self._seen = marks
                self._renew()  # in the loop: while a context loads a pair, its handshakes would fail

    def _renew(self) -> None:
        try:
            # Tried in another context first: one that is given a certificate without its key keeps it all the same.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except ConfigError as error:
            log.error("the certificate stays as it is: %s", error)
        else:
            log.info("the certificate %s was read again", self._files[0])

    def read(self) -> tuple[bytes, bytes] | None:
        """Return key and certificate as their files hold them; None, and why in the log, unless they match."""
        marks = self._marks()
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            key, cert = (Path(file).read_bytes() for file in reversed(self._files))
        except (ConfigError, OSError) as error:
            log.error("the certificate stays as it is: %s", error)
            return None
        return (key, cert) if self._marks() == marks else None  # else they are being replaced

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        try:
            context.load_cert_chain(*self._files, password="")  # or it would ask for one on the terminal
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or "the key has a password"
            problem = f"The certificate {self._files[0]} with the key {self._files[1]} cannot be used: {why}."
            fix = "Give PEM files of a certificate and its private key, without a password."
            raise ConfigError(problem, fix, param="server.tls") from error
        return context

    def _marks(self) -> list[tuple[int, int, int] | None]:
        return [_mark(file) for file in self._files]


def _mark(file: str) -> tuple[int, int, int] | None:
    """Return what changes with a file, also where a link leads to another one."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class TlsServer:
    """Accepts connections on a socket; unlike in uvloop's server, those in their TLS handshake count, too.

    clients: counts all connections. protocol: makes the protocol that a connection has after its handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        backlog: int,
        certificate: Certificate,
        clients: Connections,
        protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        self._sock, self._context, self._clients, self._protocol = sock, certificate.context, clients, protocol
        self._handshakes = set[asyncio.Task[None]]()
        sock.setblocking(False)
        sock.listen(backlog)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections; the kernel refuses new ones from the next iteration of the event loop on."""
        self._accepting.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        """Close connections that are still in their handshake."""
        await tasks.cancel(self._accepting, *self._handshakes)

    async def _accept(self) -> None:
        failing = False
        while True:
            try:
                new, _ = await asyncio.get_running_loop().sock_accept(self._sock)
            except OSError as error:  # as a rule, too many files are open, until clients leave
                if not failing:
                    log.error("no connection can be accepted: %s", error)
                failing = True
                await asyncio.sleep(_LOOK_S)
                continue
            failing = False
            task = asyncio.create_task(self._shake_hands(new))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, new: socket.socket) -> None:
        task, loop, limit = asyncio.current_task(), asyncio.get_running_loop(), self._clients.limits.head_s
        assert task is not None, "on the event loop"
        self._clients.add(handshake := _Handshake(task))
        try:
            with suppress(OSError):  # it failed, or took too long; ssl.SSLError is an OSError
                await loop.connect_accepted_socket(self._protocol, new, ssl=self._context, ssl_handshake_timeout=limit)
        finally:
            self._clients.discard(handshake)


class _Handshake:
    """A connection in its handshake, whose time limit is the event loop's."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def exceeded(self, now: float) -> Limit | None:
        return None

    def end(self, limit: Limit) -> None:
        self._task.cancel()
