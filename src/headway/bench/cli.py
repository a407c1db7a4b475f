"""`headway bench`: the benchmarks. Every command takes --quick, --json, --seed and --out."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from headway.bench.gateway_commands import accept, advise, attack, batch, faults, nodes, overhead, soak
from headway.bench.load import mix as mixes
from headway.bench.options import (
    AppSystems,
    Burstiness,
    Duration,
    Endpoint,
    FleetQuick,
    FleetRate,
    FleetSeeds,
    FleetSimulated,
    HostKv,
    Json,
    Kill,
    KvBlocks,
    Limit,
    Load,
    MaxRunning,
    MixName,
    Model,
    Out,
    Quick,
    Rate,
    Rounds,
    RunLoad,
    RunRate,
    Scale,
    Seed,
    ServerUrl,
    Slos,
    Swapping,
    Systems,
    Tail,
    Tight,
    Together,
    Trace,
)
from headway.bench.output.results import About, Pictures, deliver
from headway.errors import ConfigError
from headway.plugins import attribute

bench_app = typer.Typer(help="Benchmarks: SLO attainment, latency, overhead and cost.", no_args_is_help=True)


@bench_app.command()
def serve(
    url: ServerUrl,
    model: Annotated[str, typer.Option(help="Model name to request.")] = "smollm2",
    mix: MixName = "chat-batch",
    slo: Slos = None,
    rate: Rate = None,
    duration: Duration = 60.0,
    burstiness: Burstiness = 1.0,
    trace: Trace = None,
    limit: Limit = None,
    endpoint: Endpoint = "chat",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Send an open-loop load to an OpenAI-compatible server and report latency and SLO attainment."""
    from headway.bench.load import generator

    kind = _ENDPOINTS.get(endpoint)
    if kind is None:
        raise ConfigError(f"There is no endpoint {endpoint!r}.", "Use chat or completions.")
    if url.partition("://")[0] not in ("http", "https"):
        raise ConfigError(f"{url!r} is not an HTTP address.", "Write it like http://127.0.0.1:8000.")
    setup, rng = _mix(mix, slo), np.random.default_rng([seed, 0])
    arrivals = _arrivals(trace, limit, rate, min(duration, 30.0) if quick else duration, burstiness, rng)
    calls = mixes.calls(setup, arrivals, rng)

    async def run() -> Any:
        before = await generator.scrape(url)
        records = await generator.run(url, model, calls, api_key=api_key, endpoint=kind, progress=not as_json)
        return records, generator.gained(before, await generator.scrape(url))

    began = time.perf_counter()
    results = {"endpoint": asyncio.run(run())}
    _deliver(results, "serve", began, mixes.describe(setup), seed, as_json, out)


