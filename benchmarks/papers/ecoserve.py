"""`headway bench papers ecoserve`: the evaluation of EcoServe (section 4), SIMULATED.

OPT-13B on an A100 with 12 GB of KV; requests with the lengths of Table 2, at the paper's rates and around this
engine's saturation. Systems: EcoServe with its ablation, to the letter, and with true lengths (oracle); the
baselines with the paper's settings. Also each choice of the scheduler alone, and sweeps of padding, reserve and
buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from matplotlib.axes import Axes
from rich.progress import track

from benchmarks.experiment import Result, experiment
from benchmarks.papers.ecoserve_choices import SWEEPS, Swept, choice_rows, choices, count_choices, sweep_rows, sweeps
from benchmarks.papers.ecoserve_setup import DATA, MAX_ALLOCATION, PAPER_TEXT, SLO_SCALE, TFS, Data, workload
from benchmarks.papers.ecoserve_tables import (
    ABLATION,
    BASE,
    ECOSERVE,
    LIMIT,
    ORACLE,
    TableCase,
    Trials,
    averages,
    bounds,
    errors,
    floors,
    is_beyond,
    measured,
    rates,
)
from benchmarks.papers.parts import PaperPart, part
from benchmarks.papers.trial import PaperTrial, trial
from headway.whatif.output.plots import colour, colours, line_legend, png, sheet
from headway.whatif.output.results import SIMULATED, Ask, Row

BASELINES = (BASE, "vllm-v0", "vllm", "fastgen", "multires", *MAX_ALLOCATION)
_COMPARED = (ECOSERVE, ORACLE, BASE, "fastgen")
_SPREAD = (*ABLATION, PAPER_TEXT, ORACLE, BASE, "fastgen", "orca")  # run with every seed

_MEASURED = {"choices": "choices", "sweeps": "points"}  # parts beside the experiments


@dataclass(frozen=True, slots=True)
class EcoServePlan:
    """The size of the evaluation.

    experiments: cases and their systems
    rates: {data set: rates}, low ones for systems with max-allocation; None = all of the data set's
    share: seconds of arrivals, as a share of the data set's
    seeds: number of seeds; cases other than the plain one, and systems without a claim, use only the first
    points: points of each sweep; 0 = no sweeps
    choices: run every choice alone
    limit: seconds per output token at which rates are compared
    """

    experiments: tuple[PaperPart[TableCase], ...]
    rates: dict[str, tuple[float, ...]] | None
    share: float
    seeds: int
    points: int
    choices: bool
    limit: float = LIMIT


def full() -> EcoServePlan:
    """Return the whole evaluation."""
    experiments = (
        PaperPart("rates", (TableCase(),), (*ABLATION, PAPER_TEXT, ORACLE, *BASELINES)),
        PaperPart("copies", (TableCase(copies=2.0), TableCase(copies=5.0)), _COMPARED),
        PaperPart("slower", (TableCase(steps=2.0),), _COMPARED),
        PaperPart("long", (TableCase(span=5.0),), (ECOSERVE, ORACLE, BASE)),
    )
    return EcoServePlan(experiments, None, 1.0, 3, 6, True)


def quick_plan() -> EcoServePlan:
    """Return fewer systems at few rates, with one seed and a third of the arrivals.

    The highest rates exceed those that any of these systems sustains for this time.
    """
    rates = {"alpaca": (36.0, 60.0, 96.0, 108.0), "sharegpt": (2.0, 3.0, 5.0, 8.0, 13.0), "bookcorpus": (0.3, 0.4, 0.5)}
    systems = (*ABLATION, PAPER_TEXT, ORACLE, BASE, "fastgen")
    return EcoServePlan((PaperPart("rates", (TableCase(),), systems),), rates, 0.3, 1, 3, False)


@experiment("ecoserve", "sim", f"EcoServe ({SIMULATED})")
def main(ask: Ask, only: Sequence[str] = (), plan: EcoServePlan | None = None) -> Result:
    """Run the evaluation. `quick`: about a minute. only: parts; () = all."""
    plan, seed = part(plan or (quick_plan() if ask.quick else full()), only, _MEASURED), ask.seed
    seeds = [seed + i for i in range(plan.seeds)]
    shown = partial(track, disable=ask.as_json, transient=True)
    _compile(seed)
    trials: Trials = {}
    total = sum(1 for _ in _planned(plan, seeds))
    for case, one in shown(_trials(plan, seeds), "rates", total):
        trials.setdefault(case, []).append(one)
    points = sweeps(seeds, plan.share, plan.points)
    swept = list(shown(points, "sweeps", len(DATA) * len(SWEEPS) * plan.points))
    chosen = choices(seeds, plan.share) if plan.choices else iter(())
    alone = list(shown(chosen, "choices", count_choices(seeds)))
    rows = [*measured(trials), *choice_rows(alone), *sweep_rows(swept), *_claims(trials, seed, plan.limit)]
    return Result(rows, _describe(plan), lambda: _pictures(trials, swept, seed), notes=NOTES)


NOTES = (
    "Systems: -d decoupled queues, -sd time-synced groups too, -sdo ordered too, ecoserve with KVC"
    " pipelining; -oracle: true lengths; ecoserve-paper: the text to the letter.",
    "orca, srtf and fastserve reserve the longest sequence (3200 tokens) per request, at most 8 requests;"
    " fastserve has 5 levels; fastgen and multires fill the target forward size; srtf and multires know the"
    " lengths (2.1).",
    f"Forecasts are SIMULATED, with the errors of figure 5a. SLO: {SLO_SCALE:g} x the seconds of a request on"
    f" the idle engine. Compute: tokens of an iteration over a target forward size of {TFS}, at most 1.",
    "Figures are means over the seeds; .min and .max are the least and most of them.",
    "sched.share_pct: this machine's time for decisions over the simulated time of iterations.",
)


def _describe(plan: EcoServePlan) -> str:
    parts = (
        f"{d.name} {', '.join(f'{r:g}' for r in _rates(plan, d, ECOSERVE))} req/s for {d.seconds * plan.share:g} s"
        for d in DATA
    )
    return (
        f"{SIMULATED}: OPT-13B on an A100, 12 GB of KV, Poisson, Table 2's lengths, seeds: {plan.seeds};"
        f" {'; '.join(parts)}"
    )


def _claims(trials: Trials, seed: int, limit: float) -> Iterator[Row]:
    """Yield our figures beside the paper's."""
    yield from errors(seed)
    yield from rates(trials, limit)
    yield from averages(trials)
    yield from floors(trials, seed)
    yield from bounds(trials, seed)


