"""Engines of this process start and stop, so that each model has as many as its promises need (docs/scale.md).

The engines of the configuration are used first, then copies of the model's first one. One that is not needed is
drained: it stays known, requests for it may wait, and it is what takes work again, or starts, next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from subprocess import DEVNULL, STDOUT

from headway import clock
from headway.config import Scale
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError, HeadwayError
from headway.gateway import tasks
from headway.gateway.control.fleet import Fleet
from headway.policy.scale.rates import STEP_S
from headway.policy.scale.scaler import Member, Scaling, State, changes

log = logging.getLogger("headway.gateway")


class Autoscaler:
    """Starts and stops the engines of some models as `scaling` decides."""

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
        if len(own) >= self._scaling.scalers[model].limits.max:  # drained ones count, and hold their cores
            raise EngineError("operators have drained engines.", "Start them (headway engine roll), or remove them.")
        (id,) = await self._fleet.change([replace(self._fleet.settings[own[0].id], id=None, port=None)])
        return id

    def _started(self, id: str, model: str) -> None:
        self._starting[id] = clock.now()
        log.info("engine %s starts; %s needs more", id, model)


_POLL_S, _LONGEST_S = 1.0, 60.0  # between two looks at the number; doubled with each failure
_LIMIT_S = 300.0  # for a command
_TAIL = 1000  # bytes of its output that are logged
Wanted = Callable[[], Mapping[str, int]]


def commands(scale: Mapping[str, Scale], wanted: Wanted) -> list[tasks.Loop]:
    """Return what runs the commands of models. wanted: returns the numbers of engines, by model, as far as known."""
    return [partial(_follow, model, one.command, wanted) for model, one in scale.items() if one.command is not None]


async def _follow(model: str, command: Sequence[str], wanted: Wanted) -> None:
    """Run a model's command for each new number until it has succeeded with that; one at a time, until cancelled."""
    done, pause = None, _POLL_S
    while True:
        await asyncio.sleep(pause)
        number = wanted().get(model)
        if number in (None, done):
            pause = _POLL_S
            continue
        words = [word.replace("{model}", model).replace("{wanted}", str(number)) for word in command]
        try:
            await _run(words)
        except EngineError as error:
            pause = min(2 * pause, _LONGEST_S)
            log.error("%s needs %s engines: %s It is run again in %g s.", model, number, error.message, pause)
        else:
            done, pause = number, _POLL_S
            log.info("%s needs %s engines: %s has exited with status 0", model, number, words[0])


async def _run(words: Sequence[str]) -> None:
    """Run a command to its end; EngineError unless it succeeds. Ended early, it is killed with its process group."""
    with tempfile.TemporaryFile() as out:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=DEVNULL, stdout=out, stderr=STDOUT, start_new_session=True
            )
        except OSError as error:
            raise EngineError(f"{words[0]} cannot be run: {error.strerror}.", "Correct scale.command.") from error
        try:
            async with asyncio.timeout(_LIMIT_S):
                status = await process.wait()
        except TimeoutError:
            raise EngineError(f"{words[0]} has not ended within {_LIMIT_S:g} s.", "Look into it.") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status:
            out.seek(max(out.seek(0, os.SEEK_END) - _TAIL, 0))
            said = out.read().decode(errors="replace").strip()
            raise EngineError(f"{words[0]} has exited with status {status} ({said or 'no output'}).", "Look into it.")
