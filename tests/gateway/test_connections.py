"""Clients that take too long, or too many connections, are let go; they lock nobody out."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from headway.config import Server
from headway.errors import ConfigError
from headway.gateway import tasks
from headway.gateway.app import new_app
from headway.gateway.http.connections import SPARE, ConnectionLimits, Connections, Limit
from headway.gateway.http.protocol import LimitedHttp, WithoutChunks, protocol_class
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, SAY, Fake, Gateway, until
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import fakes, hanging

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@contextmanager
def connected(gateway: Gateway, data: bytes = b"", buffer: int | None = None) -> Iterator[socket.socket]:
    """Open a connection and send bytes on it; `buffer` limits what the system takes for its client."""
    with socket.socket() as line:
        line.settimeout(20)
        if buffer is not None:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        line.connect(("127.0.0.1", gateway.config.server.port))
        line.sendall(data)
        yield line


def rest(line: socket.socket) -> bytes:
    """Read until the gateway closes the connection."""
    seen = b""
    with suppress(ConnectionResetError):  # what was sent after the gateway had closed it
        while part := line.recv(65536):
            seen += part
    return seen


def dripped(line: socket.socket, piece: bytes) -> bytes:
    """Send a piece again and again until there is an answer; return it."""
    line.settimeout(0.05)
    while True:
        try:
            line.sendall(piece)
            answer = line.recv(65536)
        except TimeoutError:
            continue
        line.settimeout(20)
        return answer + rest(line)


def code(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


def ended(gateway: Gateway, limit: str) -> float:
    return gateway.metric(f'headway_connections_ended_total{{limit="{limit}"}}')


# ---- time


def test_a_slow_head(serve: Serve) -> None:
    with serve(server={"head_timeout_s": 0.5}) as gateway:
        with connected(gateway, b"GET /health HTTP/1.1\r\n") as line:
            answer = dripped(line, b"x: y\r\n")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert code(answer) == "head_timeout"
        with connected(gateway) as line:
            assert rest(line) == b"", "nothing has come, so there is nothing to answer"
        assert ended(gateway, "head") == 2


def test_a_slow_body(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n".encode()
    with serve(server={"body_timeout_s": 0.5}) as gateway:
        with connected(gateway, head) as line:
            answer = dripped(line, b" ")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert code(answer) == "body_timeout"
        until(lambda: gateway.inner.bodies.used == 0)
        assert gateway.jobs() == {}
        assert ended(gateway, "body") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_that_nobody_asked_for(serve: Serve) -> None:
    with serve(server={"body_timeout_s": 0.5}) as gateway:
        with connected(gateway, HEALTH[:-2] + b"content-length: 9\r\n\r\n") as line:
            answer = rest(line)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1") == 1


def test_a_slow_head_behind_another_request(serve: Serve, fake: Fake) -> None:
    with serve(server={"head_timeout_s": 0.5}) as gateway:
        body = json.dumps(gateway.chat(**fakes(hold="before"))).encode()
        post = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        with connected(gateway, post + b"GET /health HT") as line:
            until(lambda: ended(gateway, "head") == 1)
            fake.release("before")
            answer = rest(line)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer


def test_silence_between_requests(serve: Serve) -> None:
    with serve(server={"idle_timeout_s": 1, "head_timeout_s": 0.5}) as gateway:
        for after in (b"", b"\r\n"):  # an empty line begins no request
            with connected(gateway, HEALTH) as line:
                first = line.recv(65536)
                line.sendall(after)
                assert (first + rest(line)).count(b"HTTP/1.1") == 1


def test_a_request_that_waits_for_the_gateway_is_not_slow(serve: Serve, fake: Fake) -> None:
    limits = {"head_timeout_s": 0.2, "body_timeout_s": 0.2, "write_timeout_s": 0.2}
    with serve(server=limits) as gateway, hanging(gateway, **fakes(hold="not slow")) as line:
        until(lambda: fake.last()["open"] == 1)
        with connected(gateway) as silent:
            rest(silent)  # the limits have been looked at
        fake.release("not slow")
        assert line.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_stops_reading(serve: Serve, fake: Fake) -> None:
    with serve(server={"write_timeout_s": 0.5}, engine={"max_running": 128}) as gateway:
        asks = gateway.chat(stream=True, n=128, max_tokens=1900, **fakes(tokens=1900))
        data = json.dumps(asks).encode()  # its answer is larger than what the system keeps for a client
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        with connected(gateway, head + data, buffer=4096):
            until(lambda: ended(gateway, "write") == 1, 60)
            until(lambda: fake.last()["open"] == 0, 60)
            assert gateway.newest() == ("failed", "client_gone: disconnected")


class Unread(asyncio.Transport):
    """A transport whose client takes what the test says."""

    size, closing = 0, False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return self.size

    def is_closing(self) -> bool:
        return self.closing


@dataclass(eq=False)
class Looked:
    """A connection that exceeds a limit at the first looks, so many."""

    looks: int
    ended: list[Limit] = field(default_factory=list)

    def exceeded(self, now: float) -> Limit | None:
        self.looks -= 1
        return "head" if self.looks >= 0 else None

    def end(self, limit: Limit) -> None:
        self.ended.append(limit)


async def test_a_busy_gateway_does_not_take_clients_for_slow() -> None:
    """What has come is read between two looks, so the first one ends nothing."""
    every = Connections(ConnectionLimits.of(Server(), 1024))
    prompt, slow = Looked(1), Looked(1000)
    for one in (prompt, slow):
        every.add(one)
    async with tasks.running(lambda: every.watch(0.001)):
        while not slow.ended or prompt.looks > -5:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not prompt.ended


def test_progress_resets_the_time_to_read() -> None:
    limits = ConnectionLimits(max_head=1000, head_s=1000.0, body_s=1000.0, write_s=60.0, most=9)
    with closing(asyncio.new_event_loop()) as loop:
        transport = Unread()
        protocol = protocol_class(Connections(limits))(uvicorn.Config(new_app()), ServerState(), {}, loop)
        assert isinstance(protocol, LimitedHttp)
        protocol.connection_made(transport)
        now, seen = loop.time(), list[str | None]()
        for seconds, size in ((0, 0), (10, 500), (60, 500), (69, 400), (128, 400), (129, 400), (130, 0)):
            transport.size, transport.closing = size, seconds > 100
            seen.append(protocol.exceeded(now + seconds))
    assert seen == [None, None, None, None, None, "write", None]


# ---- number


def test_slow_heads_lock_nobody_out(serve: Serve) -> None:
    with serve(server={"max_connections": 4}) as gateway, ExitStack() as stack:
        lines = [stack.enter_context(connected(gateway, b"GET / HTTP")) for _ in range(4 + SPARE + 10)]
        assert gateway.post(gateway.chat()).status_code == 200
        until(lambda: ended(gateway, "room") >= 10)
        assert closed(lines[0]), "the oldest goes first"
        lines[-1].sendall(b"/1.1\r\nhost: x\r\n\r\n")
        assert lines[-1].recv(9) == b"HTTP/1.1 "


def closed(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except OSError:
        return True


def test_when_all_are_in_use_health_is_answered(serve: Serve, fake: Fake) -> None:
    with serve(server={"max_connections": 2}) as gateway:
        with hanging(gateway, **fakes(hold="use")) as one, hanging(gateway, **fakes(hold="use")) as two:
            until(lambda: fake.last()["open"] == 2)
            refused = gateway.post(gateway.chat())
            assert error(refused, 503)["code"] == "too_many_connections"
            assert refused.headers["retry-after"] == "1"
            assert gateway.get("/health").status_code == 200
            assert gateway.get("/ready").status_code == 200
            fake.release("use")
            assert one.recv(9) + two.recv(9) == b"HTTP/1.1 " * 2
        assert gateway.post(gateway.chat()).status_code == 200


def test_files_are_left_for_engines() -> None:
    def most(files: int, limit: int | None = None) -> int:
        return ConnectionLimits.of(Server(max_connections=limit), files).most

    assert most(1024) == (1024 - 256 - SPARE) // 2
    assert most(2**20) == 16_384
    assert most(2000, 1500) == 1500
    for files, limit in ((200, None), (2000, 1990)):
        with pytest.raises(ConfigError) as raised:
            most(files, limit)
        assert "server.max_connections" in raised.value.hint


@pytest.mark.parametrize("asks", ["Upgrade: h2c", "Upgrade: websocket"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_a_wish_for_another_protocol_is_ignored(serve: Serve, asks: str, chunked: bool, apart: bool) -> None:
    """The body is read by its framing: it is no request of its own, and not lost."""
    chat = json.dumps({"model": "smollm2", "messages": SAY}).encode()
    for body, expected in ((b"GET /v1/models HTTP/1.1\r\nHost: inner\r\n\r\n", b"400"), (chat, b"200")):
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, close\r\n{asks}\r\n"
            f"Content-Type: application/json\r\n{framing}\r\n\r\n"
        ).encode()
        sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
        with serve() as gateway, connected(gateway, head if apart else head + sent) as line:
            if apart:
                time.sleep(0.1)
                line.sendall(sent)
            answer = rest(line)
        assert answer.split()[1] == expected, answer
        assert answer.count(b"HTTP/1.1 ") == 1


def test_a_tunnel_is_refused(serve: Serve) -> None:
    asked = b"CONNECT inner:80 HTTP/1.1\r\nHost: inner:80\r\n\r\n"
    with serve() as gateway, connected(gateway, asked) as line:
        assert rest(line).split()[1] == b"400"


def test_a_stream_over_http_1_0_has_no_chunk_sizes(serve: Serve) -> None:
    body = json.dumps({"model": "smollm2", "messages": SAY, "stream": True}).encode()
    for version in (b"1.0", b"1.1"):
        head = b"POST %s HTTP/%s\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        with serve() as gateway, connected(gateway, head % (CHAT.encode(), version, len(body)) + body) as line:
            answered, _, stream = rest(line).partition(b"\r\n\r\n")
        assert answered.split()[1] == b"200"
        assert (b"transfer-encoding" in answered) == (version == b"1.1")
        assert stream.startswith(b"data: ") == (version == b"1.0")
    with serve() as gateway, connected(gateway, b"GET /health HTTP/1.0\r\n\r\n") as line:
        assert rest(line).endswith(b'{"status":"ok"}')


def test_an_empty_part_of_a_stream_over_http_1_0_is_nothing() -> None:
    """A translated API says nothing of some events of a chat."""
    sent: list[bytes] = []
    cycle: Any = SimpleNamespace(transport=SimpleNamespace(write=sent.append), chunked_encoding=True)
    flow = WithoutChunks(cycle)
    for data in (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"", b"2\r\nab\r\n", b"0\r\n\r\n"):
        flow.write(data)
    assert b"".join(sent) == b"HTTP/1.1 200 OK\r\n\r\nab"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET /health HTTP/2.0\r\nHost: h\r\n\r\n", b"400"),
        (b"GET /health\r\n\r\n", b"400"),
    ],
)
def test_a_head_has_a_version_and_one_host(serve: Serve, head: bytes, status: bytes) -> None:
    with serve() as gateway, connected(gateway, head) as line:
        line.shutdown(socket.SHUT_WR)
        assert rest(line).split()[1] == status


def test_a_slash_at_the_end_leads_nowhere_else(serve: Serve) -> None:
    for path, status in (("/v1/models/", 200), ("/health/", 404), ("/v1/chat/completions/", 404)):
        method = "POST" if "chat" in path else "GET"
        asked = f"{method} {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode()
        with serve(server={"hosts": ("evil.example",)}) as gateway, connected(gateway, asked) as line:
            head, _, body = rest(line).partition(b"\r\n\r\n")
        assert head.split()[1] == str(status).encode()
        assert set(json.loads(body)) == ({"object", "data"} if status == 200 else {"error"})


@pytest.mark.parametrize("more", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"], ids=["plain", "upgrade"])
def test_many_requests_at_once_are_answered(serve: Serve, more: bytes) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: h\r\n" + more + b"\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    begun, ended = asked[:20], asked[20:]
    with serve() as gateway, connected(gateway, begun) as line:
        for _ in range(3):  # each packet ends one head, begins another, and is larger than one may be
            time.sleep(0.05)
            line.sendall(ended + asked * 1000 + begun)
        line.sendall(ended + last)
        assert rest(line).count(b"HTTP/1.1 200 ") == 3005
