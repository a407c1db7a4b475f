"""Engines come and go while Headway serves: they are added, drained, removed and replaced.

An engine that leaves gets no new work. What it has not begun to answer goes back to the queue if another engine of
the model takes work; all else ends where it is. Then the engine stops. Of engines to be replaced one leaves at a time,
and only while all others are at work.

`Fleet` has what operators order and what is checked; `OwnFleet` (`own_fleet.py`) carries it out on engines of this
process, `RemoteOrders` (`remote/fleet.py`) has agents carry it out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from headway.config import Config, Engine
from headway.config.engines import expanded
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError, RequestError
from headway.gateway import tasks
from headway.gateway.control.dispatcher import Dispatcher
from headway.gateway.in_flight import RequestState
from headway.gateway.parsing.tokens import TokenCounter
from headway.types import Leaving

POLL_S = 0.1
log = logging.getLogger("headway.gateway")


class Work(Protocol):
    """The requests that are queued for engines or inside them."""

    def needing(self, models: Collection[str], *, now: bool) -> int:
        """Return the number of requests queued for models; now: those inside engines, too."""
        ...

    def inside(self, engine: str) -> int:
        """Return the number of requests inside an engine, as far as they are known here."""
        ...

    async def is_empty(self, engine: EngineView) -> bool:
        """Return whether nothing is inside an engine that takes no new work."""
        ...

    async def take_back(self, engine: EngineView, others: Iterable[EngineView]) -> None:
        """Take back from an engine the requests without a token that others can take."""
        ...

    def cut(self, engine: EngineView) -> None:
        """Take back from an engine all requests without an answer."""
        ...

    def refuse_unavailable(self) -> None:
        """End queued requests for models that no engine has any more."""
        ...


class GatewayWork:
    """The requests of a gateway (`Work`)."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.refuse_unavailable = dispatcher.refuse_unavailable

    def needing(self, models: Collection[str], *, now: bool) -> int:
        states = {RequestState.QUEUED, RequestState.SENT, RequestState.ANSWERING} if now else {RequestState.QUEUED}
        requests = self._dispatcher.in_flight.values()
        return sum(one.request.model in models and one.state in states for one in requests)

    def inside(self, engine: str) -> int:
        return len(self._dispatcher.control.controller.cluster.inside(engine))

    async def is_empty(self, engine: EngineView) -> bool:
        return not self.inside(engine.id) and engine.idle.is_set()

    async def take_back(self, engine: EngineView, others: Iterable[EngineView]) -> None:
        """Take back the requests without a token that others can take.

        An engine without Headway's scheduler does not say whether an answer that is not streamed has begun: it ends.
        What an overflow engine has would be late elsewhere, so it ends there.
        """
        if engine.config.overflow:
            return
        others = (one for one in others if not one.config.overflow)
        takes, unanswered = [one for one in others if one.serves], self._dispatcher.unanswered(engine.id)
        sent = [one for one in unanswered if any(other.takes(one.request.model) for other in takes)]
        try:
            progress = await engine.progress([one.id for one in sent]) if sent else {}
        except EngineError:
            sent, progress = [one for one in sent if one.streams], {}
        begun = {id for id, done in progress.items() if done.output_tokens}
        self._dispatcher.take_back(one for one in sent if one.id not in begun)

    def cut(self, engine: EngineView) -> None:
        self._dispatcher.take_back(self._dispatcher.unanswered(engine.id))


