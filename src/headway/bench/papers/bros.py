"""`headway bench papers bros`: the evaluation of BROS (arXiv 2504.09590, section 7), SIMULATED.

Real-time requests with the mean lengths of Table 2 (TTFT 0.4 s, TPOT 0.2 s) beside a closed loop of
best-effort batches (512-1024 in, 32-128 out): a batch comes when the one before has ended (7.1). Engines are
OPT-13B on an A100, and the same with iterations 1.6 times as long. Claims are averages over the rates, as in
the paper. Every system is a packer that sees the whole queue; those that copy KV have the same host memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import Progress

from headway.bench.output.plots import line_legend, png, sheet
from headway.bench.output.results import SIMULATED, About, Report, Row, deliver, row_grid
from headway.bench.papers import closed_loop
from headway.bench.papers.observers import TokenDeadlines, inside
from headway.forecast.latency import profiles
from headway.recipes.registry import find
from headway.sim.instance import InstanceSpec
from headway.sim.outcome import Outcome
from headway.sim.workload.lengths import draw
from headway.sim.workload.traffic import Workload, concat, poisson, single
from headway.types import Batch, Floats, Instance, Ints, Slo

PROFILE = "opt-13b-a100"
SLO = Slo(ttft=0.4, tpot=0.2)
RUNNING, SLOTS, BUDGET, LONGEST = 256, 1024, 2048, 2048
BATCH = 256  # best-effort requests of a batch; the paper does not say
_MOST = 8.0  # best-effort requests per second that no system reaches
HOST_TOKENS = 200_000  # 164 GB: 819,200 bytes a token
TABLE_2 = {"sharegpt": (222.76, 234.51), "lmsys": (90.50, 237.04)}  # mean prompt and answer


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a data set and the rates that a claim averages over.

    slower: factor of the profile's iteration times; hybrid: best-effort batches beside.
    """

    profile: str
    slower: float
    lengths: str
    rates: tuple[float, ...]
    hybrid: bool = True

    @property
    def setting(self) -> str:
        what = "" if self.hybrid else ", real-time only"
        return f"{self.profile} x{self.slower:g}, {self.lengths}{what}"


