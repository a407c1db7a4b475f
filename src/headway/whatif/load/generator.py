"""An open-loop load generator for any OpenAI endpoint, similar to `vllm bench serve`.

Each call is sent at its planned time regardless of earlier calls, and its latencies count from that time. As the
generator shares the machine with the engine, it builds bodies before the start, parses JSON once per chunk, and
records its own lateness (sent - at).
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headway.addresses import certificate_hint
from headway.errors import ConfigError
from headway.whatif.load.records import Call, Counters, Record

Endpoint = Literal["chat", "completions"]
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_COUNTED = re.compile(rb"^(?:(vllm:num_preemptions)|headway_engine_(\w+))_total(?:\{.*\})? (\S+)", re.MULTILINE)
# uvicorn closes idle connections after 5 s; closing them earlier avoids writing into a closing connection.
_KEEPALIVE = 2.0
_SPARE_FILES = 256
_CUT_OFF = "cancelled: the run ended before the response"


async def run(
    url: str,
    model: str,
    calls: Sequence[Call],
    *,
    api_key: str | None = None,
    endpoint: Endpoint = "chat",
    send_priority: bool = True,
    progress: bool = True,
    patience: float = 3600.0,
    stream: bool = True,
) -> list[Record]:
    """Send every call at its time (seconds from now) to `url`; return the records by planned arrival.

    url: address of the server, with or without /v1
    send_priority: put the class's priority in the body (vLLM refuses priorities other than 0 unless it schedules
        by priority)
    progress: show a bar on stderr
    patience: time limit of a call in seconds
    stream: stream the answers

    Refusals, 5xx, disconnects and timeouts are recorded, never raised. When cancelled (Ctrl-C) it returns the
    records so far, with open calls as "cancelled".
    """
    loop = asyncio.get_running_loop()
    tally = Tally()
    shots = [Shot(call, _body(model, call, endpoint, send_priority, stream), tally) for call in calls]
    shots.sort(key=lambda shot: shot.call.at)
    with _bar(len(calls), tally) if progress else nullcontext():
        try:
            async with session(len(calls), patience, api_key) as http:
                await _feed(http, _base(url) + _PATHS[endpoint], shots, loop.time())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()  # return the records instead
    return [shot.record() for shot in shots if shot.sent is not None]


def was_cut_off(record: Record) -> bool:
    """Tell whether the run ended (Ctrl-C) before this request completed."""
    return record.error == _CUT_OFF


async def scrape(url: str) -> dict[str, float]:
    """Return the sums of counters over all engines, from /metrics of `url`.

    These are preemptions, and a gateway's `headway_engine_NAME_total` as NAME. If /metrics cannot be read within 5
    seconds, the result is empty. ConfigError for a certificate that is not trusted, as every call would fail.
    """
    try:
        limit = aiohttp.ClientTimeout(total=5.0)
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(_base(url) + "/metrics") as page:
            text = await page.read() if page.status == 200 else b""
        return _totals(text)
    except aiohttp.ClientSSLError as error:
        raise ConfigError(f"The certificate at {url} is not accepted: {error}.", certificate_hint()) from error
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return {}


def _totals(text: bytes) -> dict[str, float]:
    found: dict[str, float] = {}
    for stock, ours, value in _COUNTED.findall(text):
        name = "preemptions" if stock else ours.decode()
        found[name] = found.get(name, 0.0) + float(value)
    return found


def gained(before: Counters, after: Counters) -> dict[str, float]:
    """Return the growth of each counter between two readings, without counters that only one of them has."""
    return {name: after[name] - before[name] for name in after if name in before}


# ---- sending


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    call: Call,
    start: float,
    *,
    headers: Mapping[str, str],
    endpoint: Endpoint = "chat",
) -> Record:
    """Send a call now, without streaming, and return its record; a failure is recorded, as in `run`.

    http: a session from `session`
    start: time of the event loop from which the record's seconds count, as does `call.at`, the planned time
    headers: headers besides those of its class and SLO
    """
    shot = Shot(call, _body(model, call, endpoint, True, False), Tally())
    await _send(http, _base(url) + _PATHS[endpoint], shot, start, headers)
    return shot.record()


async def _feed(http: aiohttp.ClientSession, url: str, shots: Sequence[Shot], start: float) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for shot in shots:
            early = start + shot.call.at - loop.time()
            if early > 0:
                await asyncio.sleep(early)
            group.create_task(_send(http, url, shot, start, {}))


async def _send(http: aiohttp.ClientSession, url: str, shot: Shot, start: float, more: Mapping[str, str]) -> None:
    clock = asyncio.get_running_loop().time
    shot.begin(clock() - start)
    try:
        headers = _headers(shot.call) | dict(more)
        async with http.post(url, data=shot.body, headers=headers) as answer:
            shot.status, shot.id = answer.status, answer.headers.get("x-request-id")
            if answer.status == 200 and answer.content_type == "application/json":
                shot.whole(await answer.read(), clock() - start)
            elif answer.status == 200:
                await listen(answer, shot, clock, start)
            else:
                shot.error = _refusal(answer.status, await answer.content.read(4096))
    except asyncio.CancelledError:
        shot.error = _CUT_OFF
        raise
    except Exception as error:  # a failed call does not stop the others
        shot.error = f"{type(error).__name__}: {error}"
    finally:
        shot.end(clock() - start)


async def listen(answer: aiohttp.ClientResponse, shot: Shot, clock: Callable[[], float], start: float) -> None:
    """Read a stream to its end into the shot, in seconds of `clock` after `start`."""
    rest = b""
    async for piece in answer.content.iter_any():
        now = clock() - start
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            shot.read(line, now)
    shot.read(rest, clock() - start)


def session(calls: int, patience: float = 3600.0, api_key: str | None = None) -> aiohttp.ClientSession:
    """Return a session with a socket for every call, so that the generator itself never queues."""
    _allow_files(calls + _SPARE_FILES)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=max(calls, 1), limit_per_host=0, keepalive_timeout=_KEEPALIVE),
        timeout=aiohttp.ClientTimeout(total=patience),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
    )


def _headers(call: Call) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "x-llm-d-inference-objective": call.tier}
    for name in ("ttft", "tpot", "e2e", "itl"):
        limit = getattr(call.slo, name)
        if limit is not None:
            headers[f"x-slo-{name}-ms"] = f"{limit * 1000:.3f}".rstrip("0").rstrip(".")
    return headers


def _body(model: str, call: Call, endpoint: Endpoint, send_priority: bool, stream: bool) -> bytes:
    body: dict[str, Any] = {
        "model": call.model or model,
        "max_tokens": call.max_tokens,
        "temperature": 0,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": call.prompt}]
    else:
        body["prompt"] = call.prompt
    if call.ignore_eos:
        body["ignore_eos"] = True
    if send_priority:
        body["priority"] = call.priority
    return json.dumps(body).encode()


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _refusal(status: int, body: bytes) -> str:
    try:
        data = json.loads(body)
        text = data.get("error", data).get("message")
    except (ValueError, AttributeError):
        text = body.decode(errors="replace")
    return f"HTTP {status}: {str(text)[:200]}"


def _allow_files(wanted: int) -> None:
    """Raise the soft limit of open files as far as allowed; an overload needs more than the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    target = wanted if hard == unlimited else min(wanted, hard)
    if soft != unlimited and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


