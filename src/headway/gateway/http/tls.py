"""TLS of the gateway's port: its certificate, taken over again whenever its files change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from headway.config import Tls
from headway.errors import ConfigError

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
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a context keeps the half of a pair that fits not
            self._load(self.context)
        except ConfigError as error:
            log.error("the certificate stays as it is: %s", error)
        else:
            log.info("the certificate %s was read again", self._files[0])

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