class Fleet(ABC):
    """What may be ordered of engines, by id, and what is refused.

    config: what there is beside the engines; its classes and keys change when a file is read again.
    check: raises ConfigError for a configuration that cannot be served; it may block.
    counters: of the models that are served, kept current; None = nothing is counted here.
    changed: called when engines came, began to leave, or left.
    """

    def __init__(
        self,
        config: Config,
        engines: Mapping[str, EngineView],
        work: Work,
        check: Callable[[Config], None],
        counters: dict[str, TokenCounter] | None,
    ) -> None:
        self.config, self.engines, self._work, self._check, self._counters = config, engines, work, check, counters
        self.changed: Callable[[], None] = lambda: None
        self._used = {*config.named}  # ids; none is given again
        self._lock = asyncio.Lock()
        self._rolls: dict[str, Engine] = {}  # engines to be replaced, with their new settings
        self._orders = Counter[str]()  # so far, by engine: the newest counts
        self._tasks: set[asyncio.Task[None]] = set()
        self._roller: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        """Change engines until the block ends, and with it all changes under way."""
        return self

    async def __aexit__(self, *error: object) -> None:
        await tasks.cancel(*self._tasks)

    @property
    def settings(self) -> dict[str, Engine]:
        """Return the settings of the engines that stay, by id, as they are to be."""
        return {id: self._rolls.get(id, one.config) for id, one in self.engines.items() if one.leaving != "remove"}

    def listed(self) -> list[dict[str, Any]]:
        """Return what operators are told of the engines."""
        return [
            describe(one)
            | {"url": one.config.url, "inside": self._work.inside(id), "to_roll": id in self._rolls}
            | {"waits_for": self._waits_for(id)}
            for id, one in self.engines.items()
        ]

    def _waits_for(self, id: str) -> str | None:
        """Return what an engine that leaves or is to be replaced waits for, None = it does neither."""
        engine = self.engines[id]
        if engine.leaving is not None and not engine.stopped:
            most, inside = engine.config.request_timeout_s, self._work.inside(id)
            return f"the requests inside it ({inside}, each at most {most:g} s)" if inside else "its end"
        if id not in self._rolls:
            return None
        return ", ".join(self._down(id)) or "the one before it"

    def _down(self, id: str) -> list[str]:
        """Return the engines that are to stay and are not at work, other than this one."""
        stay = (one for one in self.engines.values() if one.leaving is None and not one.config.overflow)
        return [one.id for one in stay if not one.serves and one.id != id and self.has_begun(one.id)]

    def has_begun(self, id: str) -> bool:
        """Tell whether an engine was ever started."""
        return True

    # ---- orders

    async def change(
        self,
        add: Sequence[Engine] = (),
        roll: Mapping[str, Engine] | None = None,
        remove: Collection[str] = (),
        *,
        now: bool = False,
        force: bool = False,
        agent: str | None = None,
    ) -> list[str]:
        """Begin to add, replace and remove engines, all or none of them; return the ids of those added.

        roll: their settings from now on, by id; one that still drains, and keeps them, takes work again as it is.
        now: those that are removed stop at once, whatever is inside them. force: also where requests wait for a model
        that no engine will have; these end. agent: that gets those added, None = the only one.
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
                await self._prepare(stay, {id: new[id] for id in new if id in added or self.engines[id].stopped})
            for id in added:
                await self._start(id, new[id], agent)
                self._used.add(id)
            self._orders.update([*roll, *remove])
            for id in remove:
                self._rolls.pop(id, None)
                await self._leave(id, "remove", now=now)
            self._roll_later({id: new[id] for id in roll})
            self._update()
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
            self._orders[id] += 1
            self._rolls.pop(id, None)
            await self._leave(id, "drain", now=False)
            self._update()

    @abstractmethod
    async def _start(self, id: str, settings: Engine, agent: str | None) -> None:
        """Start an engine that was checked."""

    @abstractmethod
    async def _leave(self, id: str, why: Leaving, *, now: bool) -> None:
        """Let an engine leave; one that is leaving already does so for this reason, and at once if so said."""

    def _stay(self, id: str, settings: Engine) -> bool:
        """Let an engine that drains take work again as it is; return whether it does."""
        return False

    @abstractmethod
    async def _replace(self, id: str, settings: Engine) -> bool:
        """Replace an engine; return whether the new one is up, or the old one was removed meanwhile."""

    # ---- checks

    def check_known(self, ids: Iterable[str], *, stays: bool = False) -> None:
        """Raise RequestError (404) for an id that is unknown. stays: also for an engine that is being removed."""
        there: Collection[str] = self.settings if stays else self.engines
        for id in ids:
            if id not in there:
                known = f"Use one of {', '.join(there)}." if there else "There is none."
                problem = f"There is no engine {id[:64]!r}."
                raise RequestError(problem, known, status=404, code="engine_not_found", param="engine")

    def _check_work(
        self, ids: Collection[str], able: Mapping[str, Engine], otherwise: str, *, now: bool, force: bool
    ) -> None:
        """Refuse to let engines go that are the only ones of a model for which requests wait; 409 unless forced.

        able: settings of those that take work afterwards.
        """
        lost = {name for id in ids if not self.engines[id].config.overflow for name in self.engines[id].models.names}
        lost -= {name for one in able.values() if not one.overflow for name in one.served}
        if (count := self._work.needing(lost, now=now)) and not force:
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
        free = (id for number in itertools.count() if (id := f"e{number}") not in self._used | {*self.engines})
        ids = [*roll, *(one.id or next(free) for one in new[len(changed) :])]
        for id in ids[len(changed) :]:
            if id in self.engines or ids.count(id) > 1:
                problem, fix = f"There is an engine {id} already.", "Choose another id, or leave it out."
                raise RequestError(problem, fix, status=409, code="engine_exists", param="id")
        return dict(zip(ids, new, strict=True))

    def _with_old_cards(self, id: str, engine: Engine) -> Engine:
        """Return new settings of an engine, with the GPUs that it has if their number is the same."""
        if engine.gpus is None:
            return engine
        old = self.engines[id].config
        return replace(engine, cards=old.cards if old.gpus == engine.gpus else None)

    async def _prepare(self, stay: Mapping[str, Engine], starting: Mapping[str, Engine]) -> None:
        """Check the fleet as it is to be, and load the tokenizers of new models.

        starting: settings of those that run beside all that run already.
        """
        served = {name for one in stay.values() if not one.overflow for name in (*one.served, *one.adapters)}
        aliases = {alias: model for alias, model in self.config.aliases.items() if model in served}
        # An overflow engine whose model has no other engine left serves nothing until that is back.
        checked = (id for id, one in stay.items() if id in starting or not one.overflow or one.name in served)
        named = tuple(replace(stay[id], id=id) for id in checked)
        own = {one.name for one in named if one.url is None}
        scale = {model: one for model, one in self.config.scale.items() if model in own or not one.starts_engines}
        await asyncio.to_thread(self._check, replace(self.config, engines=named, aliases=aliases, scale=scale))
        await self.count_tokens(stay.values())

    async def count_tokens(self, engines: Iterable[Engine]) -> None:
        """Load the tokenizers of models that are new; those of overflow engines are other engines' models."""
        models = {name: model for engine in engines if not engine.overflow for name, model in engine.served.items()}
        if self._counters is not None:
            for name in models.keys() - self._counters.keys():
                self._counters[name] = await TokenCounter.load(models[name])

    # ---- engines that are replaced

    def _roll_later(self, settings: Mapping[str, Engine]) -> None:
        """Begin to replace engines. Those that were drained serve nothing, and so wait for no others."""
        for id, one in settings.items():
            if self._stay(id, one):
                log.info("engine %s drains no more", id)
            elif self.engines[id].leaving == "drain":
                self._begin(self._start_again(id, one))
            else:
                self._rolls[id] = one
        if self._rolls and (self._roller is None or self._roller.done()):
            self._roller = self._begin(self._roll())

    async def _roll(self) -> None:
        """Replace engines, one after the other; those that are left stay as they are when one does not come up."""
        waiting: str | None = None
        while self._rolls:
            if (id := self._next_roll()) is None:
                first = next(iter(self._rolls))
                if (waits := self._waits_for(first)) != waiting:
                    log.info("engine %s is replaced when these are up: %s", first, waits)
                waiting = waits
                await asyncio.sleep(POLL_S)
            elif not await self._replace(id, self._rolls.pop(id)):
                log.error("engine %s is not replaced; nor are these: %s", id, ", ".join(self._rolls) or "no other")
                self._rolls.clear()
                self._update()

    async def _start_again(self, id: str, settings: Engine) -> None:
        if not await self._replace(id, settings):
            log.error("engine %s is not replaced", id)

    def _next_roll(self) -> str | None:
        """Return an engine that can be replaced now: it is not at work, or all others that stay are."""
        idle = [id for id in self._rolls if not self.engines[id].serves]
        ready = [id for id in self._rolls if not self._down(id)]
        return next(iter(idle + ready), None)

    # ---- beside

    def _left(self) -> None:
        """Forget what belonged to engines that have left."""
        self._rolls = {id: one for id, one in self._rolls.items() if id in self.engines}
        if self._counters is not None:
            for name in {*self._counters} - {name for one in self.engines.values() for name in one.models.names}:
                del self._counters[name]
        self._update()

    def _update(self) -> None:
        self.changed()
        self._work.refuse_unavailable()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
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
