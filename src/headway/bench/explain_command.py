"""The command `headway explain`: of a simulated run, or of the journal of a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.bench.options import Json
from headway.errors import ConfigError

JournalDir = Annotated[
    Path | None, typer.Option(help="Folder of a gateway's journal (journal.dir in headway config show).")
]


def explain(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Folder of a run: DIR/runs/RECIPE of simulate --out DIR. With --journal: a request."
        ),
    ] = None,
    request: Annotated[
        str | None, typer.Argument(help="Request id, r17 or 17; default: list the latest requests.")
    ] = None,
    journal: JournalDir = None,
    since: Annotated[
        str | None, typer.Option(help="With --journal: requests that ended since; 24h, 7d.")
    ] = None,
    worst: Annotated[int | None, typer.Option(min=1, help="List so many requests, the latest first.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="Show the whole timeline.")] = False,
    as_json: Json = False,
) -> None:
    """Explain why a request was late, simulated or real: time per state, requests served meanwhile."""
    asked = run if journal else request
    if asked is not None and worst is not None:
        raise ConfigError(f"--worst lists requests, and {asked} is one.", "Give one of the two.")
    if journal is None:
        from headway.bench.simulate.explain import main

        if run is None:
            raise ConfigError("Explain what?", "Give the folder of a run, or --journal DIR and a request.")
        main(Path(run), request, worst=worst, as_json=as_json, whole=whole)
        return
    from headway.bench.journal import explain as real
    from headway.bench.journal.times import instant

    if request is not None:
        raise ConfigError(f"--journal {journal} has no runs, but {run} is given.", "Give the request alone.")
    begin = None if since is None else instant(since)
    real.main(journal, asked, since=begin, worst=worst, as_json=as_json, whole=whole)
