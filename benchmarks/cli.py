"""The commands of `headway bench` that run from a checkout; each takes --quick, --json, --seed and --out.

A command that names a function has no body: that function gets what was asked, and the command's options.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headway.cli.bench_commands import bench_app as bench_app
from headway.cli.bench_commands import command, mix_of, with_slos
from headway.cli.journal_commands import numbers
from headway.cli.options import Burstiness, Duration, MaxRunning, MixName, Model, Rounds, Slos, Together, listed
from headway.errors import ConfigError
from headway.plugins import attribute
from headway.whatif.output.results import Ask


@command()
def truth(
    ask: Ask,
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
    rates: Annotated[str | None, typer.Option(help="Both loads in requests/s instead, as in 1.5,2.8.")] = None,
    max_running: MaxRunning = 16,
) -> None:
    """Compare the simulator with a real vLLM: one trace below and above saturation, and step by step."""
    from benchmarks.validate import validate
    from benchmarks.validate.replay import ReplaySetup
    from headway.whatif.measured.systems import standard_engine

    setup = ReplaySetup(
        mix_of(mix, slo),
        standard_engine(model, max_running=max_running, blocks=None),
        listed(systems),
        {"below": below, "above": above},
        validate.fixed(rates),
        duration,
        ask.seed,
    )
    validate.main(ask, setup)


@command()
def gpu(
    ask: Ask,
    model: Model = "smollm2",
    dummy: Annotated[
        bool, typer.Option("--dummy", help="Made-up weights: the directory needs only a configuration and a tokenizer.")
    ] = False,
    mix: MixName = "chat-batch",
    slo: Slos = None,
    duration: Duration = 30.0,
) -> None:
    """Measure stock vLLM and Headway on this machine's GPU: start-up, both loads, hook, profile, forecast."""
    from benchmarks.real.gpu import main

    main(ask, model, dummy, mix_of(mix, slo), duration)


@command("benchmarks.real.overhead:main")
def overhead(
    ask: Ask,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers",
            help="Comma-separated gateways to measure beside Headway: litellm, sglang-router (`make peers` "
            "installs them). Takes minutes longer, even with --quick.",
        ),
    ] = None,
) -> None:
    """Measure Headway's own cost: the gateway in front of a FAKE engine, the hook inside vLLM's scheduler."""


@command("benchmarks.real.attack:main")
def attack(ask: Ask) -> None:
    """Attack the gateway in front of a FAKE engine: what others notice, its memory, what is lost."""


@command()
def batch(
    ask: Ask,
    model: Model = "smollm2",
    lines: Annotated[int, typer.Option(min=1, help="Lines of the batch.")] = 10_000,
    rate: Annotated[float, typer.Option(min=0.001, help="Interactive requests per second.")] = 1.0,
    duration: Duration = 120.0,
    max_running: MaxRunning = 16,
) -> None:
    """Serve interactive requests beside a batch on real vLLM, and kill the gateway in the middle of it."""
    from benchmarks.real.batch import BatchTrial, main
    from headway.whatif.measured.systems import standard_engine

    engine = standard_engine(model, max_running=max_running, blocks=None)
    main(ask, BatchTrial(engine, lines, rate, duration, ask.seed))


@command()
def soak(
    ask: Ask, only: Annotated[str, typer.Option(help="Comma-separated: streams, kills, requests, calls.")] = ""
) -> None:
    """Test the gateway's endurance: 10,000 streams, 200 kills, 200,000 requests, 10,000 made-up calls."""
    from benchmarks.real.soak import main

    main(ask, listed(only))


@command()
def faults(
    ask: Ask,
    only: Annotated[str, typer.Option(help="Comma-separated kinds of faults; none = all.")] = "",
    count: Annotated[int | None, typer.Option("--faults", min=1, help="How many; else 1000, with --quick 30.")] = None,
) -> None:
    """Kill, pause and cut off gateways, controllers, agents, engines, RabbitMQ and PostgreSQL under load."""
    from benchmarks.real.faults.main import main

    main(ask, listed(only), count)


@command("benchmarks.real.accept:main")
def accept(
    ask: Ask,
    backlog: Annotated[
        int | None, typer.Option(min=1, help="Requests of the backlog; else 100,000, with --quick 3,000.")
    ] = None,
) -> None:
    """Measure how fast requests are accepted, by queue and gateways, and the takeover of a backlog."""


@command("benchmarks.real.nodes:main")
def nodes(
    ask: Ask,
    recipe: Annotated[str, typer.Option(help="A recipe that swaps models.")] = "headway",
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second, of all models.")] = 0.8,
    duration: Duration = 600.0,
) -> None:
    """Serve three models with real vLLM on two Ray nodes of this machine, and kill each part once."""


