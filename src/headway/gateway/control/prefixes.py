"""Common prefixes of a unit's prompts, with their KV in the engines before the next prompt needs it.

A unit's prompts begin alike: the system prompt, the tools, the examples. The gateway learns that beginning
from the latest runs. To warm it, an engine computes it as a request of the lowest rank and holds it by a pin
(`engines/vllm/plugin/pinned_prefixes.py`) until a request of the unit has its first token, or the unit is
not expected any more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import uuid
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from headway import clock
from headway.cluster.backends.port import HeldWorker
from headway.engines.vllm.process.view import EngineView
from headway.engines.vllm.request_metadata import write_metadata
from headway.errors import EngineError
from headway.gateway.control.prewarm import Warmer
from headway.gateway.parsing.requests import PATHS
from headway.policy.apps.run import place_of
from headway.stages import Prewarm
from headway.types import Forecast, Ints, Request

_UNITS = 256  # that are known, of all tenants; the one that came up longest ago is forgotten
_RUNS = 4  # whose prompts are compared
_TOKENS = 8192  # of a prompt that are kept
_BLOCKS = 2  # full blocks of KV that a prefix must have to be worth it
_LEAST_S = 1.0  # that an engine has to compute a prefix
_LAST = 2**31 - 1  # `priority` of such a request: after all others
log = logging.getLogger("headway.gateway")


@dataclass(slots=True)
class _PrefixUnit:
    """The latest prompt of a unit in each of the latest runs that visited it."""

    model: str
    prompts: OrderedDict[str, Ints] = field(default_factory=OrderedDict)


class PrefixBook:
    """The beginnings of prompts, by tenant and unit ("application/unit"). Memory is bounded (32 MiB)."""

    def __init__(self) -> None:
        self._units: OrderedDict[tuple[str, str], _PrefixUnit] = OrderedDict()

    def learn(self, request: Request, ids: Sequence[int]) -> None:
        """Take note of a prompt. ids: its tokens."""
        (tenant, app, run), unit = place_of(request)
        key = tenant, f"{app}/{unit}"
        entry = self._units.pop(key, None)
        if entry is None or entry.model != request.model:
            entry = _PrefixUnit(request.model)
        self._units[key] = entry
        entry.prompts.pop(run, None)
        entry.prompts[run] = np.array(ids[:_TOKENS], np.int32)
        if len(entry.prompts) > _RUNS:
            entry.prompts.popitem(last=False)
        if len(self._units) > _UNITS:
            self._units.popitem(last=False)

    def model(self, tenant: str, name: str) -> str | None:
        """Return the model that a unit's requests are for, None = it is not known."""
        entry = self._units.get((tenant, name))
        return None if entry is None else entry.model

    def common(self, tenant: str, name: str) -> Ints:
        """Return the longest beginning that the latest prompts share; none before two runs have had one."""
        entry = self._units.get((tenant, name))
        prompts = [] if entry is None else list(entry.prompts.values())
        if len(prompts) < 2:
            return np.empty(0, np.int32)
        shared = prompts[0]
        for prompt in prompts[1:]:
            size = min(shared.size, prompt.size)
            other = np.flatnonzero(shared[:size] != prompt[:size])
            shared = shared[: int(other[0]) if other.size else size]
        return shared


