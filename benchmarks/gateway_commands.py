"""Commands of `headway bench` on one gateway, with FAKE engines or (advise, batch) real ones."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.cli.options import Duration, Json, MaxRunning, MixName, Model, Out, PeerNames, Quick, Seed


def overhead(
    peers: PeerNames = None,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Measure Headway's own cost: the gateway in front of a FAKE engine, the hook inside vLLM's scheduler."""
    from benchmarks.real.overhead import main
    from benchmarks.real.peer_gateways import chosen

    main(chosen(peers), quick=quick, as_json=as_json, seed=seed, out=out)


def attack(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """Attack the gateway in front of a FAKE engine: what others notice, its memory, what is lost."""
    from benchmarks.real.attack import main

    main(quick=quick, as_json=as_json, seed=seed, out=out)


def soak(
    only: Annotated[str, typer.Option(help="Comma-separated: streams, kills, requests, calls.")] = "",
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Test the gateway's endurance: 10,000 streams, 200 kills, 200,000 requests, 10,000 made-up calls."""
    from benchmarks.real.soak import main

    names = tuple(name.strip() for name in only.split(",") if name.strip())
    main(names, quick=quick, as_json=as_json, seed=seed, out=out)


def accept(
    backlog: Annotated[
        int | None, typer.Option(min=1, help="Requests of the backlog; else 100,000, with --quick 3,000.")
    ] = None,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Measure how fast requests are accepted, by queue and gateways, and the takeover of a backlog."""
    from benchmarks.real.accept import main

    main(backlog, quick=quick, as_json=as_json, seed=seed, out=out)


def nodes(
    recipe: Annotated[str, typer.Option(help="A recipe that swaps models.")] = "headway",
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second, of all models.")] = 0.8,
    duration: Duration = 600.0,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Serve three models with real vLLM on two Ray nodes of this machine, and kill each part once."""
    from benchmarks.real.nodes_report import main

    main(recipe, rate, duration, quick=quick, as_json=as_json, seed=seed, out=out)


def faults(
    only: Annotated[str, typer.Option(help="Comma-separated kinds of faults; none = all.")] = "",
    count: Annotated[
        int | None, typer.Option("--faults", min=1, help="How many; else 1000, with --quick 30.")
    ] = None,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Kill, pause and cut off gateways, controllers, agents, engines, RabbitMQ and PostgreSQL under load."""
    from benchmarks.real.faults.main import main

    names = tuple(name.strip() for name in only.split(",") if name.strip())
    main(names, count, quick=quick, as_json=as_json, seed=seed, out=out)


def advise(
    mix: MixName = "deadlines",
    model: Model = "smollm2",
    recipe: Annotated[str, typer.Option(help="Recipe to serve with.")] = "headway",
    loads: Annotated[
        str, typer.Option(help="Multiples of the capacity; the journal is of the first.")
    ] = "0.9,1.3",
    duration: Duration = 240.0,
    max_running: MaxRunning = 16,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Predict attainment from a real gateway's journal at two loads, and serve them really."""
    from benchmarks.real.foresight import Trial, main
    from headway.cli.journal_commands import numbers
    from headway.whatif.load import mix as mixes
    from headway.whatif.measured.systems import standard_engine

    engine = standard_engine(model, max_running=max_running, blocks=None)
    trial = Trial(mixes.load(mix), engine, recipe, numbers(loads), duration, seed)
    main(trial, quick=quick, as_json=as_json, out=out)


def batch(
    model: Model = "smollm2",
    lines: Annotated[int, typer.Option(min=1, help="Lines of the batch.")] = 10_000,
    rate: Annotated[float, typer.Option(min=0.001, help="Interactive requests per second.")] = 1.0,
    duration: Duration = 120.0,
    max_running: MaxRunning = 16,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Serve interactive requests beside a batch on real vLLM, and kill the gateway in the middle of it."""
    from benchmarks.real.batch import Trial, main
    from headway.whatif.measured.systems import standard_engine

    engine = standard_engine(model, max_running=max_running, blocks=None)
    main(Trial(engine, lines, rate, duration, seed), quick=quick, as_json=as_json, out=out)
