"""`headway engine`: lists the engines of a running gateway, adds, drains, removes and replaces them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from headway.cli.operator import OperatorClient, Server, settings_of, show
from headway.cli.options import ConfigFile, Json

engine_app = typer.Typer(help="Engines of a running gateway.", no_args_is_help=True)
_POLL_S = 1.0

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Setting of [\\[engines]] in TOML: --set max_running=64, or for a string --set 'cores=\"1\"'."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Even if requests wait for a model that no other engine has.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done, not when it has begun.")]
EngineId = Annotated[str, typer.Argument(help="The engine's id, as in `headway engine list`.")]


class _Gateway(OperatorClient):
    """A running gateway, asked for its engines."""

    def __init__(self, config: ConfigFile, server: Server) -> None:
        super().__init__(config, server, "/v1/headway/engines")

    def wait(self, ids: Sequence[str], done: Callable[[dict[str, Any] | None], bool]) -> list[dict[str, Any]]:
        """Return the engines as soon as those of these ids are `done`; None stands for one that is gone."""
        while True:
            engines = self.call("GET")
            by_id = {one["id"]: one for one in engines}
            if all(done(by_id.get(id)) for id in ids):
                return engines
            time.sleep(_POLL_S)


@engine_app.command("list")
def list_engines(config: ConfigFile = None, server: Server = None, as_json: Json = False) -> None:
    """List the engines: state, model, requests inside, restarts, and why one has failed."""
    engines = _Gateway(config, server).call("GET")
    if as_json:
        print(json.dumps(engines))
    else:
        _print(engines)


@engine_app.command()
def add(
    settings: Settings = None,
    config: ConfigFile = None,
    server: Server = None,
    agent: Annotated[str | None, typer.Option(help="Agent that starts it; required if there are several.")] = None,
    wait: Wait = False,
) -> None:
    """Add an engine with these settings, as in --set url=http://gpu-2:8000; with count, several."""
    gateway = _Gateway(config, server)
    added = gateway.call("POST", json=settings_of(settings), params={"agent": agent} if agent else {})
    _end(gateway, added, wait, lambda one: one is None or one["state"] != "starting")


@engine_app.command()
def drain(
    id: EngineId, config: ConfigFile = None, server: Server = None, force: Force = False, wait: Wait = False
) -> None:
    """Drain an engine: it takes no new work, ends what is inside it, and stops; `roll` starts it again."""
    gateway = _Gateway(config, server)
    drained = gateway.call("POST", f"/{id}/drain", params={"force": force})
    _end(gateway, drained, wait, lambda one: one is None or one["state"] != "draining")


@engine_app.command()
def remove(
    id: EngineId,
    config: ConfigFile = None,
    server: Server = None,
    now: Annotated[bool, typer.Option("--now", help="Stop it at once; its streams end as if it had died.")] = False,
    force: Force = False,
    wait: Wait = False,
) -> None:
    """Drain an engine and forget it."""
    gateway = _Gateway(config, server)
    removed = gateway.call("DELETE", f"/{id}", params={"now": now, "force": force})
    _end(gateway, removed, wait, lambda one: one is None)


@engine_app.command()
def roll(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Engines; default: all.")] = None,
    settings: Settings = None,
    config: ConfigFile = None,
    server: Server = None,
    force: Force = False,
    wait: Wait = False,
) -> None:
    """Replace engines, with other settings or none, one after the other, each while all others are at work."""
    gateway = _Gateway(config, server)
    body = {"set": settings_of(settings)} | ({"engines": ids} if ids else {})
    rolled = gateway.call("POST", "/roll", json=body, params={"force": force})
    _end(gateway, rolled, wait, lambda one: one is None or not (one["to_roll"] or one["leaving"] or _begins(one)))


def _begins(engine: dict[str, Any]) -> bool:
    return bool(engine["state"] == "starting")


def _end(
    gateway: _Gateway, engines: list[dict[str, Any]], wait: bool, done: Callable[[dict[str, Any] | None], bool]
) -> None:
    """Print the engines that an order concerned; with `wait` all, when it is done. Exit status 1 if one has failed."""
    ids = [one["id"] for one in engines]
    engines = gateway.wait(ids, done) if wait else engines
    _print(engines)
    if wait and any(one["state"] == "failed" for one in engines if one["id"] in ids):
        raise typer.Exit(1)


def _print(engines: Sequence[dict[str, Any]]) -> None:
    table = Table("engine", "state", "model", "inside", "restarts", "about")
    for one in engines:
        leaving = one["leaving"] if one["leaving"] != "drain" else None  # which the state says
        more = f" ({leaving})" if leaving else ", to be replaced" if one["to_roll"] else ""
        waits = one["waits_for"] and f"waits for {one['waits_for']}"
        about, *_ = [*str(one["error"] or waits or one["about"] or one["url"] or "").splitlines(), ""]
        about = about.removesuffix(" Its last lines:")  # which `--json` has
        cells = one["id"], one["state"] + more, one["model"], one["inside"], one["restarts"], about
        table.add_row(*(escape(str(cell)) for cell in cells))
    show(table)
