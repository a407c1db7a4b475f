"""`headway bench papers bros`: the evaluation of BROS (arXiv 2504.09590, section 6), SIMULATED.

OPT-13B on an A100: real-time requests with the lengths of ShareGPT or LMSYS (TTFT 0.4 s, TPOT 0.2 s) beside
best-effort requests (512-1024 in, 32-128 out), at rates beyond the engine's capacity. Every system is a
packer that sees the whole queue, as in the paper; those that copy KV have the same host memory and bandwidth.
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
from headway.bench.papers.observers import TokenDeadlines, inside
from headway.forecast.latency import profiles
from headway.recipes.registry import find
from headway.sim.forecasts import Oracle
from headway.sim.instance import InstanceSpec
from headway.sim.outcome import Outcome
from headway.sim.run import Simulation
from headway.sim.workload.traffic import TrafficClass, Workload, make, poisson
from headway.types import Floats, Instance, Slo

PROFILE = "opt-13b-a100"
SLO = Slo(ttft=0.4, tpot=0.2)
BEST_EFFORT_SHARE = 0.5  # best-effort requests per real-time one
RUNNING, SLOTS, BUDGET, LONGEST = 256, 1024, 2048, 2048
HOST_TOKENS = 200_000  # 164 GB: 819,200 bytes a token
RATES: Mapping[str, tuple[float, ...]] = {
    "sharegpt": (3.0, 4.0, 4.25, 5.0, 6.0),
    "lmsys": (6.0, 7.0, 8.0, 10.0, 13.0),
}
QUICK: Mapping[str, tuple[float, ...]] = {"sharegpt": (5.0, 6.0)}
SYSTEMS = (
    "bros", "bros-plain-blocks", "bros-no-replacement", "bros-no-sizing", "bros-lost-last", "vllm-v0",
    "vllm-v0-swap", "rr", "vllm", "vllm-priority", "priority", "edf", "slack",
)  # fmt: skip
_UNITS = {
    "rt.normalized_latency": "s/token", "rt.ttft_attainment": "%", "rt.tpot_attainment": "%",
    "rt.token_attainment": "%", "rt.token_due_attainment": "%", "be.req_per_s": "req/s",
    "sched.share_pct": "%",
}  # fmt: skip
_OVERHEAD = 9.0  # scheduling share of an iteration in the paper, %
# The paper's claims on BROS against another system: figure, other system, comparison, the paper's best.
# None: not in the paper; tokens judged one by one, beside the mean that the paper reports.
_LATENCY = -74.2
CLAIMS: tuple[tuple[str, str, str, float | None], ...] = (
    ("rt.normalized_latency", "vllm-v0", "change", _LATENCY),
    ("rt.ttft_attainment", "vllm-v0", "times", 36.38),
    ("rt.tpot_attainment", "vllm-v0", "times", 1.73),
    ("be.req_per_s", "vllm-v0", "change", -11.3),
    ("rt.ttft_attainment", "bros-plain-blocks", "times", 1.23),
    ("rt.tpot_attainment", "bros-plain-blocks", "times", 1.63),
    ("rt.token_attainment", "vllm-v0", "times", None),
    ("rt.token_due_attainment", "vllm-v0", "times", None),
    ("rt.token_attainment", "bros-plain-blocks", "times", None),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one rate.

    figures: by the names of `_UNITS`; None = no request finished
    """

    system: str
    lengths: str
    rate: float
    figures: dict[str, float | None]

    @property
    def setting(self) -> str:
        return f"{PROFILE}, {self.lengths}, {self.rate:g} req/s"


