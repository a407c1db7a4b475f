"""The commands of `headway bench` that break a gateway in front of a FAKE engine."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.bench.options import Json, Out, Quick, Seed


def attack(quick: Quick = False, as_json: Json = False, seed: Seed = 0, out: Out = None) -> None:
    """Attack the gateway in front of a FAKE engine: what others notice, its memory, what is lost."""
    from headway.bench.live.attack import main

    main(quick=quick, as_json=as_json, seed=seed, out=out)


def soak(
    only: Annotated[str, typer.Option(help="Comma-separated: streams, kills, requests, calls.")] = "",
    quick: Quick = False,
    as_json: Json = False,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Test the gateway's endurance: 10,000 streams, 200 kills, 200,000 requests, 10,000 made-up calls."""
    from headway.bench.live.soak import main

    names = tuple(name.strip() for name in only.split(",") if name.strip())
    main(names, quick=quick, as_json=as_json, seed=seed, out=out)
