"""Part "kills" of `headway bench soak`: a gateway is killed (SIGKILL) again and again, with faults between.

Clients go on asking all the time, and keep what they see (`soak_history.py`); at the end nothing is broken,
and each background request that was accepted is owed its one answer.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.bench.live.attack_clients import request, say
from headway.bench.live.fake_engine import WORD
from headway.bench.live.peers import HEADWAY, Peer, fake_engine, gateway_argv, serving, write_config
from headway.bench.live.soak_faults import CLOCK, FAULTS, JUMPING, Scene, jump
from headway.bench.live.soak_history import History, Verdict, check
from headway.bench.output.results import Row
from headway.engines.vllm.process.launch import free_port

_CLIENTS, _TOKENS, _DELAY_S = 8, 4, 0.02
_PAUSE_S = 0.05  # of a client, between two requests
_LEASE_S = 2.0  # so that the next gateway takes over soon
_HEALTH_S = 0.5  # of engines: a hang is noticed while it lasts
_LIFE_S = (0.3, 1.2)  # of a gateway, before a fault and in it
_ANSWER_S = 30.0  # an answer that takes longer is none
_END_S = 120.0  # for all that is owed, once nothing is broken
_LOOKS = 40  # at background requests, in a round
_REFUSED = (429, 503)
_MARK = WORD.encode()


@dataclass(slots=True)
class Clients:
    """Clients in a thread of their own.

    lives: counts up when a gateway is ready and when it is to be killed; odd = one lives.
    unfinished: background requests whose end has not been seen.
    """

    port: int
    seed: int
    history: History = field(default_factory=History)
    lives: int = 0
    stop: bool = False
    unfinished: set[str] = field(default_factory=set)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask while the block runs."""
        thread = threading.Thread(target=lambda: asyncio.run(self._all()), name="soak-clients")
        thread.start()
        try:
            yield
        finally:
            self.stop = True
            thread.join()

    async def _all(self) -> None:
        rngs = np.random.default_rng([self.seed, 13]).spawn(_CLIENTS)
        await asyncio.gather(self._watch(), *(self._client(rng) for rng in rngs))

    async def _client(self, rng: np.random.Generator) -> None:
        while not self.stop:
            await asyncio.sleep(float(rng.exponential(_PAUSE_S)))
            if not self.lives % 2:
                continue
            if rng.random() < 0.6:
                await self._background()
            else:
                await self._wait_for(stream=bool(rng.random() < 0.5))

    async def _background(self) -> None:
        status, body = await self._send(request("/v1/chat/completions", _ask(background=True)))
        if status == 202:
            id = json.loads(body)["id"]
            self.history.looks[id] = []
            self.unfinished.add(id)

    async def _wait_for(self, stream: bool) -> None:
        """Ask and wait; without an answer, an error or a kill the gateway owes it."""
        life = self.lives
        status, body = await self._send(request("/v1/chat/completions", _ask(stream=stream)))
        if status in _REFUSED:
            return
        tokens, told = body.count(_MARK), status not in (0, 200) or b'"error":' in body
        if told or tokens >= _TOKENS:
            self.history.whole += 1
            self.history.doubled += tokens > _TOKENS or body.count(b"[DONE]") > 1
        elif life == self.lives:
            self.history.silent += 1

    async def _watch(self) -> None:
        """Look at background requests, those without an end before all others."""
        while not self.stop:
            await asyncio.sleep(0.1)
            for id in list(self.unfinished)[:_LOOKS] if self.lives % 2 else ():
                await self.look(id)

    async def look(self, id: str) -> None:
        """Look at one background request."""
        get = f"GET /v1/responses/{id} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        status, body = await self._send(get.encode())
        if status == 404:
            self.history.saw(id, "unknown", "")
        elif status == 200:
            seen = json.loads(body)
            state = seen["status"]
            self.history.saw(id, state, json.dumps([seen.get("response"), seen["error"]]))
            if state != "queued":
                self.unfinished.discard(id)

    async def _send(self, data: bytes) -> tuple[int, bytes]:
        """Send bytes on a connection of its own; status 0 = there is no whole answer."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
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


def _ask(**more: Any) -> dict[str, Any]:
    return say(max_tokens=_TOKENS, vllm_xargs={"fake_tokens": _TOKENS, "fake_delay": _DELAY_S}, **more)


@dataclass(frozen=True, slots=True)
class Killed:
    """The outcome. faults: how often each was among the kills."""

    kills: int
    faults: Counter[str]
    verdict: Verdict

    def rows(self) -> list[Row]:
        """Return the part's figures."""
        setting, verdict = f"{self.kills} kills", self.verdict
        return [
            Row("soak.accepted", HEADWAY, setting, float(verdict.accepted), "requests"),
            Row("soak.lost", HEADWAY, setting, float(verdict.lost), "requests"),
            Row("soak.twice", HEADWAY, setting, float(verdict.twice), "requests"),
            Row("soak.recomputed", HEADWAY, setting, float(verdict.recomputed), "computations"),
        ]


