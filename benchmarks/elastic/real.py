"""`headway bench elastic --real`: streams of real engines while the fleet and the gateway under them change.

Two vLLM engines in float32, a core each, behind `headway serve`. One is drained and stopped; the load doubles, and an
engine is added on its core; that one is killed (SIGKILL) in mid-stream; then a second gateway takes over the port, and
the first one gets its SIGTERM. Clients read one stream after the other all the time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console

from benchmarks.experiment import Result, experiment
from benchmarks.real.fleet import kill_engine
from benchmarks.real.streams import PATIENCE_S, Stream, Verdict, read
from headway.config import Broker, Config, Engine, Server, Sqlite, load, write
from headway.engines.vllm.process.launch import Child, command, environment, free_port
from headway.errors import ConfigError, EngineError
from headway.store.journal.reader import read as read_journal
from headway.whatif.measured.systems import answering, attempts
from headway.whatif.output.plots import png, sheet
from headway.whatif.output.results import Ask, Grid, Row, show

HEADWAY, ALL = "headway", "all"
DRAIN, ADD, KILL, REPLACE = "drain", "add", "kill -9", "gateway replaced"
GOALS = {"streams.broken": 0.0, "streams.lost": 0.0, "streams.twice": 0.0, "streams.exact_pct": 100.0}
_KEY, _ADDED, _RUNNING = "sk-of-the-operator", "added", 16
_TOPICS = (
    "a lighthouse",
    "a whale",
    "the rain",
    "an old train",
    "two brothers",
    "a garden",
    "the moon",
    "a clockmaker",
)
_KINDS = 4
DISTINCT = _KINDS * len(_TOPICS)
_PERSON = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}}
_SCHEMA = {"type": "object", "properties": _PERSON, "required": ["name", "age"], "additionalProperties": False}
_JSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
Events = Mapping[str, tuple[float, float]]  # when each began and had ended, as `time.monotonic` has it


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked.

    streams: at least. tokens: of most. clients: at first, doubled later. between: streams that end between two
    events. restarts: Headway starts the added engine, and again after its death; else that is the drained one, which
    stays dead.
    """

    streams: int = 300
    tokens: int = 96
    clients: int = 8
    between: int = 30
    restarts: bool = True


QUICK = Sizes(40, 24, 4, 5, restarts=False)