@bench_app.command()
def compare(
    systems: Systems = None,
    model: Model = "smollm2",
    mix: MixName = "chat-batch",
    slo: Slos = None,
    load: Load = 1.3,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    duration: Duration = 300.0,
    rounds: Rounds = 1,
    max_running: MaxRunning = 16,
    together: Together = False,
    tight: Tight = False,
    kv_blocks: KvBlocks = None,
    host_kv_gib: HostKv = 1.0,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Compare stock vLLM with Headway's recipes on the same trace, on engines started here."""
    from headway.bench.live import compare as comparison
    from headway.bench.live.systems import STANDARD, TIGHT, standard_engine

    names = (TIGHT if tight else STANDARD) if systems is None else _names(systems)
    engine = standard_engine(model, max_running=max_running, blocks=kv_blocks, host_kv_gib=host_kv_gib)
    asked = comparison.Setup(
        _mix(mix, slo), engine, names, load, rate, duration, rounds, seed, together, tight, burstiness
    )
    setup = comparison.shortened(asked) if quick else asked
    began = time.perf_counter()
    outcome = asyncio.run(comparison.run(setup))
    about = comparison.describe(setup, outcome)
    _deliver(outcome.results, "compare", began, about, seed, as_json, out, asked.variant)


@bench_app.command()
def truth(
    systems: Annotated[str, typer.Option(help="Comma-separated recipes.")] = "vllm,slack",
    model: Model = "smollm2",
    mix: MixName = "chat-batch",
    slo: Slos = None,
    duration: Duration = 600.0,
    below: Annotated[
        float, typer.Option(min=0.05, help="Load below saturation, as a multiple of the measured capacity.")
    ] = 0.7,
    above: Annotated[
        float, typer.Option(min=0.05, help="Load above saturation, as a multiple of the measured capacity.")
    ] = 1.3,
    rates: Annotated[
        str | None, typer.Option(help="Both loads in requests/s instead, as in 1.5,2.8.")
    ] = None,
    max_running: MaxRunning = 16,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Compare the simulator with a real vLLM: one trace below and above saturation, and step by step."""
    from headway.bench.live.systems import standard_engine
    from headway.bench.validate import validate
    from headway.bench.validate.replay import Setup

    setup = Setup(
        _mix(mix, slo), standard_engine(model, max_running=max_running, blocks=None), _names(systems),
        {"below": below, "above": above}, validate.fixed(rates), duration, seed,
    )  # fmt: skip
    validate.main(setup, quick=quick, as_json=as_json, out=out)


bench_app.command()(overhead)
bench_app.command()(attack)
bench_app.command()(batch)
bench_app.command()(soak)
bench_app.command()(faults)
bench_app.command()(accept)
bench_app.command()(nodes)
bench_app.command()(advise)


@bench_app.command()
def speed(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """Measure the simulator's speed, and a packer's decision time beside vLLM's schedule()."""
    from headway.bench.simulate.speed import main

    main(quick=quick, as_json=as_json, seed=seed, out=out)


@bench_app.command()
def planner(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """Measure the planner's cost per event and per plan against the length of the queue."""
    from headway.bench.simulate.planner import main

    main(quick=quick, as_json=as_json, seed=seed, out=out)


@bench_app.command()
def predictor(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """Measure accuracy and cost of output lengths predicted from prompts (EcoServe 2.3)."""
    from headway.bench.live.predictor import main

    main(quick=quick, as_json=as_json, seed=seed, out=out)


@bench_app.command()
def default(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell, from --seed on.")] = 3,
    hindsight: Annotated[
        int,
        typer.Option(
            min=0,
            help="Simulations of a search that knows all requests beforehand, in each cell below 80 % of "
            "the bound.",
        ),
    ] = 0,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Compare the default recipe with all others on all grounds (SIMULATED), and with an upper bound."""
    from headway.bench.simulate.default import main

    main(seeds=seeds, hindsight=hindsight, quick=quick, as_json=as_json, seed=seed, out=out)


@bench_app.command()
def rivals(
    grounds: Annotated[
        str, typer.Option(help="Only these grounds, comma-separated, without other settings of rivals.")
    ] = "",
    rivals: Annotated[
        str, typer.Option(help="Only these rivals, comma-separated, without other settings of theirs.")
    ] = "",
    real: Annotated[bool, typer.Option("--real", help="Two grounds on real engines started here.")] = False,
    duration: Annotated[float, typer.Option(min=1, help="With --real: seconds of arrivals.")] = 60.0,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Compare the default with other papers' SLO schedulers (SIMULATED without --real); from a checkout."""
    from headway.bench.checkout import from_checkout

    if real and (grounds or rivals):
        raise ConfigError("--grounds and --rivals are for simulated runs.", "Leave them out with --real.")
    if real:
        main = from_checkout("rivals.real:main")
        main(seconds=duration, quick=quick, as_json=as_json, seed=seed, out=out)
        return
    only = {"grounds": _names(grounds), "rivals": _names(rivals)}
    from_checkout("rivals.bench:main")(**only, quick=quick, as_json=as_json, seed=seed, out=out)


@bench_app.command()
def beside(
    real: Annotated[bool, typer.Option("--real", help="On real engines started here.")] = False,
    systems: Annotated[
        str, typer.Option(help="With --real, comma-separated: vllm-fcfs, vllm-priority and recipes.")
    ] = "vllm-fcfs,headway",
    model: Annotated[str, typer.Option(help="With --real: model name, directory or hub id.")] = "smollm2",
    duration: Annotated[
        float, typer.Option(min=1, help="With --real: seconds until the batch is due.")
    ] = 240.0,
    capacity: Annotated[
        float | None,
        typer.Option(min=0.001, help="With --real: requests/s of the engine, instead of measuring them."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --real: rounds over all systems.")] = 1,
    max_running: Annotated[int, typer.Option(min=1, help="With --real: batch limit of every engine.")] = 16,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Run interactive bursts beside a batch with a completion deadline (SIMULATED without --real)."""
    if not real:
        from headway.bench.simulate.beside import main

        main(quick=quick, as_json=as_json, seed=seed, out=out)
        return
    from headway.bench.live import beside as live
    from headway.bench.live.systems import standard_engine

    engine = standard_engine(model, max_running=max_running, blocks=None)
    trial = live.Trial(engine, _names(systems), duration, rounds, seed, capacity)
    live.main(trial, quick=quick, as_json=as_json, out=out)


@bench_app.command()
def fleet(
    systems: Swapping = None,
    model: Model = "smollm2",
    slo: Slos = None,
    rate: FleetRate = 1.2,
    tail: Tail = 0.06,
    burstiness: Burstiness = 1.0,
    duration: Duration = 600.0,
    max_running: MaxRunning = 8,
    kill: Kill = False,
    simulated: FleetSimulated = False,
    seeds: FleetSeeds = 5,
    quick: FleetQuick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Serve three models on two real vLLM instances (a core each) that swap them, one recipe after the other.

    Two models have one shape and are loaded in place; the third, rare one needs a restart. Variants of the
    model are made once, in Headway's cache directory (models/variants).
    """
    from headway.bench.live import fleet as live
    from headway.bench.live.fleet_report import main

    mix = _with_slos(live.MIX, slo)
    names = live.SYSTEMS if systems is None else _names(systems)
    if simulated:
        from headway.bench.simulate import fleet as virtual

        if kill:
            raise ConfigError("No engine is killed in a simulated fleet.", "Leave out --kill or --simulated.")
        setting = virtual.Trial(names, mix, rate, tail, burstiness, duration, max_running, seed, seeds)
        virtual.main(setting, quick=quick, as_json=as_json, out=out)
        return
    trial = live.Trial(
        live.make_models(model), names, mix, rate, tail, burstiness, duration, max_running, kill, seed
    )
    main(trial, quick=quick, as_json=as_json, out=out)


@bench_app.command()
def apps(
    systems: AppSystems = None,
    model: Model = "smollm2",
    slo: Slos = None,
    load: RunLoad = 1.0,
    rate: RunRate = None,
    scale: Scale = 0.25,
    burstiness: Burstiness = 0.0625,
    duration: Duration = 240.0,
    rounds: Rounds = 1,
    max_running: MaxRunning = 16,
    together: Together = False,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Run LLM applications beside chat with an SLO on real vLLM: stock, parrot, vtc and hermes."""
    from headway.bench.live import apps as live
    from headway.bench.live.app_load import CHAT, Shape
    from headway.bench.live.apps_report import main
    from headway.bench.live.systems import standard_engine

    names = live.SYSTEMS if systems is None else _names(systems)
    engine = standard_engine(model, max_running=max_running, blocks=None)
    shape = Shape(scale, burstiness, _with_slos(CHAT, slo))
    trial = live.Trial(engine, names, shape, load, rate, duration, rounds, together, seed)
    main(trial, quick=quick, as_json=as_json, out=out)


@bench_app.command()
def papers(
    name: Annotated[str, typer.Argument(help="The paper: anneal, bros, ecoserve, hermes or qlm.")],
    only: Annotated[
        str, typer.Option(help="Comma-separated parts of hermes or qlm; a wrong one names them all.")
    ] = "",
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Reproduce a paper's tables in the simulator (SIMULATED), beside the paper's figures."""
    from headway.bench.papers import PAPERS, PARTED

    if name not in PAPERS:
        raise ConfigError(f"There are no tables of {name!r}.", f"Use one of {', '.join(PAPERS)}.")
    more: dict[str, Any] = {"only": _names(only)} if only else {}
    if more and name not in PARTED:
        raise ConfigError(f"The tables of {name} have no parts.", "Leave --only out.")
    attribute(PAPERS[name])(quick=quick, as_json=as_json, seed=seed, out=out, **more)


_ENDPOINTS: dict[str, Literal["chat", "completions"]] = {"chat": "chat", "completions": "completions"}


def _names(systems: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in systems.split(",") if name.strip())


def _mix(name: str, slos: list[str] | None) -> mixes.Mix:
    return _with_slos(mixes.load(name), slos)


def _with_slos(mix: mixes.Mix, slos: list[str] | None) -> mixes.Mix:
    for text in slos or ():
        mix = mixes.override(mix, text)
    return mix


def _arrivals(
    trace: str | None, limit: int | None, rate: float | None, duration: float, burstiness: float, rng: Any
) -> Any:
    """Return arrival seconds: a trace's own (rescaled to `rate` if given), else gamma or Poisson."""
    from headway.simulate.workload import traces, traffic

    if trace is None:
        return traffic.gamma(rate or 1.0, burstiness, duration, rng)
    times = traces.arrivals(trace, limit=limit)
    times = traffic.rescale(times, rate) if rate else times
    return times[times <= duration]


def _deliver(
    results: Any, bench: str, began: float, workload: str, seed: int, as_json: bool, out: Path | None,
    variant: str = "",
) -> None:  # fmt: skip
    """Print and write the report of a load on real engines."""
    from headway.bench.load import report

    seconds, about = time.perf_counter() - began, About(workload, seed)
    built = report.build(results, bench=bench, host="vllm", seconds=seconds, about=about, variant=variant)
    deliver(built, as_json=as_json, out=out, pictures=lambda: _plots(results))


def _plots(results: Any) -> Pictures:
    from headway.bench.load import plots

    return plots.draw(results)
