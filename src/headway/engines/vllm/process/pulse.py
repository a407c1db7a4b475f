"""Health checks of one instance: its API server answers /health, its engine core a control message.

vLLM's /health fails once the engine core is dead, but not while it hangs. Questions to Headway's scheduler
are answered by the core itself, between two iterations; so a long prefill is silent no longer than one
iteration.
"""

from __future__ import annotations

import asyncio

from headway.engines.vllm.process.connection import EngineConnection, EngineGone
from headway.errors import EngineError

_PAUSE, _PAUSE_AFTER_MISS = 1.0, 0.25  # seconds between two questions
_MISSES = 3  # refusals in a row; one alone may be a connection that was just being closed


async def until_lost(engine: EngineConnection, health_s: float, core_s: float | None) -> str:
    """Ask an instance until it gives no sign of life any more; return what it failed to do.

    health_s: the longest silence of its API server.
    core_s: the longest silence of its core, None = it runs without Headway's scheduler.
    """
    checks = [asyncio.create_task(_server(engine, health_s))]
    if core_s is not None:
        checks.append(asyncio.create_task(_core(engine, core_s)))
    try:
        ended, _ = await asyncio.wait(checks, return_when=asyncio.FIRST_COMPLETED)
        return ended.pop().result()
    finally:
        for task in checks:
            task.cancel()
        await asyncio.gather(*checks, return_exceptions=True)


async def _server(engine: EngineConnection, silence: float) -> str:
    misses = 0
    while misses < _MISSES:
        healthy = await engine.health(silence)
        if healthy is None:
            return f"did not answer {engine.api.health} within {silence:g} s"
        misses = 0 if healthy else misses + 1
        await asyncio.sleep(engine.api.pause_s if healthy else _PAUSE_AFTER_MISS)
    return "does not answer any more"


async def _core(engine: EngineConnection, silence: float) -> str:
    while True:
        await asyncio.sleep(_PAUSE)
        try:
            await engine.control({"op": "state", "jobs": False}, silence)
        except EngineGone as error:
            if error.silent:
                return f"has hung: its core ended no iteration within {silence:g} s"
            # Its API server is gone, or it closed this connection: /health shows which.
        except EngineError:
            continue  # it has answered
