"""The figures of `headway bench fleet`: attainment, throughput, model swaps, and the cost of a kill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.real import fleet
from benchmarks.real.fleet import FINISHED, FleetRun, FleetTrial
from headway.whatif.load import metrics, mix, report
from headway.whatif.load.records import Results
from headway.whatif.measured.systems import Counts, total
from headway.whatif.output.results import Ask, Row, system_grid

_QUICK_SECONDS, _QUICK_TAIL = 10.0, 0.3
_SWAPS, _LOADS = "headway_model_swaps_total", "headway_model_swap_seconds"
_REQUEUED = "headway_requeue_seconds"
_DOWN, _LOADING = "#222222", "#dddddd"
Figure = tuple[str, str, float | None, str]


@experiment("fleet", "vllm", "Several models on two vLLM instances")
def main(ask: Ask, trial: FleetTrial) -> Result:
    """Run the benchmark. `quick`: one system, models of one shape only, a few seconds of arrivals."""
    if ask.quick:
        models, seconds = trial.models[:-1], min(trial.duration, _QUICK_SECONDS)
        names = tuple(name for name in trial.systems if name == "qlm") or trial.systems[:1]
        trial = replace(trial, models=models, systems=names, tail=_QUICK_TAIL, duration=seconds)
    runs = asyncio.run(fleet.run(trial))
    rows = [row for name, run in runs.items() for row in rows_of(name, run)]
    variant = f", {trial.variant}" if trial.variant else ""
    return Result(
        [replace(row, setting=row.setting + variant) for row in rows],
        _describe(trial),
        lambda: draw(runs),
        system_grid(rows),
        report.warnings({name: (run.records, {}) for name, run in runs.items()}),
    )


def _describe(trial: FleetTrial) -> str:
    arrivals = "Poisson arrivals"
    if trial.burstiness != 1.0:
        arrivals = f"arrivals of burstiness {trial.burstiness:g}"
    asked = ", ".join(f"{s:.0%} {m.name}" for s, m in zip(trial.shares, trial.models, strict=True))
    first = ", ".join(f"{id} {e.name}" for id, e in zip(fleet.INSTANCES, trial.engines(), strict=True))
    killed = f"; one engine is killed after {trial.duration / 2:g} s" if trial.kill else ""
    return (
        f"{mix.describe(trial.mix)}; not streamed; {asked}; {arrivals} at {trial.rate:g} req/s for "
        f"{trial.duration:g} s; two engines of one core, batch limit {trial.max_running}, which serve at "
        f"first: {first}{killed}."
    )


# ---- figures


def rows_of(system: str, run: FleetRun) -> list[Row]:
    """Return the figures of a system.

    attainment: share of requests that met their SLO, by class, model and over all. e2el.p99: of those that
    were answered. swaps, swap.seconds: loads that succeeded and their mean, by way and over all.
    swaps.failed. swaps.taken_back: requests that a swap sent back to the queue. lost: requests without an
    answer. answered_twice: answers by the gateway's count beyond those that clients got.
    Of a run with a kill: replanned, requests that the death sent back to the queue; replanned.seconds, mean
    until they were sent again; back.seconds, from the kill until the engine served again.
    """
    return [Row(id, system, setting, value, unit) for id, setting, value, unit in _figures(run)]


def _figures(run: FleetRun) -> Iterator[Figure]:
    records, counts = run.records, run.counts
    models = sorted({record.model for record in records if record.model is not None})
    parts = metrics.split(records)
    for tier, part in parts.items():
        yield "attainment", tier, metrics.attainment(part), "%"
    for model in models:
        yield "attainment", model, metrics.attainment([r for r in records if r.model == model]), "%"
    for tier, part in parts.items():
        seconds = metrics.values(part, "e2el")
        yield "e2el.p99", tier, float(np.quantile(seconds, 0.99)) if seconds.size else None, "s"
    answered, span = sum(record.ok for record in records), metrics.makespan(records)
    yield "throughput.req_per_s", "all", answered / span if span else None, "req/s"
    yield from _swaps(counts)
    yield "swaps.taken_back", "all", total(counts, f"{_REQUEUED}_count", "model_swap"), "count"
    yield "lost", "all", float(len(records) - answered), "count"
    finished = total(counts, FINISHED, "finished")
    yield "answered_twice", "all", max(finished - answered, 0.0), "count"
    if run.watched.killed is not None:
        again = total(counts, f"{_REQUEUED}_count", "engine_gone")
        waited = total(counts, f"{_REQUEUED}_sum", "engine_gone")
        yield "replanned", "all", again, "count"
        yield "replanned.seconds", "all", waited / again if again else None, "s"
        yield "back.seconds", "all", run.watched.back, "s"


def _swaps(counts: Counts) -> Iterator[Figure]:
    ways = ("in_place", "restart", None)
    for way in ways:
        yield "swaps", way or "all", total(counts, _SWAPS, "loaded", *([] if way is None else [way])), "count"
    for way in ways:
        labels = [] if way is None else [way]
        loads = total(counts, f"{_LOADS}_count", *labels)
        seconds = total(counts, f"{_LOADS}_sum", *labels)
        yield "swap.seconds", way or "all", seconds / loads if loads else None, "s"
    yield "swaps.failed", "all", total(counts, _SWAPS, "failed"), "count"


# ---- pictures


def draw(runs: Mapping[str, FleetRun]) -> dict[str, bytes]:
    """Return {name: PNG}: attainment and latency by class and system, and the model on each instance."""
    from headway.whatif.load import plots

    results: Results = {name: (run.records, {}) for name, run in runs.items()}
    return plots.draw(results) | {"models": _models(runs)}


def _models(runs: Mapping[str, FleetRun]) -> bytes:
    """Return a PNG with a bar per instance and system, coloured by the served model."""
    from matplotlib.patches import Patch

    from headway.whatif.output.plots import colour, png, sheet

    seen = (one for run in runs.values() for states in run.watched.states.values() for one in states)
    names = sorted({state.model for _, state in seen if state.model is not None})
    colours = {name: colour(number) for number, name in enumerate(names)}
    figure, grid = sheet(len(runs), 1, 7.2, 1.0 + 1.1 * len(runs))
    for axes, (system, run) in zip(grid, runs.items(), strict=True):
        end = max((record.last or 0.0 for record in run.records), default=0.0)
        for place, changes in enumerate(run.watched.states.values()):
            ends = [at for at, _ in changes[1:]] + [max(end, changes[-1][0])]
            for (since, state), until in zip(changes, ends, strict=True):
                shade = _LOADING if state.loading else _DOWN
                if state.model is not None:
                    shade = colours[state.model]
                axes.barh(place, until - since, left=since, height=0.8, color=shade)
        if run.watched.killed is not None:
            axes.axvline(run.watched.killed[0], color="#D55E00", linestyle="--", linewidth=1.2)
        axes.set(yticks=range(len(run.watched.states)), yticklabels=list(run.watched.states), title=system)
        axes.invert_yaxis()
    grid[-1].set_xlabel("s")
    shades = colours | {"loading": _LOADING, "down": _DOWN}
    patches = [Patch(color=shade, label=label) for label, shade in shades.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    return png(figure)
