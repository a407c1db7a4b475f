"""The rows of `headway bench papers ecoserve`: our figures beside the paper's claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from benchmarks.papers.ecoserve_setup import DATA, PAPER_TEXT, Data, alone, bound, instance, workload
from benchmarks.papers.quoted import quoted
from benchmarks.papers.trial import PaperTrial, Provisioned, forecasts
from headway.whatif.output.results import Row

ECOSERVE, BASE, ORACLE = "ecoserve", "vllm-v0-swap", "ecoserve-oracle"
ABLATION = ("ecoserve-d", "ecoserve-sd", "ecoserve-sdo", ECOSERVE)
LIMIT = 0.1  # seconds per output token at which rates are compared: four times those of an idle engine
_DATA = {data.name: data for data in DATA}
# Section 4, for OPT-13B: the least and the most over the three data sets.
_rate = partial(quoted, paper="ecoserve", section="4", line=263)
RATES = {
    BASE: (_rate(1.28, printed="1.28-2.33×"), _rate(2.33, printed="1.28-2.33×")),
    "fastgen": (_rate(1.20, printed="1.20-2.33×"), _rate(2.33, printed="1.20-2.33×")),
    "orca": (_rate(3.5, printed="3.5-25×"), _rate(25.0, printed="3.5-25×")),
}
_ssr = partial(quoted, paper="ecoserve", section="4", line=269)
SSR = {BASE: _ssr(83.0, printed="83%"), "fastgen": _ssr(42.0, printed="42%"), "orca": _ssr(93.0, printed="93%")}
_ORACLE_MORE = quoted(8.0, "ecoserve", "4", 267, "8%")  # an oracle's rate over EcoServe's, for OPT-13B
# Section 4, over vLLM: means over data sets and models, of the systems of `ABLATION`.
_average = partial(quoted, paper="ecoserve", section="4", line=271)
AVERAGES = {
    "jct.mean": tuple(_average(-one, printed=f"{one}%") for one in (28, 47, 54, 83)),
    "tbt.mean": tuple(_average(-one, printed=f"{one}%") for one in (27, 44, 49, 70)),
    "ssr": tuple(_average(one, printed=f"{one}%") for one in (26, 42, 63, 80)),
    "throughput.req_per_s": (
        _average(78, printed="78%"),
        *(_average(one, printed=f"{one / 100:g}×", unit=100) for one in (104, 121, 183)),
    ),
}
_FIELDS: dict[str, Callable[[PaperTrial], float]] = {
    "jct.mean": lambda t: t.jct,
    "tbt.mean": lambda t: t.tbt,
    "ssr": lambda t: t.ssr,
    "throughput.req_per_s": lambda t: t.throughput,
}


class TableCase(NamedTuple):
    """The conditions of compared trials: factors of the copy times to the host, of the arrivals' duration, and of the
    iterations' times.

    With longer iterations all rates are lower, and arrivals last longer, by the same factor.
    """

    copies: float = 1.0
    span: float = 1.0
    steps: float = 1.0

    def __str__(self) -> str:
        span = f", arrivals x{self.span:g}" if self.span != 1 else ""
        return f"copies x{self.copies:g}{span}" + (f", iterations x{self.steps:g}" if self.steps != 1 else "")


Trials = dict[TableCase, list[PaperTrial]]


def figures(t: PaperTrial) -> Iterator[tuple[str, float, str]]:
    """Yield id, value and unit of every figure of a trial."""
    yield "jct.mean", t.jct, "s"
    yield "jct.p99", t.jct_p99, "s"
    yield "normalized_latency", t.normalized, "s/token"
    yield "tbt.mean", t.tbt, "s"
    yield "ssr", 100 * t.ssr, "%"
    yield "throughput.req_per_s", t.throughput, "req/s"
    yield "kv.utilization", 100 * t.kv, "%"
    yield "compute.utilization", 100 * t.compute, "%"
    yield "kv.alloc_failures_pct", 100 * t.failures, "%"
    yield "sched.share_pct", 100 * t.thinking, "%"
    if "kept" in t.counts:
        yield "sched.kept_pct", 100 * t.counts["kept"] / t.iterations, "%"


def measured(trials: Trials) -> list[Row]:
    """Return every figure of every system, data set and rate: the mean over the seeds."""
    rows = []
    for case, mine in trials.items():
        groups: dict[tuple[str, str, float], list[PaperTrial]] = {}
        for t in mine:
            groups.setdefault((t.system, t.data, t.rate), []).append(t)
        for (system, data, rate), group in groups.items():
            setting = f"{data}, {rate:g} req/s, {case}"
            for each in zip(*(figures(t) for t in group), strict=True):
                id, _, unit = each[0]
                rows.append(Row(id, system, setting, float(np.mean([value for _, value, _ in each])), unit))
    return rows


# ---- rates at equal latency


def sustained(rates: Sequence[float], latency: Sequence[float], limit: float) -> float | None:
    """Return the rate up to which the latency stays within the limit, interpolated between two rates.

    rates: ascending
    None when the lowest rate exceeds the limit; the highest rate when none does.
    """
    if not rates or latency[0] > limit:
        return None
    for i in range(1, len(rates)):
        if latency[i] > limit:
            share = (limit - latency[i - 1]) / (latency[i] - latency[i - 1])
            return float(rates[i - 1] + share * (rates[i] - rates[i - 1]))
    return float(rates[-1])


def sustained_by(trials: Sequence[PaperTrial], data: str, system: str, seed: int, limit: float) -> float | None:
    """Return the rate that a system sustains on a data set with one seed."""
    mine = sorted((t for t in trials if _is_swept(t, data, system, seed)), key=lambda t: t.rate)
    return sustained([t.rate for t in mine], [t.normalized for t in mine], limit)


def is_beyond(data: Data, rate: float) -> bool:
    """Return True if a rate is so far beyond saturation that only a short run ends."""
    return rate > 2 * max(data.rates)


def rates(trials: Trials, limit: float = LIMIT) -> Iterator[Row]:
    """Yield the sustained rates, their ratios to every other system's, and the least and the largest ratio.

    limit: seconds per output token.
    """
    for case, mine in trials.items():
        seeds = sorted({t.seed for t in mine})
        for system in dict.fromkeys(t.system for t in mine):
            for data in _DATA:
                found = [sustained_by(mine, data, system, seed, limit) for seed in seeds]
                yield _mean("rate_sustained", system, f"{data}, {limit:g} s/token, {case}", found, "req/s")
        for other in RATES:
            yield from _ratios(mine, case, other, seeds, limit)
        yield from _gaps(mine, case, seeds, limit)


def _gaps(mine: Sequence[PaperTrial], case: TableCase, seeds: Sequence[int], limit: float) -> Iterator[Row]:
    """Yield the oracle's gain in sustained rate: by data set, where it is known, and its mean."""
    means, name = [], f"{ORACLE} over {ECOSERVE}"
    for data in _DATA:
        found = [_over(mine, data, ORACLE, ECOSERVE, seed, limit) for seed in seeds]
        known = [100 * (gap - 1) for gap in found if gap is not None]
        if known:
            means.append(float(np.mean(known)))
            yield Row("rate_sustained.more", name, f"{data}, {limit:g} s/token, {case}", means[-1], "%")
    if means:
        yield Row(
            "rate_sustained.more",
            name,
            f"mean of data sets, {case}",
            float(np.mean(means)),
            "%",
            _paper(case, _ORACLE_MORE),
        )


