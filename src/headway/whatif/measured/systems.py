"""The systems of a comparison: stock vLLM with its policies, and Headway with its recipes.

Each is a real server in separate processes, with the same model, cores, batch limit and KV. Systems differ only in
the scheduler and Headway's gateway. Recipes that swap KV also have host memory, which stock vLLM cannot use.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.markup import escape

from headway.config import BATCH, Broker, Config, Engine, Journal, Key, Server, Sqlite, Tier, write
from headway.engines.vllm.process.launch import Child, command, environment, free_port
from headway.errors import ConfigError, EngineError
from headway.gateway.control.graph_files import GraphFiles
from headway.policy.apps.demand import SHARED
from headway.policy.apps.graph import Graph
from headway.policy.recipes.registry import find
from headway.whatif.load import generator

START_S = 900.0  # enough with all cores busy; the end of the child is noticed at once
_SILENT_S = 60.0
_console = Console(stderr=True)


def attempts(
    name: str, child: Child, seconds: float = START_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Yield for each check whether a server is ready; the caller sleeps in between.

    Prints a line every minute. EngineError when the child has ended or after `seconds`.
    """
    began = said = clock()
    while (now := clock()) < began + seconds:
        if not child.alive:
            raise child.died(name)
        if now > said + _SILENT_S:
            said = now
            _console.print(f"[dim]{name} is not ready after {now - began:.0f} s; its log: {escape(str(child.log))}[/]")
        yield
    raise EngineError(f"{name} was not ready after {seconds:g} s.\n{child.tail()}\n", f"See {child.log}.")


STOCK = {"vllm-fcfs": "fcfs", "vllm-priority": "priority"}
STANDARD = ("vllm-fcfs", "vllm-priority", "edf", "slack", "headway")
TIGHT = ("vllm-fcfs", "vllm-priority", "slack", "bros", "ecoserve", "headway")  # with little KV
Counts = Mapping[tuple[str, ...], float]
Start = Callable[..., AbstractAsyncContextManager[str]]  # takes what `running` does


def check(systems: tuple[str, ...], engine: Engine) -> None:
    """Raise ConfigError unless every name is a stock policy or a recipe that can be served."""
    from headway.gateway.preflight import preflight

    if not systems:
        raise ConfigError("No system is named.", f"Name some of {', '.join(STANDARD)}.")
    for name in systems:
        if name not in STOCK:
            preflight(Config(recipe=name, engines=(_usable(name, engine),)))


def _usable(name: str, engine: Engine) -> Engine:
    """Return the engine, without host memory for KV if the recipe cannot use it."""
    return engine if find(name).wants.saves else replace(engine, host_kv_gib=0.0)


async def counted(name: str, url: str) -> dict[str, float]:
    """Return the counters of a running system's engine, which the same code counts in all systems.

    A gateway exports them on /metrics, stock vLLM on Headway's control route (`plugin/scheduler_stats.py`).
    """
    found = await generator.scrape(url)
    if name in STOCK:
        timeout = aiohttp.ClientTimeout(total=5)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/headway/control", json={"op": "state"}) as answer,
        ):
            found |= (await answer.json())["counters"]
    return found


async def counts(url: str) -> Counts:
    """Return a gateway's counters: (name, *values of the labels, by label name) -> value."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("headway_")
    }


def total(counts: Counts, name: str, *labels: str) -> float:
    """Return the sum of a counter over all samples with these label values."""
    return sum(value for key, value in counts.items() if key[0] == name and set(labels) <= set(key[1:]))


@asynccontextmanager
async def running(
    name: str,
    engine: Engine,
    logs: Path,
    classes: Iterable[str],
    *,
    keys: tuple[Key, ...] = (),
    graphs: Sequence[Graph] = (),
) -> AsyncIterator[str]:
    """Start a system, yield its URL once it is ready, then stop all of its processes.

    classes: classes of the requests; a gateway refuses unknown ones
    keys, graphs: as in `gateway`; stock vLLM has neither
    Raises EngineError, with the last lines of the log, when it does not start.
    """
    port = free_port()
    if name in STOCK:
        child = _stock(name, engine, port, logs)
    else:
        child = gateway(name, (_usable(name, engine),), port, logs, classes, keys=keys, graphs=graphs)
    url = f"http://127.0.0.1:{port}"
    async with answering(name, child, f"{url}/health" if name in STOCK else f"{url}/ready"):
        yield url


@asynccontextmanager
async def answering(name: str, child: Child, url: str) -> AsyncIterator[None]:
    """Start a server, wait until it answers a GET of `url` with 200, and stop its processes in the end.

    Raises EngineError, with the last lines of the log, when it does not start.
    """
    child.start()
    try:
        await _ready(name, child, url)
        yield
    finally:
        await asyncio.to_thread(child.stop, 15.0)


def _stock(name: str, engine: Engine, port: int, logs: Path) -> Child:
    argv = command(engine, port, None, STOCK[name])
    return Child(argv, environment(engine), logs / f"{name}.log")


def gateway(
    name: str,
    engines: tuple[Engine, ...],
    port: int,
    logs: Path,
    classes: Iterable[str],
    *,
    keys: tuple[Key, ...] = (),
    graphs: Sequence[Graph] = (),
    journal: str | None = None,
) -> Child:
    """Return a gateway with sqlite in front of these engines; requests state their own SLOs.

    keys: keys of its tenants, () = one tenant. graphs: demand graphs that it has from the start
    journal: folder of its journal, None = beside the queue
    """
    folder = Path(tempfile.mkdtemp(prefix=f"headway-{name.replace(':', '-')}-"))
    config = Config(
        recipe=name,
        server=Server(port=port, max_queued=100_000, operator_only=False),
        engines=engines,
        broker=Broker(sqlite=Sqlite(str(folder / "queue.sqlite"))),
        classes={name: BATCH if name == "batch" else Tier() for name in ("default", *classes)},
        keys=keys,
        journal=Journal(journal),
    )
    if graphs:
        assert config.apps_dir is not None, "beside the queue"
        files = GraphFiles(config.apps_dir)
        for graph in graphs:
            files.save(SHARED, graph)
    file = folder / "headway.toml"
    file.write_text(write(config))
    argv = [sys.executable, "-m", "headway.cli", "serve", "--config", str(file), "--logs", str(folder)]
    return Child(argv, environment(engines[0]), logs / f"{name.replace(':', '-')}.log")


async def _ready(name: str, child: Child, url: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        for _ in attempts(name, child):
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.25)


def standard_engine(model: str, *, max_running: int, blocks: int | None, host_kv_gib: float = 0.0) -> Engine:
    """Return the engine that all systems share.

    host_kv_gib: host memory, only for recipes that swap KV
    """
    return Engine(model=model, max_running=max_running, blocks=blocks, host_kv_gib=host_kv_gib, start_timeout_s=START_S)
