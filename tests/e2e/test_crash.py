"""Kill -9 the gateway, then the engine, under load: nothing accepted is lost, nothing answered twice."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.conftest import MARK
from tests.e2e.server import ANSWER_S, Headway, gone
from tests.gateway.gateway import WEB


def body(i: int, **more: Any) -> dict[str, Any]:
    ask = {"prompt": f"Number {i} is", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    return {"model": "smollm2"} | ask | more


def states(queue: Path) -> dict[str, tuple[str, int, str | None]]:
    """Return state, background flag and reason of every accepted request, read from another process."""
    with sqlite3.connect(f"file:{queue}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT id, state, background, reason FROM jobs").fetchall()
    return {id: (state, background, reason) for id, state, background, reason in rows}


def background(server: Headway, count: int) -> list[str]:
    ids = []
    for i in range(count):
        answer = WEB.post(f"{server.url}/v1/completions", json=body(i, background=True), timeout=ANSWER_S)
        assert answer.status_code == 202, answer.text
        ids.append(answer.json()["id"])
    return ids


def completed(server: Headway, ids: list[str]) -> dict[str, Any]:
    """Poll until every background response has an end; return their texts."""
    texts: dict[str, Any] = {}
    deadline = time.monotonic() + ANSWER_S
    while len(texts) < len(ids) and time.monotonic() < deadline:
        for id in ids:
            answer = WEB.get(f"{server.url}/v1/responses/{id}", timeout=ANSWER_S).json()
            if answer["status"] == "completed":
                texts[id] = answer["response"]["choices"][0]["text"]
            assert answer["status"] in ("queued", "completed"), answer
        time.sleep(0.2)
    return texts


async def ask(
    session: aiohttp.ClientSession, url: str, i: int, streaming: asyncio.Event | None
) -> tuple[int | None, bytes]:
    """Send one foreground request; return status and body, status None when the connection broke.

    streaming: set when the stream's first bytes have come; None asks for a whole answer.
    """
    seen, stream = b"", streaming is not None
    # Streams have an SLO: they go first, so the strike finds them in flight.
    headers = {"x-slo-ttft-ms": "60000"} if stream else {}
    try:
        async with session.post(f"{url}/v1/completions", json=body(i, stream=stream), headers=headers) as answer:
            async for chunk in answer.content.iter_any():
                seen += chunk
                if streaming is not None and b"data:" in seen:
                    streaming.set()
            return answer.status, seen
    except aiohttp.ClientError:
        return None, seen


async def load_and(url: str, strike: Any, count: int = 16) -> list[tuple[int | None, bytes]]:
    """Send `count` requests, half of them streaming; strike once a stream has begun; return all answers."""
    streaming = asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
        tasks = [asyncio.create_task(ask(session, url, i, None if i % 2 else streaming)) for i in range(count)]
        await asyncio.wait_for(streaming.wait(), ANSWER_S)
        await asyncio.to_thread(strike)
        return await asyncio.gather(*tasks)


def engine_core(server: Headway) -> psutil.Process:
    """Return the process that computes; its death is the hardest one to notice."""
    cores = [p for p in server.family() if "EngineCore" in " ".join(p.cmdline()) or "EngineCore" in p.name()]
    return cores[0]


async def test_nothing_accepted_is_lost_or_answered_twice(headway: Headway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway serves other modules before and after."""
    server = headway
    monkeypatch.delenv(MARK)  # so it outlives this one
    first = background(server, 8)
    left: list[psutil.Process] = []
    await load_and(server.url, lambda: left.extend(server.kill()))
    assert gone(left) == [], "the engine ends with its gateway"

    before = states(server.queue)
    assert set(first) <= set(before), "accepted means stored"
    finished = {id for id, (state, _, _) in before.items() if state == "done"}
    open_then = {id for id, (state, background, _) in before.items() if state == "open" and not background}
    assert open_then, "the kill found foreground requests in flight"
    server.start()
    server.wait_ready()
    texts = completed(server, first)
    after = states(server.queue)
    assert set(texts) == set(first)
    assert set(after) == set(before), "no request appeared or vanished"
    assert all(after[id][0] == "done" for id in finished | set(first))
    assert all(after[id][0] == "failed" and "client_gone" in str(after[id][2]) for id in open_then)

    second = background(server, 4)
    answers = await load_and(server.url, lambda: engine_core(server).kill())
    whole, streamed = answers[1::2], answers[0::2]
    assert all(status == 200 for status, _ in whole), "no byte was out: the next engine answers them"
    for status, text in streamed:
        assert status == 200
        assert b"[DONE]" in text
        assert b'"error"' not in text, "a stream that had begun goes on once the engine is back"
        assert text.count(b'"finish_reason":"length"') == 1
    page = WEB.get(f"{server.url}/metrics", timeout=ANSWER_S).text
    resumed = next(line for line in page.splitlines() if line.startswith("headway_streams_resumed_total{"))
    assert float(resumed.split()[-1]) > 0, "the kill found streams in flight"
    assert set(completed(server, second)) == set(second)
    ends = Counter(state for state, _, _ in states(server.queue).values())
    assert ends["open"] == 0
    assert completed(server, first) == texts, "what was answered stays as it was answered"