class PrefixWarmer(Warmer):
    """Warms prefixes on every engine that serves the unit's model and caches prefixes.

    On all of them, because the planner decides only when a request comes which one gets it.
    """

    def __init__(self, engines: Mapping[str, EngineView], book: PrefixBook) -> None:
        self._engines, self._book = engines, book
        self._held: dict[tuple[str, str], asyncio.Event] = {}

    def key(self, command: Prewarm) -> Hashable | None:
        """Return tenant and unit; None = its prompts are not known, or no engine caches prefixes."""
        key = command.tenant, command.resource.name
        model = self._book.model(*key)
        return key if model is not None and self._engines_for(model) else None

    def used(self, request: Request) -> None:
        """Release the prefix of the request's unit: the request now holds its blocks."""
        if self._held:
            (tenant, app, _), unit = place_of(request)
            event = self._held.get((tenant, f"{app}/{unit}"))
            if event is not None:
                event.set()

    async def warm(self, command: Prewarm) -> HeldWorker | None:
        """Compute and pin the prefix where it is not cached. EngineError when no engine could."""
        key = command.tenant, command.resource.name
        model, tokens = self._book.model(*key), self._book.common(*key)
        if model is None:
            return None
        chain, seconds = f"prewarm {key[0]}/{key[1]}", max(command.until - clock.now(), _LEAST_S)
        pins = [
            _Pin(engine, chain, model, tokens[: tokens.size - tokens.size % block].tolist())
            for engine in self._engines_for(model)
            if tokens.size >= _BLOCKS * (block := engine.instance.block_size)
        ]
        warmed = await _warm_all(pins, seconds)
        if not any(fresh is not None for fresh in warmed):
            return None
        used = self._held[key] = asyncio.Event()
        return HeldWorker(used, partial(self._release, key, pins), fresh=True in warmed)

    def _engines_for(self, model: str) -> list[EngineView]:
        return [
            engine
            for engine in self._engines.values()
            if engine.up.is_set() and engine.prefix_caching and engine.takes(model)
        ]

    async def _release(self, key: tuple[str, str], pins: Sequence[_Pin]) -> None:
        self._held.pop(key, None)
        await asyncio.gather(*(pin.release() for pin in pins))


@dataclass(frozen=True, slots=True)
class _Pin:
    """A prefix on one engine. tokens: of full blocks."""

    engine: EngineView
    chain: str
    model: str
    tokens: list[int]

    async def warm(self, seconds: float) -> bool | None:
        """Hold the prefix, computed now (True) or cached already (False).

        None = the engine was busy with other work all the time.
        """
        if await self.engine.pin(self.chain, self.tokens) == len(self.tokens):
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._compute()
        except TimeoutError:
            log.debug("engine %s had no room for %s", self.engine.id, self.chain)
            return None
        # What leaves no room for the longest request is not held; it is still cached.
        await self.engine.pin(self.chain, self.tokens)
        return True

    async def _compute(self) -> None:
        """Let the engine compute the prefix, as a best-effort request that ranks behind all others."""
        request = Request(
            f"prewarm-{uuid.uuid4().hex[:20]}",
            self.model,
            len(self.tokens),
            1,
            clock.now() + self.engine.ahead,
            priority=_LAST,
        )
        body = {
            "model": self.model,
            "prompt": self.tokens,
            "max_tokens": 1,
            "temperature": 0,
            "priority": _LAST,
            "vllm_xargs": write_metadata(request, Forecast(np.ones(1)), math.inf),
        }
        async with self.engine.open(PATHS["completions"], [json.dumps(body).encode()]) as response:
            answer = await response.content.read(2**16)  # all of one with one token
            if response.status != 200:
                raise EngineError(
                    f"The engine {self.engine.id} did not compute a prefix: {answer[:300]!r}.",
                    f"Look into the log of {self.engine.id}.",
                )

    async def release(self) -> None:
        """Give the blocks back; an engine that is gone holds none."""
        try:
            await self.engine.unpin(self.chain)
        except EngineError as error:
            log.debug("engine %s keeps its pin of %s: %s", self.engine.id, self.chain, error)


async def _warm_all(pins: Sequence[_Pin], seconds: float) -> list[bool | None]:
    """Warm on all engines at once; if none could, or this is cancelled, nothing stays pinned."""
    try:
        warmed = await asyncio.gather(*(pin.warm(seconds) for pin in pins), return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.gather(*(pin.release() for pin in pins))
        raise
    done = [one for one in warmed if not isinstance(one, BaseException)]
    errors = [one for one in warmed if isinstance(one, BaseException)]
    if not any(one is not None for one in done):
        await asyncio.gather(*(pin.release() for pin in pins))
        if errors:
            raise errors[0]
    for error in errors:
        log.warning("a prefix is warm on other engines only: %s", error)
    return done
