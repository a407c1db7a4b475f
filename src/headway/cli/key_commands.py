"""`headway key`: creates, lists, rotates and revokes the API keys in the store of running gateways."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.cli.operator import OperatorClient, Server, settings_of, show
from headway.cli.options import ConfigFile, Json

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
    body = settings_of(limits) | {"tenant": tenant} | ({} if days is None else {"expires_s": days * 86_400})
    _print(OperatorClient(config, server, _PATH).call("POST", json=body), as_json)


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
    _print(client.call("POST", f"/{id}/rotate", json={"grace_s": grace}), as_json)


@key_app.command()
def revoke(id: KeyId, config: ConfigFile = None, server: Server = None) -> None:
    """End a key: within a second no gateway of the store accepts it."""
    (key,) = OperatorClient(config, server, _PATH).call("DELETE", f"/{id}")
    print(f"{key['id']} of tenant {key['tenant']} is revoked")


def _print(keys: Sequence[dict[str, Any]], as_json: bool) -> None:
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