def main(*, quick: bool, as_json: bool, seed: int, out: Path | None) -> None:
    """Simulate every system at every rate; `quick`: ShareGPT only, two rates, 3 minutes of arrivals."""
    began = time.perf_counter()
    duration = 180.0 if quick else 600.0
    points = sweep(QUICK if quick else RATES, duration, seed, bar=not as_json)
    workload = (
        f"{SIMULATED}: {PROFILE}, batch limit {RUNNING}, {BUDGET} tokens an iteration, {duration:g} s of "
        "Poisson arrivals; rate = real-time requests/s (TTFT 0.4 s, TPOT 0.2 s), beside half as many "
        "best-effort ones (512-1024 in, 32-128 out); best-effort throughput counts requests that end "
        "within that time."
    )
    figures = [*rows(points), *claims(points)]
    report = Report(
        "papers bros", "sim", f"BROS, its ablations and its baselines ({SIMULATED})", figures,
        time.perf_counter() - began, About(workload, seed), row_grid(figures),
        notes=("A row with a paper's figure has the best of all rates ('up to'): docs/papers.md.",),
    )  # fmt: skip
    deliver(report, as_json=as_json, out=out, pictures=lambda: plots(points))


def sweep(
    rates: Mapping[str, tuple[float, ...]], duration: float, seed: int, *, bar: bool,
    systems: Sequence[str] | None = None,
) -> list[Point]:  # fmt: skip
    """Run `systems` (default: all) at every rate, after one short run of each that compiles its code."""
    points, systems = [], systems or SYSTEMS
    jobs = [(lengths, rate) for lengths, some in rates.items() for rate in some]
    with Progress(disable=not bar) as progress:
        task = progress.add_task("simulating", total=len(systems) * (len(jobs) + 1))
        for system in systems:
            measure(system, "sharegpt", traffic("sharegpt", 8.0, 20.0, seed), 8.0, 20.0)
            progress.advance(task)
        for lengths, rate in jobs:
            workload = traffic(lengths, rate, duration, seed)
            for system in systems:
                points.append(measure(system, lengths, workload, rate, duration))
                progress.advance(task)
    return points


def traffic(lengths: str, rate: float, duration: float, seed: int) -> Workload:
    """Return real-time requests at `rate` and best-effort ones beside them, without too long ones."""
    rng = np.random.default_rng(seed)
    classes = (
        TrafficClass("rt", 1.0, SLO, 0, lengths),
        TrafficClass("be", BEST_EFFORT_SHARE, Slo(), 10, "bros-best-effort"),
    )
    workload = make(classes, poisson(rate * (1 + BEST_EFFORT_SHARE), duration, rng), rng)
    return workload.take(np.flatnonzero(workload.prompt + workload.output <= LONGEST))


def measure(system: str, lengths: str, workload: Workload, rate: float, duration: float) -> Point:
    """Run one system on the workload, for at most three times the seconds of arrivals."""
    clock, tokens = list[float](), TokenDeadlines(workload)
    simulation = Simulation(
        inside(find(system), clock), [instance()], workload, Oracle(workload), until=3 * duration
    )
    outcome = simulation.run(observer=tokens)
    return Point(system, lengths, rate, judge(workload, outcome, tokens, duration, clock[1:]))


