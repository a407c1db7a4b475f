"""`headway bench beside --real`: interactive requests beside a batch on two real vLLM engines, a core each.

Like `benchmarks/simulated/beside.py`, smaller. The systems run one after the other, each on engines of its own; stock
vLLM's requests go to its engines in turn, Headway's to its gateway. Stock vLLM first serves the interactive requests
alone.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.experiment import Result, experiment
from benchmarks.simulated.beside import ALONE, BATCH_PRIORITY, BATCH_RATE, BATCH_SLO, KNEE_SHARE, Seen, Shape, rows_of
from benchmarks.simulated.beside import plot as picture
from headway.config import Engine
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.types import Floats, Slo
from headway.whatif.load import generator, mix
from headway.whatif.load.records import Call, Record
from headway.whatif.measured.compare import BURST, steady
from headway.whatif.measured.systems import START_S, STOCK, answering, check, gateway, running
from headway.whatif.output.results import Ask, Row, system_grid

UNPROTECTED = "vllm-fcfs"
_TIER = mix.TrafficTier(
    "interactive", slo=Slo(ttft=1.0, tpot=0.15), max_tokens=32, ignore_eos=True, prompt_tokens=(100, 160)
)
_CORES = ("0", "1")
_QUICK = Shape(batch=16, lead=2.0, burst=4.0, idle=2.0, bursts=1, onset=2.0)
_QUICK_KNEE = 3.0  # requests/s, instead of measuring them
_console = Console(stderr=True)

Start = Callable[[str, Sequence[Engine], Path], AbstractAsyncContextManager[Sequence[str]]]


@asynccontextmanager
async def fleet(name: str, engines: Sequence[Engine], logs: Path) -> AsyncIterator[Sequence[str]]:
    """Start a system on these engines, yield the addresses that take its requests, then stop it.

    Raises EngineError, with the last lines of the log, when it does not start.
    """
    async with AsyncExitStack() as stack:
        if name in STOCK:
            folders = [logs / f"engine-{i}" for i in range(len(engines))]
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            started = (running(name, one, folder, ()) for one, folder in zip(engines, folders, strict=True))
            yield [await stack.enter_async_context(one) for one in started]
            return
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        child = gateway(name, tuple(engines), port, logs, ("interactive", "batch"))
        await stack.enter_async_context(answering(name, child, f"{url}/ready"))
        yield [url]


@dataclass(frozen=True, slots=True)
class BesideTrial:
    """The settings of a trial.

    engine: each of the two. systems: stock policies and recipes. knee: requests/s of two engines, None = measured.
    tier: interactive requests; the batch's differ in class, SLO and priority. start: starts a system, as `fleet` does.
    """

    engine: Engine
    systems: tuple[str, ...]
    shape: Shape
    knee: float | None = None
    seed: int = 0
    tier: mix.TrafficTier = _TIER
    start: Start = fleet

    def calls(self, at: Floats, batch: bool = False, seed: int = 0) -> list[Call]:
        """Return interactive requests, or the batch's, that arrive at these seconds."""
        tier = replace(self.tier, name="batch", slo=BATCH_SLO, priority=BATCH_PRIORITY) if batch else self.tier
        return mix.calls(mix.Mix(tier.name, (tier,)), at, np.random.default_rng([self.seed, batch, seed]))

    async def send(self, urls: Sequence[str], calls: Sequence[Call], label: str) -> list[Record]:
        """Send each request to the next address, and return the records."""
        _console.print(label)
        name, parts = self.engine.name, [calls[i :: len(urls)] for i in range(len(urls))]
        each = (generator.run(url, name, part, progress=False) for url, part in zip(urls, parts, strict=True))
        return [record for records in await asyncio.gather(*each) for record in records]

    def engines(self) -> list[Engine]:
        """Return the two engines, each on a core of its own."""
        return [replace(without_prefixes(self.engine), cores=core, start_timeout_s=START_S) for core in _CORES]


def without_prefixes(engine: Engine) -> Engine:
    """Return the engine without prefix caching, which would let the second run reuse the first's prompts."""
    return replace(engine, args=(*engine.args, "--no-enable-prefix-caching"))


async def run(trial: BesideTrial) -> tuple[dict[str, Seen], float]:
    """Return the figures by system, and the knee. Raise ConfigError or EngineError if a system cannot run."""
    shape, knee, found = trial.shape, trial.knee, dict[str, Seen]()
    logs = Path(tempfile.mkdtemp(prefix="headway-beside-"))
    for name in dict.fromkeys((UNPROTECTED, *trial.systems)):
        async with trial.start(name, trial.engines(), logs) as urls:
            await trial.send(urls, trial.calls(np.zeros(4), seed=1), f"{name}: warm-up")  # first requests are slow
            knee = knee or steady(await trial.send(urls, trial.calls(np.zeros(BURST), seed=2), f"{name}: knee"))
            at = shape.interactive(KNEE_SHARE * knee, np.random.default_rng(trial.seed))
            alone, batch = trial.calls(at), trial.calls(shape.due(), batch=True)
            if name == UNPROTECTED:
                found[ALONE] = seen(shape, await trial.send(urls, alone, ALONE))
            if name in trial.systems:
                found[name] = seen(shape, await trial.send(urls, [*batch, *alone], f"{name}, beside the batch"))
    assert knee is not None
    return found, knee


def seen(shape: Shape, records: Sequence[Record]) -> Seen:
    """Return the figures of a run; a request that failed has an infinite ttft and end."""
    mine = [record for record in records if record.tier != "batch"]
    ends = np.array([np.inf if record.last is None or not record.ok else record.last for record in records])
    batch = np.array([record.tier == "batch" for record in records])
    at, ttft = (np.array([getattr(record, name) for record in mine]) for name in ("at", "ttft"))
    return Seen.of(shape, at, ttft, ends[batch] if batch.any() else None)


@experiment("beside", "vllm", "Interactive requests beside a batch on two vLLM engines")
def main(ask: Ask, trial: BesideTrial) -> Result:
    """Run the benchmark. `quick`: a batch of 16 and one short burst at a fixed rate, Headway alone beside the batch."""
    if len(os.sched_getaffinity(0)) < len(_CORES):
        raise ConfigError("Two engines need two cores.", "Run it where this process may use two.")
    check(trial.systems, trial.engine)
    if ask.quick:
        trial = replace(trial, shape=_QUICK, knee=trial.knee or _QUICK_KNEE, systems=trial.systems[-1:])
    found, knee = asyncio.run(run(trial))
    shape, tier = trial.shape, trial.tier
    rows = [*rows_of(found, f"{shape.batch} in the batch"), Row("knee", ALONE, "", knee, "requests/s")]
    workload = (
        f"two engines of {trial.engine.name}, a core each, batch limit {trial.engine.max_running}; prompts of "
        f"{tier.prompt_tokens} and answers of {tier.max_tokens} tokens, {mix.format_slo(tier.slo)}; {shape.bursts} "
        f"bursts of {shape.burst:g} s at {KNEE_SHARE:.0%} of the knee, {shape.idle:g} s apart; {shape.batch} requests "
        f"at {BATCH_RATE:g}/s from {shape.lead:g} s before the first burst on, due after a day; no prefix caching."
    )
    return Result(rows, workload, lambda: {"beside": picture(rows)}, system_grid(rows))