# ---- running


def _compile(seed: int) -> None:
    """Run every system once on a small load, so that decision times do not include compilation."""
    load = workload(DATA[0], 5.0, 4.0, seed)
    for name in (*ABLATION, PAPER_TEXT, *BASELINES):
        trial(name, DATA[0], 5.0, load, seed)


def _rates(plan: EcoServePlan, data: Data, name: str, steps: float = 1.0) -> tuple[float, ...]:
    """Return the rates of a system: those of the sweep and, with the profile's iterations, of Table 2."""
    if plan.rates is not None:
        chosen = plan.rates[data.name]
    else:
        swept = data.low if name in MAX_ALLOCATION else data.rates
        chosen = swept if steps != 1 else tuple(sorted({*swept, data.rate}))
    return tuple(rate / steps for rate in chosen)


def _planned(plan: EcoServePlan, seeds: Sequence[int]) -> Iterator[tuple[TableCase, Data, float, int, str]]:
    cases = ((case, one.systems) for one in plan.experiments for case in one.settings)
    for (case, systems), data in product(cases, DATA):
        for name in systems:
            spread = case == TableCase() and name in _SPREAD
            for rate, seed in product(_rates(plan, data, name, case.steps), seeds if spread else seeds[:1]):
                yield case, data, rate, seed, name


def _trials(plan: EcoServePlan, seeds: Sequence[int]) -> Iterator[tuple[TableCase, PaperTrial]]:
    """Run every system at every rate; rates far beyond saturation run for a third of the time."""
    for case, data, rate, seed, name in _planned(plan, seeds):
        share = plan.share * case.span * case.steps / (3 if is_beyond(data, rate * case.steps) else 1)
        load = workload(data, rate, data.seconds * share, seed, case.steps)
        yield case, trial(name, data, rate, load, seed, copies=case.copies, steps=case.steps)


# ---- plots


def _pictures(trials: Trials, swept: Sequence[Swept], seed: int) -> dict[str, bytes]:
    """Return {name: PNG} of the experiments that were run."""
    found = {"rates": _rates_plot(trials[TableCase()], seed)} if TableCase() in trials else {}
    return found | ({"sweeps": _sweep_plot(swept)} if swept else {})


_PANELS = (
    ("normalized", "s/token", "log"),
    ("jct", "JCT, s", "log"),
    ("ssr", "SSR", "linear"),
    ("kv", "KV in use", "linear"),
)


def _rates_plot(trials: Sequence[PaperTrial], seed: int) -> bytes:
    """Return a PNG: normalized latency, JCT, SSR and KV in use against the rate, a column per data set."""
    figure, panels = sheet(len(_PANELS), len(DATA), 11, 11)
    for number, axes in enumerate(panels):
        (field, label, scale), data = _PANELS[number // len(DATA)], DATA[number % len(DATA)]
        _rate_lines(axes, [t for t in trials if t.seed == seed], data, field)
        first, bottom = number % len(DATA) == 0, number >= len(panels) - len(DATA)
        axes.set(yscale=scale, ylabel=label if first else "", xlabel="req/s" if bottom else "")
        axes.set_title(data.name if number < len(DATA) else "", fontsize=10)
    line_legend(figure, 5)
    figure.suptitle(f"{SIMULATED}: OPT-13B on an A100, 12 GB of KV", fontsize=10)
    return png(figure)


def _rate_lines(axes: Axes, trials: Sequence[PaperTrial], data: Data, field: str) -> None:
    """Draw one line per system."""
    systems = [s for s in (*ABLATION, PAPER_TEXT, ORACLE, *BASELINES) if any(t.system == s for t in trials)]
    for system, shade in colours(systems).items():
        mine = [t for t in trials if (t.system, t.data) == (system, data.name) and t.rate <= max(data.rates)]
        mine.sort(key=lambda t: t.rate)
        axes.plot(
            [t.rate for t in mine],
            [getattr(t, field) for t in mine],
            "-" if system.startswith(ECOSERVE) else "--",
            marker=".",
            color=shade,
            label=system,
        )


def _sweep_plot(swept: Sequence[Swept]) -> bytes:
    """Return a PNG: JCT against padding, reserve and buffer, over the least of each data set."""
    figure, panels = sheet(1, len(SWEEPS), 10, 3.4)
    for axes, name in zip(panels, SWEEPS, strict=True):
        for number, data in enumerate(DATA):
            mine = [s for s in swept if s.name == name and s.trials[0].data == data.name]
            least = min(s.jct for s in mine)
            values = [100 * s.value for s in mine]
            axes.plot(values, [s.jct / least for s in mine], ".-", color=colour(number), label=data.name)
        axes.set(xlabel=f"{name}, %", ylabel="JCT over the least")
    line_legend(figure, len(DATA))
    figure.suptitle(f"{SIMULATED}: ecoserve", fontsize=10)
    return png(figure)
