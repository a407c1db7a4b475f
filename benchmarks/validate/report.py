"""The report of `headway bench truth`: each figure in the real run and in the simulation, and the error.

Latencies count from the planned arrival. The error of a figure is |simulated / real - 1| in percent.
Attainment is the share of the requests with an SLO that met it; its error is the difference in percentage
points, because a ratio of shares near 0 says little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from benchmarks.experiment import Result
from benchmarks.validate import conformance
from benchmarks.validate.conformance import StepTally
from benchmarks.validate.replay import ReplayRun, TwinPair
from headway.whatif.load import metrics
from headway.whatif.load.records import Record
from headway.whatif.output.plots import colour, line_legend, png, sheet
from headway.whatif.output.results import SIMULATED, Grid, Pictures, Row

GOALS = {"below": 5.0, "above": 10.0}  # error in percent
_METRICS = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
_HEADER = ("figure", "system", "setting", "real", "simulated", "error", "unit")


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a replay, real and simulated; None = undefined."""

    id: str
    system: str
    setting: str
    real: float | None
    simulated: float | None
    unit: str

    @property
    def points(self) -> bool:
        """Return True if the error is a difference in percentage points."""
        return self.unit == "%"

    @property
    def error(self) -> float | None:
        """Return |simulated / real - 1| in %, or the difference of two shares in percentage points."""
        if self.real is None or self.simulated is None:
            return None
        off = abs(self.simulated - self.real)
        if self.points:
            return off
        return 100 * off / self.real if self.real else None


def compared(pair: TwinPair) -> list[Compared]:
    """Return every figure of a replay beside its simulation."""
    real, simulated = dict(_figures(pair.real)), dict(_figures(pair.simulated))
    replay = pair.replay
    return [Compared(id, replay.system, replay.setting, real[id], simulated[id], _unit(id)) for id in real]


def _figures(records: Sequence[Record]) -> Iterator[tuple[str, float | None]]:
    for name, metric in _METRICS.items():
        seconds = metrics.values(records, metric)
        shown = seconds * 1000 if seconds.size else None
        yield f"{name}.mean", None if shown is None else float(shown.mean())
        for label, p in (("p50", 0.5), ("p99", 0.99)):
            yield f"{name}.{label}", None if shown is None else float(np.quantile(shown, p))
    span = metrics.makespan(records)
    tokens = sum(record.prompt_tokens + record.output_tokens for record in records)
    yield "tokens_per_s", tokens / span if span else None
    yield "attainment", metrics.attainment(records)


def _unit(id: str) -> str:
    return {"tokens_per_s": "tokens/s", "attainment": "%"}.get(id, "ms")


@dataclass(slots=True)
class Findings:
    """The result of `bench truth`."""

    pairs: list[TwinPair]
    runs: list[ReplayRun]
    conformance: dict[tuple[str, str], StepTally]

    def rows(self) -> list[Row]:
        """Return errors, both values, the error of the latency profile itself, and the conformance."""
        rows = [row for pair in self.pairs for one in compared(pair) for row in _rows(one)]
        rows += [Row("pace.bias_pct", p.replay.system, p.replay.setting, 100 * p.bias, "%") for p in self.pairs]
        for run in self.runs:
            rows += overheads(run)
        return rows + conformance.rows(self.conformance)

    def notes(self) -> list[str]:
        """Return the notes on the figures."""
        lines = [
            "attainment: of requests with an SLO; its error is in percentage points.",
            "pace.spread_pct: difference between the passes of the profile: the machine's own drift.",
            "pace.bias_pct: the profile's forecast of the replay's own iterations against their durations.",
        ]
        for pair in self.pairs:
            lost = len(pair.replay.records) - len(pair.real)
            if lost:
                lines.append(
                    f"{pair.replay.system}, {pair.replay.setting}: {lost} requests did not complete in the "
                    "real run and are left out of both."
                )
        lines += [
            f"{pair.replay.system}, {pair.replay.setting}: for {pair.disturbed:.0f} s of the real run "
            "another program used the machine; the simulator does not model that."
            for pair in self.pairs
            if pair.disturbed >= 1
        ]
        lines += [
            f"{run.system}: {run.fits.disturbed} samples left out: another program used the machine."
            for run in self.runs
            if run.fits.disturbed
        ]
        return lines + [
            f"{recipe} ({host}) differs from vLLM: {tally.difference[:300]}"
            for (recipe, host), tally in self.conformance.items()
            if tally.difference
        ]