# ---- one call


@dataclass(slots=True)
class Tally:
    """Progress of a run, for its bar."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    changed: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Shot:
    """One call in flight; times as in `Record`.

    latest: time of the newest chunk with tokens or with the end of the response
    begun: called at the first visible token
    """

    call: Call
    body: bytes
    tally: Tally
    sent: float | None = None
    first: float | None = None
    latest: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    chunks: int = 0
    usage: dict[str, Any] | None = None
    status: int | None = None
    id: str | None = None
    error: str | None = None
    closed: bool = False
    begun: Callable[[], None] = lambda: None

    def begin(self, now: float) -> None:
        self.sent = now
        self.tally.sent += 1
        self.tally.changed()

    def read(self, line: bytes, now: float) -> None:
        """Read one line of the event stream; comments and blank lines are skipped."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.closed = True
            return
        event = json.loads(data)
        if event.get("error"):
            self.error = f"error in the stream: {event['error']}"[:200]
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self._token(choice, now)

    def whole(self, body: bytes, now: float) -> None:
        """Read an answer that was not streamed."""
        self.usage, self.first, self.latest, self.closed = json.loads(body).get("usage"), now, now, True

    def _token(self, choice: dict[str, Any], now: float) -> None:
        """Count a chunk as a token; the first token is the first visible text, not the role.

        After it, a chunk without text counts as well (a special token, or part of a character), unless it only
        has the finish reason.
        """
        visible = bool(_text(choice))
        if visible or (self.first is not None and not choice.get("finish_reason")):
            self.chunks += 1
            if self.first is None:
                self.first = now
                self.begun()
            elif self.latest is not None:
                self.gaps.append(now - self.latest)
            self.latest = now
        elif choice.get("finish_reason"):
            self.latest = now

    def end(self, now: float) -> None:
        """Finish the record; a truncated or empty response is a failure too."""
        if self.error is None and not self.closed:
            self.error = "disconnect: the stream ended without [DONE]"
        if self.error is None and self.latest is None:
            self.error = "empty: a response without a token"
        self.last = self.latest if self.error is None else now
        if self.error is None and self.first is None:
            self.first = self.latest  # without visible text, the end counts as the first token
        self.tally.done += self.error is None
        self.tally.failed += self.error is not None
        self.tally.changed()

    def record(self) -> Record:
        assert self.sent is not None, "only a sent call has a record"
        usage = self.usage or {}
        output_tokens = usage.get("completion_tokens")
        return Record(
            tier=self.call.tier,
            at=self.call.at,
            sent=self.sent,
            first=self.first,
            last=self.last,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            output_tokens=self.chunks if output_tokens is None else int(output_tokens),
            gaps=np.array(self.gaps, np.float32),
            status=self.status,
            error=self.error,
            slo=self.call.slo,
            counted=output_tokens is None and self.error is None,
            id=self.id,
            model=self.call.model,
        )


_TEXT = ("content", "reasoning", "reasoning_content", "tool_calls")


def _text(choice: dict[str, Any]) -> Any:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text")
    return any(delta.get(name) for name in _TEXT)


# ---- the bar


@contextmanager
def _bar(total: int, tally: Tally) -> Iterator[None]:
    columns = (
        TextColumn("Requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("done"),
        TextColumn("[dim]{task.fields[sent]} sent[/] [red]{task.fields[failed]} failed[/]"),
        TimeElapsedColumn(),
    )
    # Twice a second: the bar shares the cores with the measured engine.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bar:
        task = bar.add_task("requests", total=total, sent=0, failed=0)

        def show() -> None:
            sent, done, failed = attrgetter("sent", "done", "failed")(tally)
            bar.update(task, completed=done, sent=sent, failed=failed)

        tally.changed = show
        yield
