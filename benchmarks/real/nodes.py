"""`headway bench nodes`: a complete Headway on two Ray nodes of this machine, each part of which is killed once.

Real vLLM, RabbitMQ, PostgreSQL and Ray; two engines, with a core each, swap three models. Clients behave as
behind a load balancer: they resend a request that is refused or whose gateway dies to the other gateway, and
time it from its first try. Some requests run in the background; their answers are fetched at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np
import psutil  # type: ignore[import-untyped]
from rich.console import Console

from benchmarks.experiment import Result, experiment
from benchmarks.real.fleet import FleetTrial, make_models
from benchmarks.real.fleet import check as check_models
from benchmarks.real.soak_clients import SoakHistory, Verdict, check
from headway.addresses import netloc
from headway.cluster.up.cluster import Actors, connected
from headway.cluster.up.supervisor import PartState
from headway.config import BATCH, Broker, Config, Postgres, Server, Tier, Up, Wire
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.whatif.load import generator, metrics, mix
from headway.whatif.load.records import Call, Record
from headway.whatif.output.plots import png, sheet
from headway.whatif.output.results import Ask, Row
from testing.servers import postgres, rabbitmq
from testing.servers.both import both

NODE = "headway_node_"  # prefix of the custom resources that place each engine on a separate node
KILLS = ("gateway", "controller", "agent", "engine", "RabbitMQ", "PostgreSQL")
BACKGROUND = 4  # one in this number of the batch class's requests runs in the background
_LEASE_S = 3.0
_AGAIN_S, _TRIES = 0.5, 240
_END_S = 300.0  # time limit for the remaining answers after the last kill
_console = Console(stderr=True)


@dataclass(slots=True)
class NodesSeen:
    """The clients' observations. again: number of resent requests. kills: instant and part of each kill."""

    records: list[Record] = field(default_factory=list)
    history: SoakHistory = field(default_factory=SoakHistory)
    again: int = 0
    kills: list[tuple[float, str]] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        return check(self.history)

    @property
    def lost(self) -> int:
        """The number of requests without an answer, background requests included."""
        return self.verdict.lost + sum(not record.ok for record in self.records)


@dataclass(slots=True)
class Whole:
    """The running cluster: Ray actors with their states, RabbitMQ and PostgreSQL."""

    actors: Actors
    states: dict[str, PartState]
    rabbit: rabbitmq.RabbitCluster
    database: postgres.PostgresServer

    @property
    def urls(self) -> list[str]:
        """Return the gateways' addresses."""
        gateways = [state for name, state in self.states.items() if name.startswith("gateway")]
        return [f"http://{netloc(state.host, state.port)}" for state in gateways]

    def kill(self, what: str) -> None:
        """Kill a part. Ray restarts actors; this method restarts RabbitMQ and PostgreSQL."""
        match what:
            case "RabbitMQ":
                self.rabbit.nodes[0].kill()
                self.rabbit.nodes[0].start()
            case "PostgreSQL":
                self.database.stop(signal.SIGQUIT)
                self.database.start()
            case "engine":
                core = next(
                    one
                    for one in psutil.Process(self._pid("agent-0")).children(recursive=True)
                    if "EngineCore" in one.name() or "EngineCore" in " ".join(one.cmdline())
                )
                core.kill()
            case "agent":
                os.kill(self._pid("agent-1"), signal.SIGKILL)
            case _:
                os.kill(self._pid(f"{what}-0"), signal.SIGKILL)

    def _pid(self, name: str) -> int:
        state = self.actors.state(name)
        return self.states[name].pid if state is None else state.pid


def check_ray() -> None:
    """Raise ConfigError if Ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ConfigError("Ray is not installed here.", "pip install 'headway[ray]'") from None


def configuration(trial: FleetTrial, name: str, address: str) -> Config:
    """Return the configuration of all parts; each engine asks for a separate node."""
    engines = tuple(
        replace(engine, resources={"cpus": 1.0, f"{NODE}{i}": 1.0}, port=None)
        for i, engine in enumerate(trial.engines())
    )
    return Config(
        recipe=trial.systems[0],
        server=Server(port=free_port(), max_queued=100_000, max_attempts=100),
        engines=engines,
        broker=Broker("postgres", lease_seconds=_LEASE_S, postgres=Postgres("env:HEADWAY_POSTGRES_URL")),
        wire=Wire("env:HEADWAY_RABBITMQ_URL", name, _LEASE_S),
        up=Up(address, gateways=2, controllers=2, cpus=0.5, memory_gib=0.2),
        classes={name: BATCH if name == "batch" else Tier() for name in ("default", *trial.mix.names)},
    )


@contextmanager
def ray_nodes(count: int) -> Iterator[str]:
    """Run a Ray cluster of `count` nodes on this machine; yield the head's address."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster  # type: ignore[import-untyped, unused-ignore]

    options: dict[str, Any] = {"num_cpus": 8, "object_store_memory": 80 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={**options, "include_dashboard": False, "resources": {f"{NODE}0": 1}}
    )
    try:
        for i in range(1, count):
            cluster.add_node(**options, resources={f"{NODE}{i}": 1})
        yield str(cluster.address)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call, unused-ignore]