@command()
def advise(
    ask: Ask,
    mix: MixName = "deadlines",
    model: Model = "smollm2",
    recipe: Annotated[str, typer.Option(help="Recipe to serve with.")] = "headway",
    loads: Annotated[str, typer.Option(help="Multiples of the capacity; the journal is of the first.")] = "0.9,1.3",
    duration: Duration = 240.0,
    max_running: MaxRunning = 16,
) -> None:
    """Predict attainment from a real gateway's journal at two loads, and serve them really."""
    from benchmarks.real.foresight import ForesightTrial, main
    from headway.cli.journal_commands import numbers
    from headway.whatif.measured.systems import standard_engine

    engine = standard_engine(model, max_running=max_running, blocks=None)
    main(ask, ForesightTrial(mix_of(mix, None), engine, recipe, numbers(loads), duration, ask.seed))


@command("benchmarks.simulated.speed:main")
def speed(ask: Ask) -> None:
    """Measure the simulator's speed, and a packer's decision time beside vLLM's schedule()."""


@command("benchmarks.simulated.planner:main")
def planner(ask: Ask) -> None:
    """Measure the planner's cost per event and per plan against the length of the queue."""


@command("benchmarks.real.predictor:main")
def predictor(ask: Ask) -> None:
    """Measure accuracy and cost of output lengths predicted from prompts (EcoServe 2.3)."""


@command("benchmarks.simulated.default:main")
def default(
    ask: Ask,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell, from --seed on.")] = 3,
    hindsight: Annotated[
        int,
        typer.Option(
            min=0,
            help="Simulations of a search that knows all requests beforehand, in each cell below 80 % of the bound; "
            "without the other recipes.",
        ),
    ] = 0,
) -> None:
    """Compare the default recipe with all others on all grounds (SIMULATED), and with an upper bound."""


@command()
def rivals(
    ask: Ask,
    grounds: Annotated[
        str, typer.Option(help="Only these grounds, comma-separated, without other settings of rivals.")
    ] = "",
    rivals: Annotated[
        str, typer.Option(help="Only these rivals, comma-separated, without other settings of theirs.")
    ] = "",
    real: Annotated[bool, typer.Option("--real", help="Two grounds on real engines started here.")] = False,
    duration: Annotated[float, typer.Option(min=1, help="With --real: seconds of arrivals.")] = 60.0,
) -> None:
    """Compare the default with other papers' SLO schedulers (SIMULATED without --real)."""
    if real and (grounds or rivals):
        raise ConfigError("--grounds and --rivals are for simulated runs.", "Leave them out with --real.")
    if real:
        from benchmarks.rivals.real import main as on_engines

        on_engines(ask, duration)
        return
    from benchmarks.rivals.bench import main

    main(ask, listed(grounds), listed(rivals))


@command()
def beside(
    ask: Ask,
    real: Annotated[bool, typer.Option("--real", help="On two real engines started here, a core each.")] = False,
    systems: Annotated[
        str, typer.Option(help="With --real, comma-separated: vllm-fcfs, vllm-priority and recipes.")
    ] = "vllm-fcfs,vllm-priority,headway",
    model: Annotated[str, typer.Option(help="With --real: model name, directory or hub id.")] = "smollm2",
    batch: Annotated[int, typer.Option(min=1, help="With --real: requests of the batch.")] = 300,
    burst: Annotated[
        float, typer.Option(min=1, help="With --real: seconds of a burst, and of the time after it.")
    ] = 45.0,
    knee: Annotated[
        float | None, typer.Option(min=0.001, help="With --real: requests/s of two engines, instead of measuring them.")
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="With --real: batch limit of every engine.")] = 16,
) -> None:
    """Run interactive requests beside a batch on two engines (SIMULATED without --real)."""
    if not real:
        from benchmarks.simulated.beside import main

        main(ask)
        return
    from benchmarks.real import beside as live
    from benchmarks.simulated.beside import Shape
    from headway.whatif.measured.systems import standard_engine

    engine = standard_engine(model, max_running=max_running, blocks=None)
    shape = Shape(batch, 10.0, burst, burst)
    live.main(ask, live.BesideTrial(engine, listed(systems), shape, knee, ask.seed))


