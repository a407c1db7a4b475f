"""Which benchmarks are there? Every command takes --quick, --json, --seed and --out."""

from __future__ import annotations

import asyncio
import importlib
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from headway.bench.load import mix as mixes
from headway.bench.output.results import hand_over
from headway.errors import ConfigError

bench_app = typer.Typer(help="Measure: was it on time?", no_args_is_help=True)

Quick = Annotated[bool, typer.Option("--quick", help="End within a minute on a small machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Seed = Annotated[int, typer.Option(help="Same seed, same workload.")]
Out = Annotated[Path | None, typer.Option(help="Write plots (PNG), report.json and report.html here.")]
MixName = Annotated[str, typer.Option("--mix", help="chat-batch, or a TOML file: one table per class.")]
Slos = Annotated[
    list[str] | None, typer.Option("--slo", help='A class\'s promise in ms: "chat ttft:1500 tpot:150".')
]
Rate = Annotated[float | None, typer.Option(min=0.001, help="Arrivals per second.")]
Duration = Annotated[float, typer.Option(min=1, help="Seconds of arrivals (of each round or replay).")]
Model = Annotated[str, typer.Option(help="Model name, directory or hub id.")]
MaxRunning = Annotated[int, typer.Option(min=1, help="Batch limit of every engine.")]


@bench_app.command()
def serve(
    url: Annotated[str, typer.Option(help="An OpenAI endpoint that runs.")],
    model: Annotated[str, typer.Option(help="Its model name.")] = "smollm2",
    mix: MixName = "chat-batch",
    slo: Slos = None,
    rate: Rate = None,
    duration: Duration = 60.0,
    burstiness: Annotated[float, typer.Option(min=0.01, help="1 = Poisson, lower is burstier.")] = 1.0,
    trace: Annotated[str | None, typer.Option(help="Arrival times from a trace (Azure, Mooncake).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First N arrivals of the trace.")] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Send an open-loop load to any OpenAI endpoint and report what came back when."""
    from headway.bench.load import generator
    from headway.bench.output import report

    kind: Literal["chat", "completions"] | None = _ENDPOINTS.get(endpoint)
    if kind is None:
        raise ConfigError(f"There is no endpoint {endpoint!r}.", "Use chat or completions.")
    if url.partition("://")[0] not in ("http", "https"):
        raise ConfigError(f"{url!r} is not an HTTP address.", "Write it like http://127.0.0.1:8000.")
    setup = _mix(mix, slo)
    rng = np.random.default_rng([seed, 0])
    arrivals = _arrivals(trace, limit, rate, min(duration, 30.0) if quick else duration, burstiness, rng)
    calls = mixes.calls(setup, arrivals, rng)

    async def run() -> Any:
        before = await generator.scrape(url)
        records = await generator.run(url, model, calls, api_key=api_key, endpoint=kind, progress=not as_json)
        return records, generator.gained(before, await generator.scrape(url))

    began = time.perf_counter()
    results = {"endpoint": asyncio.run(run())}
    seconds = time.perf_counter() - began
    _report(report, results, "serve", seconds, as_json, out, _about(report, seed, mixes.describe(setup)))


@bench_app.command()
def compare(
    systems: Annotated[
        str | None,
        typer.Option(
            help="Comma separated: vllm-fcfs, vllm-priority, recipes. Default: these two with edf and "
            "slack, with --tight slack, bros and ecoserve.",
        ),
    ] = None,
    model: Model = "smollm2",
    mix: MixName = "chat-batch",
    slo: Slos = None,
    load: Annotated[
        float, typer.Option(min=0.05, help="Arrivals as a multiple of the capacity (without --rate).")
    ] = 1.3,
    rate: Rate = None,
    duration: Duration = 300.0,
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    max_running: MaxRunning = 16,
    tight: Annotated[
        bool, typer.Option("--tight", help="KV for a third of a full batch: who does what without memory?")
    ] = False,
    kv_blocks: Annotated[
        int | None, typer.Option("--kv-blocks", "--blocks", min=1, help="KV blocks of every engine.")
    ] = None,
    host_kv_gib: Annotated[
        float, typer.Option("--host-kv-gib", min=0, help="Host memory for those that swap KV.")
    ] = 1.0,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Start engines and run stock vLLM and Headway's recipes on the same trace, in turn."""
    from headway.bench.live import compare as comparing
    from headway.bench.live.systems import STANDARD, TIGHT, standard_engine
    from headway.bench.output import report

    names = (TIGHT if tight else STANDARD) if systems is None else _names(systems)
    engine = standard_engine(model, max_running=max_running, blocks=kv_blocks, host_kv_gib=host_kv_gib)
    setup = comparing.Setup(_mix(mix, slo), engine, names, load, rate, duration, rounds, seed, tight=tight)
    if quick:
        setup = _quick(setup)
    began = time.perf_counter()
    outcome = asyncio.run(comparing.run(setup))
    seconds = time.perf_counter() - began
    capacity = f", capacity {outcome.capacity:.3f} req/s" if outcome.capacity else ""
    workload = (
        f"{mixes.describe(setup.mix)}; Poisson arrivals at {outcome.rate:.3f} req/s{capacity}, "
        f"{setup.rounds} x {setup.duration:g} s, batch limit {max_running}{_pool(outcome.engine)}"
    )
    _report(report, outcome.results, "compare", seconds, as_json, out, _about(report, seed, workload))


@bench_app.command()
def truth(
    systems: Annotated[str, typer.Option(help="Comma separated recipes.")] = "vllm,slack",
    model: Model = "smollm2",
    mix: MixName = "chat-batch",
    slo: Slos = None,
    duration: Duration = 600.0,
    below: Annotated[float, typer.Option(min=0.05, help="One load, as a multiple of the capacity.")] = 0.7,
    above: Annotated[float, typer.Option(min=0.05, help="The other.")] = 1.3,
    rates: Annotated[str | None, typer.Option(help="Both in requests/s instead, as 1.5,2.8.")] = None,
    max_running: MaxRunning = 16,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Real vLLM against the simulator on one trace, below and above saturation; and step by step."""
    from headway.bench.live.systems import standard_engine
    from headway.bench.validate import validate as telling

    setup = telling.Setup(
        _mix(mix, slo), standard_engine(model, max_running=max_running, blocks=None), _names(systems),
        {"below": below, "above": above}, telling.fixed(rates), duration, seed,
    )  # fmt: skip
    telling.main(setup, quick=quick, as_json=as_json, out=out, command=shlex.join(["headway", *sys.argv[1:]]))


@bench_app.command()
def overhead(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """What Headway itself costs: the gateway before a FAKE instant engine, the hook inside real vLLM."""
    from headway.bench.live.overhead import main

    main(quick=quick, as_json=as_json, seed=seed, out=out, command=shlex.join(sys.argv))


@bench_app.command()
def speed(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """How fast the simulator is, and how long a packer thinks beside vLLM's own schedule()."""
    from headway.bench.simulate.speed import main

    main(quick=quick, as_json=as_json, seed=seed, out=out)


@bench_app.command()
def predictor(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """How well an answer's length is known from its prompt, and what knowing costs (EcoServe 2.3)."""
    from headway.bench.live.predictor import main

    main(quick=quick, as_json=as_json, seed=seed, out=out)


@bench_app.command()
def papers(
    name: Annotated[str, typer.Argument(help="Which paper: bros, ecoserve.")],
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """A paper's tables beside ours, simulated at the paper's scale."""
    from headway.bench.papers import PAPERS

    if name not in PAPERS:
        raise ConfigError(f"There are no tables of {name!r}.", f"Use one of {', '.join(PAPERS)}.")
    module, _, function = PAPERS[name].partition(":")
    getattr(importlib.import_module(module), function)(quick=quick, as_json=as_json, seed=seed, out=out)


_ENDPOINTS: dict[str, Literal["chat", "completions"]] = {"chat": "chat", "completions": "completions"}


def _quick(setup: Any) -> Any:
    """Two systems, up together, a fixed rate: what fits into a minute with two engine starts."""
    both = ("vllm-fcfs", "slack")
    names = tuple(name for name in setup.systems if name in both) or setup.systems[:2]
    rate, seconds = setup.rate or 6.0, 2.0 if setup.tight else 4.0  # little KV takes longer for each
    return replace(
        setup, systems=names, rate=rate, duration=min(setup.duration, seconds), rounds=1, together=True
    )


def _names(systems: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in systems.split(",") if name.strip())


def _pool(engine: Any) -> str:
    """Say what the engines' KV was when it was not all that fits."""
    from headway.engines.vllm.process.launch import block_size

    if engine.blocks is None:
        return ""
    return (
        f", {engine.blocks} KV blocks of {block_size(engine)} tokens (recipes that swap have "
        f"{engine.host_kv_gib:g} GiB of host memory besides, stock vLLM has none)"
    )


def _mix(name: str, slos: list[str] | None) -> mixes.Mix:
    mix = mixes.load(name)
    for text in slos or ():
        mix = mixes.override(mix, text)
    return mix


def _arrivals(
    trace: str | None, limit: int | None, rate: float | None, duration: float, burstiness: float, rng: Any
) -> Any:
    """Return arrival seconds: a trace's own (rescaled to `rate` if given), else gamma or Poisson."""
    from headway.sim.workload import traces, traffic

    if trace is None:
        return traffic.gamma(rate or 1.0, burstiness, duration, rng)
    times = traces.arrivals(trace, limit=limit)
    times = traffic.rescale(times, rate) if rate else times
    return times[times <= duration]


def _about(report: Any, seed: int, workload: str) -> Any:
    return report.About(shlex.join(["headway", *sys.argv[1:]]), seed, workload)


def _report(
    report: Any, results: Any, bench: str, seconds: float, as_json: bool, out: Path | None, about: Any
) -> None:
    """Print one JSON object or a table, and write the files when a folder was given."""
    if out is not None:
        report.write(out, results, bench=bench, host="vllm", seconds=seconds, about=about)
    result = report.to_json(results, bench=bench, host="vllm", seconds=seconds)
    hand_over(result, lambda: report.table(results, about), as_json=as_json, out=out)
