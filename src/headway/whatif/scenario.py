"""The scenario of a simulation: fleet, traffic, rate and duration, from options or from a TOML file.

A TOML file has [[instances]] tables with the keys of `simulate/fleet.py` and, optionally, [[traffic]] tables
with those of `TrafficClass` in `simulate/workload/traffic.py`: name, share, model, slo ("ttft:400 tpot:200"),
promised_share (of its requests that are promised to be on time, `Slo.share`), lengths, priority, max_tokens,
slo_scale, tenants and drop (refuse requests that can no longer be on time); and
[scale.MODEL] tables as in a gateway's configuration, of models whose engines come and go.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from headway.config import Scale
from headway.errors import ConfigError
from headway.simulate import fleet as fleets
from headway.simulate.run import no_time
from headway.simulate.workload.traces import Trace
from headway.simulate.workload.traffic import TrafficClass, Workload, concat, make, poisson
from headway.types import Slo
from headway.whatif.experiment import Fleet, Machines, Mixed, chat_and_batch
from headway.whatif.load.mix import parse_slo
from headway.whatif.output.results import SIMULATED


@dataclass(frozen=True, slots=True)
class Scenario:
    """Classes of traffic with Poisson arrivals on a fleet.

    about: the scenario in one sentence
    rate: arrivals per second
    duration: seconds of arrivals
    plan_us: virtual planning time per queued request, in microseconds
    """

    fleet: Fleet | Mixed
    classes: tuple[TrafficClass, ...]
    about: str
    rate: float
    duration: float
    seed: int
    plan_us: float = 0.0

    def workload(self) -> tuple[Workload, int]:
        """Return the requests that fit some instance, and how many longer ones are left out."""
        rng = np.random.default_rng(self.seed)
        whole = make(self.classes, poisson(self.rate, self.duration, rng), rng)
        fits = fleets.holds(self.fleet.instances(whole.models[0]), whole)
        return whole.take(fits), int(np.count_nonzero(~fits))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Given requests on a fleet; otherwise like `Scenario`."""

    fleet: Machines
    requests: Workload
    about: str
    seed: int
    plan_us: float = 0.0

    def workload(self) -> tuple[Workload, int]:
        """Return the requests that fit some instance, and how many longer ones are left out."""
        fits = fleets.holds(self.fleet.instances(self.requests.models[0]), self.requests)
        return self.requests.take(fits), int(np.count_nonzero(~fits))


def planning_time(scenario: Scenario | Recorded) -> Callable[[int], float]:
    """Return a function: number of queued requests -> virtual seconds of a plan; `no_time` may run compiled."""
    return (lambda queued: scenario.plan_us * 1e-6 * queued) if scenario.plan_us else no_time


def faster(workload: Workload, load: float) -> Workload:
    """Return the same requests with arrivals `load` times as fast, including later stages of applications."""
    return replace(workload, arrival=workload.arrival / load)


def of_trace(trace: Trace, classes: Sequence[TrafficClass], slo: Slo, model: str) -> Workload:
    """Return the requests of a trace.

    classes: [[traffic]] tables with SLO, priority, model, max_tokens and drop of the trace's requests, by class.
        Other requests of the trace have `slo`.
    """
    names = np.array(trace.tiers or ("chat",) * trace.at.size)
    known = {one.name: one for one in classes}
    parts, rows = [], []
    for name in dict.fromkeys(names.tolist()):
        mine = np.flatnonzero(names == name)
        one = known.get(name) or TrafficClass(name, slo=slo, model=model)
        prefixes = tuple(trace.prefixes[row] for row in mine.tolist() if trace.prefixes)
        part = Trace(trace.at[mine], trace.prompt_tokens[mine], trace.output_tokens[mine], prefixes=prefixes)
        kept = replace(one, share=1.0, lengths=None, requests_per_run=1)
        parts.append(make([kept], part, np.random.default_rng(0)))
        rows.append(mine)
    return concat(*parts).take(np.argsort(np.concatenate(rows)))


def uniform(fleet: Fleet, rate: float, duration: float, slo: str, seed: int, plan_us: float = 0.0) -> Scenario:
    """Return chat and best effort on equal instances of one model."""
    about = (
        f"{SIMULATED}: {fleet.count} x {fleet.profile}, batch limit {fleet.max_running}; {rate:g} req/s for "
        f"{duration:g} s: 60% chat (ShareGPT-like lengths, {slo}), 40% best effort (512-1024 in, 32-128 out)"
    )
    return Scenario(fleet, chat_and_batch(parse_slo(slo)), about, rate, duration, seed, plan_us)