def _rows(one: Compared) -> list[Row]:
    unit = "percentage points" if one.points else "%"
    return [
        Row(f"error.{one.id}", one.system, one.setting, one.error, unit),
        Row(f"real.{one.id}", one.system, one.setting, one.real, one.unit),
        Row(f"simulated.{one.id}", one.system, one.setting, one.simulated, one.unit),
    ]


def overheads(run: ReplayRun) -> list[Row]:
    """Return what a profile measured beside the iterations, and its drift between passes."""
    profile = run.profile
    seconds = {
        "overhead.request_ms": profile.request_overhead_s,
        "overhead.token_ms": profile.token_overhead_s,
        "interruption_ms": profile.interruption_s,
    }
    drift = run.measured.spread(profile.law)
    spread = Row("pace.spread_pct", run.system, "profile", None if drift is None else 100 * drift, "%")
    return [spread] + [
        Row(name, run.system, "profile", None if value is None else 1000 * value, "ms")
        for name, value in seconds.items()
    ]


# ---- the report


def result(found: Findings, workload: str) -> Result:
    """Return the findings: real, simulated and error side by side, then the conformance."""
    grid = Grid(_HEADER, list(_groups(found)), ("real", "simulated", "error"))
    return Result(found.rows(), workload, lambda: pictures(found), grid, found.notes())


def _groups(found: Findings) -> Iterator[list[list[str]]]:
    for pair in found.pairs:
        lines = [_line(one) for one in compared(pair)]
        system, setting = pair.replay.system, pair.replay.setting
        lines.append(["pace.bias_pct", system, setting, "", "", f"{100 * pair.bias:+.1f} %", ""])
        yield lines
    yield [
        [row.id, row.system, row.setting, "", "", _show(row.ours), row.unit]
        for row in conformance.rows(found.conformance)
    ]


def _line(one: Compared) -> list[str]:
    goal, error = GOALS.get(one.setting), one.error
    mark = "" if goal is None or error is None else " ok" if error <= goal else " over"
    text = "-" if error is None else f"{error:.1f} {'points' if one.points else '%'}{mark}"
    return [f"error.{one.id}", one.system, one.setting, _show(one.real), _show(one.simulated), text, one.unit]


def _show(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def save_profiles(found: Findings, folder: Path) -> list[Path]:
    """Write the latency profile of each run as pace-SYSTEM.json; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"pace-{_file_name(run.system)}.json" for run in found.runs]
    for run, file in zip(found.runs, files, strict=True):
        run.profile.save(file)
    return files


def pictures(found: Findings) -> Pictures:
    """Return {SYSTEM-SETTING: PNG}."""
    return {f"{_file_name(p.replay.system)}-{p.replay.setting}": draw(p) for p in found.pairs}


def _file_name(system: str) -> str:
    return system.replace(":", "-")


def draw(pair: TwinPair) -> bytes:
    """Return a PNG of the distributions of ttft, tpot and e2e by class: real is solid, simulated is dashed."""
    figure, panels = sheet(1, len(_METRICS), 11, 3.6)
    for axes, (name, metric) in zip(panels, _METRICS.items(), strict=True):
        _cdfs(axes, pair, metric)
        axes.set(title=name, xlabel="ms", ylabel="requests, %", ylim=(0, 102))
    replay = pair.replay
    figure.suptitle(f"{replay.system}, {replay.setting} saturation ({replay.rate:.2f} req/s)", fontsize=10)
    line_legend(figure, 4)
    return png(figure)


def _cdfs(axes: Axes, pair: TwinPair, metric: str) -> None:
    for number, tier in enumerate(metrics.tiers(pair.real)):
        for records, label, dash in ((pair.real, "real", "-"), (pair.simulated, SIMULATED, "--")):
            seen = np.sort(metrics.values([r for r in records if r.tier == tier], metric)) * 1000
            shares = np.arange(1, seen.size + 1) / max(seen.size, 1) * 100
            axes.step(seen, shares, dash, where="post", color=colour(number), label=f"{tier}, {label}")
