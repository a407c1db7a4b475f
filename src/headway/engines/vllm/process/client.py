"""The gateway's client of one vLLM instance, started and supervised here or attached to by URL.

`VllmEngine` reports when the instance is up and when it is gone; between the two, requests are streamed to it
and control messages reach its scheduler. A child that dies is started again with back-off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from headway.config import Engine
from headway.engines.vllm.process.launch import Child, check_installed, command, environment, free_port
from headway.engines.vllm.request_metadata import finite
from headway.errors import EngineError
from headway.events import Event, InstanceDown, InstanceUp, Learned
from headway.forecast.latency.online import THETA_SIZE
from headway.types import Instance, Progress

log = logging.getLogger("headway.engine")
_POLL = 0.25  # seconds between checks of a child
_BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0)
# vLLM closes idle connections after 5 s; closing them earlier avoids writing into one that is being closed.
_KEEPALIVE = 2.0
_GONE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, TimeoutError)


class EngineGone(EngineError):
    """The engine went away in the middle of a request."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(
            f"The engine {name} went away: {why!r}.", "Try again; it is being restarted.", status=503
        )


class VllmEngine:
    """One instance, by its configuration. on_event: receives InstanceUp and InstanceDown."""

    def __init__(
        self, id: str, config: Engine, recipe: str, log_dir: Path, on_event: Callable[[Event], None]
    ) -> None:
        self.id, self.config, self._recipe, self._on_event = id, config, recipe, on_event
        self._port = config.port or (free_port() if config.url is None else 0)
        self.url = (config.url or f"http://127.0.0.1:{self._port}").rstrip("/")
        self._log = log_dir / f"{id}.log"
        self.child: Child | None = None
        self.up = asyncio.Event()
        self.restarts = 0
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self.failure: EngineError | None = None

    # ---- life

    async def start(self) -> None:
        """Start (or attach to) and supervise the instance in the background; `up` is set when it answers."""
        if self.config.url is None:
            await asyncio.to_thread(check_installed)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**18)
        self._task = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """End the supervision, and the child with all its processes."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self.child is not None:
            await asyncio.to_thread(self.child.stop)
        if self._session is not None:
            await self._session.close()

    async def _supervise(self) -> None:
        tries = 0
        while True:
            began = time.monotonic()
            try:
                await self._bring_up()
                tries = 0
                await self._watch()
            except EngineError as error:
                self.failure = error
                log.error("%s", error)
            except Exception as error:  # supervision must go on after any error, and operators must see it
                log.exception("engine %s", self.id)
                self.failure = EngineError(f"The engine {self.id} failed: {error!r}.", "See the log.")
            self._down()
            wait = _BACKOFF[min(tries, len(_BACKOFF) - 1)]
            tries += 1 if time.monotonic() - began < 60 else -tries
            await asyncio.sleep(wait)
            self.restarts += 1

    async def _bring_up(self) -> None:
        alive = self.child is not None and self.child.alive and await self.lives()
        if self.config.url is None and not alive:
            await _uninterrupted(self._spawn)
        await self._healthy()
        instance = await self._describe()
        self.failure = None
        self.up.set()
        log.info("engine %s is up: %s", self.id, instance)
        self._on_event(InstanceUp(instance))

    def _spawn(self) -> None:
        if self.child is not None:
            self.child.stop(grace=0.0)  # nothing of a dead engine may keep its port or its cores
        argv = command(self.config, self._port, self._recipe)
        self.child = Child(argv, environment(self.config), self._log)
        self.child.start()

    async def _healthy(self) -> None:
        """Wait until the instance answers; EngineError when it dies or takes too long."""
        deadline = time.monotonic() + self.config.start_timeout_s
        while not await self.lives():
            if self.child is not None and not self.child.alive:
                raise self.child.died(self.id)
            if time.monotonic() > deadline:
                waited = f"within {self.config.start_timeout_s:g} s"
                raise EngineError(
                    f"The engine {self.id} did not answer at {self.url} {waited}.",
                    f"Look into {self._log}, or raise start_timeout_s." if self.child else "Is it running?",
                )
            await asyncio.sleep(_POLL)

    async def _watch(self) -> None:
        """Return when the instance stops answering or `lost` is called; EngineError when its child exits."""
        misses = 0
        while misses < 3 and self.up.is_set():
            await asyncio.sleep(_POLL)
            if self.child is not None and not self.child.alive:
                raise self.child.died(self.id)
            misses = 0 if self.child is not None or await self.lives() else misses + 1
        log.error("engine %s does not answer any more", self.id)

    def lost(self) -> None:
        """Treat the instance as down until it answers again, because a request has just failed on it."""
        self._down()

    def _down(self) -> None:
        if self.up.is_set():
            self.up.clear()
            self._on_event(InstanceDown(self.id))

    async def lives(self) -> bool:
        """Tell whether the instance can still work: vLLM's /health fails once its engine core is dead."""
        try:
            async with self._http.get(f"{self.url}/health", timeout=_timeout(3)) as answer:
                return answer.status == 200
        except _GONE:
            return False

    async def _describe(self) -> Instance:
        """Return the instance; without Headway's scheduler inside it is assumed to have KV for all slots."""
        config = self.config
        try:
            state = await self.control({"op": "state"})
            block, total = int(state["block_size"]), int(state["blocks_total"])
        except (EngineError, KeyError, TypeError, ValueError):
            block, total = 16, config.max_running * config.max_model_len // 16
        return Instance(self.id, config.name, config.max_running, total, block, config.max_model_len)

    # ---- work

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "start() first"
        return self._session

    @asynccontextmanager
    async def open(self, path: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a request and yield the response; leaving the block closes it, which makes vLLM abort it.

        Raises EngineGone when the engine does not answer or the connection breaks.
        """
        try:
            headers = {"content-type": "application/json"}
            async with self._http.post(f"{self.url}{path}", data=body, headers=headers) as response:
                yield response
        except _GONE as error:
            raise EngineGone(self.id, error) from error

    async def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message to the running scheduler and return its state.

        EngineError: 400 when the message is wrong, 502 when the engine has no control.
        """
        url = f"{self.url}/headway/control"
        try:
            async with self._http.post(url, json=message, timeout=_timeout(10)) as answer:
                status, text = answer.status, await answer.text(errors="replace")
        except _GONE as error:
            raise EngineGone(self.id, error) from error
        state = _state(text)
        if status == 200 and state is not None:
            return state
        if status == 400 and state is not None:
            raise EngineError(
                f"The engine {self.id} refused the message: {state.get('error')}.",
                "See headway/engines/vllm/plugin/control.py for the messages.",
                status=400, kind="invalid_request_error",
            )  # fmt: skip
        raise EngineError(
            f"The engine {self.id} answered {status} to a control message: {text[:200]}.",
            "Only engines with Headway's scheduler inside can be controlled.",
        )

    async def rerank(self, ranks: Mapping[str, float]) -> None:
        """Set `Jobs.urgency` of requests inside (`types.Rerank`); an engine that is gone has none.

        A request that is still on its way to the engine enters with its new urgency.
        """
        values = {id: finite(rank) for id, rank in ranks.items()}
        with suppress(EngineGone):
            await self.control({"op": "urgency", "values": values, "jobs": False})

    async def learned(self) -> Learned | None:
        """Return what the scheduler inside has learned about its engine, None before it has.

        EngineError when it does not answer or has no such knowledge: stock vLLM learns nothing.
        """
        state = await self.control({"op": "state", "jobs": False})
        try:
            latency = state["latency"]
            if latency is None:
                return None
            theta, cached = np.array(latency["theta"], float), int(latency["cached"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed(error) from error
        if theta.shape != (THETA_SIZE,) or not (np.isfinite(theta) & (theta >= 0)).all():
            raise self._malformed(theta)
        return Learned(self.id, theta, cached)

    async def progress(self, ids: list[str]) -> dict[str, Progress]:
        """Return how far the engine is with requests; those that it does not hold (yet, or any more) lack.

        Of several choices (`n`) that one counts which is furthest. EngineError as `learned`.
        """
        state, found = await self.control({"op": "state", "ids": ids}), dict[str, Progress]()
        try:
            for job in state["jobs"]:
                id, done = str(job["id"]), Progress(int(job["computed"]), int(job["output_tokens"]))
                other = found.get(id, Progress(0, 0))
                found[id] = Progress(
                    max(done.computed, other.computed), max(done.output_tokens, other.output_tokens)
                )
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed(error) from error
        return {id: found[id] for id in ids if id in found}

    def _malformed(self, what: object) -> EngineError:
        return EngineError(
            f"The engine {self.id} answered a control message with an unknown state: {what!r}.",
            "Run the same version of Headway in the gateway and in its engines.",
        )

    async def metrics(self) -> str:
        """Return the instance's own Prometheus page, empty when it does not answer."""
        try:
            async with self._http.get(f"{self.url}/metrics", timeout=_timeout(5)) as answer:
                return await answer.text() if answer.status == 200 else ""
        except _GONE:
            return ""


def _state(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


async def _uninterrupted(work: Callable[[], None]) -> None:
    """Run `work` in a thread to its end even when cancelled, so that no child starts unsupervised."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)
