"""Single choices of EcoServe's scheduler, and sweeps of padding, reserve and buffer (figure 12)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.papers.ecoserve_setup import DATA, PAPER_TEXT, Data, options_of, workload
from benchmarks.papers.ecoserve_tables import ECOSERVE, figures
from benchmarks.papers.quoted import quoted
from benchmarks.papers.trial import PaperTrial, trial
from headway.policy.pack.ecoserve.step_buffer import Options
from headway.simulate.workload.traffic import Workload
from headway.whatif.output.results import Row

# The options in which `ecoserve` and `ecoserve-paper` differ, grouped where they belong together.
CHOICES: dict[str, tuple[str, ...]] = {
    "buffer by length": ("buffer", "buffer_share"),
    "no refill before a group ends": ("idle",),
    "groups of equal length": ("grain",),
    "loose guests": ("loose",),
    "fixed ranges": ("fixed_ranges",),
    "hosts first": ("hosts_first",),
    "no prompt as guest": ("lends_to_prompts",),
    "prompts alone": ("whole",),
    "guests give way": ("by_cost",),
}
SWEEPS: dict[str, tuple[float, ...]] = {
    "padding": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3),
    "reserve": (0.005, 0.01, 0.02, 0.03, 0.04, 0.1),
    "buffer": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3),
}
# The sweet spots of figure 12 in %, by data set in the order of `DATA`, with the line that states them.
SPOTS = {
    name: tuple(quoted(one, "ecoserve", "4", line, f"{one}%") for one in papers)
    for name, line, papers in (
        ("padding", 282, (10, 15, 20)),
        ("reserve", 284, (2, 3, 4)),
        ("buffer", 284, (15, 15, 10)),
    )
}
_SHOWN = ("normalized_latency", "jct.mean", "ssr", "throughput.req_per_s", "kv.alloc_failures_pct")


@dataclass(frozen=True, slots=True)
class Swept:
    """A point of a sweep: the name of the option, its value, and the trials of all seeds."""

    name: str
    value: float
    trials: tuple[PaperTrial, ...]

    @property
    def jct(self) -> float:
        """Return the mean of the trials' mean JCT, in seconds."""
        return float(np.mean([t.jct for t in self.trials]))


def choices(seeds: Sequence[int], share: float) -> Iterator[tuple[str, PaperTrial]]:
    """Yield (label, trial) of `ecoserve` with each choice of the paper's text, and of the text without each."""
    for data in DATA:
        for seed in seeds:
            load = _load(data, share, seed)
            for label, options in _labelled(data):
                yield label, trial(ECOSERVE, data, data.swept, load, seed, options=options)


def _labelled(data: Data) -> Iterator[tuple[str, Options]]:
    ours, text = options_of(ECOSERVE, data), options_of(PAPER_TEXT, data)
    assert ours is not None
    assert text is not None
    yield ECOSERVE, ours
    yield PAPER_TEXT, text
    for name, names in CHOICES.items():
        yield f"{ECOSERVE}, {name}", ours._replace(**{one: getattr(text, one) for one in names})
        yield f"{PAPER_TEXT}, not {name}", text._replace(**{one: getattr(ours, one) for one in names})


def _load(data: Data, share: float, seed: int) -> Workload:
    return workload(data, data.swept, data.seconds * share, seed)


def count_choices(seeds: Sequence[int]) -> int:
    """Return the number of trials that `choices` runs."""
    return len(DATA) * len(seeds) * (2 + 2 * len(CHOICES))


def choice_rows(labelled: Sequence[tuple[str, PaperTrial]]) -> list[Row]:
    """Return the figures of every choice, as means over the seeds."""
    groups: dict[tuple[str, str, float], list[PaperTrial]] = {}
    for label, t in labelled:
        groups.setdefault((label, t.data, t.rate), []).append(t)
    return [
        Row(id, label, f"{data}, {rate:g} req/s, choices", value, unit)
        for (label, data, rate), group in groups.items()
        for id, value, unit in _means(group)
    ]


def _means(group: Sequence[PaperTrial]) -> Iterator[tuple[str, float, str]]:
    for each in zip(*(figures(t) for t in group), strict=True):
        if each[0][0] in _SHOWN:
            yield each[0][0], float(np.mean([value for _, value, _ in each])), each[0][2]


# ---- sweeps


def sweeps(seeds: Sequence[int], share: float, points: int) -> Iterator[Swept]:
    """Yield the points of all sweeps of `ecoserve`."""
    for data in DATA:
        loads = {seed: _load(data, share, seed) for seed in seeds}
        for name, values in SWEEPS.items():
            for value in few(values, points):
                made = (_point(data, name, value, load, seed) for seed, load in loads.items())
                yield Swept(name, value, tuple(made))


def _point(data: Data, name: str, value: float, load: Workload, seed: int) -> PaperTrial:
    options = options_of(ECOSERVE, data)
    assert options is not None
    if name == "reserve":
        options = options._replace(reserve=value)
    if name == "buffer":
        options = options._replace(buffer=0, buffer_share=value)
    padding = value if name == "padding" else None
    return trial(ECOSERVE, data, data.swept, load, seed, options=options, padding=padding)


def few(values: Sequence[float], points: int) -> list[float]:
    """Return `points` evenly spread values."""
    return [values[i] for i in np.linspace(0, len(values) - 1, points).round().astype(int)]


def sweep_rows(swept: Sequence[Swept]) -> list[Row]:
    """Return the figures of every point, and the value with the lowest JCT beside the paper's."""
    rows = [
        Row(id, ECOSERVE, f"{t.data}, {t.rate:g} req/s, {s.name} {s.value:g}", value, unit)
        for s in swept
        for t in s.trials[:1]
        for id, value, unit in _means(s.trials)
    ]
    for name, papers in SPOTS.items():
        for data, paper in zip(DATA, papers, strict=True):
            mine = [s for s in swept if s.name == name and s.trials[0].data == data.name]
            if mine:
                best = min(mine, key=lambda s: s.jct).value
                rows.append(Row(f"sweet_spot.{name}", ECOSERVE, data.name, 100 * best, "%", paper))
    return rows
