"""The figures of `headway bench apps`: completion times of runs, attainment of chat, lost requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.experiment import Result, experiment
from benchmarks.real import apps
from benchmarks.real.app_load import APPS, shares, source
from benchmarks.real.apps import ALL, RUNS, AppsOutcome, AppsTrial, RunResult, ServedApps, completion_times
from headway.engines.vllm.process.sizes import expected
from headway.types import Floats
from headway.whatif.load import metrics, mix, report
from headway.whatif.load.records import Record, Results
from headway.whatif.measured.systems import total
from headway.whatif.output.plots import colours, legend, line_legend, png, sheet
from headway.whatif.output.results import Ask, Row, show, system_grid

_HERMES = "hermes"
_QUICK = ("vllm-fcfs", _HERMES)
_QUICK_SECONDS, _QUICK_RATE, _QUICK_SCALE = 4.0, 1.25, 0.1
_SECONDS = "headway_run_seconds"
Figure = tuple[str, str, float | None, str]


@experiment("apps", "vllm", "Application runs beside chat on vLLM")
def main(ask: Ask, trial: AppsTrial) -> Result:
    """Run the benchmark. `quick`: two systems, a few seconds of small runs at a fixed rate."""
    if ask.quick:
        names = _QUICK if set(_QUICK) <= set(trial.systems) else trial.systems[:2]
        trial = replace(
            trial,
            systems=names,
            rate=trial.rate or _QUICK_RATE,
            rounds=1,
            together=True,
            duration=min(trial.duration, _QUICK_SECONDS),
            shape=replace(trial.shape, scale=_QUICK_SCALE),
        )
    return result(trial, asyncio.run(apps.run(trial)))


def result(trial: AppsTrial, outcome: AppsOutcome) -> Result:
    """Return the findings; the table has a line per figure and a column per system."""
    rows = [row for name, served in outcome.served.items() for row in rows_of(name, served)]
    rows += reductions(outcome.served)
    variant = f", {trial.variant}" if trial.variant else ""
    return Result(
        [replace(row, setting=row.setting + variant) for row in rows],
        _describe(trial, outcome),
        lambda: draw(outcome.served),
        system_grid(rows),
        _notes(outcome.served),
    )


def _describe(trial: AppsTrial, outcome: AppsOutcome) -> str:
    shape = trial.shape
    asked = ", ".join(f"{share:.0%} {name}" for name, share in shares().items())
    capacity = f" (capacity {outcome.capacity:.3f} runs/s)" if outcome.capacity else ""
    return (
        f"{asked}: {source()}, tokens and seconds times {shape.scale:g}; gamma distributed gaps of "
        f"burstiness {shape.burstiness:g} at {outcome.rate:.3f} runs/s{capacity}; beside them "
        f"{mix.describe(shape.chat)}, Poisson arrivals; {trial.rounds} x {trial.duration:g} s, batch limit "
        f"{expected(trial.engine).max_running}."
    )


def _notes(results: Mapping[str, ServedApps]) -> list[str]:
    asked: Results = {name: ([*served.chat, *requests(served.runs)], {}) for name, served in results.items()}
    refused = [
        f"{name}: {served.refused} reports of runs were not accepted."
        for name, served in results.items()
        if served.refused
    ]
    return [*report.warnings(asked), *refused]


# ---- figures


def requests(runs: Sequence[RunResult]) -> list[Record]:
    """Return the records of the runs' requests."""
    return [record for run in runs for record in run.records]


def rows_of(system: str, served: ServedApps) -> list[Row]:
    """Return the figures of a system.

    act.mean, act.p95: application completion times of complete runs, by application and over all. runs: number
    of runs. lost: runs with an unanswered request; unanswered chat requests. attainment, ttft.p99: figures of
    chat. gateway.runs, gateway.act.mean: complete runs by the gateway's count, and their mean time from the
    first request to the end of the last; absent for stock vLLM, which knows no runs.
    """
    return [Row(id, system, setting, value, unit) for id, setting, value, unit in _figures(system, served)]


