"""`headway bench compare`: stock vLLM and Headway's recipes on one trace and one machine.

Each round sends the same calls to every system in turn, so that drift of the machine affects all systems. The
load is a multiple of the measured capacity of the first system (stock vLLM by default).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from headway.config import Engine
from headway.engines.vllm.process.launch import block_size
from headway.engines.vllm.process.sizes import expected
from headway.errors import ConfigError
from headway.gateway.parsing.requests import ChatBody
from headway.gateway.parsing.tokens import TokenCounter
from headway.models.resolve import resolve
from headway.simulate.workload import arrivals
from headway.whatif.load import generator, metrics, mix
from headway.whatif.load.records import Call, Counters, Record
from headway.whatif.measured.systems import STANDARD, Start, check, counted, running

BURST = 64  # calls at once that measure the capacity
LOAD, DEFAULT_MIX = 1.3, "chat-batch"  # defaults, which a comparison's `variant` leaves out
_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class CompareSetup:
    """The setup of a comparison.

    load: arrivals per second as a multiple of the measured capacity
    rate: arrivals per second, instead of `load`
    duration: seconds of arrivals per round
    together: run all systems at once; saves restarts, but needs memory for all engines
    tight: choose so few KV blocks that a full batch of this mix overflows them (`tight`), unless the engine sets
        their number
    burstiness: shape of the gamma-distributed gaps between arrivals, 1 = Poisson, lower is burstier
    start: starts the systems, as `running` does
    """

    mix: mix.Mix
    engine: Engine
    systems: tuple[str, ...] = STANDARD
    load: float = LOAD
    rate: float | None = None
    duration: float = 300.0
    rounds: int = 1
    seed: int = 0
    together: bool = False
    tight: bool = False
    burstiness: float = 1.0
    start: Start = running

    @property
    def variant(self) -> str:
        """Name mix, load, KV and burstiness if they differ from the defaults, else ""."""
        words = {
            self.mix.name: self.mix.name != DEFAULT_MIX,
            f"{self.rate:g} req/s" if self.rate else f"{self.load:g}x": self.rate or self.load != LOAD,
            "tight": self.tight and self.engine.blocks is None,
            f"{self.engine.blocks} KV blocks": self.engine.blocks is not None,
            f"burstiness {self.burstiness:g}": self.burstiness != 1.0,
        }
        return ", ".join(word for word, differs in words.items() if differs)


@dataclass(frozen=True, slots=True)
class Systems:
    """The systems of a setup, running all at once or started for each of their runs.

    urls: {system: address} of running systems
    """

    setup: CompareSetup
    urls: dict[str, str]
    logs: Path

    async def send(self, name: str, calls: Sequence[Call], label: str) -> tuple[list[Record], Counters]:
        """Send the calls to a system; return the records and the growth of its counters.

        label: text to print at the start. Raises KeyboardInterrupt when the run was cut off, and EngineError when
        the system does not start.
        """
        async with self._at(name) as url:
            before = await counted(name, url)
            _console.print(f"[bold]{escape(name)}[/], {escape(label)}")
            records = await generator.run(url, self.setup.engine.name, calls)
            if len(records) < len(calls) or any(generator.was_cut_off(record) for record in records):
                raise KeyboardInterrupt  # a comparison needs complete runs
            return records, generator.gained(before, await counted(name, url))

    async def capacity(self) -> float:
        """Return the requests per second that the first system completes under saturation."""
        name = self.setup.systems[0]
        planned = _calls(self.setup, BURST / 10, 2000, duration=20.0)[:BURST]
        calls = [replace(call, at=0.0) for call in planned]
        async with self._at(name) as url:
            began = time.perf_counter()
            records = await generator.run(url, self.setup.engine.name, calls, progress=False)
            seconds = time.perf_counter() - began
        capacity = steady(records)
        _console.print(f"capacity of {name}: {capacity:.3f} req/s ({len(records)} calls at once, {seconds:.0f} s)")
        return capacity

    @asynccontextmanager
    async def _at(self, name: str) -> AsyncIterator[str]:
        """Yield the address of a system; start it unless it is running."""
        if name in self.urls:
            yield self.urls[name]
            return
        async with AsyncExitStack() as stack:
            url = await _start(stack, name, self.setup, self.logs)
            await _warm(url, self.setup)
            yield url


@dataclass(slots=True)
class CompareOutcome:
    """The result of a comparison.

    results: records and counters by system
    rate: arrivals per second
    capacity: measured capacity, requests/s; None with a fixed rate
    """

    results: dict[str, tuple[list[Record], Counters]]
    rate: float
    capacity: float | None
    engine: Engine


async def run(setup: CompareSetup) -> CompareOutcome:
    """Run the comparison. Raises ConfigError or EngineError when a system cannot be run."""
    async with started(setup) as systems:
        setup = systems.setup
        capacity = None if setup.rate else await systems.capacity()
        rate = setup.rate or setup.load * (capacity or 0.0)
        outcome = CompareOutcome({name: ([], {}) for name in setup.systems}, rate, capacity, setup.engine)
        for number in range(setup.rounds):
            calls = _calls(setup, rate, number)
            for name in rotated(setup.systems, number):
                label = f"round {number + 1} of {setup.rounds}"
                _append(outcome, name, *await systems.send(name, calls, label))
    return outcome


@asynccontextmanager
async def started(setup: CompareSetup) -> AsyncIterator[Systems]:
    """Check the setup, size its KV, start and warm systems that run throughout, and stop them in the end.

    Raises ConfigError or EngineError when a system cannot be run.
    """
    check(setup.systems, setup.engine)
    resolve(setup.engine.model)
    if setup.tight and setup.engine.blocks is None:
        setup = replace(setup, engine=await tight(setup.engine, setup.mix, setup.seed))
    check_blocks(setup.engine)
    logs = Path(tempfile.mkdtemp(prefix="headway-bench-"))
    _console.print(f"[dim]logs: {escape(str(logs))}[/]")
    async with AsyncExitStack() as stack:
        names = setup.systems if setup.together else ()
        urls = await asyncio.gather(*(_start(stack, name, setup, logs) for name in names))
        for url in urls:  # one by one: concurrent engines would compete for cores
            await _warm(url, setup)
        yield Systems(setup, dict(zip(names, urls, strict=True)), logs)


async def _start(stack: AsyncExitStack, name: str, setup: CompareSetup, logs: Path) -> str:
    _console.print(f"[dim]starting {escape(name)} ...[/]")
    return await stack.enter_async_context(setup.start(name, setup.engine, logs, setup.mix.names))


async def _warm(url: str, setup: CompareSetup) -> None:
    """Send a few unmeasured requests, because the first batches of a new engine are slow."""
    calls = [replace(call, at=0.0, max_tokens=8) for call in _calls(setup, 4.0, 1000, duration=3.0)]
    await generator.run(url, setup.engine.name, calls, progress=False)


def shortened(setup: CompareSetup) -> CompareSetup:
    """Return a setup of about a minute: two systems, started together, at a fixed rate.

    Its batches are small, so that a few requests suffice to make others wait.
    """
    both = ("vllm-fcfs", "headway")
    names = tuple(name for name in setup.systems if name in both) or setup.systems[:2]
    rate, seconds = setup.rate or 5.0, 2.0 if setup.tight else 3.0  # requests take longer with little KV
    engine = replace(setup.engine, max_running=min(expected(setup.engine).max_running, 8))
    return replace(
        setup, engine=engine, systems=names, rate=rate, duration=min(setup.duration, seconds), rounds=1, together=True
    )


def describe(setup: CompareSetup, outcome: CompareOutcome) -> str:
    """Return the workload line of the report."""
    capacity = f", capacity {outcome.capacity:.3f} req/s" if outcome.capacity else ""
    spread = "Poisson arrivals"
    if setup.burstiness != 1.0:
        spread = f"arrivals with gamma distributed gaps (burstiness {setup.burstiness:g})"
    return (
        f"{mix.describe(setup.mix)}; {spread} at {outcome.rate:.3f} req/s{capacity}, "
        f"{setup.rounds} x {setup.duration:g} s, batch limit {expected(setup.engine).max_running}"
        f"{_kv_size(outcome.engine)}"
    )


def _kv_size(engine: Engine) -> str:
    """Describe the engines' KV if its size is set."""
    if engine.blocks is None:
        return ""
    return (
        f", {engine.blocks} KV blocks of {block_size(engine)} tokens (recipes that swap have "
        f"{engine.host_kv_gib:g} GiB of host memory besides, stock vLLM has none)"
    )


