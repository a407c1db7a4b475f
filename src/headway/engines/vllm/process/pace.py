"""Measures the pace of an engine that has just started, with a few requests before any client's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from headway.engines.vllm.process.connection import BROKEN, EngineConnection, EngineTimeout, engine_error
from headway.errors import EngineError

PROMPT = 256  # tokens of the prompt whose first token is timed
_SHORT = 32  # tokens of the others' prompts
_TOKENS, _FEWEST = 12, 4  # of an answer
_SECONDS = 1.0  # that a measurement takes, about
_LIMIT_S = 30.0  # for all of it
_IDS = 100, 1000  # of tokens that every vocabulary has, none of them special


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """The latencies of an idle engine, as a client sees them.

    ttft: seconds to the first token of a prompt of `PROMPT` tokens.
    tpot: seconds per token of a single stream. together: of the slowest of `streams` streams at once.
    """

    ttft: float
    tpot: float
    streams: int
    together: float

    def __str__(self) -> str:
        ttft, tpot, together = (f"{1000 * seconds:,.0f} ms" for seconds in (self.ttft, self.tpot, self.together))
        alone = f"a prompt of {PROMPT} tokens takes {ttft}, then a token {tpot}"
        return f"{alone}, with {self.streams} streams at once {together}"

    def slowest(self, other: MeasuredPace) -> MeasuredPace:
        """Return the pace that both engines can keep."""
        slower = max(self, other, key=lambda one: one.together)
        return MeasuredPace(max(self.ttft, other.ttft), max(self.tpot, other.tpot), slower.streams, slower.together)


async def measure(engine: EngineConnection, model: str, max_running: int, max_model_len: int) -> MeasuredPace:
    """Measure an engine without other requests, in a few seconds; a quarter of its batch runs at once.

    EngineError when it does not answer as it should, or takes too long.
    """
    probe = _Probe(engine, model, Random(0))
    try:
        async with asyncio.timeout(_LIMIT_S):
            half, streams = max_model_len // 2, max(max_running // 4, 1)
            _, first = await probe.stream(min(_SHORT, half), 3)  # the first request of all is slow
            ttft, tpot = await probe.stream(min(PROMPT, half), _tokens(first))
            together = await probe.streams(streams, min(_SHORT, half), _tokens(2 * tpot))
    except TimeoutError as error:
        raise EngineTimeout(engine.id) from error
    return MeasuredPace(ttft, tpot, streams, max(together, tpot))


def _tokens(seconds: float) -> int:
    """Return the number of tokens to measure with, when each takes `seconds`."""
    return min(max(int(_SECONDS / max(seconds, 1e-3)), _FEWEST), _TOKENS)


@dataclass(frozen=True, slots=True)
class _Probe:
    """Sends prompts of random tokens, which no prefix cache knows, for answers of exact length."""

    engine: EngineConnection
    model: str
    rng: Random

    async def streams(self, count: int, prompt: int, tokens: int) -> float:
        """Return the seconds per token of the slowest of several streams at once."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.stream(prompt, tokens)) for _ in range(count)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return max(task.result()[1] for task in tasks)

    async def stream(self, prompt: int, tokens: int) -> tuple[float, float]:
        """Return the seconds to the first token, and per token after it. EngineError when there are none."""
        ids = [self.rng.randrange(*_IDS) for _ in range(prompt)]
        began = time.monotonic()
        times = await self._times(ids, tokens)
        if not times:
            raise EngineError(f"The engine {self.engine.id} answered a probe without a token.", "See its log.")
        return times[0] - began, (times[-1] - times[0]) / max(tokens - 1, 1)

    async def _times(self, ids: Sequence[int], tokens: int) -> list[float]:
        """Return when events with tokens came."""
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        times = list[float]()
        async with self.engine.open("/v1/completions", [json.dumps(body).encode()]) as response:
            if response.status != 200:
                answer = await response.content.read(300)
                raise EngineError(f"The engine {self.engine.id} refused a probe: {answer!r}.", "See its log.")
            try:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        times.append(time.monotonic())
            except BROKEN as error:
                raise engine_error(self.engine.id, error) from error
        return times
