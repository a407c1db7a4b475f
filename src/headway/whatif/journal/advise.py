"""`headway advise`: the number of instances, the recipe and the batch limit that keep your traffic's promises.

It simulates the traffic at its load and above (SIMULATED), with the planners and packers of `headway serve`. To
show the simulator's error, it also simulates the traffic as it was served and prints both figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.progress import Progress

from headway.errors import ConfigError
from headway.policy.recipes.registry import find
from headway.policy.scale.scaler import fewest
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload
from headway.store.journal.reader import JournalReader
from headway.whatif.experiment import records
from headway.whatif.journal.served import records_of
from headway.whatif.journal.trust import differs, slower, warning
from headway.whatif.load import metrics
from headway.whatif.load.records import Record
from headway.whatif.output.results import SIMULATED, About, Grid, Line, Pictures, Report, Row, deliver, show
from headway.whatif.scenario import faster

_LIMITS = (0.5, 2.0)  # factors of the present batch limit to try


@dataclass(frozen=True, slots=True)
class Case:
    """A question to the simulator.

    kinds: the present instances, copied in turn for larger fleets. requests: the present traffic.
    served: the recipe and the records of these requests as really served, None = unknown.
    loads: factors of the arrivals' rate. target: least attainment of every class, in %.
    most: most instances to try.
    suspects: events in the journal that a simulation cannot reproduce.
    """

    kinds: tuple[InstanceSpec, ...]
    requests: Workload
    served: tuple[str, Sequence[Record]] | None
    recipes: tuple[str, ...]
    loads: tuple[float, ...]
    target: float
    most: int
    suspects: Sequence[str] = ()


@dataclass(slots=True)
class Advice:
    """The answers to a `Case`; row ids are `advise.*`, `real.*` and `simulated.*`.

    differences: differences between the served traffic and its simulation that a good simulation would not have.
    """

    rows: list[Row] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def main(case: Case, about: str, notes: Sequence[str], *, seed: int, as_json: bool, out: Path | None) -> None:
    """Print the advice, and write it to a folder."""
    if not case.requests.promised.any():
        raise ConfigError(
            "None of these requests has an SLO, so there are no promises to plan for.",
            "Give classes SLOs (docs/classes.md), or with --trace give --slo.",
        )
    began = time.perf_counter()
    with Progress(disable=as_json, transient=True) as bar:
        advice = advise(case, bar)
    report = Report(
        "advise",
        "sim",
        f"What keeps the promises ({SIMULATED})",
        advice.rows,
        time.perf_counter() - began,
        About(about, seed),
        _grid(advice.rows),
        notes=[*advice.words, *notes],
        warning=warning(advice.differences, case.suspects),
    )
    deliver(report, as_json=as_json, out=out, pictures=lambda: _pictures(advice.rows, case))


def advise(case: Case, bar: Progress | None = None) -> Advice:
    """Return the answers to a case."""
    found = Advice()
    cells = [(load, recipe) for load in case.loads for recipe in case.recipes]
    task = bar.add_task("simulating", total=len(cells) + 2) if bar else None

    def step() -> None:
        if bar and task is not None:
            bar.advance(task)

    if case.served is not None:
        _error(case, *case.served, found)
    step()
    needed: dict[tuple[float, str], int | None] = {}
    for load, recipe in cells:
        needed[load, recipe] = _needed(case, load, recipe, found)
        step()
    found.words += list(_words(case, needed))
    found.rows += _limits(case, needed)
    step()
    return found


def fleet_of(kinds: Sequence[InstanceSpec], count: int) -> list[InstanceSpec]:
    """Return `count` instances: those of `kinds`, then copies of them in turn."""
    copies = [kinds[i % len(kinds)] for i in range(count)]
    return [replace(spec, instance=replace(spec.instance, id=f"e{i}")) for i, spec in enumerate(copies)]


def attained(records_: Sequence[Record]) -> float:
    """Return the lowest attainment of any class, in %; one that keeps the share that it promises counts as 100."""
    parts = metrics.split(metrics.promised(records_))
    if any(metrics.promised_share(part) for part in parts.values()):
        del parts[metrics.ALL]  # the total says nothing where classes promise different shares
    return min((_of_promised(part) for part in parts.values()), default=100.0)


def _of_promised(part: Sequence[Record]) -> float:
    share, value = metrics.promised_share(part), metrics.attainment(part) or 0.0
    return 100.0 if share is not None and value >= share else value


def _simulated(case: Case, fleet: Sequence[InstanceSpec], load: float, recipe: str) -> list[Record]:
    requests = faster(case.requests, load)
    return records(requests, Simulation(find(recipe), list(fleet), requests).run())


# ---- how many


def _needed(case: Case, load: float, recipe: str, found: Advice) -> int | None:
    """Return the fewest instances that reach the target, None = not even `most` do; add the figures to `found`."""
    tried: dict[int, float] = {}

    def at(count: int) -> float:
        if count not in tried:
            tried[count] = attained(_simulated(case, fleet_of(case.kinds, count), load, recipe))
        return tried[count]

    best = fewest(at, case.target, len(case.kinds), case.most)
    now, setting = len(case.kinds), f"{load:g}x"
    found.rows.append(Row("advise.instances", recipe, setting, best, "instances"))
    if now <= case.most:
        found.rows.append(Row("advise.attained_now", recipe, setting, at(now), "%"))
    if best is None:
        found.rows.append(Row("advise.attained_most", recipe, setting, at(case.most), "%"))
    else:
        found.rows.append(Row("advise.attained", recipe, setting, at(best), "%"))
        if best > 1:
            found.rows.append(Row("advise.attained_one_fewer", recipe, setting, at(best - 1), "%"))
    return best


def _words(case: Case, needed: dict[tuple[float, str], int | None]) -> Iterator[str]:
    """Yield sentences: the instances needed at each load, fewest first, and why a figure is missing."""
    for load in case.loads:
        counts = {recipe: needed[load, recipe] for recipe in case.recipes}
        order = sorted(case.recipes, key=lambda recipe: counts[recipe] or case.most + 1)
        parts = [f"{recipe} {counts[recipe] or f'more than {case.most}'}" for recipe in order]
        yield f"At {load:g}x, {case.target:g} % of every class on time needs instances: {', '.join(parts)}."
    if None in needed.values():
        yield (
            f'"-" is more than the {case.most} instances of --most. Where these keep hardly more promises than '
            "today's, no number helps: a promise is shorter than its request's time on an idle engine."
        )
    if len(case.kinds) > case.most:
        yield f"Today's {len(case.kinds)} instances are not simulated: --most is {case.most}."


def _limits(case: Case, needed: dict[tuple[float, str], int | None]) -> list[Row]:
    """Return the attainment of the first recipe at the first load with other batch limits."""
    load, recipe = case.loads[0], case.recipes[0]
    count = needed[load, recipe] or case.most
    rows = []
    for factor in _LIMITS:
        fleet = [_limited(spec, factor) for spec in fleet_of(case.kinds, count)]
        limits = "/".join(str(size) for size in sorted({spec.instance.max_running for spec in fleet}))
        setting = f"{load:g}x, {count} instances, batch limit {limits}"
        share = attained(_simulated(case, fleet, load, recipe))
        rows.append(Row("advise.attained_limit", recipe, setting, share, "%"))
    return rows


def _limited(spec: InstanceSpec, factor: float) -> InstanceSpec:
    most = min(max(int(spec.instance.max_running * factor), 1), spec.budget)
    return replace(spec, instance=replace(spec.instance, max_running=most), slots=2 * most)


# ---- the simulator's own error


def _error(case: Case, recipe: str, served: Sequence[Record], found: Advice) -> None:
    """Add the real and the simulated figures of the served traffic by class, and their differences."""
    simulated = _simulated(case, case.kinds, 1.0, recipe)
    for setting, real in metrics.split(served).items():
        ours = metrics.split(simulated).get(setting, [])
        pairs = {"attained": (metrics.attainment(real), metrics.attainment(ours), "%")}
        for name in ("ttft", "e2el"):
            pairs[f"{name}.p50"] = _median(real, name), _median(ours, name), "ms"
        for id, (truth, guess, unit) in pairs.items():
            if truth is None or guess is None:
                why = "has an SLO" if id == "attained" else "got a complete answer"
                name = _LABELS[f"real.{id}"].removesuffix(", served")
                found.words.append(f'There is no "{name}" of {setting}: none of its requests {why}.')
                continue
            found.rows.append(Row(f"real.{id}", recipe, setting, truth, unit))
            found.rows.append(Row(f"simulated.{id}", recipe, setting, guess, unit))
            if setting != metrics.ALL:
                found.differences += _difference(id, setting, truth, guess, len(metrics.promised(real)))


def _difference(id: str, setting: str, truth: float, guess: float, promised: int) -> Iterator[str]:
    """Describe a difference that a good simulation would not have."""
    if id == "attained" and differs(truth, guess, promised):
        yield f"{setting} kept {truth:.1f} % of its promises, in the simulation {guess:.1f} %"
    if id == "e2el.p50" and slower(truth, guess):
        took, simulated = truth / 1000, guess / 1000
        yield f"the median answer of {setting} took {took:.2f} s, in the simulation {simulated:.2f} s"


def _median(found: Sequence[Record], metric: str) -> float | None:
    values = metrics.values(found, metric)
    return float(np.median(values) * 1000) if values.size else None


def served_of(journal: JournalReader) -> tuple[str, list[Record]]:
    """Return the recipe under which a journal's requests were served and their records."""
    (recipe,) = recipes_of(journal)
    return recipe, records_of(journal.requests)


