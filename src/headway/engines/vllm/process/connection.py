"""HTTP to one vLLM instance: requests, control messages, its health and its metrics."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakSet

import aiohttp
import numpy as np

from headway.engines.vllm.process.answers import read_strictly
from headway.engines.vllm.process.api import APIS, EngineApi
from headway.engines.vllm.request_metadata import finite
from headway.errors import EngineError
from headway.events import Learned
from headway.policy.forecast.latency.online import THETA_SIZE
from headway.prefix import CacheReport
from headway.types import Progress

if TYPE_CHECKING:
    from aiohttp.connector import Connection

# vLLM closes idle connections after 5 s; closing them earlier avoids writing into one that is being closed.
_KEEPALIVE = 2.0
_GONE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, TimeoutError)
_CONNECT_S = 5.0
_MOST = 2**20  # bytes of an answer to a question beside the requests
_MOST_LOGS = 16 * 2**20  # of one that holds logs of the scheduler
_LOGS = frozenset(("log", "iterations", "requests", "epoch"))  # what a control message asks for them by

_CONTROLLED = "Only engines with Headway's scheduler inside can be controlled."
_COPIED = 2**16  # bytes of a body; larger ones are written part by part, without a copy that waits, too
Part = bytes | memoryview
# All that a connection raises.
BROKEN = (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, ConnectionError, TimeoutError)


class EngineGone(EngineError):
    """The engine went away in the middle of a request."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"The engine {name} went away.", "Try again; it is being restarted.", status=503)
        self.why = why  # for logs: it may hold addresses, which are not for clients

    @property
    def silent(self) -> bool:
        """Return whether it did not answer in time, rather than breaking off."""
        return isinstance(self.why, TimeoutError)


class EngineTimeout(EngineError):
    """A request was inside the engine for longer than its configuration allows."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The engine {name} did not answer in time.",
            "Ask for less, or raise request_timeout_s in [[engines]].",
            status=504,
            code="engine_timeout",
        )


class MalformedAnswer(EngineError):
    """An engine's answer that is not what its API promises."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"The engine {name} sent an invalid answer: {what}.",
            "Check that a vLLM is at its url, and its log.",
            code="invalid_answer",
        )


def engine_error(name: str, error: BaseException) -> EngineError:
    """Return what an error of the connection (`BROKEN`) means for the request on it."""
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
        return EngineTimeout(name)  # the time limit of the request; the others are those of a connection
    if isinstance(error, _GONE):
        return EngineGone(name, error)
    return MalformedAnswer(name, "it is not HTTP")


class Content(Protocol):
    """The body of a response, as `EngineResponse` reads it."""

    async def read(self, n: int = -1) -> bytes:
        """Return the next bytes, at most `n`, empty at the end."""
        ...

    def at_eof(self) -> bool:
        """Tell whether all of it has been read."""
        ...


