"""`headway engine`: lists the engines of a running gateway, adds, drains, removes and replaces them."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.addresses import netloc
from headway.cli.options import ConfigFile, Json
from headway.config import load
from headway.config.keys import reveal
from headway.errors import ConfigError, HeadwayError

engine_app = typer.Typer(help="Engines of a running gateway.", no_args_is_help=True)
_PATH, _ANSWER_S, _POLL_S = "/v1/headway/engines", 600.0, 1.0  # the first use of a model may download its tokenizer
_ANY = ("0.0.0.0", "::")

Server = Annotated[
    str | None, typer.Option("--server", help="URL of the gateway; default: server.host and server.port.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Setting of [\\[engines]], as in --set max_running=64 (TOML).")
]
Force = Annotated[bool, typer.Option("--force", help="Even if requests wait for a model that no other engine has.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done, not when it has begun.")]
EngineId = Annotated[str, typer.Argument(help="The engine's id, as in `headway engine list`.")]


class _Gateway:
    """A running gateway, called with the operator's key of a configuration."""

    def __init__(self, config: ConfigFile, server: Server) -> None:
        setup = load(config)
        if (key := setup.server.operator_key) is None:
            problem = "Only operators may see and change engines, and server.operator_key is not set."
            raise ConfigError(problem, "Give the gateway's configuration (-c) with it.", param="server.operator_key")
        host = "127.0.0.1" if setup.server.host in _ANY else setup.server.host
        self._url = (server or f"http://{netloc(host, setup.server.port)}").rstrip("/")
        self._headers = {"authorization": f"Bearer {reveal(key, 'server.operator_key')}"}

    def call(self, method: str, path: str = "", **more: Any) -> list[dict[str, Any]]:
        """Return the engines of an answer; HeadwayError for an error or no answer."""
        try:
            answer = httpx.request(
                method, f"{self._url}{_PATH}{path}", headers=self._headers, timeout=_ANSWER_S, **more
            )
            body = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, json.JSONDecodeError) as error:
            problem = f"The gateway at {self._url} does not answer as one does: {error}."
            raise HeadwayError(problem, "Start it, or correct --server.") from error
        if answer.is_error:
            raise HeadwayError(str(body["error"]["message"]), f"The gateway at {self._url} refused it.")
        return list(body["data"])

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
    added = gateway.call("POST", json=_settings(settings), params={"agent": agent} if agent else {})
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
    body = {"set": _settings(settings)} | ({"engines": ids} if ids else {})
    rolled = gateway.call("POST", "/roll", json=body, params={"force": force})
    _end(gateway, rolled, wait, lambda one: one is None or not (one["to_roll"] or one["leaving"] or _begins(one)))


def _begins(engine: dict[str, Any]) -> bool:
    return bool(engine["state"] == "starting")


def _settings(words: Sequence[str] | None) -> dict[str, Any]:
    """Return settings given as NAME=VALUE; a value that is not TOML is a string."""
    found = dict[str, Any]()
    for word in words or ():
        name, sign, value = word.partition("=")
        if not sign:
            raise ConfigError(f"--set {word} has no value.", "Write it like --set max_running=64.")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found


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
        more = f" ({one['leaving']})" if one["leaving"] else ", to be replaced" if one["to_roll"] else ""
        waits = one["waits_for"] and f"waits for {one['waits_for']}"
        about, *_ = [*str(one["error"] or waits or one["about"] or one["url"] or "").splitlines(), ""]
        cells = one["id"], one["state"] + more, one["model"], one["inside"], one["restarts"], about
        table.add_row(*(escape(str(cell)) for cell in cells))
    Console(soft_wrap=True).print(table, highlight=False)
