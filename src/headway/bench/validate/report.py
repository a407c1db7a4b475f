"""How far apart are the real run and the simulated one? Rows, a table, and the distributions as pictures.

Latencies count from the planned arrival, as everywhere; the error of a figure is |simulated / real - 1| in
per cent. Attainment is the share of the requests with a promise that kept it, and its error is the difference
in percentage points: a ratio of shares near 0 would say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from headway.bench.load import metrics
from headway.bench.load.metrics import Row
from headway.bench.load.records import Record
from headway.bench.output.page import About, Page, contract, save
from headway.bench.output.plots import png
from headway.bench.output.results import tabulate
from headway.bench.validate import conformance
from headway.bench.validate.conformance import Tally
from headway.bench.validate.validate import Pair, Run

GOALS = {"below": 5.0, "above": 10.0}  # per cent
_METRICS = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
_HEADER = ("figure", "system", "setting", "real", "simulated", "error", "unit")
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of a replay in both worlds; None = cannot be computed. unit: of the two values."""

    id: str
    system: str
    setting: str
    real: float | None
    simulated: float | None
    unit: str

    @property
    def points(self) -> bool:
        """Tell whether the error is a difference in percentage points."""
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


def compared(pair: Pair) -> list[Compared]:
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
    yield "attainment", metrics.attainment([r for r in records if r.slo.objective != "best_effort"])


def _unit(id: str) -> str:
    return {"tokens_per_s": "tokens/s", "attainment": "%"}.get(id, "ms")


@dataclass(slots=True)
class Findings:
    """All that `bench truth` found."""

    pairs: list[Pair]
    runs: list[Run]
    conformance: dict[tuple[str, str], Tally]

    def rows(self) -> list[Row]:
        """Return the rows: errors, both values, how wrong the pace itself was, and the conformance."""
        rows = [row for pair in self.pairs for one in compared(pair) for row in _rows(one)]
        rows += [
            Row("pace.bias_pct", p.replay.system, p.replay.setting, 100 * p.bias, "%") for p in self.pairs
        ]
        for run in self.runs:
            rows += _overheads(run)
        return rows + conformance.rows(self.conformance)

    def notes(self) -> list[str]:
        """Return what a reader must know beside the figures."""
        lines = [
            "attainment: of requests with a promise; its error is in percentage points.",
            "pace.spread_pct: how far the passes of the profile differ: the machine's own drift.",
            "pace.bias_pct: the latency profile's forecast of the replay's own iterations against what they took.",
        ]
        for pair in self.pairs:
            lost = len(pair.replay.records) - len(pair.real)
            if lost:
                lines.append(
                    f"{pair.replay.system}, {pair.replay.setting}: {lost} requests did not complete in the "
                    "real run and are in neither."
                )
        lines += [
            f"{pair.replay.system}, {pair.replay.setting}: in {pair.disturbed:.0f} s of the real run another "
            "program had the machine; the simulator cannot know that."
            for pair in self.pairs
            if pair.disturbed >= 1
        ]
        lines += [
            f"{run.system}: {run.fits.disturbed} samples of the profile left out: the machine was disturbed."
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


def _overheads(run: Run) -> list[Row]:
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


# ---- how people read it


def table(found: Findings, about: About) -> Table:
    """Return a rich table: real, simulated and error side by side, then the conformance."""
    caption = "\n".join([about.workload, *found.notes()])
    title = "How far can the simulator be trusted? (real against SIMULATED)"
    numbers = ("real", "simulated", "error")
    return tabulate(title, _HEADER, _sections(found), caption=caption, numbers=numbers)


def _sections(found: Findings) -> Iterator[list[list[str]]]:
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
    return [
        f"error.{one.id}", one.system, one.setting, _show(one.real), _show(one.simulated), text, one.unit
    ]  # fmt: skip


def _show(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def to_json(found: Findings, seconds: float) -> dict[str, object]:
    """Return the figures by the JSON contract (`page.contract`)."""
    return contract(found.rows(), bench="truth", host="vllm", seconds=seconds)


def write(folder: Path, found: Findings, seconds: float, about: About) -> list[Path]:
    """Write report.json, a picture per replay, latency profiles and report.html into a folder."""
    pictures = {f"{p.replay.system.replace(':', '-')}-{p.replay.setting}": draw(p) for p in found.pairs}
    lines = [line for section in _sections(found) for line in section]
    page = Page("Real vLLM against the simulator", _HEADER, lines, pictures, found.notes())
    files = save(folder, to_json(found, seconds), page, about)
    for run in found.runs:
        file = folder / f"pace-{run.system.replace(':', '-')}.json"
        run.profile.save(file)
        files.append(file)
    return files


def draw(pair: Pair) -> bytes:
    """Return a PNG of three distributions by class, ttft, tpot and e2e: real, and SIMULATED dashed."""
    figure = Figure(figsize=(11, 3.6), dpi=120, layout="constrained")
    for axes, (name, metric) in zip(figure.subplots(1, 3), _METRICS.items(), strict=True):
        _cdfs(axes, pair, metric)
        axes.set(title=name, xlabel="ms", ylabel="requests, %", ylim=(0, 102))
    replay = pair.replay
    figure.suptitle(f"{replay.system}, {replay.setting} saturation ({replay.rate:.2f} req/s)", fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return png(figure)


def _cdfs(axes: Axes, pair: Pair, metric: str) -> None:
    for colour, tier in zip(_COLOURS, metrics.tiers(pair.real), strict=False):
        for records, label, dash in ((pair.real, "real", "-"), (pair.simulated, "SIMULATED", "--")):
            seen = np.sort(metrics.values([r for r in records if r.tier == tier], metric)) * 1000
            shares = np.arange(1, seen.size + 1) / max(seen.size, 1) * 100
            axes.step(seen, shares, dash, where="post", color=colour, label=f"{tier}, {label}")
    axes.spines[["top", "right"]].set_visible(False)