class HttpResponse(Protocol):
    """The response of an engine: from aiohttp, or through another proxy (`gateway/picker`)."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content(self) -> Content: ...
    @property
    def content_length(self) -> int | None: ...


class EngineConnection:
    """The connection to one instance.

    url: where it listens; it changes when another process takes its place.
    request_s: the longest that a request may take, None = for ever.
    key: what it asks for, if any. api: what its server offers. tls: for https, None = the system's certificates.
    idle: set when no request is open on it.
    """

    def __init__(
        self,
        id: str,
        url: str,
        request_s: float | None = None,
        key: str | None = None,
        api: EngineApi = APIS["vllm"],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self.id, self.url, self.key, self.api = id, url, key, api
        self.idle = asyncio.Event()
        self.idle.set()
        self._open = 0
        self._request_timeout = aiohttp.ClientTimeout(total=request_s, sock_connect=_CONNECT_S)
        self._session: aiohttp.ClientSession | None = None
        self._sockets = WeakSet[socket.socket]()

    def connect(self) -> None:
        """Make the session; to be called on the event loop, before anything else."""
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEPALIVE, socket_factory=self._new_socket, ssl=self._tls or True
        )
        self._session = aiohttp.ClientSession(
            timeout=self._request_timeout,
            connector=connector,
            read_bufsize=2**18,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"accept-encoding": "identity"},
            response_class=_Response,
        )
        self.use_key(self.key)

    def use_key(self, key: str | None) -> None:
        """Send this key from now on, None = none."""
        self.key = key
        if self._session is not None:
            self._session.headers.pop("authorization", None)
            if key is not None:
                self._session.headers["authorization"] = f"Bearer {key}"

    def _new_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        new = socket.socket(*address[:3])
        self._sockets.add(new)
        return new

    async def disconnect(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    def sever(self) -> None:
        """Break all connections: what waits on one gets EngineGone, and the engine aborts its request.

        What a hung engine sends when it goes on reaches no request any more.
        """
        for one in list(self._sockets):
            with suppress(OSError):  # it is closed already
                one.shutdown(socket.SHUT_RDWR)

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "connect() first"
        return self._session

    async def _ask(
        self, method: str, path: str, seconds: float, message: Mapping[str, Any] | None = None, most: int = _MOST
    ) -> tuple[int, bytes]:
        """Make a call that is no client's request; return status and body.

        EngineGone when it is not answered in time, MalformedAnswer when the answer is too long or not HTTP.
        """
        timeout, parts = aiohttp.ClientTimeout(total=seconds), bytearray()
        try:
            async with self._http.request(
                method, f"{self.url}{path}", json=message, timeout=timeout, allow_redirects=False
            ) as answer:
                async for part in answer.content.iter_any():
                    parts += part
                    if len(parts) > most:
                        raise MalformedAnswer(self.id, f"{path} has more than {most >> 20} MiB")
        except TimeoutError as error:
            raise EngineGone(self.id, error) from error
        except BROKEN as error:
            raise engine_error(self.id, error) from error
        return answer.status, bytes(parts)

    async def lives(self) -> bool:
        """Return whether the instance can still work: vLLM's /health fails once its engine core is dead."""
        return bool(await self.health(3))

    async def health(self, seconds: float) -> bool | None:
        """Return whether `EngineApi.health` reports no failure; None = no answer in time."""
        try:
            status, _ = await self._ask("GET", self.api.health, seconds, most=_MOST_LOGS)
        except EngineError as error:
            return None if isinstance(error, EngineGone) and error.silent else False
        return status == 200

    def open(self, path: str, body: Sequence[Part], more: Mapping[str, str] | None = None) -> OpenRequest:
        """Return a context that posts a request; leaving it closes the response, so that vLLM aborts it.

        body: in parts. more: headers besides those of the body.
        Entering it raises EngineGone when the engine does not answer or the connection breaks, EngineTimeout
        when it takes too long, MalformedAnswer when it does not speak HTTP.
        """
        return OpenRequest(self, path, body, more or {})

    def post(self, path: str, body: Sequence[Part], more: Mapping[str, str]) -> Awaitable[aiohttp.ClientResponse]:
        """Return the response, to be awaited, as aiohttp has it; parameters as `open`."""
        size = sum(map(len, body))
        headers = {"content-type": "application/json", "content-length": str(size), **more}
        data = b"".join(body) if size <= _COPIED else _one_by_one(body)
        return self._http.post(f"{self.url}{path}", data=data, headers=headers, allow_redirects=False)

    def count(self, change: int) -> None:
        """Take note of requests that are opened, or closed (negative)."""
        self._open += change
        if self._open:
            self.idle.clear()
        else:
            self.idle.set()

    async def control(self, message: dict[str, Any], seconds: float = 10) -> dict[str, Any]:
        """Send a message to the running scheduler and return its state.

        EngineError: 400 when the message is wrong, 502 when the engine has no control.
        """
        if not self.api.vllm:
            raise EngineError(f"The engine {self.id} is not a vLLM.", _CONTROLLED)
        most = _MOST if _LOGS.isdisjoint(message) else _MOST_LOGS
        status, text = await self._ask("POST", "/headway/control", seconds, message, most)
        state = _state(text)
        if status == 200 and state is not None:
            return state
        if status == 400 and state is not None:
            raise EngineError(
                f"The engine {self.id} refused the message: {state.get('error')}.",
                "See headway/engines/vllm/plugin/control.py for the messages.",
                status=400,
                kind="invalid_request_error",
            )
        raise EngineError(
            f"The engine {self.id} answered {status} to a control message: {_decode(text[:200])}.", _CONTROLLED
        )

    async def control_model(self, message: dict[str, Any], seconds: float) -> None:
        """Send a message about models (`plugin/models.py`) and wait for its end; EngineError if it fails."""
        status, text = await self._ask("POST", "/headway/model", seconds, message)
        if status != 200:
            raise EngineError(
                f"The engine {self.id} failed to {message['op']}: {_decode(text[:500])}.", "Its log has the trace."
            )

    async def load_adapter(self, name: str) -> bool:
        """Bring a LoRA adapter into memory (`plugin/models.py`); return whether it was there.

        EngineError when it cannot be loaded.
        """
        status, text = await self._ask("POST", "/headway/adapter", 60, {"name": name})
        answer = _state(text)
        if status != 200 or answer is None or "resident" not in answer:
            raise EngineError(
                f"The engine {self.id} did not load the adapter {name}: {_decode(text[:500])}.", "Look into its log."
            )
        return bool(answer["resident"])

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

    async def end_runs(self, runs: Sequence[int]) -> None:
        """Let KV go first that only these application runs have used (`prefix.run_number`); EngineError as `pin`."""
        await self.control({"op": "end", "runs": list(runs), "jobs": False})

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

    async def cached(self, epoch: str, position: int) -> CacheReport | None:
        """Return what its prefix cache has taken in and given up since a report's end; None = it follows none.

        EngineError as `learned`.
        """
        answer = await self.control({"op": "cache", "epoch": epoch, "position": position})
        try:
            if (told := answer["cache"]) is None:
                return None
            return CacheReport.of(told)
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed(error) from error

    async def progress(self, ids: list[str]) -> dict[str, Progress]:
        """Return how far the engine is with requests; those that it does not hold (yet, or any more) are missing.

        Of several choices (`n`) the furthest counts. EngineError as `learned`.
        """
        state, by_id = await self.control({"op": "state", "ids": ids}), dict[str, Progress]()
        try:
            for job in state["jobs"]:
                id, done = str(job["id"]), Progress(int(job["computed"]), int(job["output_tokens"]))
                other = by_id.get(id, Progress(0, 0))
                by_id[id] = Progress(max(done.computed, other.computed), max(done.output_tokens, other.output_tokens))
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed(error) from error
        return {id: by_id[id] for id in ids if id in by_id}

    def _malformed(self, what: object) -> EngineError:
        return EngineError(
            f"The engine {self.id} answered a control message with an unknown state: {what!r}.",
            "Run the same version of Headway in the gateway and in its engines.",
        )

    async def metrics(self, seconds: float) -> str:
        """Return the instance's own Prometheus page, empty when it does not answer in time or is not a vLLM."""
        return _decode(await self.get("/metrics", seconds)) if self.api.vllm else ""

    async def get(self, path: str, seconds: float) -> bytes:
        """Return the body at a path, empty when it is not there or does not come in time."""
        try:
            status, body = await self._ask("GET", path, seconds)
        except EngineError:
            return b""
        return body if status == 200 else b""


