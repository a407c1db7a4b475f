"""The commands of `headway bench` that run from a checkout; each takes --quick, --json, --seed and --out."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from benchmarks.gateway_commands import accept, advise, attack, batch, faults, nodes, overhead, soak
from headway.cli.bench_commands import bench_app, listed, mix_of, with_slos
from headway.cli.options import (
    AppSystems,
    Burstiness,
    Duration,
    FleetQuick,
    FleetRate,
    FleetSeeds,
    FleetSimulated,
    Json,
    Kill,
    MaxRunning,
    MixName,
    Model,
    Out,
    Quick,
    Rounds,
    RunLoad,
    RunRate,
    Scale,
    Seed,
    Slos,
    Swapping,
    Tail,
    Together,
)
from headway.errors import ConfigError
from headway.plugins import attribute


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
    from benchmarks.validate import validate
    from benchmarks.validate.replay import Setup
    from headway.whatif.measured.systems import standard_engine

    setup = Setup(
        mix_of(mix, slo), standard_engine(model, max_running=max_running, blocks=None), listed(systems),
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
    from benchmarks.simulated.speed import main

    main(quick=quick, as_json=as_json, seed=seed, out=out)


@bench_app.command()
def planner(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """Measure the planner's cost per event and per plan against the length of the queue."""
    from benchmarks.simulated.planner import main

    main(quick=quick, as_json=as_json, seed=seed, out=out)


@bench_app.command()
def predictor(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """Measure accuracy and cost of output lengths predicted from prompts (EcoServe 2.3)."""
    from benchmarks.real.predictor import main

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
    from benchmarks.simulated.default import main

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
    """Compare the default with other papers' SLO schedulers (SIMULATED without --real)."""
    if real and (grounds or rivals):
        raise ConfigError("--grounds and --rivals are for simulated runs.", "Leave them out with --real.")
    if real:
        from benchmarks.rivals.real import main as on_engines

        on_engines(seconds=duration, quick=quick, as_json=as_json, seed=seed, out=out)
        return
    only = {"grounds": listed(grounds), "rivals": listed(rivals)}
    from benchmarks.rivals.bench import main

    main(**only, quick=quick, as_json=as_json, seed=seed, out=out)


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
        from benchmarks.simulated.beside import main

        main(quick=quick, as_json=as_json, seed=seed, out=out)
        return
    from benchmarks.real import beside as live
    from headway.whatif.measured.systems import standard_engine

    engine = standard_engine(model, max_running=max_running, blocks=None)
    trial = live.Trial(engine, listed(systems), duration, rounds, seed, capacity)
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
    from benchmarks.real import fleet as live
    from benchmarks.real.fleet_report import main

    mix = with_slos(live.MIX, slo)
    names = live.SYSTEMS if systems is None else listed(systems)
    if simulated:
        from benchmarks.simulated import fleet as virtual

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
    from benchmarks.real import apps as live
    from benchmarks.real.app_load import CHAT, Shape
    from benchmarks.real.apps_report import main
    from headway.whatif.measured.systems import standard_engine

    names = live.SYSTEMS if systems is None else listed(systems)
    engine = standard_engine(model, max_running=max_running, blocks=None)
    shape = Shape(scale, burstiness, with_slos(CHAT, slo))
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
    from benchmarks.papers import PAPERS, PARTED

    if name not in PAPERS:
        raise ConfigError(f"There are no tables of {name!r}.", f"Use one of {', '.join(PAPERS)}.")
    more: dict[str, Any] = {"only": listed(only)} if only else {}
    if more and name not in PARTED:
        raise ConfigError(f"The tables of {name} have no parts.", "Leave --only out.")
    attribute(PAPERS[name])(quick=quick, as_json=as_json, seed=seed, out=out, **more)