def asked(number: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request; every fourth is sampled and shows its token ids, the others are greedy."""
    kind, topic = number % _KINDS, _TOPICS[number // _KINDS % len(_TOPICS)]
    body: dict[str, Any] = {"model": "smollm2", "max_tokens": tokens, "temperature": 0.0}
    if kind == 0:
        return "/v1/completions", body | {"prompt": f"This is a story about {topic}. Once", "ignore_eos": True}
    chat = body | {"messages": [{"role": "user", "content": f"Tell me a long story about {topic}."}]}
    more = ({"ignore_eos": True}, {"response_format": _JSON}, {"temperature": 0.9, "return_token_ids": True})
    return "/v1/chat/completions", chat | more[kind - 1]


@dataclass(frozen=True, slots=True)
class Seen:
    """A stream. whole: an unbroken one of the same request, None = it is sampled. moved: it has lost its engine."""

    got: Stream
    whole: Stream | None
    moved: bool = False

    @property
    def verdict(self) -> Verdict:
        """Judge it by its characters, or by its tokens and its usage where it is sampled."""
        if self.whole is not None:
            return self.got.verdict(len(self.got.text), len(self.whole.text))
        return self.got.verdict(len(self.got.ids), self.got.tokens or 0)

    @property
    def exact(self) -> bool:
        """Return whether text, finish reason and number of tokens are those of the unbroken one."""
        one, other = self.got, self.whole
        return other is not None and (one.text, one.ends, one.tokens) == (other.text, other.ends, other.tokens)


# ---- load


@dataclass(slots=True)
class Load:
    """Clients that read one stream after the other. going: they begin further ones even if there were enough."""

    url: str
    sizes: Sizes
    http: aiohttp.ClientSession
    seen: list[tuple[int, Stream]] = field(default_factory=list)
    going: bool = True
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def client(self) -> None:
        """Read streams."""
        for number in self._numbers:
            if not self.going and number >= self.sizes.streams:
                return
            self.seen.append((number, await self.read(number)))

    async def read(self, number: int) -> Stream:
        """Read the stream of a request."""
        path, body = asked(number, self.sizes.tokens)
        return await read(self.http, self.url + path, body)

    async def unbroken(self) -> dict[int, Stream]:
        """Return a stream of each greedy request while nothing happens; EngineError if one is broken."""
        greedy = [number for number in range(DISTINCT) if number % _KINDS < _KINDS - 1]
        found = dict(zip(greedy, await asyncio.gather(*map(self.read, greedy)), strict=True))
        if broken := [one for one in found.values() if one.error or not one.done]:
            raise EngineError(f"A stream broke before any event: {broken[0].error}", "See the gateway's log.")
        return found

    async def more(self) -> None:
        """Wait until the streams between two events have ended."""
        ended = len(self.seen) + self.sizes.between
        while len(self.seen) < ended:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def middle(self) -> None:
        """Wait for half a stream: those that began together when others had ended are in the middle then."""
        took = [one.ended - one.began for _, one in self.seen[-self.sizes.between :]]
        await asyncio.sleep(float(np.median(took)) / 2)


# ---- the fleet and its events


@dataclass(slots=True)
class Fleet:
    """Gateways, and engines that outlive these. ports: of engines, by place; each has a core."""

    folder: Path
    stack: AsyncExitStack
    cores: Sequence[str]
    ports: Sequence[int] = field(default_factory=lambda: [free_port() for _ in range(3)])
    port: int = field(default_factory=free_port)
    gateways: list[Child] = field(default_factory=list)

    def url(self, place: int) -> str:
        """Return the address of an engine."""
        return f"http://127.0.0.1:{self.ports[place]}"

    async def start_engine(self, place: int) -> Child:
        """Start an engine with Headway's scheduler, and wait until it is up."""
        engine = Engine(cores=self.cores[place], max_running=_RUNNING, dtype="float32")
        argv, env = command(engine, self.ports[place], HEADWAY), environment(engine, recipe=HEADWAY)
        child = Child(argv, env, self.folder / f"engine-{place}.log")
        await self.stack.enter_async_context(answering(f"engine {place}", child, f"{self.url(place)}/health"))
        return child

    async def start_gateway(self, *places: int) -> None:
        """Start a gateway in front of engines, and wait until it says that it is ready."""
        config = Config(
            server=Server(port=self.port, operator_key=_KEY, drain_s="streams", reuse_port=True),
            engines=tuple(Engine(url=self.url(place), max_running=_RUNNING) for place in places),
            broker=Broker(sqlite=Sqlite(str(self.folder / "queue.sqlite"))),
        )
        file = self.folder / f"gateway-{len(self.gateways)}.toml"
        file.write_text(write(config))
        argv = [sys.executable, "-m", "headway.cli", "serve", "-c", str(file), "--logs", str(self.folder)]
        child = Child(argv, dict(os.environ), file.with_suffix(".log"))
        child.start()
        self.stack.callback(child.stop)
        self.gateways.append(child)
        for _ in attempts("the gateway", child):
            if "ready:" in child.log.read_text():
                break
            await asyncio.sleep(0.1)

    async def order(self, *words: str) -> None:
        """Give an order with `headway engine`, and wait until it is carried out."""
        argv = ("-m", "headway.cli", "engine", *words, "-c", str(self.folder / "gateway-0.toml"), "--wait")
        child = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.DEVNULL)
        if await child.wait():
            raise EngineError(f"`headway engine {' '.join(words)}` failed.", f"See the logs in {self.folder}.")

    async def add(self, **settings: str | int) -> None:
        """Add an engine."""
        words = (f"{name}={value!r}" for name, value in {"id": _ADDED, "max_running": _RUNNING, **settings}.items())
        await self.order("add", *(word for one in words for word in ("--set", one)))

    async def restarted(self, http: aiohttp.ClientSession) -> None:
        """Wait until Headway has started the added engine again."""
        url, headers = f"http://127.0.0.1:{self.port}/v1/headway/engines", {"authorization": f"Bearer {_KEY}"}
        for _ in attempts(_ADDED, self.gateways[-1]):
            async with http.get(url, headers=headers) as answer:
                if any(one["id"] == _ADDED and one["restarts"] and one["up"] for one in (await answer.json())["data"]):
                    return
            await asyncio.sleep(0.5)

    async def replace_gateway(self, *places: int) -> None:
        """Start a gateway on the same port, end the one before, and wait until the streams of that have ended."""
        old = self.gateways[-1].process
        await self.start_gateway(*places)
        assert old is not None
        old.terminate()
        await asyncio.to_thread(old.wait, PATIENCE_S)


