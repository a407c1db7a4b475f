"""API keys with what they may claim, and secrets that a configuration names instead of spelling out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headway.errors import ConfigError

_LEAST = 8  # characters of a secret
# A secret, or where it is: "env:NAME" or "file:PATH".
Secret = Annotated[str, Field(min_length=_LEAST)]
_Ms = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
_Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Key:
    """An API key, the tenant of its requests, and the most that these may claim; unset = no limit.

    key: the key itself, "env:NAME" or "file:PATH".
    classes: that they may name; "default" is that of requests that name none.
    ttft_ms, tpot_ms, e2e_ms: the tightest SLO, whether it is the request's own or its class's. e2e_ms holds
        for the deadline of a run, too.
    priority: the most urgent (lowest) that a request may ask for itself; that of its class is the class's.
    max_queued: a request is refused while this many of its tenant wait.
    requests_per_min, tokens_per_min: as max_queued, of the tenant's requests and tokens in the last minute.
    """

    key: Secret
    tenant: _Name
    classes: tuple[_Name, ...] | None = None
    ttft_ms: _Ms | None = None
    tpot_ms: _Ms | None = None
    e2e_ms: _Ms | None = None
    priority: int | None = None
    max_queued: Annotated[int, Field(ge=1)] | None = None
    requests_per_min: Annotated[int, Field(ge=1)] | None = None
    tokens_per_min: Annotated[int, Field(ge=1)] | None = None


def reveal(secret: str, setting: str) -> str:
    """Return a secret, read from where it is. ConfigError, which does not quote it, if it is not there.

    setting: what it is for, as messages name it.
    """
    kind, _, place = secret.partition(":")
    if kind not in ("env", "file"):
        return secret
    if kind == "env":
        found = os.environ.get(place, "")
        if not found:
            problem = f"{setting} is in the environment variable {place}, which is not set."
            raise ConfigError(problem, "Set it where headway serve starts.", param=setting)
    else:
        try:
            found = Path(place).expanduser().read_text("utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            problem = f"{setting} is in the file {place}, which cannot be read: {why}."
            raise ConfigError(problem, "Check the path after file: and its permissions.", param=setting) from None
    if len(found) < _LEAST or not found.isascii() or not found.isprintable():
        raise ConfigError(
            f"{setting} holds no usable secret.",
            f"It needs {_LEAST} printable ASCII characters or more, on one line.",
            param=setting,
        )
    return found


def revealed(keys: tuple[Key, ...]) -> dict[str, Key]:
    """Return the keys by what clients send. ConfigError where a secret is missing, or one stands twice."""
    found: dict[str, Key] = {}
    for i, key in enumerate(keys):
        text = reveal(key.key, f"keys.{i}.key")
        if text in found:
            raise ConfigError(
                f"keys.{i}.key is the same as an earlier one.", "Give each entry of [[keys]] a key of its own."
            )
        found[text] = key
    return found