class OpenRequest:
    """A request on a connection: a context manager, made by `EngineConnection.open`."""

    __slots__ = ("_connection", "_posting", "_response")

    def __init__(self, connection: EngineConnection, path: str, body: Sequence[Part], more: Mapping[str, str]) -> None:
        self._connection = connection
        self._posting: Callable[[], Awaitable[aiohttp.ClientResponse]] | None = partial(
            connection.post, path, body, more
        )
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        self._connection.count(1)
        try:
            self._response = await self._post()
        except BaseException as error:
            self._connection.count(-1)
            if isinstance(error, BROKEN):
                raise engine_error(self._connection.id, error) from error
            raise
        return self._response

    def _post(self) -> Awaitable[aiohttp.ClientResponse]:
        """Begin to post, and let go of the body, so that it is not kept while the engine works."""
        posting, self._posting = self._posting, None
        assert posting is not None, "it is entered once"
        return posting()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._response is not None, "it was entered"
        try:
            self._response.release()
            await self._response.wait_for_close()
        except BROKEN as broken:
            error = broken
        finally:
            self._connection.count(-1)
        if isinstance(error, BROKEN):
            raise engine_error(self._connection.id, error) from error


class _Response(aiohttp.ClientResponse):
    """A response that does not keep its headers as bytes until its end."""

    async def start(self, connection: Connection) -> Self:
        """Read status and headers; ClientError when these are not ASCII."""
        await super().start(connection)
        if not all(value.isascii() for header in self.raw_headers for value in header):
            raise aiohttp.ClientError("headers that are not ASCII")
        self._raw_headers = ()
        return self


async def _one_by_one(parts: Sequence[Part]) -> AsyncIterator[Part]:
    for part in parts:
        yield part


def _decode(text: bytes) -> str:
    return text.decode(errors="replace")


def _state(text: bytes) -> dict[str, Any] | None:
    try:
        value = read_strictly(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
