"""The FAKE engine of `testing.fake_engine`, served in this process on a free port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn

from testing.fake_engine import FakeEngine

METRICS = """# HELP vllm:num_preemptions_total Cumulative number of preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m, {a}"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""


def fake(tokens: int = 4, **more: object) -> FakeEngine:
    """Return a fake engine whose chunks have two tokens each and whose events come in two HTTP chunks."""
    return FakeEngine(tokens, **{"chunk_tokens": 2, "split": True, "metrics": METRICS, **more})


async def until(true: Callable[[], object]) -> None:
    """Wait until something is true, for at most 10 s."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[str]:
    """Serve the engine and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(engine, lifespan="off", log_config=None, access_log=False, log_level="critical")
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task