def steady(records: Sequence[Record]) -> float:
    """Return completions per second from the first to the third quartile, without ramp-up and drain."""
    ends = np.sort([record.last for record in records if record.ok and record.last is not None])
    low, high = len(ends) // 4, 3 * len(ends) // 4
    return float((high - low) / (ends[high] - ends[low]))


def _calls(setup: CompareSetup, rate: float, number: int, *, duration: float | None = None) -> list[Call]:
    """Return the calls of a round, the same for every system."""
    rng = np.random.default_rng([setup.seed, number])
    seconds = duration or setup.duration
    if setup.burstiness == 1.0:
        at = arrivals.poisson(rate, seconds, rng)
    else:
        at = arrivals.bursty(rate, setup.burstiness, seconds, rng)
    return mix.calls(setup.mix, at, rng, warn=lambda _: None if number else _console.print(_))


def rotated(systems: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Return the systems in the round's order, so that none always runs first."""
    start = number % len(systems)
    return systems[start:] + systems[:start]


def _append(outcome: CompareOutcome, name: str, records: Sequence[Record], counters: Counters) -> None:
    """Append a round after the earlier ones, shifted to their end, so that makespans add up."""
    earlier, counts = outcome.results[name]
    start = metrics.makespan(earlier) or 0.0
    shifted = [_shift(record, start) for record in records]
    known = {key: value + counts[key] for key, value in counters.items() if key in counts}
    outcome.results[name] = ([*earlier, *shifted], known if earlier else counters)


def _shift(record: Record, by: float) -> Record:
    later = {
        name: None if value is None else value + by for name, value in (("first", record.first), ("last", record.last))
    }
    return replace(record, at=record.at + by, sent=record.sent + by, **later)  # type: ignore[arg-type]


# ---- KV memory


SHARE = 1 / 3  # of the KV that `max_running` requests hold at their maximum length
_SAMPLE = 512  # requests of the mix
_NULL = 1  # vLLM's null block


def fewest_blocks(engine: Engine) -> int:
    """Return the fewest blocks with which vLLM starts: one request of max_model_len, and the null block."""
    return -(-expected(engine).max_model_len // block_size(engine)) + _NULL


def check_blocks(engine: Engine) -> None:
    """Raise ConfigError when the configured blocks cannot hold one request of max_model_len."""
    if engine.blocks is not None and engine.blocks < fewest_blocks(engine):
        raise ConfigError(
            f"{engine.blocks} KV blocks of {block_size(engine)} tokens, one of them vLLM's null block, cannot hold "
            f"one request of {expected(engine).max_model_len} tokens.",
            f"Give {fewest_blocks(engine)} or more.",
            param="engines.blocks",
        )


async def tight(engine: Engine, load: mix.Mix, seed: int) -> Engine:
    """Return the engine with KV for `SHARE` of a full batch of this mix, but at least one request.

    Raises ConfigError when the model has no tokenizer or the mix no prompts.
    """
    counter = await TokenCounter.load(engine.model)
    rng = np.random.default_rng([seed, 3000])
    calls = mix.calls(load, np.zeros(_SAMPLE), rng, warn=lambda _: None)
    held = [-(-_tokens(counter, call, engine) // block_size(engine)) for call in calls]
    wanted = round(SHARE * expected(engine).max_running * float(np.mean(held))) + _NULL
    return replace(engine, blocks=max(wanted, fewest_blocks(engine)))


def _tokens(counter: TokenCounter, call: Call, engine: Engine) -> int:
    messages = [{"role": "user", "content": call.prompt}]
    body = ChatBody.model_validate({"model": engine.name, "messages": messages})
    return counter.read(body, expected(engine).max_model_len).tokens + call.max_tokens
