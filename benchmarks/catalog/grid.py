"""The grid of a benchmark on a fleet with prefix caches: systems on grounds, sizes of the fleet and loads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from headway.cli.journal_commands import numbers
from headway.cli.options import listed
from headway.errors import ConfigError
from headway.whatif.output.results import Row

SOURCES = ("catalog", "placement")  # on which the figures of all these benchmarks depend (`experiment.computed`)


@dataclass(frozen=True, slots=True)
class Cell:
    """One system on one load of a ground. kv: share of the profile's KV that engines have."""

    ground: str
    engines: int
    load: float
    system: str
    seconds: float
    seed: int
    kv: float = 1.0

    def setting(self, kind: str = "") -> str:
        """Return the setting of one workload of the ground, as rows name it; "" = of all."""
        kv = "" if self.kv == 1 else f", {self.kv:g} of the KV"
        return f"{self.ground}{kind and ': '}{kind}, {self.engines} engines, {self.load:g}x{kv}"


@dataclass(frozen=True, slots=True)
class Grid:
    """What is simulated; what is empty is not given.

    engines: sizes of the fleet. loads: multiples of its capacity. seconds: those that count.
    """

    systems: tuple[str, ...] = ()
    grounds: tuple[str, ...] = ()
    engines: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    seconds: float = 0.0

    @classmethod
    def read(
        cls, systems: str | None, grounds: str | None, engines: str | None, loads: str | None, seconds: float | None
    ) -> Grid:
        """Return that of a command's options. ConfigError for what is no list of numbers."""
        sizes, multiples = (numbers(given) if given else () for given in (engines, loads))
        return cls(listed(systems or ""), listed(grounds or ""), sizes, multiples, seconds or 0.0)

    def within(self, default: Grid) -> Grid:
        """Return it with what is not given as by default. ConfigError for fleets and loads that cannot be simulated."""
        grid = replace(
            default, **{one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name)}
        )
        if any(count < 1 or count % 1 for count in grid.engines) or not all(0 < load < math.inf for load in grid.loads):
            raise ConfigError(
                "A fleet needs whole engines and some load.", "Give --engines such as 4,16 and --loads above 0."
            )
        return grid

    def cells(self, seed: int, kv: float = 1.0) -> list[Cell]:
        """Return all of it, the systems of a load together."""
        product = itertools.product(self.grounds, self.engines, self.loads, self.systems)
        return [Cell(ground, int(count), load, name, self.seconds, seed, kv) for ground, count, load, name in product]


def rows_of(found: Mapping[Cell, Mapping[str, float]], units: Mapping[str, str]) -> Iterator[Row]:
    """Yield the figures that have a unit as rows."""
    for cell, figures in found.items():
        for id, unit in units.items():
            yield Row(id, cell.system, cell.setting(), figures[id], unit)