def mixed(
    specs: Sequence[fleets.Spec],
    classes: Sequence[TrafficClass],
    rate: float,
    duration: float,
    slo: str,
    seed: int,
    plan_us: float = 0.0,
) -> Scenario:
    """Return `classes` (default: chat and best effort for every model) on instances of several kinds."""
    fleet = Mixed(tuple(specs))
    models = fleets.models(fleet.instances())
    kinds = ", ".join(f"{spec.count} x {spec.profile}" for spec in specs)
    traffic = tuple(classes) or chat_and_batch(parse_slo(slo), models)
    names = ", ".join(f"{one.name} of {one.model} {one.share:g}" for one in traffic)
    about = f"{SIMULATED}: {kinds}; {rate:g} req/s for {duration:g} s, shares: {names}"
    return Scenario(fleet, traffic, about, rate, duration, seed, plan_us)


# ---- TOML


class _Traffic(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    name: str
    share: float
    slo: str
    promised_share: float
    priority: int
    lengths: str
    model: str
    slo_scale: float
    max_tokens: int
    tenants: list[str]
    drop: bool


_ADAPTER = TypeAdapter(_Traffic)
_SCALE = TypeAdapter(dict[str, Scale])
_TABLES = ("instances", "traffic", "scale")


def load(path: Path, **defaults: Any) -> tuple[list[fleets.Spec], list[TrafficClass], dict[str, Scale]]:
    """Return the fleet, the traffic and the scaling models of a file; no [[traffic]] gives an empty list.

    defaults: default values of the instances' keys
    Raises ConfigError with a hint.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The fleet file {path} cannot be read: {error.strerror}.", "Check --fleet.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.", "See https://toml.io for the syntax.") from error
    for key in data:
        if key not in _TABLES:
            raise ConfigError(
                f"{path} has an unknown table {key!r}.", "Use [[instances]], [[traffic]] and [scale.MODEL]."
            )
    specs = [
        fleets.table({**defaults, **entry}, f"instance {i} of {path}")
        for i, entry in enumerate(_tables(data, "instances", path))
    ]
    if not specs:
        raise ConfigError(f"{path} names no instance.", "Add an [[instances]] table with a profile.")
    return specs, [_traffic(entry, path) for entry in _tables(data, "traffic", path)], _scale(data, path)


def _tables(data: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    found = data.get(key, [])
    if not (isinstance(found, list) and all(isinstance(entry, dict) for entry in found)):
        raise ConfigError(f"{key!r} in {path} is not a list of tables.", f"Write [[{key}]], with double brackets.")
    return found


def _scale(data: dict[str, Any], path: Path) -> dict[str, Scale]:
    try:
        return _SCALE.validate_json(json.dumps(data.get("scale", {})), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, ("scale", *problem["loc"])))
        raise ConfigError(f"{where} in {path}: {problem['msg']}.", "See docs/scale.md for its keys.") from None


def _traffic(entry: dict[str, Any], path: Path) -> TrafficClass:
    try:
        read = _ADAPTER.validate_python(entry)
    except ValidationError as error:
        raise _explain(error, path) from None
    if "name" not in read:
        raise ConfigError(f"A [[traffic]] table in {path} has no name.", "Add a name, which reports show.")
    promised = read.pop("promised_share", None)
    if promised is not None and not 0 < promised < 1:
        raise ConfigError(f"promised_share of [[traffic]] in {path} is {promised}.", "Give a number from 0 to 1.")
    values: dict[str, Any] = {**read, "slo": replace(parse_slo(read.get("slo", "")), share=promised)}
    if "tenants" in read:
        values["tenants"] = tuple(read["tenants"])
    return TrafficClass(**values)


def _explain(error: ValidationError, path: Path) -> ConfigError:
    problem = error.errors()[0]
    key = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        keys = list(_Traffic.__annotations__)
        near = get_close_matches(key, keys, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(keys)}."
        return ConfigError(f"[[traffic]] in {path} has no {key!r}.", hint)
    return ConfigError(f"{key} of [[traffic]] in {path}: {problem['msg']} (it is {problem['input']!r}).", "Correct it.")
