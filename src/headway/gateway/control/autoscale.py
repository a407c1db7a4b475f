"""Engines of this process start and stop, so that each model has as many as its promises need (docs/scale.md).

The engines of the configuration are used first, then copies of the model's first one. One that is not needed is
drained: it stays known, requests for it may wait, and it is what starts next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace

from headway import clock
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError, HeadwayError
from headway.gateway.control.fleet import Fleet
from headway.policy.scale.rates import STEP_S
from headway.policy.scale.scaling import Scaling

log = logging.getLogger("headway.gateway")


class Autoscaler:
    """Starts and stops the engines of some models by what `scaling` wants."""

    def __init__(self, fleet: Fleet, scaling: Scaling, models: Collection[str]) -> None:
        self._fleet, self._scaling, self._models = fleet, scaling, models
        self._drained: set[str] = set()  # engines that are not needed
        self._starting: dict[str, float] = {}  # engine -> instant of its order
        self._refused: dict[str, str] = {}  # model -> why no engine of it starts, as it was logged

    async def run(self) -> None:
        """Start and stop engines until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            self._note_started()
            for model in self._models:
                if (wanted := self._scaling.current.get(model)) is not None:
                    await self._reach(model, wanted)

    def have(self, model: str) -> int:
        """Return how many engines of a model are up or starting."""
        return len(self._at_work(model))

    def _own(self, model: str) -> list[EngineView]:
        settings = self._fleet.settings
        own = [one for id, one in self._fleet.engines.items() if id in settings and one.config.url is None]
        return [one for one in own if one.config.name == model]

    def _at_work(self, model: str) -> list[EngineView]:
        return [one for one in self._own(model) if one.leaving in (None, "roll") or one.id in self._starting]

    def _note_started(self) -> None:
        queued = {one["id"] for one in self._fleet.listed() if one["to_roll"]}
        for id, began in tuple(self._starting.items()):
            engine = self._fleet.engines.get(id)
            if engine is None or engine.serves or (engine.leaving in ("drain", "remove") and id not in queued):
                del self._starting[id]  # it is up, or was drained or removed meanwhile
            if engine is not None and engine.serves and engine.config.name in self._scaling.scalers:
                self._scaling.scalers[engine.config.name].started(clock.now() - began)

    async def _reach(self, model: str, wanted: int) -> None:
        work = self._at_work(model)
        try:
            for _ in range(wanted - len(work)):
                await self._start(model)
            inside = {one["id"]: one["inside"] for one in self._fleet.listed()}
            unneeded = sorted(work, key=lambda one: (one.serves, inside.get(one.id, 0)))[: max(len(work) - wanted, 0)]
            for one in unneeded:
                await self._fleet.drain(one.id, force=not wanted)
                self._drained.add(one.id)
                self._starting.pop(one.id, None)
                log.info("engine %s is not needed; %s needs %d", one.id, model, wanted)
        except HeadwayError as error:
            if self._refused.get(model) != str(error):
                log.warning("%s needs %d engines and has %d: %s", model, wanted, self.have(model), error)
            self._refused[model] = str(error)
        else:
            self._refused.pop(model, None)

    async def _start(self, model: str) -> None:
        """Start the engine again that stopped last, or else a copy of the first one."""
        own, settings = self._own(model), self._fleet.settings
        if again := [one.id for one in own if one.id in self._drained and one.leaving == "drain"]:
            id = again[-1]
            await self._fleet.change(roll={id: settings[id]})
            self._drained.discard(id)
        elif not own:
            raise EngineError("no engine is left to copy.", "Add one (headway engine add).")
        else:
            (id,) = await self._fleet.change([replace(settings[own[0].id], id=None, port=None)])
        self._starting[id] = clock.now()
        log.info("engine %s starts; %s needs more", id, model)
