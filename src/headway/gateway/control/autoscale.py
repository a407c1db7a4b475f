"""Engines of this process start and stop, so that each model has as many as its promises need (docs/scale.md).

The engines of the configuration are used first, then copies of the model's first one. One that is not needed is
drained: it stays known, requests for it may wait, and it is what takes work again, or starts, next.
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
from headway.policy.scale.changes import Member, State, changes
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
        return sum(one.state in (State.UP, State.STARTING) for one in self._members(model))

    def _own(self, model: str) -> list[EngineView]:
        settings = self._fleet.settings
        own = [one for id, one in self._fleet.engines.items() if id in settings and one.config.url is None]
        return [one for one in own if one.config.name == model]

    def _members(self, model: str) -> list[Member]:
        """Return the engines that follow the number wanted; an operator may have drained others."""
        listed = {one["id"]: one for one in self._fleet.listed()}
        found = []
        for one in self._own(model):
            if one.leaving in (None, "roll") or one.id in self._starting or listed[one.id]["to_roll"]:
                state = State.UP if one.serves else State.STARTING
            elif one.leaving == "drain" and one.id in self._drained:
                state = State.OFF if one.stopped else State.DRAINING
            else:
                continue
            found.append(Member(one.id, state, listed[one.id]["inside"], self._starting.get(one.id, 0.0)))
        return found

    def _note_started(self) -> None:
        leaving = {id for id, one in self._fleet.engines.items() if one.leaving is not None}
        self._drained &= leaving  # an operator may have let others take work again
        queued = {one["id"] for one in self._fleet.listed() if one["to_roll"]}
        for id, began in tuple(self._starting.items()):
            engine = self._fleet.engines.get(id)
            if engine is None or engine.serves or (engine.leaving in ("drain", "remove") and id not in queued):
                del self._starting[id]  # it is up, or was drained or removed meanwhile
            if engine is not None and engine.serves and engine.config.name in self._scaling.scalers:
                self._scaling.scalers[engine.config.name].started(clock.now() - began)

    async def _reach(self, model: str, wanted: int) -> None:
        found = changes(self._members(model), wanted)
        try:
            for id in found.undrain:
                await self._again(id)
                log.info("engine %s takes work again; %s needs %d", id, model, wanted)
            for id in found.start:
                await self._again(id)
                self._started(id, model)
            for _ in range(found.missing):
                self._started(await self._copy(model), model)
            for id in found.stop:
                await self._fleet.drain(id, force=not wanted)
                self._drained.add(id)
                self._starting.pop(id, None)
                log.info("engine %s is not needed; %s needs %d", id, model, wanted)
        except HeadwayError as error:
            if self._refused.get(model) != str(error):
                log.warning("%s needs %d engines and has %d: %s", model, wanted, self.have(model), error)
            self._refused[model] = str(error)
        else:
            self._refused.pop(model, None)

    async def _again(self, id: str) -> None:
        """Let an engine that drains take work again, or start one that has stopped."""
        await self._fleet.change(roll={id: self._fleet.settings[id]})
        self._drained.discard(id)

    async def _copy(self, model: str) -> str:
        """Start a copy of the model's first engine; return its id."""
        if not (own := self._own(model)):
            raise EngineError("no engine is left to copy.", "Add one (headway engine add).")
        if len(own) >= self._scaling.scalers[model].limits.max:  # one that is drained has its place, and its cores
            raise EngineError("operators have drained engines.", "Start them (headway engine roll), or remove them.")
        (id,) = await self._fleet.change([replace(self._fleet.settings[own[0].id], id=None, port=None)])
        return id

    def _started(self, id: str, model: str) -> None:
        self._starting[id] = clock.now()
        log.info("engine %s starts; %s needs more", id, model)
