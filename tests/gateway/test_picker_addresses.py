"""The endpoint picker's addresses of engines, and what it writes when it names one (docs/picker.md)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from headway.config import Server
from headway.engines.vllm.process.connection import EngineGone
from headway.gateway import tasks
from headway.gateway.picker.addresses import Addresses
from headway.gateway.picker.exchange import DESTINATION, NAMESPACE, Exchange, Pool
from headway.gateway.picker.messages import ProcessingRequest
from tests.gateway.ext_proc import head


def engine(url: str, **config: Any) -> Any:
    """Return what `Addresses` and `Exchange` look at of an engine."""
    settings = SimpleNamespace(overflow=False, request_timeout_s=None)
    return SimpleNamespace(id="e0", url=url, key=None, config=settings, count=lambda change: None)


async def test_names_are_resolved_all_at_once_in_the_background_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    ips, asked, both = {"a": "10.0.0.1", "b": "fd00::1"}, list[str](), asyncio.Barrier(2)

    async def resolve(name: str) -> str:
        asked.append(name)
        await both.wait()  # neither waits for the other
        if name not in ips:
            raise OSError("no such name")
        return ips[name]

    engines = {"e0": engine("http://a:8000"), "e1": engine("https://b"), "e2": engine("http://10.0.0.3:80")}
    addresses = Addresses(engines, resolve)
    assert dict(addresses) == {"e2": "10.0.0.3:80"}
    await addresses.resolve()
    assert dict(addresses) == {"e0": "10.0.0.1:8000", "e1": "[fd00::1]:443", "e2": "10.0.0.3:80"}
    ips["a"] = "10.0.0.2"
    del ips["b"]
    for _ in range(2):
        await addresses.resolve()
    assert (addresses["e0"], addresses["e1"]) == ("10.0.0.2:8000", "[fd00::1]:443")
    assert caplog.text.count("the name b of an engine cannot be resolved") == 1
    assert len(asked) == 6  # none for those that look


async def test_a_new_name_is_resolved_at_once() -> None:
    asked = asyncio.Queue[str]()

    async def resolve(name: str) -> str:
        asked.put_nowait(name)
        return "10.0.0.1"

    engines = {"e0": engine("http://old:8000")}
    addresses = Addresses(engines, resolve)
    async with tasks.running(addresses.follow), asyncio.timeout(3):
        assert await asked.get() == "old"
        engines["e1"] = engine("http://new:8000")
        assert "e1" not in addresses
        assert {await asked.get(), await asked.get()} == {"old", "new"}
    assert addresses["e1"] == "10.0.0.1:8000"


class Told:
    """A gRPC call that keeps what is written, and brings one message."""

    def __init__(self, message: Any = None) -> None:
        self.message, self.written = message, list[Any]()

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def read(self) -> Any:
        return self.message


async def test_the_address_counts_when_the_request_is_forwarded() -> None:
    """An engine may have lost its address, or have moved, since the request was planned."""
    addresses, message = dict[str, str](), ProcessingRequest(response_headers=head({":status": "200"}))
    call, to = Told(message), engine("http://a:8000")
    exchange = Exchange(call, Pool({"e0": to}, addresses, True), Server())
    with pytest.raises(EngineGone):
        async with exchange.open(to, "/v1/chat/completions", [b"{}"], {}):
            pass
    assert not call.written
    addresses["e0"] = "10.0.0.7:8000"
    async with exchange.open(to, "/v1/chat/completions", [b"{}"], {}) as response:
        assert response.status == 200
    assert call.written[0].dynamic_metadata[NAMESPACE][DESTINATION] == "10.0.0.7:8000"


async def test_the_body_is_let_go_once_it_is_forwarded() -> None:
    class Body(list[bytes]):
        pass

    message = ProcessingRequest(response_headers=head({":status": "200"}))
    to, body = engine("http://a:8000"), Body([b"{}"])
    exchange, there = Exchange(Told(message), Pool({"e0": to}, {"e0": "10.0.0.7:8000"}, True), Server()), ref(body)
    opening = exchange.open(to, "/v1/chat/completions", body, {})
    del body
    async with opening:
        assert there() is None
