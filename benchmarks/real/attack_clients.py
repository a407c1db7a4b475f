"""The attacks of `headway bench attack`: hostile clients on raw connections."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.real.peers import Peer
from testing.nonsense import NONSENSE

MIB = 2**20
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SAY = [{"role": "user", "content": "Say something."}]
_ANSWER_S = 30.0  # a later answer counts as missing
HANG_S = 3.0  # duration of an engine's hang
BURST = 5000  # connections
FLOOD = 4000
ALPHA, BETA = "sk-alpha-123", "sk-beta-1234"  # keys of two tenants
KEYS = ({"key": ALPHA, "tenant": "alpha"}, {"key": BETA, "tenant": "beta"})


@dataclass(slots=True)
class AttackTarget:
    """The gateway under attack, and its clients' observations.

    engine: the FAKE engine behind the gateway. folder: the directory of the gateway's queue.
    stop: time of the event loop's clock at which attackers end.
    headers: extra headers of the honest client. flood: number of requests from a flooding tenant.
    broken: unexpected 5xx, and invalid engine responses that reached a client.
    lost: accepted requests without an answer. refused: 429s that the honest client received.
    """

    gateway: Peer
    engine: Peer
    folder: Path
    stop: float = 0.0
    headers: str = ""
    flood: int = FLOOD
    broken: int = 0
    lost: int = 0
    refused: int = 0
    numbers: count[int] = field(default_factory=count)

    @property
    def going(self) -> bool:
        return asyncio.get_running_loop().time() < self.stop

    async def end(self) -> None:
        """Wait until attackers end."""
        await asyncio.sleep(max(self.stop - asyncio.get_running_loop().time(), 0.0))

    async def send(self, data: bytes, *, port: int | None = None, meant: int = 503) -> tuple[int, bytes]:
        """Send bytes on a new connection; return status and body of the answer. Status 0 = no answer.

        meant: the allowed 5xx, besides 503.
        """
        status, body = await exchange(port or self.gateway.port, data)
        self.broken += status >= 500 and status not in (503, meant)
        return status, body

    async def chat(self, **fields: Any) -> int:
        """Send a chat as an honest client and return the status. A missing answer is a loss, a 429 or 503 is not."""
        status, body = await self.send(request(_CHAT, say(**fields), self.headers))
        self.refused += status == 429
        self.lost += status not in (200, 429, 503) or (status == 200 and b"fake " not in body)
        return status


Attack = Callable[[AttackTarget], Awaitable[None]]


async def exchange(port: int, data: bytes) -> tuple[int, bytes]:
    """Send bytes on a new connection; return status and body. Status 0 = no complete answer."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0, b""
    status = int(head[9:12] or 0)
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    return (0, b"") if length and len(body) < int(length) else (status, body)


