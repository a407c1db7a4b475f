"""A sweep: simulates every combination of recipe, rate and seed on all cores.

Each combination is a cell. A computed cell is one small file, named by a hash of everything its figures
depend on; so a stopped sweep can continue, and a changed sweep computes only the changed cells.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import tomllib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import headway
from headway.errors import ConfigError, HeadwayError
from headway.policy.forecast.latency import profiles
from headway.policy.recipes.registry import find
from headway.types import Slo
from headway.whatif.experiment import Fleet, chat_batch, simulate
from headway.whatif.load import metrics
from headway.whatif.load.metrics import ALL
from headway.whatif.load.mix import parse_slo

_SOURCES = (
    "types.py",
    "compiled.py",
    "policy",
    "simulate",
    "engines/simulated",
    "whatif/experiment.py",
    "whatif/load/metrics.py",
    "whatif/load/records.py",
)
_DIED = "its process died (out of memory?)"


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of a sweep."""

    recipe: str
    rate: float
    seed: int
    duration: float
    slo: str
    fleet: Fleet

    def setting(self) -> dict[str, Any]:
        """Return everything that the figures depend on: the cell, the content of its latency profile, the code."""
        return asdict(self) | {"pace_file": _profile(self.fleet.profile), "code": source_digest()}

    @property
    def key(self) -> str:
        """Return the cell's name, a hash of its whole setting."""
        text = json.dumps(self.setting(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def __str__(self) -> str:
        return f"{self.recipe} at {self.rate:g} req/s, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """All cells of a sweep: recipes x rates x seeds.

    rates: arrivals per second
    seeds: number of seeds, from `seed` on
    duration: seconds of arrivals
    slo: SLO of chat, as `mix.parse_slo` reads it
    Raises ConfigError for a sweep that cannot run.
    """

    recipes: tuple[str, ...] = ("vllm", "edf", "slack", "headway")
    rates: tuple[float, ...] = (2.0, 4.0, 6.0, 8.0, 10.0)
    seeds: int = 3
    seed: int = 0
    duration: float = 120.0
    slo: str = "ttft:400 tpot:200"
    fleet: Fleet = field(default_factory=lambda: Fleet("opt-13b-a100"))

    def __post_init__(self) -> None:
        if not self.recipes or not self.rates or self.seeds < 1:
            raise ConfigError("The sweep is empty.", "Give recipes, rates and 1 seed or more.")
        bad = [number for number in (*self.rates, self.duration) if not 0 < number < float("inf")]
        if bad:
            raise ConfigError(f"{bad[0]} is not a rate or duration.", "Give rates and durations above 0.")

    def check(self) -> None:
        """Raise ConfigError, before anything is simulated, for a recipe, SLO or fleet that cannot run."""
        for name in self.recipes:
            find(name)
        parse_slo(self.slo)
        self.fleet.instances("default")

    def cells(self) -> list[Cell]:
        """Return all cells, each once, grouped by rate."""
        seeds = range(self.seed, self.seed + self.seeds)
        cells = [
            Cell(recipe, rate, seed, self.duration, self.slo, self.fleet)
            for rate, seed, recipe in product(self.rates, seeds, self.recipes)
        ]
        return list(dict.fromkeys(cells))

    def quick(self, given: Collection[str] = ()) -> Sweep:
        """Return a sweep of at most a minute on a small machine; fields in `given` are kept."""
        rates = self.rates
        if len(rates) > 3:
            rates = (rates[0], rates[len(rates) // 2], rates[-1])
        few: dict[str, Any] = {
            "recipes": self.recipes[:4],
            "rates": rates,
            "seeds": min(self.seeds, 2),
            "duration": min(self.duration, 20.0),
        }
        return replace(self, **{name: value for name, value in few.items() if name not in given})


def read(file: Path, given: Mapping[str, Any], fleet: Mapping[str, Any]) -> Sweep:
    """Return the sweep of a TOML file: keys are the fields of `Sweep`, a [fleet] table has those of `Fleet`.

    given, fleet: values that replace those of the file
    Raises ConfigError that names the nearest key.
    """
    try:
        data = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.", "Give a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}.", "Correct that line.") from error
    table = data.pop("fleet", {})
    _known(file, data, Sweep)
    _known(file, table, Fleet)
    return build({**data, **given}, {**table, **fleet}, str(file))


def build(given: Mapping[str, Any], fleet: Mapping[str, Any], where: str = "the sweep") -> Sweep:
    """Return a sweep with these values, and defaults for other fields. ConfigError for a wrong type."""
    base = Sweep()
    try:
        lists = {name: tuple(given[name]) for name in ("recipes", "rates") if name in given}
        rates = {"rates": tuple(float(rate) for rate in lists.pop("rates"))} if "rates" in lists else {}
        return replace(base, **{**given, **lists, **rates}, fleet=replace(base.fleet, **fleet))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} has a value of a wrong type: {error}.", "recipes and rates are lists.") from error


def _known(file: Path, table: Any, kind: type[Sweep] | type[Fleet]) -> None:
    types = {entry.name: entry.type for entry in fields(kind)}
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: fleet is {table!r}.", "Write it as a table: [fleet].")
    for name, value in table.items():
        if name not in types:
            near = get_close_matches(name, types, 1, 0)[0]
            raise ConfigError(f"{file} has an unknown key {name}.", f"Did you mean {near}?")
        if not isinstance(value, _VALUES[str(types[name])]) or isinstance(value, bool):
            raise ConfigError(f"{file}: {name} is {value!r}.", f"It must be {_EXPECTED[str(types[name])]}.")


_VALUES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "int | None": (int,),
    "tuple[str, ...]": (list,),
    "tuple[float, ...]": (list,),
    "Fleet": (dict,),
}
_EXPECTED = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "int | None": "a whole number",
    "tuple[str, ...]": "a list of names",
    "tuple[float, ...]": "a list of numbers",
    "Fleet": "a table",
}


# ---- one cell


def compute(cell: Cell, folder: Path) -> None:
    """Simulate a cell and write its file atomically."""
    workload = chat_batch(cell.rate, cell.duration, cell.seed, parse_slo(cell.slo), cell.fleet.max_model_len)
    found = simulate([cell.recipe], cell.fleet, workload, bar=False)
    rows = [[row.id, row.setting, row.ours, row.unit] for row in metrics.figures(found.records)]
    speed = found.speeds[cell.recipe]
    data = {"setting": cell.setting(), "rows": rows, "seconds": speed.wall, "simulated": speed.simulated}
    part = folder / f"{cell.key}.{os.getpid()}.part"
    part.write_text(json.dumps(data, allow_nan=False), encoding="utf-8")
    os.replace(part, folder / f"{cell.key}.json")


def done(cell: Cell, folder: Path) -> dict[str, Any] | None:
    """Return the content of a cell's file; None when it is missing or unreadable."""
    try:
        data = json.loads((folder / f"{cell.key}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("setting") == _as_json(cell.setting()) else None


def _as_json(setting: dict[str, Any]) -> Any:
    return json.loads(json.dumps(setting))


@cache
def _profile(name: str) -> str:
    """Return a digest of a latency profile's content."""
    return hashlib.sha256(repr(profiles.load(name)).encode()).hexdigest()[:16]


@cache
def source_digest() -> str:
    """Return a digest of the code that a simulation's figures depend on."""
    root, digest = Path(headway.__file__).parent, hashlib.sha256()
    for name in _SOURCES:
        place = root / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


# ---- all cells

Ends = Generator[tuple[Cell, str | None], None, None]


def run(cells: Sequence[Cell], folder: Path, jobs: int) -> Ends:
    """Compute cells on `jobs` processes; yield each as it ends, with its error or None.

    A cell whose process dies breaks the pool; `run` halves the lost cells and computes them again until the failing
    cell is alone. When the caller closes the generator (Ctrl-C), all processes end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lost: list[Cell] = []
    with closing(_pool(cells, folder, jobs)) as ends:
        for cell, error in ends:
            if error == _DIED and len(cells) > 1:
                lost.append(cell)
            else:
                yield cell, error
    for half in (lost[::2], lost[1::2]):
        if half:
            yield from run(half, folder, jobs)


def _pool(cells: Sequence[Cell], folder: Path, jobs: int) -> Ends:
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(max(min(jobs, len(cells)), 1), multiprocessing.get_context("spawn"))
    try:
        with _ignored_interrupt():  # inherited by the workers: the parent handles Ctrl-C
            todo: dict[Future[None], Cell] = {pool.submit(compute, cell, folder): cell for cell in cells}
        for future in as_completed(todo):
            yield todo[future], _error(future)
    except (KeyboardInterrupt, GeneratorExit):
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _error(future: Future[None]) -> str | None:
    error = future.exception()
    if error is None:
        return None
    if isinstance(error, BrokenProcessPool):
        return _DIED
    return str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"


@contextmanager
def _ignored_interrupt() -> Iterator[None]:
    """Ignore Ctrl-C within the context."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One figure at one rate over its seeds; None when no seed has it."""

    mean: float | None
    low: float | None
    high: float | None
    unit: str
    seeds: int


@dataclass(frozen=True, slots=True)
class Curves:
    """The figures of a sweep against the rate.

    points: {(recipe, class, figure): {rate: CurvePoint}}
    slo: SLO of chat
    """

    points: Mapping[tuple[str, str, str], Mapping[float, CurvePoint]]
    recipes: tuple[str, ...]
    rates: tuple[float, ...]
    classes: tuple[str, ...]
    slo: Slo

    def of(self, recipe: str, tier: str, figure: str) -> Mapping[float, CurvePoint]:
        """Return a curve, empty if there is none. `attainment` is the attainment of the class."""
        name = f"attainment.{tier}" if figure == "attainment" else figure
        return self.points.get((recipe, tier, name), {})

    def has_slo(self, tier: str) -> bool:
        """Tell whether a class has an SLO: chat has, and every class that missed one."""
        points = [p for recipe in self.recipes for p in self.of(recipe, tier, "attainment").values()]
        return tier == "chat" or any(point.low is not None and point.low < 100 for point in points)


def collect(sweep: Sweep, found: Mapping[Cell, dict[str, Any]]) -> Curves:
    """Return the curves of the computed cells."""
    seen: dict[tuple[str, str, str], dict[float, list[float]]] = {}
    units: dict[str, str] = {}
    for cell, data in found.items():
        for figure, tier, ours, unit in data["rows"]:
            values = seen.setdefault((cell.recipe, tier, figure), {}).setdefault(cell.rate, [])
            values += [] if ours is None else [ours]
            units[figure] = unit
    points = {
        key: {rate: _point(values, units[key[2]]) for rate, values in by_rate.items()} for key, by_rate in seen.items()
    }
    tiers = dict.fromkeys(tier for _, tier, _ in points if tier != ALL)
    return Curves(points, sweep.recipes, tuple(sorted(set(sweep.rates))), (*tiers, ALL), parse_slo(sweep.slo))


def _point(values: list[float], unit: str) -> CurvePoint:
    if not values:
        return CurvePoint(None, None, None, unit, 0)
    return CurvePoint(float(np.mean(values)), min(values), max(values), unit, len(values))