def _figures(system: str, served: ServedApps) -> Iterator[Figure]:
    for setting in (ALL, *APPS):
        seconds = completion_times(served.runs, setting)
        yield "act.mean", setting, float(seconds.mean()) if seconds.size else None, "s"
        yield "act.p95", setting, float(np.quantile(seconds, 0.95)) if seconds.size else None, "s"
    for setting in (ALL, *APPS):
        made = sum(setting in (ALL, run.app) for run in served.runs)
        yield "runs", setting, float(made), "count"
        yield "lost", setting, float(made - completion_times(served.runs, setting).size), "count"
    for tier in metrics.tiers(served.chat):
        part = [record for record in served.chat if record.tier == tier]
        late = metrics.values(part, "ttft")
        yield "attainment", tier, metrics.attainment(part), "%"
        yield "ttft.p99", tier, float(np.quantile(late, 0.99)) * 1000 if late.size else None, "ms"
        yield "requests", tier, float(len(part)), "count"
        yield "lost", tier, float(sum(not record.ok for record in part)), "count"
    if served.counts:
        yield from _gateway(served)


def _gateway(served: ServedApps) -> Iterator[Figure]:
    for setting in (ALL, *APPS):
        labels = () if setting == ALL else (setting,)
        ended = total(served.counts, f"{_SECONDS}_count", *labels)
        seconds = total(served.counts, f"{_SECONDS}_sum", *labels)
        yield "gateway.runs", setting, total(served.counts, RUNS, "finished", *labels), "count"
        yield "gateway.act.mean", setting, seconds / ended if ended else None, "s"


def reductions(results: Mapping[str, ServedApps]) -> list[Row]:
    """Return the reduction of completion times by `hermes` and its variants against each other system, in percent."""
    rows: list[Row] = []
    times = {name: completion_times(served.runs) for name, served in results.items()}
    for name, other in permutations((name for name, some in times.items() if some.size), 2):
        if name.startswith(_HERMES):
            mean = 100 * (1 - float(times[name].mean() / times[other].mean()))
            p95 = 100 * (1 - float(np.quantile(times[name], 0.95) / np.quantile(times[other], 0.95)))
            rows.append(Row("act.mean.reduction_pct", name, f"{ALL}, against {other}", mean, "%"))
            rows.append(Row("act.p95.reduction_pct", name, f"{ALL}, against {other}", p95, "%"))
    return rows


# ---- plots


def draw(results: Mapping[str, ServedApps]) -> dict[str, bytes]:
    """Return {name: PNG} of completion times by application and system, and of their distribution."""
    return {"act": _bars(results), "act-cdf": _distribution(results)}


def _bars(results: Mapping[str, ServedApps]) -> bytes:
    figure, grid = sheet(1, 2, 11, 4)
    settings, shades = (ALL, *APPS), list(colours(results).values())
    for axes, title, p in zip(grid, ("mean", "P95"), (None, 0.95), strict=True):
        for number, (shade, served) in enumerate(zip(shades, results.values(), strict=True)):
            times = [completion_times(served.runs, setting) for setting in settings]
            heights = [_of(seconds, p) for seconds in times]
            at = np.arange(len(settings)) + (number - (len(results) - 1) / 2) * 0.8 / len(results)
            bars = axes.bar(at, heights, 0.75 / len(results), color=shade)
            labels = [show(height if seconds.size else None) for height, seconds in zip(heights, times, strict=True)]
            axes.bar_label(bars, labels, padding=2, fontsize=7)
        axes.set_xticks(range(len(settings)), settings)
        axes.set(ylabel="application completion time, s", title=title)
    legend(figure, list(results))
    return png(figure)


def _of(seconds: Floats, p: float | None) -> float:
    if not seconds.size:
        return 0.0
    return float(seconds.mean() if p is None else np.quantile(seconds, p))


def _distribution(results: Mapping[str, ServedApps]) -> bytes:
    """Draw the distribution of completion times; lost runs keep the curve below 100 %."""
    figure, (axes,) = sheet(1, 1, 7, 4)
    shades = colours(results)
    for name, served in results.items():
        seconds = np.sort(completion_times(served.runs))
        share = 100 * np.arange(1, seconds.size + 1) / max(len(served.runs), 1)
        axes.step(seconds, share, where="post", color=shades[name], label=name)
    axes.set(xlabel="application completion time, s", ylabel="runs, %", xscale="log", ylim=(0, 103))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    line_legend(figure, 4)
    return png(figure)
