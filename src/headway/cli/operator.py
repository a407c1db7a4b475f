"""The commands on a running gateway, `headway engine` and `headway key`, and how they call it."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.addresses import certificate_hint
from headway.cli.options import ConfigFile, Json
from headway.config import load
from headway.config.keys import reveal
from headway.errors import ConfigError, HeadwayError

_ANY = ("0.0.0.0", "::")
_ANSWER_S = 600.0  # the first use of a model may download its tokenizer
_WIDEST = 100_000  # columns of a table

Server = Annotated[
    str | None, typer.Option("--server", help="URL of the gateway; default: server.host and server.port.")
]


class OperatorClient:
    """A running gateway, called with the operator's key of a configuration. path: of what is to be changed there."""

    def __init__(self, config: ConfigFile, server: Server, path: str) -> None:
        setup = load(config)
        if (key := setup.server.operator_key) is None:
            problem = "Only operators may see and change this, and server.operator_key is not set."
            raise ConfigError(problem, "Give the gateway's configuration (-c) with it.", param="server.operator_key")
        host = "127.0.0.1" if setup.server.host in _ANY else setup.server.host
        self._url, self._path = (server or replace(setup.server, host=host).url).rstrip("/"), path
        self._headers = {"authorization": f"Bearer {reveal(key, 'server.operator_key')}"}

    def call(self, method: str, path: str = "", **more: Any) -> list[dict[str, Any]]:
        """Return the list of an answer; HeadwayError for an error or no answer."""
        import httpx  # 60 ms and 6 MiB, which most commands do not need

        try:
            answer = httpx.request(
                method, f"{self._url}{self._path}{path}", headers=self._headers, timeout=_ANSWER_S, **more
            )
            body = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, json.JSONDecodeError) as error:
            problem = f"The gateway at {self._url} does not answer as one does: {error}."
            hint = "Start it, or correct --server."
            if isinstance(error, OSError) or "SSL" in str(error):  # OSError: the file in SSL_CERT_FILE is unreadable
                hint = f"{certificate_hint()} Name it with --server."
            raise HeadwayError(problem, hint) from error
        if answer.is_error:
            raise HeadwayError(str(body["error"]["message"]), f"The gateway at {self._url} refused it.")
        return list(body["data"])


def show(table: Table) -> None:
    """Print a table without truncating or wrapping its cells; lines may be wider than the terminal."""
    Console(soft_wrap=True, width=_WIDEST).print(table, highlight=False)


def settings_of(words: Sequence[str] | None) -> dict[str, Any]:
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
        _print_engines(engines)


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
    _print_engines(engines)
    if wait and any(one["state"] == "failed" for one in engines if one["id"] in ids):
        raise typer.Exit(1)


def _print_engines(engines: Sequence[dict[str, Any]]) -> None:
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


key_app = typer.Typer(help="API keys in the queue's store (server.stored_keys).", no_args_is_help=True)
_PATH = "/v1/headway/keys"
_MOST = 1_000_000  # keys that the gateway lists at once
_KNOWN = ("id", "prefix", "state", "created_at", "expires_at", "revoked_at", "tenant", "key")


def _id(text: str) -> str:
    """Return the id in a key, whose text is not to be sent."""
    return text.removeprefix("hw-").partition("-")[0]


KeyId = Annotated[str, typer.Argument(help="The key's id, as in `headway key list`.", parser=_id)]
Limits = Annotated[
    list[str] | None, typer.Option("--set", help="Limit as in [\\[keys]], such as --set max_queued=20 (TOML).")
]


@key_app.command("list")
def list_keys(config: ConfigFile = None, server: Server = None, as_json: Json = False) -> None:
    """List the keys of configuration and store: tenant, state, limits; those that ended, for 30 days more."""
    keys = OperatorClient(config, server, _PATH).call("GET", params={"limit": _MOST})
    if as_json:
        print(json.dumps(keys))
        return
    table = Table("id", "tenant", "state", "created", "expires", "limits")
    for key in keys:
        limits = ", ".join(f"{name} = {json.dumps(value)}" for name, value in key.items() if name not in _KNOWN)
        row = key["id"] or "-", key["tenant"], key["state"], _date(key["created_at"]), _date(key["expires_at"]), limits
        table.add_row(*(escape(cell) for cell in row))
    show(table)


@key_app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Tenant of its requests.")],
    limits: Limits = None,
    days: Annotated[float | None, typer.Option(min=0.0, help="Days after which it expires; default: never.")] = None,
    config: ConfigFile = None,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it. It is shown only now: the gateways keep its hash."""
    given = {"tenant": tenant} | ({} if days is None else {"expires_s": days * 86_400})
    if twice := sorted(given.keys() & (settings := settings_of(limits)).keys()):
        raise ConfigError(f"{twice[0]} is given twice.", f"Leave out --set {twice[0]}=...")
    _print_key(OperatorClient(config, server, _PATH).call("POST", json=settings | given), as_json)


@key_app.command()
def rotate(
    id: KeyId,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds for which the old key stays valid.")] = 0.0,
    config: ConfigFile = None,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Replace a key with a new one of the same limits and lifetime, and print that."""
    client = OperatorClient(config, server, _PATH)
    _print_key(client.call("POST", f"/{id}/rotate", json={"grace_s": grace}), as_json)


@key_app.command()
def revoke(id: KeyId, config: ConfigFile = None, server: Server = None) -> None:
    """End a key: within a second no gateway of the store accepts it."""
    (key,) = OperatorClient(config, server, _PATH).call("DELETE", f"/{id}")
    print(f"{key['id']} of tenant {key['tenant']} is revoked")


def _print_key(keys: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print the first key's text alone on stdout, for scripts, and what it is on stderr."""
    if as_json:
        print(json.dumps(keys))
        return
    new = keys[0]
    print(new["key"])
    about = f"key {new['id']} of tenant {new['tenant']}, expires: {_date(new['expires_at']) or 'never'}; shown only now"
    Console(stderr=True, soft_wrap=True).print(escape(about), highlight=False)


def _date(instant: float | None) -> str:
    return "" if instant is None else datetime.fromtimestamp(instant).astimezone().isoformat(" ", "minutes")
