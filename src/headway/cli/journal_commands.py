"""The commands on a gateway's journal: `headway explain`, `headway report` and `headway advise`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from headway.cli.options import ConfigFile, Json, Out, Seed, listed
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config import Scale
    from headway.simulate.fleet import Spec
    from headway.simulate.workload.traffic import TrafficClass
    from headway.whatif.journal.source import JournalSource

JournalDir = Annotated[
    Path | None,
    typer.Option(help="Folder of a gateway's journal; default: where headway serve keeps it with --config."),
]
Since = Annotated[
    str | None, typer.Option(help="Only requests that ended after this: 90m, 24h or 7d ago, or 2026-11-23 10:00.")
]
Until = Annotated[str | None, typer.Option(help="Only requests that ended before this; like --since.")]
TraceFile = Annotated[
    str | None, typer.Option(help="A file of arrivals and lengths (formats: docs/journal.md), instead of --journal.")
]
Today = Annotated[
    list[str] | None, typer.Option(help="Today's instances, as in headway simulate; default: the journal's.")
]
FleetToday = Annotated[Path | None, typer.Option(help="File of today's instances and classes, as in headway simulate.")]
TraceSlo = Annotated[str, typer.Option(help="With --trace: SLO of classes that --fleet does not name, in ms.")]
Wanted = Annotated[str, typer.Option(help="Recipes to compare, the preferred one first.")]
Target = Annotated[float, typer.Option(min=1, max=100, help="Least attainment of every class, in %.")]
Stretch = Annotated[str, typer.Option(help="Simulate only the busiest stretch of this length.")]


def explain(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Request id (x-request-id of its answer); default: list those with the largest SLO violations. "
            "Or the folder of a simulated run: DIR/runs/RECIPE of simulate --out DIR."
        ),
    ] = None,
    request: Annotated[
        str | None,
        typer.Argument(
            help="Request of a simulated run, r17 or 17; default: list those with the largest SLO violations."
        ),
    ] = None,
    journal: JournalDir = None,
    config: ConfigFile = None,
    since: Since = None,
    worst: Annotated[int | None, typer.Option(min=1, help="Number of requests to list, the worst first.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="Show the whole timeline.")] = False,
    as_json: Json = False,
) -> None:
    """Explain why a simulated or real request was late: time in each state, requests served meanwhile."""
    simulated = journal is None and run is not None and (request is not None or _is_path(run))
    asked = request if simulated else run
    if asked is not None and worst is not None:
        raise ConfigError(f"--worst lists requests, but {asked} names one.", "Give only one of them.")
    if simulated and run is not None:
        from headway.store.journal.writer import PATTERN
        from headway.whatif.explain import main

        if any(Path(run).glob(PATTERN)):
            raise ConfigError(f"{run} is a journal, not the folder of a run.", f"Give --journal {run}.")
        main(Path(run), request, worst=worst, as_json=as_json, whole=whole)
        return
    from headway.whatif.journal import explain as real

    if request is not None:
        raise ConfigError(f"--journal {journal} has no runs, but {run} is given.", "Give only the request.")
    folder = folder_of(journal, config)
    real.main(folder, asked, since=_instant(since), worst=worst, as_json=as_json, whole=whole)


def _is_path(text: str) -> bool:
    """Tell whether this is a folder, even a missing one, and not a request id."""
    return "/" in text or Path(text).exists()


def report(
    journal: JournalDir = None,
    config: ConfigFile = None,
    since: Since = "24h",
    until: Until = None,
    by: Annotated[
        str | None, typer.Option(help="Report tokens and cost instead, by tenant, key, app, class or model.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="With --by: print CSV.")] = False,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Report on served requests: attainment, tails, drops and headroom by class, tenant and engine; or their cost."""
    folder = folder_of(journal, config)
    if by is not None:
        from headway.whatif.journal import costs

        if by not in get_args(costs.By):
            raise ConfigError(f"--by {by} is unknown.", f"Use one of {', '.join(get_args(costs.By))}.")
        kind = cast(costs.By, by)
        low, high = _instant(since), _instant(until)
        costs.main(folder, kind, since=low, until=high, as_csv=as_csv, as_json=as_json, out=out)
        return
    if as_csv:
        raise ConfigError("--csv is for tokens and cost.", "Give --by tenant, key, app, class or model, too.")
    from headway.whatif.journal.report import main

    main(folder, since=_instant(since), until=_instant(until), as_json=as_json, out=out)