@contextmanager
def whole(trial: FleetTrial) -> Iterator[Whole]:
    """Start everything, yield it once all parts are ready, then stop everything."""
    with ExitStack() as stack:
        rabbit, database = stack.enter_context(both(1))
        stack.enter_context(_environment(rabbit.url, database.url))
        address = stack.enter_context(ray_nodes(2))
        actors = stack.enter_context(connected(configuration(trial, "nodes", address)))
        stack.callback(actors.down, _told)
        _console.print("[dim]starting gateways, controllers and agents on two Ray nodes ...[/]")
        yield Whole(actors, actors.up(_told), rabbit, database)


@contextmanager
def _environment(rabbit: str, database: str) -> Iterator[None]:
    given = {"HEADWAY_RABBITMQ_URL": rabbit, "HEADWAY_POSTGRES_URL": database}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    with tempfile.TemporaryDirectory(prefix="headway-nodes-") as state:
        os.environ["XDG_STATE_HOME"], home = state, os.environ.get("XDG_STATE_HOME")
        try:
            yield
        finally:
            for name, value in {**before, "XDG_STATE_HOME": home}.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _told(name: str, state: PartState | None) -> None:
    """Ignore progress: a part that is not ready in time raises an error."""


# ---- a run


def run(trial: FleetTrial, kills: Sequence[str] = KILLS) -> NodesSeen:
    """Send the trial's calls while parts are killed one after the other; return the clients' observations."""
    with whole(trial) as headway:
        return asyncio.run(_run(trial, headway, kills))


async def _run(trial: FleetTrial, headway: Whole, kills: Sequence[str]) -> NodesSeen:
    seen, calls = NodesSeen(), trial.calls()
    batch = itertools.count()
    urls = headway.urls
    async with generator.session(len(calls), 3600.0, None) as http, asyncio.TaskGroup() as group:
        start = asyncio.get_running_loop().time()
        group.create_task(_kill(headway, trial.duration, kills, start, seen))
        for number, call in enumerate(calls):
            behind = call.tier == "batch" and next(batch) % BACKGROUND == 0
            send = _background if behind else _foreground
            group.create_task(_later(send, http, urls, number, call, start, seen))
    await _collect(urls, seen)
    return seen


async def _kill(headway: Whole, duration: float, kills: Sequence[str], start: float, seen: NodesSeen) -> None:
    """Kill the parts one by one, evenly spread over the duration."""
    loop = asyncio.get_running_loop()
    for number, what in enumerate(kills, 1):
        await asyncio.sleep(max(start + duration * number / (len(kills) + 1) - loop.time(), 0.0))
        _console.print(f"[dim]{loop.time() - start:.0f} s: killing {what}[/]")
        seen.kills.append((loop.time() - start, what))
        await asyncio.to_thread(headway.kill, what)


Send = Callable[[aiohttp.ClientSession, Sequence[str], int, Call, float, NodesSeen], Awaitable[None]]


async def _later(
    send: Send, http: aiohttp.ClientSession, urls: Sequence[str], number: int, call: Call, start: float, seen: NodesSeen
) -> None:
    await asyncio.sleep(max(start + call.at - asyncio.get_running_loop().time(), 0.0))
    await send(http, urls, number, call, start, seen)


async def _foreground(
    http: aiohttp.ClientSession, urls: Sequence[str], number: int, call: Call, start: float, seen: NodesSeen
) -> None:
    """Send a request to the gateways in turn until one answers."""
    for attempt in range(_TRIES):
        url = urls[(number + attempt) % len(urls)]
        record = await generator.ask(http, url, "", call, start, headers={})
        if record.ok or record.status in (400, 404, 422):
            break
        seen.again += 1
        await asyncio.sleep(_AGAIN_S)
    seen.records.append(record)


