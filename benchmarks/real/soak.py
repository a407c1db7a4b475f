"""`headway bench soak`: the gateway's endurance under many streams, kills, requests and generated calls.

Each part starts private gateways in front of a FAKE engine (`fake_engine.py`), whose answers say nothing about
an engine: the benchmark measures lost requests, wrong answers and memory of the gateway.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.experiment import Result, experiment
from benchmarks.real import soak_calls, soak_kills, soak_requests, soak_streams
from headway.errors import ConfigError
from headway.whatif.output.plots import png, sheet
from headway.whatif.output.results import Ask, Grid, Row, show
from testing.fake_engine import NAME

# Upper bounds by row id; the other rows have no goal.
GOALS = {
    "soak.reset": 0.0,
    "soak.rss_mb": 400.0,
    "soak.short_ms.p99": 50.0,
    "soak.lost": 0.0,
    "soak.twice": 0.0,
    "soak.rss_growth_mb": 5.0,
    "soak.5xx": 0.0,
    "soak.undocumented": 0.0,
}
WORKLOAD = (
    f"Headway's gateway (sqlite broker, synchronous = full) in front of a {NAME}: streams that are all open "
    "at once; kills with full disks, clock jumps, engine hangs and faults of the queue's file among them; "
    "short chats as fast as they are answered; calls that schemathesis makes up from /openapi.json."
)
_NOTES = (
    "reset: streams without all of their tokens and their end. short_ms: of chats, one after the other, "
    "while the streams are open. lost: accepted requests without an answer. twice: requests with two ends. "
    "recomputed: computations by the engine beyond the first of a request. rss_growth_mb: resident memory "
    "at the end minus that after the first tenth. 5xx: except 502 and 503. undocumented: answers that the "
    "schema does not have.",
)
_PERIOD_S = 15.0  # time between two tokens of a stream


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of each part."""

    streams: int = 10_000
    kills: int = 200
    requests: int = 200_000
    calls: int = 10_000
    period: float = _PERIOD_S

    def of(self, part: str) -> int:
        """Return the size of a part, in the part's unit."""
        return int(getattr(self, part))


QUICK = Sizes(streams=300, kills=2, requests=2000, calls=150, period=1.0)
Part = Callable[[Path, Sizes, int, Callable[[int], None]], list[Row]]


def _streams(folder: Path, sizes: Sizes, seed: int, tick: Callable[[int], None]) -> list[Row]:
    measured = soak_streams.measure(folder, sizes.streams, sizes.period)
    tick(sizes.streams)
    return measured.rows()


def _kills(folder: Path, sizes: Sizes, seed: int, tick: Callable[[int], None]) -> list[Row]:
    return soak_kills.measure(folder, sizes.kills, seed, tick).rows()


PARTS: dict[str, Part] = {
    "streams": _streams,
    "kills": _kills,
    "requests": lambda folder, sizes, *more: soak_requests.measure(folder, sizes.requests, *more),
    "calls": lambda folder, sizes, *more: soak_calls.measure(folder, sizes.calls, *more),
}


@experiment("soak", "vllm", "The gateway's endurance")
def main(ask: Ask, only: Sequence[str] = ()) -> Result:
    """Measure the named parts; () = all."""
    for name in only:
        if name not in PARTS:
            raise ConfigError(f"There is no part {name!r}.", f"Use some of {', '.join(PARTS)}.", param="only")
    return result(measure(only or tuple(PARTS), QUICK if ask.quick else Sizes(), ask.seed))


def measure(names: Sequence[str], sizes: Sizes, seed: int) -> list[Row]:
    """Measure the parts one after the other, each with a separate folder and servers."""
    rows = list[Row]()
    with Progress(console=Console(stderr=True)) as progress:
        for name in names:
            task = progress.add_task(name, total=sizes.of(name))
            with tempfile.TemporaryDirectory(prefix=f"headway-soak-{name}-") as folder:
                rows += PARTS[name](Path(folder), sizes, seed, partial(progress.advance, task))
    return rows


# ---- the report


def result(rows: list[Row]) -> Result:
    """Return the findings, with a line per figure and its goal beside it."""
    lines = [
        [row.setting, row.id, show(row.ours), show(GOALS[row.id]) if row.id in GOALS else "", row.unit] for row in rows
    ]
    header = ("setting", "figure", "value", "goal, at most", "unit")
    grid = Grid(header, [lines], ("value", "goal, at most"))
    return Result(rows, WORKLOAD, lambda: {"soak": plot(rows)}, grid, _NOTES)


def plot(rows: list[Row]) -> bytes:
    """Return a PNG of each figure with a goal above 0, and that goal."""
    shown = [row for row in rows if GOALS.get(row.id)] or rows[:1]
    figure, panels = sheet(1, len(shown), 3.4 * len(shown), 3.2)
    for axes, row in zip(panels, shown, strict=True):
        axes.bar([row.setting], [row.ours or 0.0], color="#0072B2")
        if row.id in GOALS:
            axes.axhline(GOALS[row.id], color="#D55E00", linewidth=1)
        axes.set_title(f"{row.id}, {row.unit} (line: goal)", fontsize=8)
        axes.tick_params(labelsize=7)
    return png(figure)
