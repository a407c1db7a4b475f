"""A separate process that measures a gateway's memory and its latency, of /health or of short chats.

In a thread of the attacking process, the measurements would wait for the interpreter that runs the attackers.
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

_PAUSE = 0.01  # seconds between two requests
_SLOW = 60.0  # timeout of a request, seconds


@dataclass(slots=True)
class HealthSeen:
    """The seconds that each answer took, and the gateway's resident bytes, first before any request."""

    health: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)


class HealthWatch:
    """Sends /health or short chats to a gateway while a block runs."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    @contextmanager
    def watching(self) -> Iterator[HealthSeen]:
        """Measure while the block runs; the yielded object is filled when it ends."""
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
    """Start the process that watches the gateway with this port and process id; end it after the block.

    chat: the body of a chat to send instead of /health.
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
    """Measure between True and False on the pipe, then send the results; return when the pipe is closed."""
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
