"""Reports ended application runs to engines, which then evict KV first that only these runs have used.

A run that is silent for too long has ended, too, but may go on: its KV keeps its place in the engines' order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError
from headway.policy.apps.account import EndedRun
from headway.policy.apps.run import Key, place_of
from headway.prefix import run_number
from headway.types import Request

log = logging.getLogger("headway.gateway")


class RunEnds:
    """Remembers which engines had requests of each live run, and reports its end to them."""

    def __init__(self, engines: Mapping[str, EngineView]) -> None:
        self._engines = engines
        self._of: dict[Key, set[str]] = {}
        self._untold: dict[str, list[int]] = {}  # by engine
        self._changed = asyncio.Event()

    def sent(self, request: Request, engine: str) -> None:
        """Take note of a request that goes to an engine; its run is live until `ended`."""
        if request.stage is not None:
            self._of.setdefault(place_of(request)[0], set()).add(engine)

    def ended(self, run: EndedRun) -> None:
        """Report a run soon whose client said that it ends."""
        for engine in self._of.pop(run.key, ()):
            if run.told:
                self._untold.setdefault(engine, []).append(run_number(run.key))
                self._changed.set()

    async def run(self) -> None:
        """Report ends until cancelled, in one message to each engine at a time."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            untold, self._untold = self._untold, {}
            await asyncio.gather(*(self._tell(name, runs) for name, runs in untold.items()))

    async def _tell(self, name: str, runs: Sequence[int]) -> None:
        """Report runs to an engine; if it does not answer, its KV keeps the order of last use."""
        engine = self._engines.get(name)
        if engine is None or not engine.up.is_set() or not engine.prefix_caching:
            return
        try:
            await engine.end_runs(runs)
        except EngineError as error:
            log.debug("engine %s keeps the KV of runs that have ended: %s", name, error)
