"""Clients that send requests while gateways die and return, the history that they record, and the verdict on it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmarks.real import streams
from benchmarks.real.attack_clients import exchange, request, say
from testing.fake_engine import FIRST_ID, WORD

OPEN = ("queued",)  # states of an unfinished background request
End = tuple[str, str]  # the state, and the answer or error as it was sent


@dataclass(slots=True)
class SoakHistory:
    """The clients' observations.

    looks: id of each accepted (202) background request -> the distinct results of polling it, in order;
        ("unknown", "") is a 404
    whole: foreground requests that got an answer or an error
    told: foreground requests that got an error
    silent: foreground requests whose connection ended without an answer while the gateway was alive
    doubled: foreground requests whose answer had more tokens or ends than a single answer
    computed: id -> number of times that an engine received it
    streams: id of each long stream -> what became of it (`soak_clients.judged`), and its error
    """

    looks: dict[str, list[End]] = field(default_factory=dict)
    whole: int = 0
    told: int = 0
    silent: int = 0
    doubled: int = 0
    computed: Counter[str] = field(default_factory=Counter)
    streams: dict[str, tuple[str, str]] = field(default_factory=dict)

    def saw(self, id: str, state: str, answer: str) -> None:
        """Record the result of polling a background request, unless it equals the previous one."""
        looks = self.looks[id]
        if not looks or looks[-1] != (state, answer):
            looks.append((state, answer))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of requests, and the ids of lost and twice answered background requests.

    accepted: accepted background requests, and foreground requests with an answer or a lost one
    lost: background requests that did not complete, and foreground requests without an answer
    twice: background requests that changed after their end, and foreground requests with doubled answers
    recomputed: computations beyond the first of each request
    """

    accepted: int
    lost: int
    twice: int
    recomputed: int
    lost_ids: tuple[str, ...]
    twice_ids: tuple[str, ...]


def check(history: SoakHistory) -> Verdict:
    """Return the requests that were lost and those that were answered twice."""
    lost = tuple(id for id, looks in history.looks.items() if not looks or looks[-1][0] != "completed")
    twice = tuple(id for id, looks in history.looks.items() if _more_than_one_end(looks))
    return Verdict(
        accepted=len(history.looks) + history.whole + history.silent,
        lost=len(lost) + history.silent,
        twice=len(twice) + history.doubled,
        recomputed=sum(history.computed.values()) - len(history.computed),
        lost_ids=lost,
        twice_ids=twice,
    )


def _more_than_one_end(looks: Iterable[End]) -> bool:
    """Return True if the request changed after its end."""
    seen = list(looks)
    first = next((i for i, (state, _) in enumerate(seen) if state not in OPEN), len(seen))
    return len(seen) > first + 1


_CLIENTS, _TOKENS, _DELAY_S = 8, 4, 0.02
_LONG, _LONG_DELAY_S = (20, 150), 0.05  # tokens of a long stream, and seconds from one to the next
_PAUSE_S = 0.05  # mean pause between two requests of a client
_END_S = 120.0  # time limit for the remaining answers, once nothing is broken
_POLLS = 40  # background requests polled per round
_MARK = WORD.encode()


@dataclass(slots=True)
class Endpoint:
    """A gateway's port.

    lives: incremented when the gateway is ready and again just before it is killed; odd = a gateway is alive.
    """

    port: int
    lives: int = 0

    @property
    def lives_now(self) -> bool:
        return self.lives % 2 == 1


