"""A TCP proxy that can cut or stall the connections to a healthy server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from yarl import URL


class Proxy:
    """Forwards bytes between clients and a server, until it is told to cut or stall."""

    def __init__(self, target: URL) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.accepts = True
        self.port = 0

    def cut(self, *, accept: bool = True) -> None:
        """Reset all connections. accept: let clients connect again."""
        self.accepts = accept
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """Stop forwarding; connections stay open."""
        self._open.clear()

    def resume(self) -> None:
        """Continue after `stall`."""
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect one client."""
        if not self.accepts:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:  # the server does not run
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        self._writers -= {writer, back}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """Yield a proxy for the server at a URL, and the URL that goes through it."""
    proxy = Proxy(URL(url))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy, str(URL(url).with_host("127.0.0.1").with_port(proxy.port))
    finally:
        proxy.cut(accept=False)
        proxy.resume()
        server.close()
        await server.wait_closed()
