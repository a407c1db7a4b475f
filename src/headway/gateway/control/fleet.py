"""The engines of `headway serve` come and go while it serves: they are added, drained, removed and replaced.

An engine that leaves gets no new work. What it has not begun to answer goes back to the queue if another engine of
the model takes work; all else ends where it is. Then the engine stops. Of engines to be replaced one leaves at a time,
and only while all others are at work.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.config import Config, Engine
from headway.config.copies import expanded
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.memory import check_memory
from headway.engines.vllm.process.view import EngineView, Leaving
from headway.errors import EngineError, RequestError
from headway.gateway import tasks
from headway.gateway.control.targets import Paces
from headway.gateway.control.wiring import LocalGateway
from headway.gateway.in_flight import RequestState
from headway.gateway.parsing.tokens import TokenCounter

_POLL_S = 0.1
log = logging.getLogger("headway.gateway")


class Fleet:
    """Changes the engines of this process.

    check: raises ConfigError for a configuration that cannot be served; it may block.
    counters, paces: of the models and engines that are there.
    changed: called when engines came, began to leave, or left.
    """

    def __init__(
        self,
        config: Config,
        wired: LocalGateway,
        check: Callable[[Config], None],
        counters: dict[str, TokenCounter],
        paces: Paces,
    ) -> None:
        self._config, self._wired, self._check = config, wired, check
        self._counters, self._paces = counters, paces
        self.changed: Callable[[], None] = lambda: None
        self._numbers = itertools.count(len(config.engines))  # for ids; none is used again
        self._lock = asyncio.Lock()
        self._rolls: dict[str, Engine] = {}  # engines to be replaced, with their new settings
        self._cut: set[str] = set()  # engines that leave at once
        self._work: set[asyncio.Task[None]] = set()
        self._roller: asyncio.Task[None] | None = None

    @property
    def engines(self) -> dict[str, VllmEngine]:
        return self._wired.agents.engines

    @property
    def settings(self) -> dict[str, Engine]:
        """Return the settings of the engines that stay, by id, as they are to be."""
        return {id: self._rolls.get(id, one.config) for id, one in self.engines.items() if one.leaving != "remove"}

    async def __aenter__(self) -> None:
        """Change engines until the block ends, and with it all changes under way."""

    async def __aexit__(self, *error: object) -> None:
        await tasks.cancel(*self._work)

    # ---- orders

    async def change(
        self,
        add: Sequence[Engine] = (),
        roll: Mapping[str, Engine] | None = None,
        remove: Collection[str] = (),
        *,
        now: bool = False,
        force: bool = False,
    ) -> list[str]:
        """Begin to add, replace and remove engines, all or none of them; return the ids of those added.

        roll: their settings from now on, by id. now: those that are removed stop at once, whatever is inside them.
        force: also where requests wait for a model that no engine will have; these end.
        ConfigError for settings that cannot be served here, RequestError for an id that is unknown (404) or taken, and
        for work that would be lost (409).
        """
        roll = roll or {}
        async with self._lock:
            self.check_known(remove)
            self.check_known(roll, stays=True)
            new = self._placed(add, roll, remove)
            added = [id for id in new if id not in roll]
            stay = {id: one for id, one in (self.settings | new).items() if id not in remove}
            able = {id: one for id, one in stay.items() if id in new or self.engines[id].leaving is None}
            self._check_work([*roll, *remove], able, "they end with status 503", now=now, force=force)
            if new:
                await self._prepare(stay, new, added)
            for id in added:
                await self._wired.agents.start(self._wired.make(id, new[id]))
            for id in remove:
                self._leave(id, "remove", now=now)
            self._rolls |= {id: new[id] for id in roll}
            self._update()
            if self._rolls and (self._roller is None or self._roller.done()):
                self._roller = self._begin(self._roll())
            return added

    async def drain(self, id: str, *, force: bool = False) -> None:
        """Begin to drain an engine: it takes no new work, ends what is inside it, and stops; errors as `change`.

        force: also where requests wait for a model that no other engine has; these go on waiting.
        """
        async with self._lock:
            self.check_known([id], stays=True)
            others = {name: one for name, one in self.settings.items() if name != id}
            able = {name: one for name, one in others.items() if self.engines[name].leaving is None}
            self._check_work([id], able, "they wait until an engine has it", now=False, force=force)
            self._leave(id, "drain", now=False)
            self._update()

    def listed(self) -> list[dict[str, Any]]:
        """Return what is to be told of the engines."""
        cluster = self._wired.control.controller.cluster
        return [
            describe(one) | {"url": one.config.url, "inside": len(cluster.inside(id)), "to_roll": id in self._rolls}
            for id, one in self.engines.items()
        ]

    # ---- checks

    def check_known(self, ids: Iterable[str], *, stays: bool = False) -> None:
        """Raise RequestError (404) for an id that is unknown. stays: also for an engine that is being removed."""
        for id in ids:
            if id not in (self.settings if stays else self.engines):
                known = f"Use one of {', '.join(self.engines)}." if self.engines else "There is none."
                problem = f"There is no engine {id[:64]!r}."
                raise RequestError(problem, known, status=404, code="engine_not_found", param="engine")

    def _check_work(
        self, ids: Collection[str], able: Mapping[str, Engine], otherwise: str, *, now: bool, force: bool
    ) -> None:
        """Refuse to let engines go that the only ones have a model for which requests wait; 409 unless forced.

        able: settings of those that have work afterwards.
        """
        lost = {name for id in ids for name in self.engines[id].models.names}
        lost -= {name for one in able.values() for name in one.served}
        states = {RequestState.QUEUED, RequestState.SENT, RequestState.ANSWERING} if now else {RequestState.QUEUED}
        count = sum(
            one.request.model in lost and one.state in states for one in self._wired.dispatcher.in_flight.values()
        )
        if count and not force:
            raise RequestError(
                f"Requests ({count}) need {', '.join(sorted(lost))}, which no other engine has.",
                f"Add an engine for it first, or repeat this with force=true: {otherwise}.",
                status=409,
                code="work_waiting",
            )

    def _placed(self, add: Sequence[Engine], roll: Mapping[str, Engine], remove: Collection[str]) -> dict[str, Engine]:
        """Return new settings by id, with GPUs that no other engine has; 409 for an id that is taken."""
        kept = [one for id, one in self.settings.items() if id not in roll and id not in remove]
        kept += [one.config for id, one in self.engines.items() if id not in self.settings or id in remove]
        changed = [self._with_old_cards(id, one) for id, one in roll.items()]
        new = expanded([*changed, *(replace(one, cards=None) if one.gpus else one for one in add)], kept)
        ids = [*roll, *(one.id or self._free_id() for one in new[len(changed) :])]
        for id in ids[len(changed) :]:
            if id in self.engines or ids.count(id) > 1:
                fix = "Choose another id, or leave it out."
                raise RequestError(
                    f"There is an engine {id} already.", fix, status=409, code="engine_exists", param="id"
                )
        return dict(zip(ids, new, strict=True))

    def _with_old_cards(self, id: str, engine: Engine) -> Engine:
        """Return new settings of an engine, with the GPUs that it has if their number is the same."""
        if engine.gpus is None:
            return engine
        old = self.engines[id].config
        return replace(engine, cards=old.cards if old.gpus == engine.gpus else None)

    def _free_id(self) -> str:
        return next(id for number in self._numbers if (id := f"e{number}") not in self.engines)

    async def _prepare(self, stay: Mapping[str, Engine], new: Mapping[str, Engine], added: Collection[str]) -> None:
        """Check the fleet as it is to be, and load the tokenizers of new models."""
        served = {name for one in stay.values() for name in (*one.served, *one.adapters)}
        aliases = {alias: model for alias, model in self._config.aliases.items() if model in served}
        named = tuple(replace(one, id=id) for id, one in stay.items())
        await asyncio.to_thread(self._check, replace(self._config, engines=named, aliases=aliases))
        await asyncio.to_thread(check_memory, {id: new[id] for id in added})
        for engine in new.values():
            for name, model in engine.served.items():
                if name not in self._counters:
                    self._counters[name] = await TokenCounter.load(model)

    # ---- engines that leave

    def _leave(self, id: str, why: Leaving, *, now: bool) -> None:
        """Let an engine leave; one that is leaving already does so for this reason, and at once if so said."""
        engine = self.engines[id]
        self._rolls.pop(id, None)
        if now:
            self._cut.add(id)
        if engine.leaving is None or engine.stopped:
            engine.leave(why)
            self._begin(self._end(engine))
        elif engine.leaving != "remove":
            engine.leaving = why

    async def _end(self, engine: VllmEngine) -> None:
        """Stop an engine that leaves when nothing is inside it, and forget one that is removed."""
        await self._empty(engine)
        if engine.leaving != "roll":
            await self._stop(engine)

    async def _stop(self, engine: VllmEngine) -> None:
        await self._wired.agents.stop(engine.id)
        log.info("engine %s has stopped (%s)", engine.id, engine.leaving)
        if engine.leaving != "remove" or self.engines.get(engine.id) is not engine:
            return
        del self.engines[engine.id]
        self._cut.discard(engine.id)
        self._paces.remove(engine.id)
        self._wired.metrics.forget_engine(engine.id)
        for name in {*self._counters} - {name for one in self.engines.values() for name in one.models.names}:
            del self._counters[name]
        self._update()

    async def _empty(self, engine: VllmEngine) -> None:
        """Take back what an engine has not begun to answer, and wait until the rest has ended."""
        inside = self._wired.control.controller.cluster.inside(engine.id)
        if engine.id not in self._cut:
            await self._take_back(engine)
        while len(inside) or not engine.idle.is_set():
            if engine.id in self._cut:
                break
            await asyncio.sleep(_POLL_S)
        if engine.id in self._cut:
            self._wired.dispatcher.take_back(self._wired.dispatcher.unanswered(engine.id))
            engine.sever()

    async def _take_back(self, engine: VllmEngine) -> None:
        """Take back the requests without a token that another engine can take.

        An engine without Headway's scheduler does not say whether an answer that is not streamed has begun: it ends.
        """
        takes = [one for one in self.engines.values() if one.serves]
        sent = [
            one
            for one in self._wired.dispatcher.unanswered(engine.id)
            if any(other.takes(one.request.model) for other in takes)
        ]
        try:
            progress = await engine.progress([one.id for one in sent]) if sent else {}
        except EngineError:
            sent, progress = [one for one in sent if one.streams], {}
        begun = {id for id, done in progress.items() if done.output_tokens}
        self._wired.dispatcher.take_back(one for one in sent if one.id not in begun)

    # ---- engines that are replaced

    async def _roll(self) -> None:
        """Replace engines, one after the other; those that are left stay as they are when one does not come up."""
        while self._rolls:
            if (id := self._next_roll()) is None:
                await asyncio.sleep(_POLL_S)
            elif not await self._replace(self.engines[id], self._rolls.pop(id)):
                log.error("engine %s does not come up; not replaced: %s", id, ", ".join(self._rolls) or "no other")
                self._rolls.clear()
                self._update()

    def _next_roll(self) -> str | None:
        """Return an engine that can be replaced now: it is not at work, or all others that stay are."""
        stays = [one for one in self.engines.values() if one.leaving is None]
        idle = [id for id in self._rolls if not self.engines[id].serves]
        ready = [id for id in self._rolls if all(one.serves for one in stays if one.id != id)]
        return next(iter(idle + ready), None)

    async def _replace(self, old: VllmEngine, settings: Engine) -> bool:
        """Let an engine leave and start another one in its place; return whether that is up, or removed meanwhile."""
        old.leave("roll")
        self._update()
        await self._empty(old)
        async with self._lock:
            if old.leaving != "roll":  # it was drained or removed meanwhile
                await self._stop(old)
                return True
            await self._wired.agents.stop(old.id)
            new = self._wired.make(old.id, settings)
            await self._wired.agents.start(new)
            self._update()
        while True:
            if (state := new.state) != "starting":
                return state != "failed"
            await asyncio.sleep(_POLL_S)

    # ---- beside

    def _update(self) -> None:
        self.changed()
        self._wired.dispatcher.refuse_unavailable()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a change of the engines failed", exc_info=task.exception())


def describe(engine: EngineView) -> dict[str, Any]:
    """Return what operators are told of an engine."""
    return {
        "id": engine.id,
        "object": "headway.engine",
        "state": engine.state,
        "leaving": engine.leaving,
        "model": engine.models.current,
        "models": list(engine.models.names),
        "loading": engine.loading,
        "up": engine.up.is_set(),
        "restarts": engine.restarts,
        "assumed": engine.instance.assumed,
        "about": engine.about,
        "error": None if engine.failure is None else str(engine.failure),  # with the end of a log, paths and addresses
    }