async def _background(
    http: aiohttp.ClientSession, urls: Sequence[str], number: int, call: Call, start: float, seen: NodesSeen
) -> None:
    """Send a background request to the gateways in turn until one accepts it."""
    body = {
        "model": call.model,
        "messages": [{"role": "user", "content": call.prompt}],
        "background": True,
        "max_tokens": call.max_tokens,
        "ignore_eos": call.ignore_eos,
        "service_tier": call.tier,
    }
    for attempt in range(_TRIES):
        url = urls[(number + attempt) % len(urls)]
        with suppress(aiohttp.ClientError, TimeoutError):
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                if answer.status == 202:
                    seen.history.looks[(await answer.json())["id"]] = []
                    return
        seen.again += 1
        await asyncio.sleep(_AGAIN_S)


async def _collect(urls: Sequence[str], seen: NodesSeen) -> None:
    """Poll each gateway until all background requests have ended."""
    deadline = time.monotonic() + _END_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http:
        for url in urls:
            waiting = set(seen.history.looks)
            while waiting and time.monotonic() < deadline:
                for id in [*waiting]:
                    if await _look(http, url, id, seen.history):
                        waiting.discard(id)
                await asyncio.sleep(0.5)


async def _look(http: aiohttp.ClientSession, url: str, id: str, history: SoakHistory) -> bool:
    """Poll a background request; return True if it has ended."""
    try:
        async with http.get(f"{url}/v1/responses/{id}") as answer:
            status, body = answer.status, await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
        return False
    if status == 404:
        history.saw(id, "unknown", "")
    elif status == 200:
        history.saw(id, body["status"], json.dumps([body.get("response"), body["error"]]))
        return bool(body["status"] != "queued")
    return False


_QUICK = ("controller", "engine")
_NOTES = (
    "attainment: requests that met their deadline, timed from their first try; those in the background have "
    "none. lost: requests without an answer. twice: requests in the background with two ends. again: how "
    "often clients sent a request again, since a gateway was dead, or refused it (429, 503).",
)


@experiment("nodes", "vllm", "Two Ray nodes, and a kill of each part")
def main(ask: Ask, recipe: str, rate: float, duration: float) -> Result:
    """Serve a load on two Ray nodes while parts are killed."""
    check_ray()
    duration = 15.0 if ask.quick else duration
    trial = FleetTrial(make_models("smollm2"), (recipe,), rate=rate, duration=duration, seed=ask.seed)
    check_models(trial)
    return result(trial, run(trial, _QUICK if ask.quick else KILLS))


def rows(system: str, seen: NodesSeen) -> list[Row]:
    """Return a row per figure."""
    made = list[Row]()
    for tier, part in metrics.split(seen.records).items():
        seconds = metrics.values(part, "e2el")
        p99 = float(np.quantile(seconds, 0.99)) if seconds.size else None
        made.append(Row("nodes.attainment", system, tier, metrics.attainment(part), "%"))
        made.append(Row("nodes.e2el.p99", system, tier, p99, "s"))
    counts = {
        "requests": len(seen.records),
        "background": len(seen.history.looks),
        "lost": seen.lost,
        "twice": seen.verdict.twice,
        "again": seen.again,
        "kills": len(seen.kills),
    }
    return made + [Row(f"nodes.{name}", system, "all", float(value), "count") for name, value in counts.items()]


def result(trial: FleetTrial, seen: NodesSeen) -> Result:
    """Return the findings."""
    killed = ", ".join(f"{what} after {at:.0f} s" for at, what in seen.kills)
    workload = (
        f"{mix.describe(trial.mix)}; not streamed, one of {BACKGROUND} of the class batch in the background; "
        f"{len(trial.models)} models on two vLLM engines of one core each, which swap them; Poisson arrivals "
        f"at {trial.rate:g} req/s for {trial.duration:g} s; two gateways, two controllers, two agents on two "
        f"Ray nodes, RabbitMQ and PostgreSQL, all on this machine. Killed: {killed}."
    )
    return Result(rows(trial.systems[0], seen), workload, lambda: {"nodes": plot(seen)}, notes=_NOTES)


def plot(seen: NodesSeen) -> bytes:
    """Return a PNG of the seconds that each request took, by arrival, and the kills."""
    figure, panels = sheet(1, 1, 9.0, 3.2)
    axes = panels[0]
    for number, (tier, part) in enumerate(metrics.split(seen.records).items()):
        if tier != "all":
            at = [record.at for record in part]
            axes.plot(at, [record.e2el for record in part], ".", label=tier, markersize=4, color=f"C{number}")
    for at_s, what in seen.kills:
        axes.axvline(at_s, color="#D55E00", linewidth=0.8)
        axes.annotate(what, (at_s, 1), xycoords=("data", "axes fraction"), fontsize=6, rotation=30)
    axes.set_xlabel("arrival, s", fontsize=8)
    axes.set_ylabel("seconds to the answer", fontsize=8)
    axes.legend(fontsize=7)
    return png(figure)
