"""Requests begin, and streams go on, in turns: what comes meanwhile does not wait for all of them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from headway.config import Server
from headway.gateway.http.connections import ConnectionLimits, Connections
from headway.gateway.http.protocol import protocol_class
from headway.gateway.http.turns import Turns


async def stream(turns: Turns, number: int, served: list[int]) -> None:
    await turns.take()
    served.append(number)


async def test_so_many_go_on_in_one_iteration_in_their_order() -> None:
    turns, served = Turns(8), list[int]()
    streams = [asyncio.create_task(stream(turns, number, served)) for number in range(50)]
    counts = [0]
    while len(served) < 50:
        await asyncio.sleep(0)
        counts.append(len(served))
    assert max(after - before for before, after in pairwise(counts)) == 8
    assert len(counts) < 12, "no iteration is left out"
    assert served == list(range(50))
    await asyncio.gather(*streams)


@pytest.mark.parametrize("waiting", [100, 1000])
async def test_a_request_passes_them(waiting: int) -> None:
    turns, served = Turns(8), list[int]()
    streams = [asyncio.create_task(stream(turns, number, served)) for number in range(waiting)]
    for _ in range(6):  # a request's iterations
        await asyncio.sleep(0)
    assert len(served) <= 6 * 8
    await asyncio.gather(*streams)
    assert len(served) == waiting


async def test_streams_that_wait_go_before_new_ones() -> None:
    turns, served = Turns(1), list[int]()
    early = [asyncio.create_task(stream(turns, number, served)) for number in range(3)]
    await asyncio.sleep(0)
    late = asyncio.create_task(stream(turns, 3, served))
    await asyncio.gather(*early, late)
    assert served == [0, 1, 2, 3]


async def test_a_stream_whose_client_has_left_takes_no_turn() -> None:
    turns, served = Turns(1), list[int]()
    streams = [asyncio.create_task(stream(turns, number, served)) for number in range(4)]
    await asyncio.sleep(0)
    streams[1].cancel()
    streams[2].cancel()
    await asyncio.wait(streams, timeout=1)
    assert served == [0, 3]


async def test_all_turns_come_back() -> None:
    turns = Turns(2)
    for _ in range(5):
        async with asyncio.timeout(1):
            for _ in range(3):
                await turns.take()
        await asyncio.sleep(0)


# ---- requests


class Door:
    """Connections to an application that notes which requests begin, and answers each at once."""

    def __init__(self) -> None:
        self.begun = list[str]()
        self._http = protocol_class(Connections(ConnectionLimits.of(Server(), 4096)))
        self._config = uvicorn.Config(self._answer, interface="asgi3", proxy_headers=False)
        self._config.load()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append(scope["path"] + scope["query_string"].decode())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def connect(self) -> Any:
        transport = Mock(asyncio.Transport, is_closing=lambda: False, get_extra_info=lambda *_: None)
        made = self._http(self._config, ServerState(), {}, asyncio.get_running_loop())
        made.connection_made(transport)
        return made

    def ask(self, connection: Any, target: str) -> None:
        connection.data_received(f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_few_requests_begin_in_one_iteration_and_all_in_the_end(path: str) -> None:
    door, counts = Door(), [0]
    for _ in range(100):
        door.ask(door.connect(), path)
    for _ in range(30):
        await asyncio.sleep(0)
        counts.append(len(door.begun))
    assert max(after - before for before, after in pairwise(counts)) == 8
    assert len(door.begun) == 100


async def test_a_question_about_health_waits_for_no_other_request() -> None:
    door = Door()
    for _ in range(100):
        door.ask(door.connect(), "/v1/models")
    for path in ("/health", "/ready", "/metrics"):
        door.ask(door.connect(), path)
    for _ in range(3):
        await asyncio.sleep(0)
    assert {"/health", "/ready", "/metrics"} < set(door.begun)
    assert len(door.begun) < 50


async def test_a_question_on_a_connection_that_has_had_answers_passes_those_on_new_ones() -> None:
    door = Door()
    monitor = door.connect()
    door.ask(monitor, "/health")
    await asyncio.sleep(0.01)
    for _ in range(100):
        door.ask(door.connect(), "/health")
    door.ask(monitor, "/health?monitor")
    for _ in range(3):
        await asyncio.sleep(0)
    assert "/healthmonitor" in door.begun
    assert len(door.begun) < 50