FULL = (
    Case(PROFILE, 1.0, "sharegpt", (2.0, 3.0, 4.0, 5.0, 6.0)),
    Case(PROFILE, 1.0, "lmsys", (3.0, 4.0, 5.0, 6.0, 7.0)),
    Case(PROFILE, 1.6, "sharegpt", (2.0, 3.0, 4.0)),
    Case(PROFILE, 1.0, "sharegpt", (4.0, 5.0, 6.0, 7.0), hybrid=False),
)
QUICK = (
    Case(PROFILE, 1.0, "sharegpt", (3.0,)),
    Case(PROFILE, 1.6, "sharegpt", (3.0,)),
)
SYSTEMS = (
    "bros", "bros-paper", "bros-no-parts", "bros-recompute", "bros-plain-blocks", "bros-no-replacement",
    "bros-no-sizing", "bros-lost-last", "vllm-v0", "vllm-v0-swap", "rr", "vllm-priority", "slack",
)  # fmt: skip
QUICK_SYSTEMS = ("bros", "bros-paper", "bros-no-parts", "bros-recompute", "vllm-v0", "rr")
_UNITS = {
    "rt.normalized_latency": "s/token", "rt.ttft_attainment": "%", "rt.tpot_attainment": "%",
    "rt.token_attainment": "%", "rt.token_due_attainment": "%", "rt.req_per_s": "req/s",
    "be.req_per_s": "req/s",
    "sched.share_pct": "%",
}  # fmt: skip
_OVERHEAD = 9.0  # scheduling share of an iteration in the paper, %
# The paper's claims on BROS: figure, other system, comparison, {(data set, hybrid): the paper's}.
Papers = Mapping[tuple[str, bool], float]
CLAIMS: tuple[tuple[str, str, str, Papers], ...] = (
    ("rt.normalized_latency", "vllm-v0", "change",
     {("sharegpt", True): -74.20, ("lmsys", True): -69.61, ("sharegpt", False): -29.36}),
    ("rt.ttft_attainment", "vllm-v0", "times", {("sharegpt", True): 36.38, ("lmsys", True): 21.42}),
    ("rt.tpot_attainment", "vllm-v0", "times", {("sharegpt", True): 1.73, ("lmsys", True): 2.62}),
    ("be.req_per_s", "vllm-v0", "change", {("sharegpt", True): -11.29, ("lmsys", True): -17.67}),
    ("rt.req_per_s", "vllm-v0", "times", {("sharegpt", False): 1.08}),
    ("rt.normalized_latency", "rr", "change", {("sharegpt", True): -54.31, ("lmsys", True): -25.77}),
    ("rt.ttft_attainment", "rr", "times", {("sharegpt", True): 11.75, ("lmsys", True): 14.23}),
    ("rt.tpot_attainment", "rr", "times", {("sharegpt", True): 1.47, ("lmsys", True): 2.28}),
    ("be.req_per_s", "rr", "change", {("sharegpt", True): -8.80, ("lmsys", True): -15.18}),
    ("rt.ttft_attainment", "bros-recompute", "times", {("sharegpt", True): 1.23}),
    ("rt.tpot_attainment", "bros-recompute", "times", {("sharegpt", True): 1.63}),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one rate.

    figures: by the names of `_UNITS`; None = no request finished
    """

    system: str
    case: Case
    rate: float
    seed: int
    figures: dict[str, float | None]

    @property
    def setting(self) -> str:
        return f"{self.case.setting}, {self.rate:g} req/s, seed {self.seed}"


def main(*, quick: bool, as_json: bool, seed: int, out: Path | None) -> None:
    """Simulate every system at every rate; `quick`: few systems, one rate, 30 seconds, one seed."""
    began = time.perf_counter()
    duration, seeds = (30.0, (seed,)) if quick else (600.0, (seed, seed + 1, seed + 2))
    points = sweep(
        QUICK if quick else FULL, duration, seeds, bar=not as_json,
        systems=QUICK_SYSTEMS if quick else SYSTEMS,
    )  # fmt: skip
    workload = (
        f"{SIMULATED}: {PROFILE}, batch limit {RUNNING}, {BUDGET} tokens an iteration, {duration:g} s; rate "
        f"= real-time requests/s, Poisson (TTFT 0.4 s, TPOT 0.2 s), beside a closed loop of {BATCH} "
        "best-effort ones (512-1024 in, 32-128 out); throughput counts requests that end within that time."
    )
    figures = [*rows(points), *claims(points)]
    report = Report(
        "papers bros", "sim", f"BROS, its ablations and its baselines ({SIMULATED})", figures,
        time.perf_counter() - began, About(workload, seed), row_grid(figures),
        notes=("Claims are averages over the rates and seeds; .least and .most are those of one seed.",),
    )  # fmt: skip
    deliver(report, as_json=as_json, out=out, pictures=lambda: plots(points))


def sweep(
    cases: Sequence[Case], duration: float, seeds: Sequence[int], *, bar: bool, systems: Sequence[str],
) -> list[Point]:  # fmt: skip
    """Run `systems` in every case, at every rate, with every seed."""
    points = []
    jobs = [(case, rate, seed) for case in cases for rate in case.rates for seed in seeds]
    with Progress(disable=not bar) as progress:
        task = progress.add_task("simulating", total=len(systems) * len(jobs))
        for case, rate, seed in jobs:
            workload = traffic(case.lengths, rate, duration, seed, BATCH if case.hybrid else 0)
            for system in systems:
                points.append(measure(system, case, workload, rate, duration, seed))
                progress.advance(task)
    return points


def traffic(lengths: str, rate: float, duration: float, seed: int, batch: int) -> Workload:
    """Return real-time requests at `rate`, then the best-effort ones of batches, without too long ones."""
    rng = np.random.default_rng(seed)
    at = poisson(rate, duration, rng)
    prompt, output = table_2(lengths, at.size, rng)
    real_time = single(at, prompt, output, slo=SLO, tier="rt")
    real_time = real_time.take(np.flatnonzero(prompt + output <= LONGEST))
    if not batch:
        return real_time
    size = batch * (int(_MOST * duration) // batch + 2)
    prompt, output = draw("bros-best-effort", size, rng)
    return concat(real_time, single(np.zeros(size), prompt, output, priority=10, tier="be"))


def table_2(lengths: str, size: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Return lengths of a data set, scaled so that their means are those of Table 2."""
    plain = draw(lengths, 100_000, np.random.default_rng(0))
    scaled = [
        np.maximum(np.rint(drawn * mean / all_.mean()), 1).astype(np.int64)
        for drawn, all_, mean in zip(draw(lengths, size, rng), plain, TABLE_2[lengths], strict=True)
    ]
    return scaled[0], scaled[1]


def measure(system: str, case: Case, workload: Workload, rate: float, duration: float, seed: int) -> Point:
    """Run one system on the workload, for at most three times the seconds of arrivals."""
    clock, tokens = list[float](), TokenDeadlines(workload)
    outcome = closed_loop.run(
        inside(find(system), clock), instance(case), workload,
        open=int(np.count_nonzero(np.isfinite(workload.ttft))), batch=BATCH, stop=duration,
        until=3 * duration, observer=tokens,
    )  # fmt: skip
    return Point(system, case, rate, seed, judge(workload, outcome, tokens, duration, clock[1:]))


class _Slower(profiles.FixedLatency):
    """A latency profile whose iterations take `factor` times as long. Not for compiled loops."""

    def __init__(self, profile: profiles.LatencyProfile, factor: float) -> None:
        super().__init__(profile.law)
        self._factor = factor

    def seconds(self, batch: Batch) -> float:
        return self._factor * super().seconds(batch)

    def prefill_seconds(self, tokens: Floats) -> Floats:
        return self._factor * super().prefill_seconds(tokens)


def instance(case: Case) -> InstanceSpec:
    """Return the case's engine, with host memory for the systems that copy KV."""
    profile = profiles.load(case.profile)
    assert profile.kv_tokens is not None
    shape = Instance(
        "e0", "default", RUNNING, profile.kv_tokens // profile.block_size, profile.block_size, LONGEST
    )
    latency = _Slower(profile, case.slower)
    return InstanceSpec(shape, latency, SLOTS, BUDGET, profile.copy_seconds(), host_tokens=HOST_TOKENS)


def judge(
    workload: Workload, outcome: Outcome, tokens: TokenDeadlines, duration: float, deciding: Sequence[float]
) -> dict[str, float | None]:
    """Return the figures of one run.

    deciding: wall seconds of each decision

    token_attainment is the share of the tokens after the first (also those never generated) that came at most
    tpot after the previous one; token_due_attainment that of the k-th tokens by arrival + ttft + k x tpot.
    """
    real_time = np.isfinite(workload.ttft)
    ended = ~np.isnan(outcome.end)
    rest_tokens = workload.output - 1
    tpot = (outcome.end - outcome.first) / np.maximum(rest_tokens, 1)
    latency = ((outcome.end - workload.arrival) / workload.output)[real_time & ended]
    first_met = outcome.first - workload.arrival <= workload.ttft
    tpot_met = (tpot <= workload.tpot) & ended
    within = ended & (outcome.end <= duration)
    later = max(int(rest_tokens[real_time].sum()), 1)
    share = 100 * float(np.median(deciding)) * outcome.iterations / outcome.busy
    return {
        "rt.normalized_latency": float(latency.mean()) if latency.size else None,
        "rt.ttft_attainment": 100 * float(first_met[real_time].mean()),
        "rt.tpot_attainment": 100 * float(tpot_met[real_time].mean()),
        "rt.token_attainment": 100 * int(tokens.steady[real_time].sum()) / later,
        "rt.token_due_attainment": 100 * int(tokens.ahead[real_time].sum()) / later,
        "rt.req_per_s": int(np.count_nonzero(real_time & within)) / duration,
        "be.req_per_s": int(np.count_nonzero(~real_time & within)) / duration,
        "sched.share_pct": share,
    }


# ---- rows


def rows(points: Sequence[Point]) -> list[Row]:
    """Return a row per system, setting and figure."""
    return [
        Row(name, point.system, point.setting, value, _UNITS[name], _paper(point.system, name))
        for point in points
        for name, value in point.figures.items()
    ]


def _paper(system: str, name: str) -> float | None:
    return _OVERHEAD if (system, name) == ("bros", "sched.share_pct") else None


def claims(points: Sequence[Point]) -> list[Row]:
    """Return the paper's claims beside ours: BROS against another system, averages over rates, by case.

    change: the mean over the rates of the changes in %; times: the ratio of the means over the rates. Ours is
    the mean over the seeds; rows with `.least` and `.most` have the extremes where there are several.
    """
    found = []
    for case in dict.fromkeys(point.case for point in points):
        for name, other, how, papers in CLAIMS:
            paper = papers.get((case.lengths, case.hybrid))
            mine = [point for point in points if point.case == case]
            values = [
                value
                for seed in dict.fromkeys(point.seed for point in mine)
                if (value := _compared([p for p in mine if p.seed == seed], name, other, how)) is not None
            ]
            if paper is None or not values:
                continue
            unit, system = "%" if how == "change" else "x", f"bros vs {other}"
            of = {"": float(np.mean(values))}
            if len(values) > 1:
                of |= {".least": min(values), ".most": max(values)}
            found += [
                Row(f"{name}.{how}{end}", system, case.setting, value, unit, None if end else paper)
                for end, value in of.items()
            ]
    return found


def _compared(points: Sequence[Point], name: str, other: str, how: str) -> float | None:
    """Return BROS's figure against another system's over the rates; None where one has none, or only 0."""
    ours, theirs = (
        {p.rate: p.figures[name] for p in points if p.system == system} for system in ("bros", other)
    )
    pairs = [(mine, theirs[rate]) for rate, mine in ours.items() if theirs.get(rate) is not None]
    both = np.array([pair for pair in pairs if pair[0] is not None], float).reshape(-1, 2)
    if how == "times":
        return float(both[:, 0].sum() / both[:, 1].sum()) if both[:, 1].any() else None
    both = both[both[:, 1] > 0]
    return float(np.mean(100 * (both[:, 0] / both[:, 1] - 1))) if both.size else None


_STYLE: dict[str, tuple[str, str]] = {
    "bros": ("#D55E00", "-"), "bros-paper": ("#D55E00", "-."), "bros-no-parts": ("#009E73", "--"),
    "bros-recompute": ("#009E73", ":"), "bros-plain-blocks": ("#D55E00", ":"),
    "bros-no-replacement": ("#E69F00", "--"), "bros-no-sizing": ("#E69F00", ":"),
    "bros-lost-last": ("#D55E00", "--"), "vllm-v0": ("#0072B2", "-"), "vllm-v0-swap": ("#0072B2", ":"),
    "rr": ("#999999", "-"), "vllm-priority": ("#56B4E9", "--"), "slack": ("#009E73", "-"),
}  # fmt: skip
_DRAWN = ("rt.normalized_latency", "rt.ttft_attainment", "rt.tpot_attainment", "be.req_per_s")


def plots(points: Sequence[Point]) -> dict[str, bytes]:
    """Return {name: PNG} per case: four figures against the rate, of the first seed."""
    return {_name(case): _plot(points, case) for case in dict.fromkeys(point.case for point in points)}


def _name(case: Case) -> str:
    slower = "" if case.slower == 1 else f"-x{case.slower:g}"
    return f"bros-{case.lengths}{slower}" + ("" if case.hybrid else "-real-time")


def _plot(points: Sequence[Point], case: Case) -> bytes:
    figure, panels = sheet(2, 2, 11, 7)
    figure.suptitle(f"{SIMULATED}: {case.setting}", fontsize=10)
    seed = points[0].seed
    for axes, name in zip(panels, _DRAWN, strict=True):
        for system, (colour, line) in _STYLE.items():
            mine = [p for p in points if (p.system, p.case, p.seed) == (system, case, seed)]
            values: Floats = np.array([p.figures[name] for p in mine], float)
            axes.plot([p.rate for p in mine], values, line, color=colour, marker="o", ms=3, label=system)
        axes.set(xlabel="real-time requests/s", ylabel=_UNITS[name], title=name)
        if name == "rt.normalized_latency":
            axes.set_yscale("log")
    line_legend(figure, 6)
    return png(figure)