def recipes_of(journal: JournalReader) -> set[str]:
    """Return the recipes of a journal's engines."""
    return {engine.recipe for engine in journal.engines.values()}


# ---- table and picture


def _grid(rows: Sequence[Row]) -> Grid:
    lines: list[Line] = [
        [_LABELS.get(row.id, row.id), row.system, row.setting, show(row.ours), row.unit] for row in rows
    ]
    wanted = [line for line, row in zip(lines, rows, strict=True) if row.id.startswith("advise.")]
    errors = [line for line, row in zip(lines, rows, strict=True) if not row.id.startswith("advise.")]
    return Grid(("figure", "recipe", "load or class", "value", "unit"), [wanted, errors], ("value",))


_LABELS = {
    "advise.instances": "instances needed",
    "advise.attained": "on time with these",
    "advise.attained_one_fewer": "on time with one fewer",
    "advise.attained_now": "on time with today's",
    "advise.attained_limit": "on time with another batch limit",
    "advise.attained_most": "on time with the most tried",
    "real.attained": "on time, served",
    "simulated.attained": "on time, simulated",
    "real.ttft.p50": "ttft p50, served",
    "simulated.ttft.p50": "ttft p50, simulated",
    "real.e2el.p50": "e2e p50, served",
    "simulated.e2el.p50": "e2e p50, simulated",
}


def _pictures(rows: Sequence[Row], case: Case) -> Pictures:
    from headway.whatif.output.plots import colours, legend, png, sheet

    figure, (axes,) = sheet(1, 1, 6.4, 3.4)
    width, shades = 0.8 / len(case.recipes), colours(case.recipes)
    for number, recipe in enumerate(case.recipes):
        counts = [row.ours for row in rows if row.id == "advise.instances" and row.system == recipe]
        places = np.arange(len(counts)) + (number - (len(case.recipes) - 1) / 2) * width
        bars = axes.bar(places, [count or case.most for count in counts], width * 0.92, color=shades[recipe])
        axes.bar_label(bars, [show(count) if count else f"> {case.most}" for count in counts], padding=2)
    axes.set(xticks=range(len(case.loads)), xticklabels=[f"{load:g}x" for load in case.loads])
    axes.set(ylabel="instances", xlabel="load", title=f"for {case.target:g} % of every class on time")
    legend(figure, list(case.recipes))
    return {"instances": png(figure, SIMULATED)}