def _ratios(
    mine: Sequence[PaperTrial], case: TableCase, other: str, seeds: Sequence[int], limit: float
) -> Iterator[Row]:
    times, name = [], f"{ECOSERVE} over {other}"
    for data in _DATA:
        each = [_over(mine, data, ECOSERVE, other, seed, limit) for seed in seeds]
        known = [one for one in each if one is not None]
        if not known:
            continue
        times.append(float(np.mean(known)))
        setting = f"{data}, {limit:g} s/token, {case}"
        yield Row("rate_sustained.times", name, setting, times[-1], "x")
        if len(known) > 1:
            yield Row("rate_sustained.times.min", name, setting, min(known), "x")
            yield Row("rate_sustained.times.max", name, setting, max(known), "x")
    if times:
        least, most = RATES[other]
        yield Row("rate_sustained.times", name, f"least of data sets, {case}", min(times), "x", _paper(case, least))
        yield Row("rate_sustained.times", name, f"most of data sets, {case}", max(times), "x", _paper(case, most))


def _over(mine: Sequence[PaperTrial], data: str, ours: str, theirs: str, seed: int, limit: float) -> float | None:
    """Return the ratio of two sustained rates; None if one is outside the rates that were run."""
    a, b = (sustained_by(mine, data, system, seed, limit) for system in (ours, theirs))
    if a is None or b is None:
        return None
    for name, rate in ((ours, a), (theirs, b)):
        if rate == max((t.rate for t in mine if _is_swept(t, data, name, seed)), default=rate):
            return None
    return a / b


