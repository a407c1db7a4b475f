"""API keys with their limits, and secrets that a configuration refers to instead of spelling them out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from headway.errors import ConfigError

_LEAST = 8  # characters of a secret
MASK = "****"  # stands for a secret in `headway config show`


def _checked(text: str) -> str:
    """Refuse a mask and a secret that is too short; a secret elsewhere is checked when it is read (`reveal`)."""
    if text == MASK:
        problem = 'it is masked by `headway config show`; write the secret, or "env:NAME" or "file:PATH"'
        raise PydanticCustomError("masked", problem)
    if len(text) < _LEAST and not text.startswith(("env:", "file:")):
        raise PydanticCustomError("short", f"a secret needs at least {_LEAST} characters")
    return text


# A secret, or its location: "env:NAME" or "file:PATH".
Secret = Annotated[str, AfterValidator(_checked)]
_Ms = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
_Name = Annotated[str, Field(min_length=1)]
# In logs, the sender with the operator's key, and how the names of an issuer's tokens begin.
OPERATOR_NAME, TOKEN_PREFIX = "operator", "token:"
OTHER = "(other)"  # in metrics and on the dashboard: all values without their own label


_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_STRICT)
class Budget:
    """A limit of the tenant's usage in a day or a month (UTC), of all its keys together.

    per: the time that is limited, from midnight, or from the first of the month, in UTC.
    tokens: limit of the tokens of prompts and answers.
    cost: limit of their cost by [prices], in the same units. A budget has one of the two.
    soft: serve requests beyond it without promises, instead of refusing them (429).
    """

    per: Literal["day", "month"]
    tokens: Annotated[int, Field(ge=1)] | None = None
    cost: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)] | None = None
    soft: bool = False


@dataclass(frozen=True, config=_STRICT)
class Key:
    """An API key, the tenant of its requests, and limits on these; unset = no limit.

    key: the key itself, "env:NAME" or "file:PATH".
    name: name of the key in the journal, reports and the audit log, where the key itself is never written; unset, the
        tenant's.
    budgets: limits of a day or a month.
    classes: classes that its requests may name; requests without a class have "default".
    ttft_ms, tpot_ms, e2e_ms, itl_ms: the tightest SLO, from the request or its class. e2e_ms also limits the
        deadline of a run.
    priority: the most urgent (lowest) priority that a request may ask for; the priority of its class is not limited.
    max_queued: number of the tenant's waiting requests at which another one is refused.
    requests_per_min, tokens_per_min: number of the tenant's requests or tokens in the last minute at which another
        request is refused.
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
    itl_ms: _Ms | None = None
    name: _Name | None = None
    budgets: tuple[Budget, ...] = ()

    @property
    def label(self) -> str:
        """Return its name in the journal, reports and the audit log."""
        return self.name or self.tenant


def reveal(secret: str, setting: str) -> str:
    """Return a secret, read from its location. ConfigError, which never quotes it, if it cannot be read.

    setting: name of the setting in messages.
    """
    kind, _, place = secret.partition(":")
    if kind not in ("env", "file"):
        return secret
    if kind == "env":
        found = os.environ.get(place, "")
        if not found:
            problem = f"{setting} is in the environment variable {place}, which is not set."
            raise ConfigError(problem, "Set it in the environment of headway serve.", param=setting)
    else:
        try:
            found = Path(place).expanduser().read_text("utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            problem = f"{setting} is in the file {place}, which cannot be read: {why}."
            raise ConfigError(problem, "Check the path after file: and its permissions.", param=setting) from None
    return _usable(found, setting)


def reveal_key(secret: str, setting: str) -> str:
    """Return an API key as `reveal` does. ConfigError also if it is spelled out and not printable ASCII."""
    return _usable(reveal(secret, setting), setting)


def _usable(text: str, setting: str) -> str:
    if len(text) < _LEAST or not text.isascii() or not text.isprintable():
        raise ConfigError(
            f"{setting} holds no usable secret.",
            f"It needs at least {_LEAST} printable ASCII characters, on one line.",
            param=setting,
        )
    return text


def revealed(keys: tuple[Key, ...], is_operator: Callable[[str], bool]) -> dict[str, Key]:
    """Return the keys by the secret that clients send; errors as `reveal_key`.

    ConfigError also if one is repeated or the operator's (`is_operator`).
    """
    found: dict[str, Key] = {}
    for i, key in enumerate(keys):
        text = reveal_key(key.key, f"keys.{i}.key")
        if text in found:
            raise ConfigError(f"keys.{i}.key is the same as an earlier one.", "Give each [[keys]] table another key.")
        if is_operator(text):
            fix = "Give the operator a key that no tenant has: it may change everything."
            raise ConfigError(f"keys.{i}.key is the same as server.operator_key.", fix, param=f"keys.{i}.key")
        found[text] = key
    return found
