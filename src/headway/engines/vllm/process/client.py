"""The gateway's client of one vLLM instance, started and supervised here or attached to by URL.

`VllmEngine` reports when the instance is up and when it is gone; between the two, requests are streamed to it
and control messages reach its scheduler. A child that dies is started again with back-off.

One task, the supervisor, owns the child: it starts it, watches it, and carries out model swaps (`Swap`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from headway.config import Engine
from headway.config.keys import reveal
from headway.engines.vllm.process.children import Children
from headway.engines.vllm.process.connection import EngineConnection, EngineGone
from headway.engines.vllm.process.exits import BadArguments
from headway.engines.vllm.process.launch import Child, check_installed
from headway.engines.vllm.process.limits import (
    describe,
    instance_of,
    limit_warnings,
    read_fatal,
    read_limits,
    read_state,
)
from headway.engines.vllm.process.models import EngineModels, SwapReport, Way
from headway.engines.vllm.process.pace import MeasuredPace, measure
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError
from headway.events import Event, InstanceDown, InstanceUp, Swapped, Warmed
from headway.types import Instance, Leaving

log = logging.getLogger("headway.engine")
_LOG_EVERY = 10.0  # seconds between log messages while it waits
_POLL = 0.25  # seconds between checks of a child
_LINE = 200  # characters of a line of a child's log
T = TypeVar("T")
_ATTACHED = "Start that vLLM, or correct its url."
_BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0)


class VllmEngine(EngineView):
    """One instance, by its configuration.

    host: the address at which one that is started here listens.
    on_event: receives InstanceUp and InstanceDown, Swapped and Warmed. on_swap: how each swap ended.
    on_pace: receives the pace of one that is started here, measured once before it takes requests; None =
        it is not measured.
    """

    models: EngineModels

    def __init__(
        self,
        id: str,
        config: Engine,
        recipe: str,
        log_dir: Path,
        on_event: Callable[[Event], None],
        on_swap: Callable[[str, SwapReport], None] = lambda id, report: None,
        *,
        host: str = "127.0.0.1",
        on_pace: Callable[[str, MeasuredPace], None] | None = None,
    ) -> None:
        self._children = Children(id, config, recipe, log_dir, host)
        key = None if config.api_key is None else reveal(config.api_key, f"{id}.api_key")
        url, key = (self._children.url, self._children.secret) if config.url is None else (config.url, key)
        super().__init__(id, config, url, key)
        self._on_event, self._on_swap, self._on_pace = on_event, on_swap, on_pace
        self.models = EngineModels(config)
        self._held = self.models.held
        self._log = log_dir / f"{id}.log"
        self._wake = asyncio.Event()  # a swap was ordered
        self._announced: Instance | None = None
        self._has_scheduler = False  # Headway's scheduler is inside
        self._served = False  # it has been up, so its arguments are good
        self._task: asyncio.Task[None] | None = None
        self._side_tasks: set[asyncio.Task[None]] = set()

    @property
    def child(self) -> Child | None:
        return self._children.current

    # ---- life

    async def start(self) -> None:
        """Start (or attach to) and supervise the instance in the background; `up` is set when it answers."""
        if self.config.url is None:
            await asyncio.to_thread(check_installed)
        self.connect()
        self._task = asyncio.create_task(self._supervise())

    def leave(self, why: Leaving) -> None:
        """Take no new work from now on; what is inside goes on. It is not started again, whatever happens to it."""
        self.leaving, self._announced = why, None
        self._end_side_tasks()
        self._on_event(InstanceDown(self.id))

    def stay(self) -> bool:
        """Take new work again instead of leaving; return False if it must be started for that."""
        if self.stopped or not self.up.is_set() or self.loading is not None:
            return False
        self.leaving = None
        self._announce(InstanceUp)
        return True

    async def stop(self) -> None:
        """End the supervision, and the children with all their processes."""
        self.up.clear()
        self._end_side_tasks()
        work = [task for task in (self._task, *self._side_tasks) if task is not None]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)  # they report their errors themselves
        await asyncio.to_thread(self._held.close)
        await asyncio.to_thread(self._children.stop)
        await self.disconnect()
        self.stopped = True

    async def _supervise(self) -> None:
        while True:
            try:
                await self._bring_up()
                while await self._watch():
                    await self._swap()
            except EngineError as error:
                self.failure = error
                log.error("%s", error)
                if isinstance(error, BadArguments) and not self._served:
                    self.given_up = True
                    return
            except Exception as error:  # supervision must go on after any error, and operators must see it
                log.exception("engine %s", self.id)
                self.failure = EngineError(f"The engine {self.id} failed: {error!r}.", "See the log.")
            self.loading = None
            self._wake.clear()
            self._down()
            if self.leaving is not None:
                return
            self.tries += 1
            await asyncio.sleep(_BACKOFF[min(self.tries, len(_BACKOFF)) - 1])
            self.restarts += 1

    async def _bring_up(self) -> None:
        if self.config.url is None and not (self._children.alive and await self.lives()):
            model = self.models.current
            warm, began = await asyncio.to_thread(self.models.is_warm, model), time.monotonic()
            await self._start(model)
            self.models.started(warm, time.monotonic() - began)
        await self._wait_until_healthy()
        await self._serve(InstanceUp)

    async def _measure(self) -> None:
        """Measure the pace at the first start; while others use the engine, too, it would mean nothing."""
        notify, self._on_pace = self._on_pace, None
        if notify is None or self.config.url is not None or self.config.runner == "pooling":
            return
        one, began = self.instance, time.monotonic()
        try:
            pace = await measure(self, self.models.current, one.max_running, one.max_model_len)
        except EngineError as error:
            log.warning("engine %s: its pace is not known: %s", self.id, error)
        else:
            log.info("engine %s: measured in %.1f s: %s", self.id, time.monotonic() - began, pace)
            notify(self.id, pace)

    async def _serve(self, event: type[InstanceUp] | type[Swapped]) -> None:
        """Announce that the instance takes work from now on."""
        await self._describe()
        await self._measure()
        if self.models.swaps:
            await asyncio.to_thread(self.models.survey)
        self.failure, self.tries, self.loading = None, 0, None
        if self.leaving is not None:  # it was ordered meanwhile
            return
        self.up.set()
        self._served = True
        self._announce(event)

    def _announce(self, event: type[InstanceUp] | type[Swapped]) -> None:
        self._announced = one = self.models.announce(self.instance)
        log.info("engine %s is up with %s: %s%s", self.id, one.model, self.about, _others(one))
        self._on_event(event(one))
        if self.models.swaps and self.loading is None:  # the event may have ordered the next swap
            self._start_side_task(self._follow_models())

    async def _wait_until_healthy(self) -> None:
        """Wait until the instance answers; EngineError when it dies or takes too long."""
        began = last = time.monotonic()
        deadline = began + self.config.start_timeout_s
        while not await self.lives():
            self._children.check()
            if time.monotonic() > last + _LOG_EVERY:
                last = time.monotonic()
                log.info(
                    "engine %s: no answer at %s yet, after %d s%s", self.id, self.url, last - began, self._last_words()
                )
            if time.monotonic() > deadline:
                waited = f"within {self.config.start_timeout_s:g} s"
                raise EngineError(
                    f"The engine {self.id} did not answer at {self.url} {waited}.",
                    f"Look into {self._log}, or raise start_timeout_s." if self.child else _ATTACHED,
                )
            await asyncio.sleep(_POLL)

    def _last_words(self) -> str:
        """Return the last line of the child's log: what it does while nothing else shows it."""
        lines = self.child.tail().splitlines() if self.child else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), None)
        return "" if last is None else f"; its log ends with: {last[:_LINE]}"

    async def _watch(self) -> bool:
        """Return True when a swap is ordered, False when `lost` is called.

        EngineError when its child exits, or the instance gives no sign of life any more.
        """
        core = self.config.silence_timeout_s if self._has_scheduler else None
        pulse = asyncio.create_task(until_lost(self, self.config.health_timeout_s, core))
        try:
            while self.up.is_set():
                if await _wait_within(self._wake, _POLL):
                    self._wake.clear()
                    return True
                self._children.check()
                if pulse.done():
                    await self._give_up(pulse.result())
        finally:
            pulse.cancel()
            await asyncio.gather(pulse, return_exceptions=True)
        log.error("engine %s does not answer any more", self.id)
        return False

    async def _give_up(self, why: str) -> NoReturn:
        """Free the requests of an instance that has hung, and end its child; raises EngineError.

        A child that only stood still must not go on beside the one that takes its place.
        """
        self._down()
        self.sever()
        if self.child is not None:
            await _run_to_end(partial(self._children.end_current, grace=0.0))
        raise EngineError(
            f"The engine {self.id} {why}.",
            _ATTACHED if self.config.url else f"It is started again. Look into {self._log}.",
        )

    def lost(self) -> None:
        """Treat the instance as down until it answers again, because a request has just failed on it."""
        if self.loading is None:  # otherwise the swap finds out
            self._down()

    def _down(self) -> None:
        self.up.clear()
        self._end_side_tasks()
        if self._announced is not None:
            self._announced = None
            self._on_event(InstanceDown(self.id))

    async def _describe(self) -> Instance:
        """Ask the instance what it is."""
        state = await self._state()
        self._has_scheduler = state is not None
        self.prefix_caching = bool((state or {}).get("prefix_caching"))
        self.fatal = await read_fatal(self, self.config, state, self.config.health_timeout_s)
        limits = await read_limits(self, state, self.config.health_timeout_s)
        for problem, fix in limit_warnings(self.config, limits):
            log.warning("engine %s %s", self.id, f"{problem} {fix}".rstrip())
        instance = instance_of(self.id, self.models.current, self.config, limits)
        self.instance = replace(
            instance,
            prefix_caching=self.prefix_caching or state is None,
            own_order=state is None or bool(state.get("own_order")),
            continues=bool((state or {}).get("continues")),
        )
        self.about = describe(self.instance, state)
        return self.instance

    async def _state(self) -> dict[str, Any] | None:
        """Return the state of Headway's scheduler, None = it is not inside."""
        try:
            return await read_state(self, self.config.silence_timeout_s)
        except EngineGone as error:
            if error.silent:
                await self._give_up("did not answer its first question")
            raise

    # ---- models

    def begin_swap(self, model: str) -> None:
        """Order a swap: `takes` is False from now on; ends with `Swapped`, or `InstanceUp` when it failed.

        The caller takes back the requests whose answers have not begun. Streams that have begun end first. Until
        then no other order is obeyed.
        """
        if self.loading is not None:
            log.warning("engine %s is loading %s, so an order to load %s is ignored", self.id, self.loading, model)
            return
        self.loading = model
        self._end_side_tasks()  # the load has the disk for itself
        self._wake.set()

    async def _swap(self) -> None:
        """Carry out the swap that was ordered; EngineError when in the end no model is served."""
        model, before = self.loading, self.models.current
        assert model is not None, "begin_swap() first"
        if not await self._drained():
            log.warning("engine %s keeps %s: streams have not ended", self.id, before)
            self.models.postpone(model)
            await self._serve(InstanceUp)
            return
        began = time.monotonic()  # the engine is empty from here on
        way = await asyncio.to_thread(self.models.way, model)
        warm = await asyncio.to_thread(self.models.is_warm, model)
        try:
            await self._load(model, way)
        except EngineError as error:
            report = SwapReport(model, way, warm, time.monotonic() - began, error)
            log.error("engine %s goes back to %s: %s was not loaded: %s", self.id, before, model, error)
            try:
                await self._start(before)
            finally:
                self._report(report)  # from now on it counts how long the model is not offered
            await self._serve(InstanceUp)
        else:
            self._report(SwapReport(model, way, warm, time.monotonic() - began))
            await self._serve(Swapped)

    def _report(self, report: SwapReport) -> None:
        self.models.report(report)
        self._on_swap(self.id, report)

    async def _drained(self) -> bool:
        """Wait until no request is open; False when that takes too long. EngineError when the child exits."""
        deadline = time.monotonic() + self.config.drain_timeout_s
        while not await _wait_within(self.idle, _POLL):
            self._children.check()
            if time.monotonic() > deadline:
                return False
        if not await self.lives():  # its death may have ended the streams, which says nothing about the model
            raise EngineGone(self.id, "it died while streams ended")
        return True

    async def _load(self, model: str, way: Way) -> None:
        """Load a model in the place of the current one; EngineError when it does not answer with it."""
        before, self.models.current = self.models.current, model
        if way == "in_place":
            message = {"op": "load", "path": self.models.path(model), "name": model}
            await self.control_model(message, self.config.start_timeout_s)
            return
        self.up.clear()
        if way == "sleep":
            await self.control_model({"op": "sleep"}, self.config.start_timeout_s)
            size = self.models.size(before)
            await _run_to_end(partial(self._children.add_sleeping, before, size, self._held))
        await self._start(model)

    async def _start(self, model: str) -> None:
        """Start a child with a model, or wake the one that sleeps with it; end the one that runs."""
        self.models.current = model
        self.up.clear()
        woken = await _run_to_end(partial(self._children.take_sleeping, model, self._held))
        if not woken:
            log.info("engine %s starts; its log is %s", self.id, self._log)
            await _run_to_end(partial(self._children.replace, self.models.config_of(model)))
        self.url = self._children.url
        await self._wait_until_healthy()
        if woken:
            try:
                await self.control_model({"op": "wake"}, self.config.start_timeout_s)
            except EngineError:
                await asyncio.to_thread(self._children.end_current)  # it answers /health, half asleep
                raise

    def begin_warm(self, model: str) -> None:
        """Bring a model's weights into host memory; ends with `Warmed`, unless a swap begins before."""
        self._start_side_task(self._warm(model))

    async def _warm(self, model: str) -> None:
        await asyncio.to_thread(self.models.hold, model)
        self._refresh(always=True)

    async def _follow_models(self) -> None:
        """Hold the current model in host memory, too, and offer again what failed when its time has come."""
        await asyncio.to_thread(self.models.hold, self.models.current)
        self._refresh()
        while (wait := self.models.next_offer) is not None:
            await asyncio.sleep(wait + 0.01)
            self._refresh()

    def _refresh(self, *, always: bool = False) -> None:
        """Report what the instance can load, and how fast, when that has changed."""
        if self._announced is None or self.loading is not None:
            return
        instance = self.models.announce(self._announced)
        if always or instance != self._announced:
            self._announced = instance
            self._on_event(Warmed(instance))

    def _start_side_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the supervisor until it ends, the model changes or the instance goes down."""
        task = asyncio.create_task(work)
        self._side_tasks.add(task)
        task.add_done_callback(self._side_task_ended)

    def _side_task_ended(self, task: asyncio.Task[None]) -> None:
        self._side_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("engine %s", self.id, exc_info=task.exception())

    def _end_side_tasks(self) -> None:
        self.models.stop_reading()
        for task in self._side_tasks:
            task.cancel()


def _others(instance: Instance) -> str:
    others = ", ".join(other.model for other in instance.loadable)
    return f"; it can load {others}" if others else ""


async def _wait_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; False when it has not come in time."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


async def _run_to_end(work: Callable[[], T]) -> T:
    """Run `work` in a thread to its end even when cancelled, so that no child starts unsupervised."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


_PAUSE, _PAUSE_AFTER_MISS = 1.0, 0.25  # seconds between two questions
_MISSES = 3  # refusals in a row; one alone may be a connection that was just being closed


async def until_lost(engine: EngineConnection, health_s: float, core_s: float | None) -> str:
    """Ask an instance until it gives no sign of life any more; return what it failed to do.

    vLLM's /health fails once the engine core is dead, but not while it hangs. Questions to Headway's scheduler are
    answered by the core itself, between two iterations; so a long prefill is silent no longer than one iteration.

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
