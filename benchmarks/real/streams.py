"""A client of one stream, and what it has got in the end: for benchmarks in which engines and gateways go away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import aiohttp

PATIENCE_S = 120.0  # a stream that has not ended by then is broken
REFUSED = (429, 503)  # to be sent again
Verdict = Literal["whole", "broken", "lost", "twice"]


@dataclass(slots=True)
class Stream:
    """What a client has got.

    began: when the request was sent (`time.monotonic`). id: the gateway's, "" = it did not answer.
    times: of the events with text. ids: of the tokens, if asked for. ends: finish reasons. done: how many [DONE].
    tokens: of the answer, by its usage. error: why it ended before its end, "" = it did not.
    """

    began: float
    status: int = 0
    id: str = ""
    times: list[float] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    done: int = 0
    tokens: int | None = None
    error: str = ""

    @property
    def ended(self) -> float:
        return self.times[-1] if self.times else self.began

    @property
    def silence(self) -> tuple[float, float]:
        """Return the longest silence after the first token, from and until when."""
        return max(pairwise(self.times), key=lambda ends: ends[1] - ends[0], default=(self.ended, self.ended))

    def verdict(self, has: int, due: int) -> Verdict:
        """Judge it. has: the tokens or characters that the client has; due: those that it should have."""
        if self.error or self.status != 200 or not self.done:
            return "broken"
        if has > due or self.done > 1 or len(self.ends) > 1:
            return "twice"
        return "lost" if has < due or not self.ends else "whole"

    def add(self, event: Mapping[str, Any], now: float) -> None:
        """Add an event of a chat or a completion."""
        if "error" in event:
            self.error = str(event["error"])
            return
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        for choice in event["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.text += text
            self.ids += choice.get("token_ids") or ()
            self.ends += filter(None, [choice.get("finish_reason")])
            if text or choice.get("token_ids"):
                self.times.append(now)


async def read(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Stream:
    """Send a request and read its stream to the end, however it ends."""
    seen = Stream(time.monotonic())
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with asyncio.timeout(PATIENCE_S), http.post(url, json={**body, **usage}) as answer:
            seen.status, seen.id = answer.status, answer.headers.get("x-request-id", "")
            if answer.status != 200:
                seen.error = await answer.text()
                return seen
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    seen.done += 1
                elif line.startswith(b"data: "):
                    seen.add(json.loads(line[6:]), time.monotonic())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:  # of the way, or the answer
        seen.error = repr(error)
    return seen
