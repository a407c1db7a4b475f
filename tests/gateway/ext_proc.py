"""A client of Envoy's external processing: it sends what Envoy would, and shows what the picker answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from headway.gateway.picker.exchange import DESTINATION, NAMESPACE, SUBSET, SUBSET_NAMESPACE
from headway.gateway.picker.messages import (
    FULL_DUPLEX,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from headway.gateway.picker.server import HEALTH, SERVICE
from tests.gateway.gateway import CHAT, SAY


@dataclass
class Immediate:
    """An answer in the place of an engine."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


@dataclass
class Forwarded:
    """A request as the picker lets Envoy forward it."""

    address: str
    headers: dict[str, str]
    removed: tuple[str, ...]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


def _headers(mutation: Any) -> dict[str, str]:
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}


def head(headers: dict[str, str], *, end: bool = False) -> dict[str, Any]:
    pairs = [{"key": name, "raw_value": value.encode()} for name, value in headers.items()]
    return {"headers": {"headers": pairs}, "end_of_stream": end}


def modes(mode: int = FULL_DUPLEX) -> dict[str, int]:
    return {"request_body_mode": mode, "response_body_mode": mode}


class Call:
    """One exchange, as Envoy has it."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **message: Any) -> None:
        await self.call.write(ProcessingRequest(**message))

    async def read(self) -> Any:
        return await self.call.read()

    async def ask(
        self,
        body: Any = None,
        *,
        path: str = CHAT,
        parts: int = 1,
        subset: Sequence[str] | str | None = None,
        trailers: bool = False,
        **headers: str,
    ) -> None:
        """Send a request with a JSON body (or bytes), in so many parts."""
        data = body if isinstance(body, bytes) else json.dumps(chat() if body is None else body).encode()
        pseudo = {":method": "POST", ":path": path, ":authority": "gateway.local", ":scheme": "http"}
        more = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        first = ProcessingRequest(request_headers=head(pseudo | more), protocol_config=modes())
        if subset is not None:
            value = subset if isinstance(subset, str) else list(subset)
            first.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET: value})
        await self.call.write(first)
        size = max(-(-len(data) // parts), 1)
        pieces = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        for number, piece in enumerate(pieces, 1):
            await self.send(request_body={"body": piece, "end_of_stream": number == len(pieces) and not trailers})
        if trailers:
            await self.send(request_trailers={})

    async def forwarded(self) -> Forwarded:
        """Return the request as it is forwarded."""
        first = await self.read()
        assert first.WhichOneof("response") == "request_headers", first
        address = first.dynamic_metadata[NAMESPACE][DESTINATION]
        changes, body, ended = first.request_headers.response.header_mutation, b"", False
        while not ended:
            message = await self.read()
            if message.WhichOneof("response") == "request_trailers":
                break
            part = message.request_body.response.body_mutation.streamed_response
            assert len(part.body) <= 62_000
            body, ended = body + part.body, part.end_of_stream
        assert _headers(changes)[DESTINATION] == address
        return Forwarded(address, _headers(changes), tuple(changes.remove_headers), body)

    async def answer(self, *parts: bytes, status: int = 200, kind: str = "application/json") -> None:
        """Send the response of an engine."""
        await self.send(response_headers=head({":status": str(status), "content-type": kind}))
        for number, part in enumerate(parts, 1):
            await self.send(response_body={"body": part, "end_of_stream": number == len(parts)})

    async def answered(self) -> tuple[dict[str, str], bytes]:
        """Return headers and body of the response as the client gets it."""
        first = await self.read()
        assert first.WhichOneof("response") == "response_headers", first
        body, ended = b"", False
        while not ended:
            part = (await self.read()).response_body.response.body_mutation.streamed_response
            body, ended = body + part.body, part.end_of_stream
        assert await self.read() is grpc.aio.EOF
        return _headers(first.response_headers.response.header_mutation), body

    async def immediate(self) -> Immediate:
        """Return the answer that comes in the place of an engine's."""
        message = await self.read()
        assert message is not grpc.aio.EOF
        assert message.WhichOneof("response") == "immediate_response", message
        answer = message.immediate_response
        return Immediate(answer.status.code, _headers(answer.headers), answer.body)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "messages": SAY, "max_tokens": 8, **fields}


def whole(tokens: int = 8) -> bytes:
    """Return an answer that is not streamed."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "fake"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 11, "completion_tokens": tokens, "total_tokens": 11 + tokens}
    return json.dumps({"id": "a", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


class Channel:
    """A connection to a picker."""

    def __init__(self, channel: Any) -> None:
        self._process = channel.stream_stream(
            f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )
        self._check = channel.unary_unary(
            f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )

    def call(self) -> Call:
        return Call(self._process())

    async def asked(self, body: Any = None, **more: Any) -> Call:
        call = self.call()
        await call.ask(body, **more)
        return call

    async def begun(
        self, method: str = "POST", path: str = CHAT, *, end: bool = False, mode: int = FULL_DUPLEX
    ) -> Call:
        """Begin a request whose body does not come."""
        call = self.call()
        names = {":method": method, ":path": path, ":authority": "gateway.local"}
        await call.send(request_headers=head(names, end=end), protocol_config=modes(mode))
        return call

    async def got(self, path: str) -> Call:
        """Send a request without a body."""
        return await self.begun("GET", path, end=True)

    async def status(self, service: str = "") -> int:
        return int((await self._check(HealthCheckRequest(service=service))).status)


@asynccontextmanager
async def connected(port: int, ca: bytes | None = None, *, window: bool = True) -> AsyncIterator[Channel]:
    """Open a connection. window: what it takes without being read may grow beyond HTTP/2's 64 KiB."""
    address = f"127.0.0.1:{port}"
    if ca is None:
        made = grpc.aio.insecure_channel(address, options=[("grpc.http2.bdp_probe", int(window))])
    else:
        made = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca))
    async with made as channel:
        yield Channel(channel)