@command()
def placement(
    ask: Ask,
    systems: Annotated[
        str | None, typer.Option(help="Comma-separated systems (docs/placement.md); unset, all.")
    ] = None,
    grounds: Annotated[
        str | None, typer.Option(help="Comma-separated grounds (docs/placement.md); unset, all.")
    ] = None,
    engines: Annotated[str | None, typer.Option(help="Sizes of the simulated fleet; unset, 4,16,64.")] = None,
    loads: Annotated[str | None, typer.Option(help="Multiples of the fleet's capacity; unset, 0.7,1,1.3.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="Simulated seconds that count; unset, 240.")] = None,
    kv: Annotated[float, typer.Option(min=0.1, max=1.0, help="Share of the profile's KV that engines have.")] = 1.0,
    real: Annotated[
        bool, typer.Option("--real", help="Two real vLLM engines on a core each, instead of the simulator.")
    ] = False,
    hindsight: Annotated[
        bool, typer.Option("--hindsight", help="Small cases against the best of all placements, in the simulator.")
    ] = False,
    index: Annotated[bool, typer.Option("--index", help="What the index of prefix caches costs.")] = False,
    model: Model = "smollm2",
) -> None:
    """Send conversations to engines with prefix caches by Headway's rule and by those of other routers."""
    if index or hindsight:
        attribute(f"benchmarks.placement.{'index' if index else 'hindsight'}:main")(ask)
        return
    from benchmarks.catalog.grid import Grid
    from benchmarks.placement import real as live
    from benchmarks.placement import simulated as virtual

    if real:
        live.main(ask, listed(systems) if systems else live.SYSTEMS, model, live.Talk())
        return
    virtual.main(ask, Grid.read(systems, grounds, engines, loads, seconds), kv)


@command()
def catalog(
    ask: Ask,
    systems: Annotated[
        str | None, typer.Option(help="Comma-separated systems (docs/bench/catalog.md) or recipes; unset, all.")
    ] = None,
    grounds: Annotated[
        str | None, typer.Option(help="Comma-separated grounds (docs/bench/catalog.md); unset, all.")
    ] = None,
    engines: Annotated[str | None, typer.Option(help="Sizes of the fleet; unset, 4,16.")] = None,
    loads: Annotated[str | None, typer.Option(help="Multiples of the fleet's capacity; unset, 0.7,1,1.3,2.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="Simulated seconds that count; unset, 240.")] = None,
) -> None:
    """Serve the workloads of Kubernetes' inference-perf, alone and mixed, on a fleet (SIMULATED)."""
    from benchmarks.catalog.grid import Grid
    from benchmarks.catalog.simulated import main

    main(ask, Grid.read(systems, grounds, engines, loads, seconds))


@command()
def agents(
    ask: Ask,
    systems: Annotated[
        str | None, typer.Option(help="Comma-separated systems (docs/bench/catalog.md) or recipes; unset, all.")
    ] = None,
    settings: Annotated[str | None, typer.Option(help="all-kv, little-kv or both; unset, both.")] = None,
    engines: Annotated[str | None, typer.Option(help="Sizes of the fleet; unset, 4,16.")] = None,
    loads: Annotated[str | None, typer.Option(help="Multiples of the fleet's capacity; unset, 0.5,0.7,1.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1.0, help="Simulated seconds that count; unset, 240.")] = None,
    real: Annotated[bool, typer.Option("--real", help="Shorter ones on two real vLLM engines.")] = False,
) -> None:
    """Replay coding agents in a closed loop beside chat (needs HEADWAY_DATA; SIMULATED without --real)."""
    if real:
        if settings or engines or loads or seconds:
            problem = "--settings, --engines, --loads and --seconds are for simulated runs."
            raise ConfigError(problem, "Leave them out with --real.")
        from benchmarks.catalog.agents_real import main as on_engines

        on_engines(ask, listed(systems or ""))
        return
    from benchmarks.catalog.agents import main
    from benchmarks.catalog.grid import Grid

    main(ask, Grid.read(systems, settings, engines, loads, seconds))


@command()
def elastic(
    ask: Ask,
    systems: Annotated[str | None, typer.Option(help="Comma-separated systems (docs/scale.md); unset, all.")] = None,
    grounds: Annotated[
        str | None, typer.Option(help="Comma-separated grounds (docs/scale.md); unset, all whose traces are there.")
    ] = None,
    starts: Annotated[str | None, typer.Option(help="Seconds of an engine's start; unset, 60,300.")] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Streams of two real vLLM engines while engines and the gateway change.")
    ] = False,
) -> None:
    """Let engines follow the load by Headway's rule and by other autoscalers (SIMULATED without --real)."""
    if real and (systems or grounds or starts):
        problem = "--systems, --grounds and --starts are for simulated runs."
        raise ConfigError(problem, "Leave them out with --real.")
    if real:
        from benchmarks.elastic.real import main as on_engines

        on_engines(ask)
        return
    from benchmarks.elastic.simulated import main

    main(ask, listed(systems or ""), listed(grounds or ""), numbers(starts) if starts else ())


@command(
    quick=Annotated[
        bool,
        typer.Option(
            "--quick",
            help="About a minute, mostly for the start of two engines: one system (qlm), 10 s of arrivals, two "
            "models of one shape, without the model that needs a restart of vLLM.",
        ),
    ]
)
def fleet(
    ask: Ask,
    systems: Annotated[
        str | None,
        typer.Option(
            "--systems",
            help="Comma-separated recipes that swap models. Default: vllm-model-swap, edf-model-swap, shepherd, "
            "qlm, and headway if it swaps.",
        ),
    ] = None,
    model: Model = "smollm2",
    slo: Slos = None,
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="Requests/s, of all models.")] = 1.2,
    tail: Annotated[float, typer.Option(min=0, max=1, help="Share of the requests for the rare model.")] = 0.06,
    burstiness: Burstiness = 1.0,
    duration: Duration = 600.0,
    max_running: MaxRunning = 8,
    kill: Annotated[bool, typer.Option("--kill", help="Kill one engine (SIGKILL) after half of the arrivals.")] = False,
    simulated: Annotated[
        bool,
        typer.Option("--simulated", help="Simulate in virtual time (SIMULATED), without engines; means over seeds."),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="With --simulated: number of seeds, from --seed on.")] = 5,
) -> None:
    """Serve three models on two real vLLM instances (a core each) that swap them, one recipe after the other.

    Two models have one shape and are loaded in place; the third, rare one needs a restart. Variants of the
    model are made once, in Headway's cache directory (models/variants).
    """
    from benchmarks.real import fleet as live
    from benchmarks.real.fleet import main
    from benchmarks.simulated import fleet as virtual

    names = live.SYSTEMS if systems is None else listed(systems)
    what = (names, with_slos(live.MIX, slo), rate, tail, burstiness, duration, max_running)
    if simulated and kill:
        raise ConfigError("No engine is killed in a simulated fleet.", "Leave out --kill or --simulated.")
    if simulated:
        virtual.main(ask, virtual.Trial(*what, seeds))
    else:
        main(ask, live.FleetTrial(live.make_models(model), *what, kill, ask.seed))


@command()
def apps(
    ask: Ask,
    systems: Annotated[
        str | None,
        typer.Option(
            "--systems",
            help="Comma-separated: vllm-fcfs, vllm-priority and recipes. Default: vllm-fcfs, parrot, vtc, hermes.",
        ),
    ] = None,
    model: Model = "smollm2",
    slo: Slos = None,
    load: Annotated[
        float, typer.Option("--load", min=0.05, help="Runs per second as a multiple of the measured capacity.")
    ] = 1.0,
    rate: Annotated[float | None, typer.Option("--rate", min=0.001, help="Runs per second, instead of --load.")] = None,
    scale: Annotated[
        float, typer.Option(min=0.01, max=1, help="Factor for recorded tokens and seconds outside the LLM.")
    ] = 0.25,
    burstiness: Burstiness = 0.0625,
    duration: Duration = 240.0,
    rounds: Rounds = 1,
    max_running: MaxRunning = 16,
    together: Together = False,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated",
            help="Simulate in virtual time (SIMULATED), without engines; also hermes-oracle, which knows true demands, "
            "and hermes-aging-X, in which runs gain X seconds of rank per second.",
        ),
    ] = False,
) -> None:
    """Run LLM applications beside chat with an SLO on real vLLM: stock, parrot, vtc and hermes."""
    from benchmarks.real import apps as live
    from benchmarks.real.app_load import CHAT, AppShape
    from benchmarks.real.apps_report import main
    from benchmarks.simulated import apps as virtual
    from headway.whatif.measured.systems import standard_engine

    names = live.SYSTEMS if systems is None else listed(systems)
    engine = standard_engine(model, max_running=max_running, blocks=None)
    shape = AppShape(scale, burstiness, with_slos(CHAT, slo))
    trial = live.AppsTrial(engine, names, shape, load, rate, duration, rounds, together, ask.seed)
    (virtual.main if simulated else main)(ask, trial)


@command()
def papers(
    ask: Ask,
    name: Annotated[str, typer.Argument(help="The paper: anneal, bros, ecoserve, hermes or qlm.")],
    only: Annotated[str, typer.Option(help="Comma-separated parts; a wrong one names them all.")] = "",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds of each setting of bros, hermes, hermes-caches or qlm.")
    ] = None,
) -> None:
    """Reproduce a paper's tables in the simulator (SIMULATED), beside the paper's figures."""
    from benchmarks.papers import PAPERS, SEEDED

    if name not in PAPERS:
        raise ConfigError(f"There are no tables of {name!r}.", f"Use one of {', '.join(PAPERS)}.")
    more: dict[str, Any] = {"only": listed(only)} if only else {}
    if seeds is not None and name not in SEEDED:
        raise ConfigError(f"The seeds of {name} are fixed.", "Leave --seeds out.")
    more |= {} if seeds is None else {"seeds": seeds}
    attribute(PAPERS[name])(ask, **more)
