"""Latency profiles: JSON files with what was measured of a model on a device.

A profile holds the coefficients of a latency law (BROS 4.1, SLO-aware 4.2) and their errors, the memory for
KV and the seconds to load the model. `python -m tools.latency_profiles.build` made the built-in profiles from
public data; each names the source of every number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import ConfigError
from headway.policy.forecast.latency.laws import LAWS, Additive, Error, LatencyLaw, Shapes, law_seconds
from headway.types import Batch, Floats

VERSION = 1
BUILTIN = Path(__file__).parent / "data"
SHORTEST = 1e-4  # seconds; a law may be 0 for an empty batch, an iteration may not
_REQUIRED = {"model": str, "device": str, "block_size": int, "kv_bytes_per_token": int, "weights_bytes": int}
_OPTIONAL = {"kv_tokens": int, "load_cold_s": float, "load_warm_s": float, "kv_copy_gb_s": float}
_OVERHEADS = ("request_overhead_s", "token_overhead_s", "interruption_s")  # left out of a file that does not know them


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """One model on one device.

    law: the law that fits best.
    additive: the additive law fitted to the same data, whose five numbers compiled loops take.
    kv_tokens: tokens of KV that fit.
    load_cold_s: seconds to load the weights from disk.
    load_warm_s: seconds to load them from host memory or a ready image.
    kv_copy_gb_s: KV between device and host, in 1e9 bytes per second over all the instance's links.
    errors: {law: {kind of batch: Error}}.
    source: {field: where it is from}.
    request_overhead_s: from a client to the scheduler.
    token_overhead_s: from the end of an iteration to the client.
    interruption_s: by how much each request that arrives prolongs the iteration in progress, where API server
        and engine share cores.

    None = not known.
    """

    model: str
    device: str
    law: LatencyLaw
    additive: Additive
    block_size: int
    kv_bytes_per_token: int
    weights_bytes: int
    kv_tokens: int | None
    load_cold_s: float | None
    load_warm_s: float | None
    kv_copy_gb_s: float | None
    errors: dict[str, dict[str, Error]]
    source: dict[str, str]
    request_overhead_s: float | None = None
    token_overhead_s: float | None = None
    interruption_s: float | None = None

    def latency(self) -> FixedLatency:
        """Return the forecast of iteration times by the profile's best law."""
        return _fixed(self.law)

    def coefficients(self) -> Floats:
        """Return the additive [base, decodes, context, prefill, prefill_context] in seconds, as float64."""
        return self.additive.array()

    def copy_seconds(self) -> float:
        """Return the seconds to move one token's KV between device and host; inf when not known."""
        rate = self.kv_copy_gb_s
        return self.kv_bytes_per_token / (rate * 1e9) if rate else math.inf

    def save(self, path: str | Path) -> None:
        """Write the file as JSON, the same bytes for the same content."""
        data: dict[str, Any] = asdict(self)
        fitted = {"form": self.law.NAME, "coefficients": data.pop("law"), "additive": data.pop("additive")}
        for name in _OVERHEADS:
            if data[name] is None:
                del data[name]
        head = {"version": VERSION, "model": self.model, "device": self.device, **fitted}
        Path(path).write_text(json.dumps(head | data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class FixedLatency:
    """A `ports.LatencyModel` that stays as it was measured: for simulating a machine, not for serving on
    one."""

    def __init__(self, law: LatencyLaw) -> None:
        self.law, self.compiled_law = law, (law.CODE, law.array())

    def seconds(self, batch: Batch) -> float:
        """Return the forecast duration of one iteration of this shape, at least 0.1 ms."""
        shape = (batch.decodes, batch.context, batch.prefill, batch.prefill_context)
        return max(float(law_seconds(*self.compiled_law, *shape)), SHORTEST)

    def prefill_seconds(self, tokens: Floats) -> Floats:
        """Return forecast seconds to compute prompts of these lengths alone, elementwise."""
        none = np.zeros_like(tokens, float)
        alone = Shapes(none, none, np.asarray(tokens, float), np.square(tokens, dtype=float) / 2)
        return np.asarray(np.maximum(self.law.seconds(alone), SHORTEST))

    def learn(self, batch: Batch, seconds: float) -> None:
        """Do nothing: a latency profile is a record. `OnlineLatency` learns."""


@cache
def _fixed(law: LatencyLaw) -> FixedLatency:
    """Return the forecast by a law: the same object for equal laws, so that what it says is computed once for all."""
    return FixedLatency(law)


def names() -> list[str]:
    """Return the names of the latency profiles that come with Headway, sorted."""
    return sorted(path.stem for path in BUILTIN.glob("*.json"))


def load(name: str | Path) -> LatencyProfile:
    """Return the latency profile of a built-in name or a path.

    Raises ConfigError, naming what is wrong and a hint, when there is none or it cannot be trusted.
    """
    path = _locate(name)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The latency profile {path} cannot be read: {error.strerror}.", "Check the path.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.", f"Copy one of {BUILTIN} and edit that.") from error
    return parse(data, str(path))


def parse(data: Any, where: str = "the latency profile") -> LatencyProfile:
    """Return the latency profile of decoded JSON; errors as `load`."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is JSON but not an object.", f"Copy one of {BUILTIN} and edit that.")
    _check_version(data, where)
    law = _law(data.get("form"), where)
    return LatencyProfile(
        law=law(**_coefficients(data, "coefficients", law, where)),
        additive=Additive(**_coefficients(data, "additive", Additive, where)),
        errors=_errors(data.get("errors", {}), where),
        source={str(k): str(v) for k, v in _table(data, "source", where, default={}).items()},
        **{key: _value(data, key, kind, where) for key, kind in _REQUIRED.items()},
        **{key: _optional(data, key, kind, where) for key, kind in _OPTIONAL.items()},
        **{key: _optional(data, key, float, where) for key in _OVERHEADS},
    )


def _locate(name: str | Path) -> Path:
    bare = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) is not None
    if bare and (BUILTIN / f"{name}.json").is_file():
        return BUILTIN / f"{name}.json"
    if Path(name).exists():
        return Path(name)
    near = get_close_matches(Path(name).stem, names(), n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"There is no latency profile {name}.", f"{hint}Built in are {', '.join(names())}; else give a .json file."
    )


def _check_version(data: Mapping[str, Any], where: str) -> None:
    version = data.get("version")
    if type(version) is not int or version < 1:
        raise ConfigError(f"{where} has no version.", f'Add "version": {VERSION}.')
    if version > VERSION:
        raise ConfigError(
            f"{where} is of version {version}; this Headway reads up to {VERSION}.",
            "Upgrade Headway, or measure the file again with this one.",
        )


def _law(name: object, where: str) -> Any:
    if isinstance(name, str) and name in LAWS:
        return LAWS[name]
    raise ConfigError(f"{where} has the unknown law {name!r}.", f"Use one of {', '.join(LAWS)}.")


def _coefficients(data: Mapping[str, Any], key: str, law: Any, where: str) -> dict[str, float]:
    table = _table(data, key, where)
    wanted = [field.name for field in fields(law)]
    for extra in set(table) - set(wanted):
        raise ConfigError(f"{where}: {key} has {extra!r}, which {law.NAME} has not.", f"Keep {', '.join(wanted)}.")
    return {name: _value(table, name, float, f"{where}: {key}") for name in wanted}


def _table(data: Mapping[str, Any], key: str, where: str, default: Any = None) -> dict[str, Any]:
    value = data.get(key, default)
    if not isinstance(value, dict):
        raise ConfigError(f"{where} has no table {key!r}.", f'Add "{key}": {{...}} as in {BUILTIN}.')
    return value


def _value(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """Return a text, a whole number of at least 1, or a finite number of at least 0."""
    if data.get(key) is None:
        raise ConfigError(f"{where} has no {key!r}.", f'Add "{key}".')
    value = data[key]
    numeric = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not (isinstance(value, str) if kind is str else numeric):
        wanted = {str: "text", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{where}: {key} is {value!r}.", f"Give {wanted}.")
    least = 1 if kind is int else 0  # counts divide
    if kind is not str and not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{where}: {key} is {value}.", f"Give a finite number, {least} or more.")
    return kind(value)


def _optional(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    return None if data.get(key) is None else _value(data, key, kind, where)


def _errors(data: Any, where: str) -> dict[str, dict[str, Error]]:
    try:
        return {law: {kind: Error(**e) for kind, e in kinds.items()} for law, kinds in data.items()}
    except (AttributeError, TypeError) as error:
        hint = "Remove it, or give {law: {kind: {mean, p50, p90, rows}}}."
        raise ConfigError(f"{where}: errors cannot be read ({error}).", hint) from error