def _is_swept(t: PaperTrial, data: str, system: str, seed: int) -> bool:
    same = (t.data, t.system, t.seed) == (data, system, seed)
    return same and not is_beyond(_DATA[data], t.rate)


def _paper(case: TableCase, value: float) -> float | None:
    """Return the paper's figure where only the iterations may differ, else None: it states no cost of copies."""
    return value if case._replace(steps=1.0) == TableCase() else None


def _mean(id: str, system: str, setting: str, found: Sequence[float | None], unit: str) -> Row:
    known = [one for one in found if one is not None]
    whole = known and len(known) == len(found)
    return Row(id, system, setting, float(np.mean(known)) if whole else None, unit)


# ---- averages, SLOs and throughput


def averages(trials: Trials) -> Iterator[Row]:
    """Yield the change of vLLM's figures by each step of the ablation, beside the means of section 4."""
    for case, mine in trials.items():
        seeds = sorted({t.seed for t in mine})
        for at in ("Table 2's rates", "all rates"):
            setting = f"mean of data sets, {at}, {case}"
            chosen = [t for t in mine if at == "all rates" or t.rate == _DATA[t.data].rate]
            for id, paper in AVERAGES.items():
                papers = dict(zip(ABLATION, paper, strict=True))
                for system in (*ABLATION, PAPER_TEXT):
                    each = [_change(chosen, id, system, BASE, seed) for seed in seeds]
                    yield from _spread(f"{id}.change", system, setting, each, papers.get(system), case)
            for ours, other in product((ECOSERVE, ORACLE), SSR):
                each = [_change(chosen, "ssr", ours, other, seed) for seed in seeds]
                figure = SSR[other] if ours == ECOSERVE else None
                yield from _spread("ssr.change", f"{ours} over {other}", setting, each, figure, case)


def _spread(
    id: str, system: str, setting: str, each: Sequence[float | None], paper: float | None, case: TableCase
) -> Iterator[Row]:
    """Yield the mean over seeds and, for several seeds, the least and the most."""
    known = [one for one in each if one is not None]
    if not known:
        return
    stated = None if paper is None else _paper(case, paper)
    yield Row(id, system, setting, float(np.mean(known)), "%", stated)
    if len(known) > 1:
        yield Row(f"{id}.min", system, setting, min(known), "%")
        yield Row(f"{id}.max", system, setting, max(known), "%")


def _change(mine: Sequence[PaperTrial], id: str, ours: str, theirs: str, seed: int) -> float | None:
    """Return the change of a figure in %; None unless both systems ran on every data set.

    It is the mean over the data sets of the change of the sum over the rates. For SSRs, whose ratios are
    meaningless near 0, the sum is taken over the data sets, too.
    """
    value, sums = _FIELDS[id], []
    for data in _DATA:
        of = {
            name: {t.rate: value(t) for t in mine if (t.system, t.data, t.seed) == (name, data, seed)}
            for name in (ours, theirs)
        }
        common = of[ours].keys() & of[theirs].keys()
        if not common:
            return None
        sums.append([sum(each[rate] for rate in common) / len(common) for each in of.values()])
    a, b = np.array(sums).T
    ratio = a.sum() / max(b.sum(), 1e-9) if id == "ssr" else (a / b).mean()
    return float(100 * (ratio - 1))