def say(**fields: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    return {"model": "smollm2", "messages": _SAY, "max_tokens": 4, **fields}


def request(path: str, body: Mapping[str, Any] | bytes, headers: str = "") -> bytes:
    """Return the bytes of a POST whose connection ends with the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}"
    return f"{lines}content-length: {len(data)}\r\n\r\n".encode() + data


def _mib(before: str, element: str) -> bytes:
    """Return a JSON body of 1 MiB with a list that repeats one element."""
    times = (MIB - 200) // (len(element) + 1)
    return f'{{"model": "smollm2", {before}: [{",".join([element] * times)}]}}'.encode()


def repeated(data: bytes) -> Attack:
    """Return an attack that sends the same bytes again and again."""

    async def attack(target: AttackTarget) -> None:
        while target.going:
            await target.send(data)

    return attack


async def waiting(target: AttackTarget) -> None:
    """Queue 1 MiB bodies whose answers never begin, then disconnect."""
    data = request(_CHAT, say(metadata="x" * (MIB - 400), vllm_xargs={"fake_hold": "never"}))
    lines = list[asyncio.StreamWriter]()
    try:
        while target.going and len(lines) < 200:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", target.gateway.port)
                lines.append(writer)
                writer.write(data)
                await writer.drain()
        await target.end()
    finally:
        for writer in lines:
            writer.transport.abort()


async def aborted(target: AttackTarget) -> None:
    """Begin 1 MiB uploads and abort them."""
    data = request(_CHAT, say(metadata="x" * (MIB - 400)))[: MIB // 2]
    while target.going:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", target.gateway.port)
            writer.write(data)
            await writer.drain()
            writer.transport.abort()


async def made_up_tasks(target: AttackTarget) -> None:
    """Name a new task in every request."""
    while target.going:
        task = f"{next(target.numbers):0128d}"
        await target.send(request(_CHAT, say(), f"x-headway-task: {task}\r\n"))


async def background(target: AttackTarget) -> None:
    """Queue background requests with 1 MiB bodies; those that do not complete count as lost."""
    ids = list[str]()
    data = request(_CHAT, say(metadata="x" * (MIB - 400), background=True))
    while target.going and len(ids) < 60:
        status, body = await target.send(data)
        ids += [json.loads(body)["id"]] if status == 202 else []
    await _completed(target, ids)


async def full_disk(target: AttackTarget) -> None:
    """Let background requests end while the queue's file cannot grow; those that do not complete are lost."""
    hold = f"disk-{next(target.numbers)}"
    data = request(_CHAT, say(background=True, max_tokens=2000, vllm_xargs={"fake_hold": hold}))
    answers = [await target.send(data) for _ in range(20)]
    log = target.folder / "queue.sqlite-wal"
    limit = target.gateway.process.rlimit
    before = limit(resource.RLIMIT_FSIZE)
    limit(resource.RLIMIT_FSIZE, (min(log.stat().st_size, 4096), before[1]))
    try:
        await target.send(request(f"/release/{hold}", b""), port=target.engine.port)
        await target.end()
    finally:
        limit(resource.RLIMIT_FSIZE, before)
    await _completed(target, [json.loads(body)["id"] for status, body in answers if status == 202])


async def hung(target: AttackTarget) -> None:
    """Suspend the engine's process while it has requests, then resume it; each must get an answer."""
    process = target.engine.process
    while target.going:
        asked = [asyncio.ensure_future(target.chat(vllm_xargs={"fake_delay": 0.1})) for _ in range(8)]
        await asyncio.sleep(0.2)  # now they are inside
        process.suspend()
        try:
            await asyncio.sleep(HANG_S)
        finally:
            process.resume()
        await asyncio.gather(*asked)


async def untrusted(target: AttackTarget) -> None:
    """Make the engine send invalid responses, streamed and whole; each must end with a 502 or 503."""
    asks = [request(_CHAT, say(stream=stream, vllm_xargs={"fake_end": name})) for name, stream in _UNTRUSTED]
    while target.going:
        for ask in asks:
            status, _ = await target.send(ask, meant=502)
            target.lost += status == 0
            target.broken += 0 < status < 500


async def tenant(target: AttackTarget) -> None:
    """Send a flood of requests as one tenant; accepted requests that do not complete are lost."""
    ids, header = list[str](), bearer(ALPHA)
    slow = {"fake_tokens": 8, "fake_delay": 0.5}
    data = request(_CHAT, say(background=True, vllm_xargs=slow), header)

    async def some() -> None:
        while next(target.numbers) < target.flood:
            status, body = await target.send(data)
            ids.extend([json.loads(body)["id"]] if status == 202 else [])

    target.stop = inf  # the honest client continues until the flood is over
    await asyncio.gather(*(some() for _ in range(64)))
    await _completed(target, ids, header)
    target.stop = 0.0


def bearer(key: str) -> str:
    """Return the authorization header with a key."""
    return f"authorization: Bearer {key}\r\n"


async def _completed(target: AttackTarget, ids: list[str], headers: str = "") -> None:
    """Count the requests that do not complete in time as lost."""
    left, deadline = set(ids), asyncio.get_running_loop().time() + _ANSWER_S
    while left and asyncio.get_running_loop().time() < deadline:
        for id in list(left):
            get = f"GET /v1/responses/{id} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n"
            _, body = await target.send(get.encode())
            if b'"status":"completed"' in body:
                left.discard(id)
        await asyncio.sleep(0.1)
    target.lost += len(left)


async def full_of(target: AttackTarget, count: int, data: bytes, drip: bytes) -> None:
    """Keep `count` connections open with an unfinished request each, to which `drip` is added from time to time."""
    lines = list[asyncio.StreamWriter]()
    try:
        while target.going:
            while target.going and len(lines) < count:
                lines += await _connected(target, data)
            for writer in lines:
                writer.write(drip)
            await asyncio.sleep(0.2)
            lines = [writer for writer in lines if not writer.transport.is_closing()]
    finally:
        for writer in lines:
            writer.transport.abort()


async def _connected(target: AttackTarget, data: bytes) -> list[asyncio.StreamWriter]:
    """Open a connection and send bytes without reading; return an empty list if it is refused."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", target.gateway.port, limit=1)
    except OSError:
        return []
    writer.write(data)
    return [writer]


async def slow_heads(target: AttackTarget) -> None:
    """Send heads that never end, on 1,000 connections at a time."""
    await full_of(target, 1000, b"GET /health HTTP/1.1\r\n", b"x: y\r\n")


async def slow_bodies(target: AttackTarget) -> None:
    """Send bodies that never end, on 1,000 connections at a time."""
    head = f"POST {_CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n"
    await full_of(target, 1000, head.encode(), b" ")


async def unread(target: AttackTarget) -> None:
    """Ask for long streams and read none, on 32 connections at a time."""
    data = request(_CHAT, say(stream=True, n=64, max_tokens=1500, vllm_xargs={"fake_tokens": 1500}))
    await full_of(target, 32, data, b"\r\n")  # a blank line does not begin a request


async def burst(target: AttackTarget) -> None:
    """Open 5,000 connections at once; those without an answer are lost."""
    health = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answers = await asyncio.gather(*(target.send(health) for _ in range(BURST)))
    target.lost += sum(status == 0 for status, _ in answers)
    await target.end()


async def replaced_file(target: AttackTarget) -> None:
    """Replace the queue's file with another for a while.

    Background requests accepted meanwhile are lost unless they complete when the file is back.
    """
    path = target.folder / "queue.sqlite"
    aside, data, ids = path.with_suffix(".aside"), request(_CHAT, say(background=True)), list[str]()
    path.rename(aside)
    path.touch()
    try:
        while target.going:
            status, body = await target.send(data)
            ids += [json.loads(body)["id"]] if status == 202 else []
            await asyncio.sleep(0.02)
    finally:
        aside.replace(path)
    await _completed(target, ids)


_FORGED = json.dumps(say(vllm_xargs={"headway_urgency": -1e300}, temperature=0))[:-1] + ', "top_p": 1e400}'
_PIPELINED = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + b"nonsense\r\n\r\n"
_UNTRUSTED = [(name, stream) for name in NONSENSE for stream in (False, True)]
# By name: the attack, and the number of clients that carry it out at once.
ATTACKS: dict[str, tuple[Attack, int]] = {
    "1 MiB of empty objects": (repeated(request(_COMPLETIONS, _mib('"prompt"', "{}"))), 2),
    "1 MiB of lists": (repeated(request(_COMPLETIONS, _mib('"prompt"', "[0]"))), 2),
    "1 MiB of numbers as messages": (repeated(request(_CHAT, _mib('"messages"', "0"))), 2),
    "1 MiB of text": (repeated(request(_COMPLETIONS, {"model": "smollm2", "prompt": "word " * 209_000})), 2),
    "150 kB of text": (repeated(request(_COMPLETIONS, {"model": "smollm2", "prompt": "word " * 30_000})), 2),
    "1 MiB bodies that wait": (waiting, 1),
    "1 MiB bodies in background": (background, 1),
    "uploads broken off": (aborted, 4),
    "forged facts, 1e400": (repeated(request(_CHAT, _FORGED.encode())), 4),
    "bad heads behind others": (repeated(_PIPELINED), 4),
    "made-up task names": (made_up_tasks, 8),
    "a full disk": (full_disk, 1),
    "an engine that hangs": (hung, 1),
    "an engine that answers nonsense": (untrusted, 1),
    "the queue's file replaced": (replaced_file, 1),
    "1,000 slow heads": (slow_heads, 1),
    "1,000 slow bodies": (slow_bodies, 1),
    "streams that are not read": (unread, 1),
    "5,000 connections at once": (burst, 1),
}
# Attacks of one tenant on another, with configured keys.
TENANTS: dict[str, tuple[Attack, int]] = {"4,000 requests by one tenant": (tenant, 1)}