def instance() -> InstanceSpec:
    """Return the paper's engine, with host memory for the systems that copy KV."""
    profile = profiles.load(PROFILE)
    assert profile.kv_tokens is not None
    shape = Instance(
        "e0", "default", RUNNING, profile.kv_tokens // profile.block_size, profile.block_size, LONGEST
    )
    return InstanceSpec(
        shape, profile.latency(), SLOTS, BUDGET, profile.copy_seconds(), host_tokens=HOST_TOKENS
    )


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
    best_effort = int(np.count_nonzero(~real_time & ended & (outcome.end <= duration)))
    later = max(int(rest_tokens[real_time].sum()), 1)
    share = 100 * float(np.median(deciding)) * outcome.iterations / outcome.busy
    return {
        "rt.normalized_latency": float(latency.mean()) if latency.size else None,
        "rt.ttft_attainment": 100 * float(first_met[real_time].mean()),
        "rt.tpot_attainment": 100 * float(tpot_met[real_time].mean()),
        "rt.token_attainment": 100 * int(tokens.steady[real_time].sum()) / later,
        "rt.token_due_attainment": 100 * int(tokens.ahead[real_time].sum()) / later,
        "be.req_per_s": best_effort / duration,
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
    """Return the paper's claims beside ours: BROS against another system, at the best rate for each claim.

    change: in %. Latency: the largest drop. Throughput: the best among the rates whose latency drops at least
        as much as in the paper, else where it drops most.
    times: the largest ratio
    """
    found = []
    for name, other, how, paper in CLAIMS:
        pairs = _pairs(points, "bros", other)
        compared = [(pair, value) for pair in pairs if (value := _compared(pair, name, how)) is not None]
        if not compared:
            continue
        best = _strongest(compared, name, how)
        unit = "%" if how == "change" else "x"
        system = f"bros vs {other}"
        found.append(Row(f"{name}.{how}", system, best[0][0].setting, best[1], unit, paper))
    return found


Pair = tuple[Point, Point]


def _strongest(compared: list[tuple[Pair, float]], name: str, how: str) -> tuple[Pair, float]:
    if name == "rt.normalized_latency":
        return min(compared, key=lambda item: item[1])
    if how == "times":
        return max(compared, key=lambda item: item[1])
    falls = [_compared(pair, "rt.normalized_latency", "change") or 0.0 for pair, _ in compared]
    enough = [item for item, fall in zip(compared, falls, strict=True) if fall <= _LATENCY]
    return max(enough, key=lambda item: item[1]) if enough else compared[int(np.argmin(falls))]


def _pairs(points: Sequence[Point], system: str, other: str) -> list[Pair]:
    """Return the points of two systems in the same settings."""
    there = {point.setting: point for point in points if point.system == other}
    mine = [point for point in points if point.system == system]
    return [(point, there[point.setting]) for point in mine if point.setting in there]


def _compared(pair: Pair, name: str, how: str) -> float | None:
    ours, theirs = pair[0].figures[name], pair[1].figures[name]
    if ours is None or not theirs:
        return None
    return 100 * (ours / theirs - 1) if how == "change" else ours / theirs


_STYLE: dict[str, tuple[str, str]] = {
    "bros": ("#D55E00", "-"), "bros-plain-blocks": ("#D55E00", ":"), "bros-no-replacement": ("#E69F00", "--"),
    "bros-no-sizing": ("#E69F00", ":"), "bros-lost-last": ("#D55E00", "--"), "vllm-v0": ("#0072B2", "-"),
    "vllm-v0-swap": ("#0072B2", ":"), "rr": ("#999999", "-"), "vllm": ("#56B4E9", "-"),
    "vllm-priority": ("#56B4E9", "--"), "priority": ("#56B4E9", ":"), "edf": ("#CC79A7", "-"),
    "slack": ("#009E73", "-"),
}  # fmt: skip
_DRAWN = ("rt.normalized_latency", "rt.ttft_attainment", "rt.tpot_attainment", "be.req_per_s")


def plots(points: Sequence[Point]) -> dict[str, bytes]:
    """Return {name: PNG} per data set: four figures against the rate."""
    return {f"bros-{name}": _plot(points, name) for name in dict.fromkeys(p.lengths for p in points)}


def _plot(points: Sequence[Point], lengths: str) -> bytes:
    figure, panels = sheet(2, 2, 11, 7)
    figure.suptitle(f"{SIMULATED}: OPT-13B on an A100, real-time {lengths} beside best effort", fontsize=10)
    for axes, name in zip(panels, _DRAWN, strict=True):
        for system, (colour, line) in _STYLE.items():
            mine = [p for p in points if (p.system, p.lengths) == (system, lengths)]
            values: Floats = np.array([p.figures[name] for p in mine], float)
            axes.plot([p.rate for p in mine], values, line, color=colour, marker="o", ms=3, label=system)
        axes.set(xlabel="real-time requests/s", ylabel=_UNITS[name], title=name)
        if name == "rt.normalized_latency":
            axes.set_yscale("log")
    line_legend(figure, 6)
    return png(figure)
