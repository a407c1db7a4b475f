"""The command `headway bench nodes`: its figures and its report."""

from __future__ import annotations

import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.real import nodes
from benchmarks.real.fleet import FleetTrial, check, make_models
from benchmarks.real.nodes import BACKGROUND, KILLS, NodesSeen
from headway.whatif.load import metrics, mix
from headway.whatif.output.plots import png, sheet
from headway.whatif.output.results import Ask, Row

_QUICK = ("controller", "engine")
_NOTES = (
    "attainment: requests that met their deadline, timed from their first try; those in the background have "
    "none. lost: requests without an answer. twice: requests in the background with two ends. again: how "
    "often clients sent a request again, since a gateway was dead, or refused it (429, 503).",
)


@experiment("nodes", "vllm", "Two Ray nodes, and a kill of each part")
def main(ask: Ask, recipe: str, rate: float, duration: float) -> Result:
    """Serve a load on two Ray nodes while parts are killed."""
    nodes.check_ray()
    duration = 15.0 if ask.quick else duration
    trial = FleetTrial(make_models("smollm2"), (recipe,), rate=rate, duration=duration, seed=ask.seed)
    check(trial)
    return result(trial, nodes.run(trial, _QUICK if ask.quick else KILLS))


def rows(system: str, seen: NodesSeen) -> list[Row]:
    """Return a row per figure."""
    made = list[Row]()
    for tier, part in metrics.split(seen.records).items():
        seconds = metrics.values(part, "e2el")
        p99 = float(np.quantile(seconds, 0.99)) if seconds.size else None
        made.append(Row("nodes.attainment", system, tier, metrics.attainment(part), "%"))
        made.append(Row("nodes.e2el.p99", system, tier, p99, "s"))
    counts = {
        "requests": len(seen.records),
        "background": len(seen.history.looks),
        "lost": seen.lost,
        "twice": seen.verdict.twice,
        "again": seen.again,
        "kills": len(seen.kills),
    }
    return made + [Row(f"nodes.{name}", system, "all", float(value), "count") for name, value in counts.items()]


def result(trial: FleetTrial, seen: NodesSeen) -> Result:
    """Return the findings."""
    killed = ", ".join(f"{what} after {at:.0f} s" for at, what in seen.kills)
    workload = (
        f"{mix.describe(trial.mix)}; not streamed, one of {BACKGROUND} of the class batch in the background; "
        f"{len(trial.models)} models on two vLLM engines of one core each, which swap them; Poisson arrivals "
        f"at {trial.rate:g} req/s for {trial.duration:g} s; two gateways, two controllers, two agents on two "
        f"Ray nodes, RabbitMQ and PostgreSQL, all on this machine. Killed: {killed}."
    )
    return Result(rows(trial.systems[0], seen), workload, lambda: {"nodes": plot(seen)}, notes=_NOTES)


def plot(seen: NodesSeen) -> bytes:
    """Return a PNG of the seconds that each request took, by arrival, and the kills."""
    figure, panels = sheet(1, 1, 9.0, 3.2)
    axes = panels[0]
    for number, (tier, part) in enumerate(metrics.split(seen.records).items()):
        if tier != "all":
            at = [record.at for record in part]
            axes.plot(at, [record.e2el for record in part], ".", label=tier, markersize=4, color=f"C{number}")
    for at_s, what in seen.kills:
        axes.axvline(at_s, color="#D55E00", linewidth=0.8)
        axes.annotate(what, (at_s, 1), xycoords=("data", "axes fraction"), fontsize=6, rotation=30)
    axes.set_xlabel("arrival, s", fontsize=8)
    axes.set_ylabel("seconds to the answer", fontsize=8)
    axes.legend(fontsize=7)
    return png(figure)
