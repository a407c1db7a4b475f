"""HTTP to one vLLM instance: requests, control messages, its health and its metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import numpy as np

from headway.engines.vllm.request_metadata import finite
from headway.errors import EngineError
from headway.events import Learned
from headway.forecast.latency.online import THETA_SIZE
from headway.types import Progress

# vLLM closes idle connections after 5 s; closing them earlier avoids writing into one that is being closed.
_KEEPALIVE = 2.0
_GONE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, TimeoutError)


_COPIED = 2**16  # bytes of a body; larger ones are written part by part, without a copy that waits, too
Part = bytes | memoryview


class EngineGone(EngineError):
    """The engine went away in the middle of a request."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"The engine {name} went away.", "Try again; it is being restarted.", status=503)
        self.why = why  # for logs: it may tell addresses, which are not for clients


class EngineConnection:
    """The connection to one instance.

    url: where it listens; it changes when another process takes its place. key: what it asks for, if any.
    idle: set when no request is open on it.
    """

    def __init__(self, id: str, url: str, key: str | None = None) -> None:
        self.id, self.url, self._key = id, url, key
        self.idle = asyncio.Event()
        self.idle.set()
        self._open = 0
        self._session: aiohttp.ClientSession | None = None

    def connect(self) -> None:
        """Make the session; to be called on the event loop, before anything else."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE)
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=connector, read_bufsize=2**18, headers=headers
        )

    async def disconnect(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "connect() first"
        return self._session

    async def lives(self) -> bool:
        """Tell whether the instance can still work: vLLM's /health fails once its engine core is dead."""
        try:
            async with self._http.get(f"{self.url}/health", timeout=_timeout(3)) as answer:
                return answer.status == 200
        except _GONE:
            return False

    @asynccontextmanager
    async def open(self, path: str, body: Sequence[Part]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a request and yield the response; leaving the block closes it, which makes vLLM abort it.

        body: in parts.
        Raises EngineGone when the engine does not answer or the connection breaks.
        """
        self._open += 1
        self.idle.clear()
        try:
            size = sum(map(len, body))
            headers = {"content-type": "application/json", "content-length": str(size)}
            data = b"".join(body) if size <= _COPIED else _one_by_one(body)
            async with self._http.post(f"{self.url}{path}", data=data, headers=headers) as response:
                yield response
        except _GONE as error:
            raise EngineGone(self.id, error) from error
        finally:
            self._open -= 1
            if not self._open:
                self.idle.set()

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

    async def tell_model(self, message: dict[str, Any], seconds: float) -> None:
        """Send a message about models (`plugin/models.py`) and wait for its end; EngineError if it fails."""
        url = f"{self.url}/headway/model"
        try:
            async with self._http.post(url, json=message, timeout=_timeout(seconds)) as answer:
                status, text = answer.status, await answer.text(errors="replace")
        except _GONE as error:
            raise EngineGone(self.id, error) from error
        if status != 200:
            raise EngineError(
                f"The engine {self.id} failed to {message['op']}: {text[:500]}.", "Its log has the trace."
            )

    async def load_adapter(self, name: str) -> bool:
        """Bring a LoRA adapter into memory (`plugin/adapters.py`); return whether it was there.

        EngineError when it cannot be loaded.
        """
        url = f"{self.url}/headway/adapter"
        try:
            async with self._http.post(url, json={"name": name}, timeout=_timeout(60)) as answer:
                status, text = answer.status, await answer.text(errors="replace")
        except _GONE as error:
            raise EngineGone(self.id, error) from error
        said = _state(text)
        if status != 200 or said is None or "resident" not in said:
            raise EngineError(
                f"The engine {self.id} did not load the adapter {name}: {text[:500]}.", "Look into its log."
            )
        return bool(said["resident"])

    async def rerank(self, ranks: Mapping[str, float]) -> None:
        """Set `Jobs.urgency` of requests inside (`types.Rerank`); an engine that is gone has none.

        A request that is still on its way to the engine enters with its new urgency.
        """
        values = {id: finite(rank) for id, rank in ranks.items()}
        with suppress(EngineGone):
            await self.control({"op": "urgency", "values": values, "jobs": False})

    async def pin(self, chain: str, tokens: Sequence[int]) -> int:
        """Hold what is cached of prompts that begin with these tokens; return how many tokens that is.

        EngineError when it does not answer or does not know pins.
        """
        answer = await self.control({"op": "pin", "chain": chain, "tokens": list(tokens), "jobs": False})
        try:
            return int(answer["pinned"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed(error) from error

    async def unpin(self, chain: str) -> None:
        """Give back what `pin` holds; EngineError as there."""
        await self.control({"op": "unpin", "chain": chain, "jobs": False})

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


async def _one_by_one(parts: Sequence[Part]) -> AsyncIterator[Part]:
    for part in parts:
        yield part


def _state(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)
