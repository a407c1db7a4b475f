"""How long a gateway's /health, or a short chat, takes to answer, and its memory: asked by another process.

In a thread of the process that attacks, the answers would wait for the attackers' interpreter.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection

import psutil  # type: ignore[import-untyped]

_PAUSE = 0.01  # seconds between two questions
_SLOW = 60.0  # seconds after which no answer is waited for


@dataclass(slots=True)
class HealthSeen:
    """Seconds that each answer took, and the gateway's resident bytes, the first before all."""

    health: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)


class HealthWatch:
    """Asks a gateway for /health, or short chats, while a block runs."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    @contextmanager
    def watching(self) -> Iterator[HealthSeen]:
        """Yield what will have been seen when the block has ended."""
        seen = HealthSeen()
        self._line.send(True)
        self._line.recv()  # it has begun
        try:
            yield seen
        finally:
            self._line.send(False)
            seen.health, seen.rss = self._line.recv()


@contextmanager
def health_watch(port: int, pid: int, chat: str = "") -> Iterator[HealthWatch]:
    """Start the process that asks the gateway with this port and process id; end it after the block.

    chat: the body of the chat that it asks for, instead of /health.
    """
    context = get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_ask, args=(its, port, pid, chat), daemon=True)
    process.start()
    its.close()
    try:
        yield HealthWatch(ours)
    finally:
        ours.close()
        process.join()


def _ask(line: Connection, port: int, pid: int, chat: str) -> None:
    """Ask between True and False, then send what was seen; return when the other end is closed."""
    gateway = psutil.Process(pid)
    try:
        while line.recv():
            health, rss = list[float](), [gateway.memory_info().rss]
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=_SLOW)
            line.send(True)
            while not line.poll(_PAUSE):
                began = time.perf_counter()
                client.request(*(("POST", "/v1/chat/completions", chat) if chat else ("GET", "/health")))
                client.getresponse().read()
                health.append(time.perf_counter() - began)
                rss.append(gateway.memory_info().rss)
            client.close()
            line.recv()
            line.send((health, rss))
    except EOFError:
        return
