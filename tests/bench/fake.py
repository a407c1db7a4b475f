"""A fake endpoint: a local HTTP server that speaks OpenAI's event stream from a script, without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

METRICS = """# HELP vllm:num_preemptions_total Cumulative number of preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m, {a}"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""


@dataclass
class Fake:
    """What the fake endpoint does: `words` chunks, the first after `wait` s, the others `gap` s apart.

    hold: answers begin when so many are open at once. script: the way of failing per prompt ("" = none).
    """

    words: int = 4
    wait: float = 0.0
    gap: float = 0.0
    hold: int = 0
    script: Callable[[str], str] = lambda prompt: ""
    metrics: str | None = METRICS
    counters: dict[str, float] = field(default_factory=dict)  # what a counting scheduler says
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    came: asyncio.Event = field(default_factory=asyncio.Event)  # a request did
    done: asyncio.Event = field(default_factory=asyncio.Event)  # an answer is whole

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        return await self._answer(request, body, body["messages"][0]["content"], _chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        return await self._answer(request, body, body["prompt"], _completion)

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics) if self.metrics is not None else web.Response(status=404)

    async def control(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"op": "state"}
        return web.json_response({"counters": self.counters})

    async def _note(self, request: web.Request) -> dict[str, Any]:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.bodies.append(await request.json())
        self.came.set()
        return self.bodies[-1]

    async def _answer(self, request, body, prompt, shape) -> web.StreamResponse:
        how = self.script(prompt)
        if how in ("429", "500"):
            error = {"error": {"message": "no room: try later", "type": "x"}}
            return web.json_response(error, status=int(how))
        if how == "html":
            return web.Response(status=502, text="<h1>bad gateway</h1>")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open >= self.hold:
            self.enough.set()
        try:
            return await self._stream(request, body, how, shape)
        finally:
            self.open -= 1

    async def _stream(self, request, body, how, shape) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        if shape is _chat:
            await _event(out, shape({"role": "assistant", "content": ""}, None))
        await out.write(b": a comment\r\n\r\n")
        await asyncio.wait_for(self.enough.wait(), 10)
        await asyncio.sleep(self.wait)
        for number in range(0 if how in ("silent", "empty") else self.words):
            if number and self.gap:
                await asyncio.sleep(self.gap)
            if how == "drop" and number == 2:
                request.transport.close()
                return out
            if how == "error" and number == 2:
                await _event(out, {"error": {"message": "engine died"}})
            if how == "garbage" and number == 2:
                await out.write(b"data: {not json\n\n")
            await _event(out, shape({"content": "word "}, "length" if number == self.words - 1 else None))
        if how == "silent":
            await _event(out, shape({"content": ""}, "stop"))
        if how != "no usage":
            output_tokens = {"silent": 1, "empty": 0}.get(how, 2 * self.words)  # two tokens a chunk
            await _event(
                out, {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": output_tokens}}
            )
        if how != "short":
            await out.write(b"data: [DONE]\n\n")
            self.done.set()
        return out


def _chat(delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def _completion(delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": delta["content"], "finish_reason": reason}]}


async def _event(out: web.StreamResponse, data: dict[str, Any]) -> None:
    text = b"data: " + json.dumps(data).encode() + b"\n\n"
    await out.write(text[:9])  # chunks of HTTP are not events: one event in two writes
    await out.write(text[9:])


@asynccontextmanager
async def serving(fake: Fake) -> AsyncIterator[Fake]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.chat)
    app.router.add_post("/v1/completions", fake.completions)
    app.router.add_get("/metrics", fake.page)
    app.router.add_post("/headway/control", fake.control)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()