def floors(trials: Trials, seed: int) -> Iterator[Row]:
    """Yield JCT and time between tokens of a request alone on the engine, and their change against vLLM's.

    No schedule can be faster. jct.mean.bound is the least mean JCT of any schedule (`jct_bound`). vLLM's are means over
    all rates and seeds, as in `averages`.
    """
    for case, mine in trials.items():
        changes: dict[tuple[str, str], list[float]] = {}
        for data in DATA:
            load = workload(data, data.rates[-1], 5 * data.seconds, seed, case.steps)
            base = [t for t in mine if (t.system, t.data) == (BASE, data.name)]
            floor = {
                (f"{id}.alone", "a request alone"): one.mean()
                for id, one in zip(("jct.mean", "tbt.mean"), alone(load, instance(steps=case.steps)), strict=True)
            }
            if base:
                floor["jct.mean.bound", "any schedule"] = np.mean([t.jct_bound for t in base])
            for (id, name), least in floor.items():
                yield Row(id, name, f"{data.name}, {case}", float(least), "s")
                if base:
                    theirs = np.mean([_FIELDS[id.rpartition(".")[0]](t) for t in base])
                    changes.setdefault((id, name), []).append(float(100 * (least / theirs - 1)))
                    setting = f"{data.name}, all rates, {case}"
                    yield Row(f"{id}.change", f"{name} over {BASE}", setting, changes[id, name][-1], "%")
        for (id, name), each in changes.items():
            setting, paper = f"mean of data sets, all rates, {case}", _paper(case, AVERAGES[id.rpartition(".")[0]][-1])
            yield Row(f"{id}.change", f"{name} over {BASE}", setting, float(np.mean(each)), "%", paper)


def bounds(trials: Trials, seed: int) -> Iterator[Row]:
    """Yield the bound on requests per second of any schedule, and its gain over vLLM's best.

    The workload is long, so that its mean lengths are the data set's.
    """
    gains = []
    for data in DATA:
        load = workload(data, data.rates[-1], 5 * data.seconds, seed)
        for name, exact in (("any schedule", False), ("any schedule with exact allocation", True)):
            yield Row("throughput.bound", name, data.name, bound(load, exact=exact), "req/s")
        best = [t.throughput for t in trials.get(TableCase(), []) if (t.system, t.data) == (BASE, data.name)]
        if best:
            gain = 100 * (bound(load, exact=False) / max(best) - 1)
            gains.append(gain)
            yield Row("throughput.bound.gain", f"any schedule over {BASE}", data.name, gain, "%")
    if gains:
        yield Row(
            "throughput.bound.gain",
            f"any schedule over {BASE}",
            "mean of data sets",
            float(np.mean(gains)),
            "%",
            AVERAGES["throughput.req_per_s"][-1],
        )


def errors(seed: int) -> Iterator[Row]:
    """Yield the simulated predictor's accuracy and its unused and missing tokens (2.3, figure 5a)."""
    for data in DATA:
        load = workload(data, data.rates[-1], 5 * data.seconds, seed)
        lengths = forecasts(ECOSERVE, data, load, seed)
        assert isinstance(lengths, Provisioned)
        accuracy, over, under = lengths.shares
        yield Row("forecast.accuracy_pct", ECOSERVE, data.name, 100 * accuracy, "%", 100 * data.accuracy)
        yield Row("forecast.over_pct", ECOSERVE, data.name, 100 * over, "%", 100 * data.over)
        yield Row("forecast.under_pct", ECOSERVE, data.name, 100 * under, "%", 100 * data.under)
