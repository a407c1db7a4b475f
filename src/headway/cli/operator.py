"""A running gateway, as the commands of operators call it."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from headway.cli.options import ConfigFile
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
        try:
            answer = httpx.request(
                method, f"{self._url}{self._path}{path}", headers=self._headers, timeout=_ANSWER_S, **more
            )
            body = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, json.JSONDecodeError) as error:
            problem = f"The gateway at {self._url} does not answer as one does: {error}."
            hint = "Start it, or correct --server."
            if isinstance(error, OSError) or "SSL" in str(error):  # OSError: what SSL_CERT_FILE names cannot be read
                file = os.environ.get("SSL_CERT_FILE", "unset")
                hint = (
                    f"Set SSL_CERT_FILE (now {file}) to a PEM file of the authority that signed the gateway's "
                    "certificate, and --server to a name in that certificate."
                )
            raise HeadwayError(problem, hint) from error
        if answer.is_error:
            raise HeadwayError(str(body["error"]["message"]), f"The gateway at {self._url} refused it.")
        return list(body["data"])


def show(table: Table) -> None:
    """Print a table with its cells as they are; lines may be longer than the terminal is wide."""
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