def advise(
    journal: JournalDir = None,
    config: ConfigFile = None,
    since: Since = "24h",
    until: Until = None,
    trace: TraceFile = None,
    instance: Today = None,
    fleet: FleetToday = None,
    slo: TraceSlo = "",
    recipes: Wanted = "headway,vllm",
    loads: Annotated[str, typer.Option(help="Multiples of the traffic's rate.")] = "1,1.5,2",
    target: Target = 99.0,
    most: Annotated[int, typer.Option(min=1, help="Most instances to try.")] = 16,
    busiest: Stretch = "1h",
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Find the number of instances, the recipe and the batch limit that keep the promises of your traffic."""
    from headway.whatif.journal import advise as advice
    from headway.whatif.journal.source import seconds

    specs, classes, _ = fleet_of(instance, fleet, {})
    source = source_of(journal, config, trace, since, until, specs, classes, slo, seed)
    case, about, notes = source.case(
        listed(recipes), numbers(loads), target=target, most=most, busiest=seconds(busiest)
    )
    advice.main(case, about, notes, seed=seed, as_json=as_json, out=out)


def folder_of(journal: Path | None, config: Path | None) -> Path:
    """Return the journal folder: --journal, or that of `headway serve`. Raise ConfigError if it has no journal."""
    if journal is not None:
        return journal
    from headway.config import load
    from headway.store.journal.writer import PATTERN

    folder, whose = load(config).journal_dir, config or "the default configuration"
    if folder is None:
        raise ConfigError(
            f'No journal is kept with {whose}: journal.dir is "none", or broker.kind is "memory".',
            "Set journal.dir to a folder and restart the gateway, or give --journal DIR.",
        )
    if not any(folder.glob(PATTERN)):
        raise ConfigError(
            f"There is no journal in {folder}, where headway serve keeps it with {whose}.",
            "It begins with the first request that ends. Give the gateway's --config FILE (whose [journal] dir "
            'must not be "none"), or --journal DIR.',
        )
    return folder


def fleet_of(
    instance: list[str] | None, fleet: Path | None, sizes: dict[str, int]
) -> tuple[list[Spec], list[TrafficClass], dict[str, Scale]]:
    """Return the specs of --instance and --fleet, the file's traffic and scaling. sizes: defaults of the specs."""
    from headway.simulate.fleet import spec
    from headway.whatif.scenario import load

    specs, traffic, scale = load(fleet, **sizes) if fleet else ([], [], {})
    return [*specs, *(spec(text, **sizes) for text in instance or ())], traffic, scale


def source_of(
    journal: Path | None,
    config: Path | None,
    trace: str | None,
    since: str | None,
    until: str | None,
    specs: list[Spec],
    classes: list[TrafficClass],
    slo: str,
    seed: int,
) -> JournalSource:
    """Return the real traffic that the options name. specs: its fleet; empty = the journal's engines."""
    from headway.whatif.journal.source import JournalSource

    journal = journal if trace else folder_of(journal, config)
    begin, end = _instant(since), _instant(until)
    return JournalSource(journal, trace, begin, end, tuple(specs), tuple(classes), slo, seed)


def _instant(text: str | None) -> float | None:
    from headway.whatif.journal.source import instant

    return None if text is None else instant(text)


def numbers(text: str) -> tuple[float, ...]:
    """Read numbers above 0 such as "1,1.5,2". ConfigError for anything else."""
    try:
        numbers = tuple(float(part) for part in listed(text))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise ConfigError(f"{text!r} is not a list of numbers above 0.", "Write it like 1,1.5,2.")
    return numbers