def measure(folder: Path, kills: int, seed: int, tick: Callable[[int], None]) -> Killed:
    """Kill gateways on one queue, then let the last one end what is owed; tick: told of kills."""
    rng, faults = np.random.default_rng([seed, 12]), Counter[str]()
    engine_port, port, journal = free_port(), free_port(), folder / "journal"
    jump(folder, 0.0)
    server, engines = {"max_attempts": 1000}, {"health_timeout_s": _HEALTH_S}
    write_config(folder, engine_port, port, "slack", server, engines, lease_seconds=_LEASE_S)
    clients = Clients(port, seed)
    with fake_engine(folder, engine_port, "--journal", str(journal)) as engine:
        with clients.running():
            for _ in range(kills):
                name = str(rng.choice(list(FAULTS)))
                faults[name] += 1
                _life(clients, engine, folder, name, rng)
                tick(1)
        _pay(clients, folder)
    clients.history.computed.update(filter(None, journal.read_text().split("\n")))
    return Killed(kills, faults, check(clients.history))


@contextmanager
def _gateway(folder: Path, port: int) -> Iterator[Peer]:
    """Run a gateway; the origin of its clock is in the folder, so that jumps stay in here."""
    argv = gateway_argv(folder, JUMPING.format(path=str(folder / CLOCK)))
    with serving(HEADWAY, argv, port, "/ready", folder, {"TMPDIR": str(folder)}) as gateway:
        yield gateway


def _life(clients: Clients, engine: Peer, folder: Path, fault: str, rng: np.random.Generator) -> None:
    """Let a gateway live for a while, break something, and kill the gateway: in the fault, or after it."""
    with _gateway(folder, clients.port) as gateway:
        clients.lives += 1
        time.sleep(rng.uniform(*_LIFE_S))
        within = rng.random() < 0.5
        with FAULTS[fault](Scene(engine, gateway, folder, rng)):
            time.sleep(rng.uniform(*_LIFE_S))
            if within:
                _kill(clients, gateway)
        if not within:
            time.sleep(rng.uniform(*_LIFE_S))
            _kill(clients, gateway)


def _kill(clients: Clients, gateway: Peer) -> None:
    clients.lives += 1
    gateway.process.send_signal(signal.SIGKILL)
    gateway.process.wait(30)


def _pay(clients: Clients, folder: Path) -> None:
    """Let a last gateway end what is owed; look at everything, and once more after it was killed, too."""
    for _ in range(2):
        with _gateway(folder, clients.port) as gateway:
            asyncio.run(_look_at_all(clients))
            gateway.process.send_signal(signal.SIGKILL)
            gateway.process.wait(30)


async def _look_at_all(clients: Clients) -> None:
    deadline = time.monotonic() + _END_S
    for id in clients.history.looks:
        await clients.look(id)
    while clients.unfinished and time.monotonic() < deadline:
        for id in list(clients.unfinished):
            await clients.look(id)
        await asyncio.sleep(0.2)