async def change(fleet: Fleet, load: Load, drained: Child, double: Callable[[], None]) -> Events:
    """Carry out the events, one after the other. drained: the engine e1. double: doubles the load."""
    events, restarts = dict[str, tuple[float, float]](), load.sizes.restarts

    @contextmanager
    def event(name: str) -> Iterator[None]:
        began = monotonic()
        yield
        events[name] = began, monotonic()

    await load.more()
    with event(DRAIN):
        await fleet.order("drain", "e1")
    if restarts:
        await asyncio.to_thread(drained.stop)  # its core is for the added one
    else:
        await fleet.order("remove", "e1")
    await load.more()
    double()
    with event(ADD):
        if restarts:
            await fleet.add(port=fleet.ports[2], cores=fleet.cores[1], dtype="float32")
        else:
            await fleet.add(url=fleet.url(1))
    await load.more()
    await load.middle()
    with event(KILL):
        kill_engine(os.getpid(), str(fleet.ports[2 if restarts else 1]))
        if restarts:
            await fleet.restarted(load.http)
    await load.more()
    with event(REPLACE):  # what the first gateway has added ends with it: the second one has the other engine
        await fleet.replace_gateway(0)
    await load.more()
    return events


async def measure(sizes: Sizes, folder: Path) -> tuple[list[Seen], Events]:
    """Run everything; return the streams by their beginnings, and the events."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http, AsyncExitStack() as stack:
        fleet = Fleet(folder, stack, cores)
        _, drained, _ = await asyncio.gather(fleet.start_engine(0), fleet.start_engine(1), fleet.start_gateway(0, 1))
        work = Load(f"http://127.0.0.1:{fleet.port}", sizes, http)
        whole = await work.unbroken()
        async with asyncio.TaskGroup() as clients:

            def begin() -> None:
                for _ in range(sizes.clients):
                    clients.create_task(work.client())

            begin()
            events = await change(fleet, work, drained, begin)
            work.going = False
    journal = load(folder / "gateway-0.toml").journal_dir
    assert journal is not None, "beside the queue"
    rows = read_journal(journal).requests
    moved = {row.id for row in rows if row.requeues and row.first and row.resent and row.resent > row.first}
    streams = [Seen(one, whole.get(number % DISTINCT), one.id in moved) for number, one in work.seen]
    return sorted(streams, key=lambda one: one.got.began), events


# ---- figures


def rows(streams: Sequence[Seen], events: Events) -> list[Row]:
    """Return the figures of all streams, and of those that were under way at each event."""
    found = list(_rows(ALL, streams, [one for one in streams if one.moved]))
    for name, (since, until) in events.items():
        there = [one for one in streams if one.got.began < until and one.got.ended > since]
        moved = [one for one in there if one.moved and one.got.silence[0] < until and one.got.silence[1] > since]
        found += _rows(name, there, moved)
    return found


def _rows(setting: str, streams: Sequence[Seen], moved: Sequence[Seen]) -> Iterator[Row]:
    """Yield the figures of streams, and of those among them that have moved then."""
    verdicts, greedy = [one.verdict for one in streams], [one for one in streams if one.whole is not None]
    values: dict[str, tuple[float | None, str]] = {
        "streams": (len(streams), "streams"),
        "streams.moved": (len(moved), "streams"),
        **{f"streams.{name}": (verdicts.count(name), "streams") for name in ("broken", "lost", "twice")},
        "streams.exact_pct": (100 * sum(one.exact for one in greedy) / len(greedy) if greedy else None, "%"),
    }
    for name, those in (("seam", moved), ("gap", [one for one in streams if not one.moved])):
        gaps = np.diff([one.got.silence for one in those])
        for share in (50, 99) if gaps.size else ():
            values[f"{name}.p{share}_s"] = float(np.percentile(gaps, share)), "s"
    yield from (Row(id, HEADWAY, setting, value, unit) for id, (value, unit) in values.items())


@experiment("elastic", "vllm", "Streams while engines and gateways come and go")
def main(ask: Ask) -> Result:
    """Measure; `quick`: fewer streams, and no engine is started but the first two."""
    if len(os.sched_getaffinity(0)) < 2:
        raise ConfigError("Two engines need two cores.", "Run it where this process may use two.")
    sizes = QUICK if ask.quick else Sizes()
    folder = Path(tempfile.mkdtemp(prefix="headway-elastic-"))
    Console(stderr=True).print(f"[dim]logs: {folder}[/]")
    streams, events = asyncio.run(measure(sizes, folder))
    found = rows(streams, events)
    workload = (
        f"Two engines of smollm2 in float32, a core each; {sizes.clients}, later {2 * sizes.clients} clients, each of "
        f"one stream of up to {sizes.tokens} tokens after the other: completions, chats and JSON, greedy, and sampled "
        "chats. Figures of an event are of the streams that were under way then."
    )
    lines = [
        [row.setting, row.id, show(row.ours), show(GOALS[row.id]) if row.id in GOALS else "", row.unit] for row in found
    ]
    grid = Grid(("event", "figure", "value", "goal", "unit"), [lines], ("value", "goal"))
    return Result(found, workload, lambda: {"elastic": plot(streams, events)}, grid, (_NOTE, *_faults(streams)))


_NOTE = (
    "moved: went on at another engine after their first token. broken: an error event, or no end. lost, twice: ended "
    "with fewer or more characters (sampled: tokens) than due. exact: of the greedy ones, those equal to an unbroken "
    "stream. seam: the longest gap between two tokens of a stream that moved; gap: of all others."
)


def _faults(streams: Sequence[Seen]) -> list[str]:
    """Return a sentence for each stream that is not as it should be."""
    return [
        f"{one.got.id}: {one.verdict}{'' if one.whole is None or one.exact else ', not exact'} {one.got.error}"
        for one in streams
        if one.verdict != "whole" or (one.whole is not None and not one.exact)
    ]


def plot(streams: Sequence[Seen], events: Events) -> bytes:
    """Return a PNG of a line per stream, with a gap where it is silent, and of the events."""
    start = streams[0].got.began
    figure, (axes,) = sheet(1, 1, 9.0, 4.5)
    for place, one in enumerate(streams):
        times = np.array(one.got.times) - start
        shade = "#D55E00" if one.moved else "#0072B2"
        axes.plot(times, np.full(times.size, place), ".", markersize=1.5, color=shade)
    for name, (since, until) in events.items():
        axes.axvspan(since - start, until - start, color="0.9", zorder=0)
        axes.text(since - start, len(streams), name, fontsize=7, va="bottom")
    axes.set(xlabel="seconds", ylabel="streams by their beginning (orange: moved)")
    return png(figure)
