"""What does a TOML file say about a simulation? [[instances]] and, if it likes, [[traffic]].

The instances as in `sim/fleet.py`; a class of traffic has a name, share, model, slo ("ttft:400 tpot:200"),
lengths, priority, max_tokens, slo_scale and tenants, as `sim/workload.TrafficClass` has them.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from headway.bench.load.mix import promise
from headway.errors import ConfigError
from headway.sim import fleet
from headway.sim.workload.traffic import TrafficClass


class _Traffic(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    name: str
    share: float
    slo: str
    priority: int
    lengths: str
    model: str
    slo_scale: float
    max_tokens: int
    tenants: list[str]


_ADAPTER = TypeAdapter(_Traffic)
_TABLES = ("instances", "traffic")


def load(path: Path, **defaults: Any) -> tuple[list[fleet.Spec], list[TrafficClass]]:
    """Return a file's fleet and its traffic (empty = none said). ConfigError says what is wrong and the mend.

    defaults: keys of every instance that has no such key of its own.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"The fleet file {path} cannot be read: {error.strerror}.", "Check --fleet."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.", "See https://toml.io for the syntax.") from error
    for key in data:
        if key not in _TABLES:
            raise ConfigError(f"{path} has a table {key!r}.", "Use [[instances]] and [[traffic]].")
    specs = [
        fleet.table({**defaults, **entry}, f"instance {i} of {path}")
        for i, entry in enumerate(_tables(data, "instances", path))
    ]
    if not specs:
        raise ConfigError(f"{path} names no instance.", "Add an [[instances]] table with a profile.")
    return specs, [_traffic(entry, path) for entry in _tables(data, "traffic", path)]


def _tables(data: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    found = data.get(key, [])
    if not (isinstance(found, list) and all(isinstance(entry, dict) for entry in found)):
        raise ConfigError(f"{key!r} in {path} is no list of tables.", f"Write [[{key}]], twice the bracket.")
    return found


def _traffic(entry: dict[str, Any], path: Path) -> TrafficClass:
    try:
        read = _ADAPTER.validate_python(entry)
    except ValidationError as error:
        raise _explain(error, path) from None
    if "name" not in read:
        raise ConfigError(f"A [[traffic]] table in {path} has no name.", "Give it one: the reports use it.")
    values: dict[str, Any] = {**read, "slo": promise(read.get("slo", ""))}
    if "tenants" in read:
        values["tenants"] = tuple(read["tenants"])
    return TrafficClass(**values)


def _explain(error: ValidationError, path: Path) -> ConfigError:
    problem = error.errors()[0]
    key = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        keys = [entry.name for entry in fields(TrafficClass)]
        near = get_close_matches(key, keys, n=1)
        mend = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(keys)}."
        return ConfigError(f"[[traffic]] in {path} has no {key!r}.", mend)
    return ConfigError(
        f"{key} of [[traffic]] in {path}: {problem['msg']} (it is {problem['input']!r}).", "Correct it."
    )