@dataclass(slots=True)
class Clients:
    """Clients in a separate thread, which send each request to an endpoint with a live gateway.

    background: share of background requests. pause: mean seconds between two requests of a client. readers: further
    clients, each of one long stream after the other. unfinished: background requests not yet seen as ended. refused:
    number of 429 and 503 responses.
    """

    endpoints: list[Endpoint]
    seed: int
    background: float = 0.6
    pause: float = _PAUSE_S
    readers: int = 0
    history: SoakHistory = field(default_factory=SoakHistory)
    stop: bool = False
    unfinished: set[str] = field(default_factory=set)
    refused: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send requests while the block runs."""
        thread = threading.Thread(target=lambda: asyncio.run(self._all()), name="soak-clients")
        thread.start()
        try:
            yield
        finally:
            self.stop = True
            thread.join()

    async def _all(self) -> None:
        rngs = np.random.default_rng([self.seed, 13]).spawn(_CLIENTS + 1 + self.readers)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            lines = (self._read_streams(http, rng) for rng in rngs[_CLIENTS + 1 :])
            await asyncio.gather(self._watch(rngs[_CLIENTS]), *map(self._client, rngs[:_CLIENTS]), *lines)

    async def _client(self, rng: np.random.Generator) -> None:
        while not self.stop:
            await asyncio.sleep(float(rng.exponential(self.pause)))
            endpoint = self._endpoint(rng)
            if endpoint is None:
                continue
            if rng.random() < self.background:
                await self._background(endpoint)
            else:
                await self._wait_for(endpoint, stream=bool(rng.random() < 0.5))

    def _endpoint(self, rng: np.random.Generator) -> Endpoint | None:
        """Return a random endpoint with a live gateway; None if there is none."""
        open_ = [endpoint for endpoint in self.endpoints if endpoint.lives_now]
        return open_[int(rng.integers(len(open_)))] if open_ else None

    async def _background(self, endpoint: Endpoint) -> None:
        status, body = await exchange(endpoint.port, request("/v1/chat/completions", _ask(background=True)))
        self.refused += status in streams.REFUSED
        if status == 202:
            id = json.loads(body)["id"]
            self.history.looks[id] = []
            self.unfinished.add(id)

    async def _wait_for(self, endpoint: Endpoint, stream: bool) -> None:
        """Send a request and wait; a missing answer counts as lost unless the gateway was killed meanwhile."""
        life = endpoint.lives
        status, body = await exchange(endpoint.port, request("/v1/chat/completions", _ask(stream=stream)))
        if status in streams.REFUSED:
            self.refused += 1
            return
        tokens, failed = body.count(_MARK), status not in (0, 200) or b'"error":' in body
        if failed or tokens >= _TOKENS:
            self.history.whole += 1
            self.history.told += failed
            self.history.doubled += tokens > _TOKENS or body.count(b"[DONE]") > 1
        elif life == endpoint.lives:
            self.history.silent += 1

    async def _read_streams(self, http: aiohttp.ClientSession, rng: np.random.Generator) -> None:
        """Read long streams, every second one with its token ids; all are of the FAKE engine's word."""
        while not self.stop:
            await asyncio.sleep(float(rng.exponential(self.pause)))
            endpoint, tokens = self._endpoint(rng), int(rng.integers(*_LONG))
            if endpoint is None:
                continue
            life, url = endpoint.lives, f"http://127.0.0.1:{endpoint.port}/v1/chat/completions"
            paced = {"fake_tokens": tokens, "fake_delay": _LONG_DELAY_S}
            body = say(max_tokens=tokens, vllm_xargs=paced, return_token_ids=tokens % 2 == 0)
            seen = await streams.read(http, url, body)
            lived = life == endpoint.lives
            if seen.status in streams.REFUSED:
                self.refused += 1
            else:
                self.history.streams[seen.id or str(seen.began)] = judged(seen, tokens, lived), seen.error

    async def _watch(self, rng: np.random.Generator) -> None:
        """Poll the unfinished background requests."""
        while not self.stop:
            await asyncio.sleep(0.1)
            for id in list(self.unfinished)[:_POLLS]:
                if (endpoint := self._endpoint(rng)) is not None:
                    await self._look(id, endpoint)

    async def _look(self, id: str, endpoint: Endpoint) -> None:
        """Poll one background request."""
        get = f"GET /v1/responses/{id} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        status, body = await exchange(endpoint.port, get.encode())
        if status == 404:
            self.history.saw(id, "unknown", "")
        elif status == 200:
            seen = json.loads(body)
            state = seen["status"]
            self.history.saw(id, state, json.dumps([seen.get("response"), seen["error"]]))
            if state != "queued":
                self.unfinished.discard(id)

    async def look_at_all(self) -> None:
        """Poll every background request at every endpoint, until all have ended or time is up."""
        deadline = time.monotonic() + _END_S
        for endpoint in self.endpoints:
            for id in self.history.looks:
                await self._look(id, endpoint)
        while self.unfinished and time.monotonic() < deadline:
            for id in list(self.unfinished):
                await self._look(id, self.endpoints[0])
            await asyncio.sleep(0.2)


async def probe(port: int) -> bool:
    """Return True if the gateway answers a request with all of its tokens."""
    ask = say(max_tokens=1, vllm_xargs={"fake_tokens": 1})
    status, body = await exchange(port, request("/v1/chat/completions", ask))
    return status == 200 and _MARK in body


def _ask(**more: Any) -> dict[str, Any]:
    return say(max_tokens=_TOKENS, vllm_xargs={"fake_tokens": _TOKENS, "fake_delay": _DELAY_S}, **more)


def judged(seen: streams.Stream, tokens: int, lived: bool) -> str:
    """Return the verdict on a FAKE engine's stream of `tokens` tokens.

    One that did not end counts for nothing when its gateway did not live until then ("gateway gone").
    """
    verdict = seen.verdict(seen.text.count(WORD), tokens)
    if verdict == "broken" and not lived:
        return "gateway gone"
    if verdict == "whole" and seen.ids and seen.ids != list(range(FIRST_ID, FIRST_ID + tokens)):
        return "twice" if len(set(seen.ids)) < len(seen.ids) else "lost"
    return verdict
