"""`headway bench papers bros`: the evaluation of BROS (arXiv 2504.09590, section 7), SIMULATED.

Real-time requests with the mean lengths of Table 2 (TTFT 0.4 s, TPOT 0.2 s) run beside a closed loop of
best-effort batches (512-1024 in, 32-128 out): a batch arrives when the previous one has ended (7.1). The
paper's models: OPT-13B, measured on one A100, where the paper has two with 40 GB; OPT-30B on four with 40 GB,
interpolated between two measured models; Llama-3-70B on eight, summed from operators (see `source` in the
profiles). In addition, OPT-13B with iterations 1.6, 1.9 and 2.2 times as long. Every system is a packer that sees
the whole queue; those that copy KV have the same host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.progress import track

from benchmarks.experiment import Result, experiment
from benchmarks.papers import bros_choices, closed_loop
from benchmarks.papers.bros_claims import (
    AUTHORS_TIMES,
    FIXED,
    LATE_LAST,
    UNITS,
    ClaimCase,
    ClaimPoint,
    claims,
    measured,
)
from benchmarks.papers.observers import TokenDeadlines, inside
from benchmarks.papers.parts import PaperPart, part
from benchmarks.papers.quoted import quoted
from benchmarks.papers.slower import SlowerLatency
from headway.policy.forecast.latency import profiles
from headway.simulate.instance import InstanceSpec
from headway.simulate.outcome import Outcome
from headway.simulate.workload.lengths import draw
from headway.simulate.workload.traffic import Workload, concat, poisson, single
from headway.types import Floats, Instance, Ints, Slo
from headway.whatif.output.plots import line_legend, png, sheet
from headway.whatif.output.results import SIMULATED, Ask

OPT_13B, OPT_30B, LLAMA_3 = "opt-13b-a100", "opt-30b-a100-40g-tp4", "llama-3-70b-a100-tp8"
SLO = Slo(ttft=quoted(0.4, "bros", "7.1", 280, "0.4s"), tpot=quoted(0.2, "bros", "7.1", 280, "0.2s"))
RUNNING, SLOTS, BUDGET, LONGEST = 256, 1024, 2048, 2048
BATCH = 256  # best-effort requests of a batch; the paper does not say
_MOST = 8.0  # best-effort requests per second that no system reaches
HOST_TOKENS = 200_000  # of OPT-13B 164 GB, 819,200 bytes a token
TABLE_2 = {  # mean prompt and answer
    "sharegpt": (quoted(222.76, "bros", "Table 2", 231), quoted(234.51, "bros", "Table 2", 231)),
    "lmsys": (quoted(90.50, "bros", "Table 2", 232, "90.50"), quoted(237.04, "bros", "Table 2", 232)),
}


@dataclass(frozen=True, slots=True)
class BrosPlan:
    """The parts of the evaluation to run, the seconds of arrivals, and the number of seeds."""

    experiments: tuple[PaperPart[ClaimCase], ...]
    duration: float
    seeds: int


SYSTEMS = (
    "bros",
    FIXED,
    "bros-paper",
    "bros-no-parts",
    "bros-recompute",
    "bros-plain-blocks",
    "bros-no-replacement",
    "bros-no-sizing",
    LATE_LAST,
    "vllm-v0",
    "vllm-v0-swap",
    "rr",
    "tgi",
    "vllm-priority",
    "slack",
)
QUICK_SYSTEMS = ("bros", "bros-paper", "bros-no-parts", "vllm-v0", "rr", "tgi")
_COMPARED = ("bros", FIXED, LATE_LAST, "bros-paper", "vllm-v0", "rr", "tgi")
_ALONE = ("bros", "bros-paper", "vllm-v0", "tgi")
_SHARED = ("bros", "bros-recompute", "bros-plain-blocks")
_SHARED_CASE = ClaimCase(
    OPT_30B, 1.0, "sharegpt", (quoted(10.0, "bros", "7.4.1", 313, "fixed to 10"),), "shared blocks"
)
_MEASURED: dict[str, str] = {}  # parts beside the experiments


def _both(profile: str, sharegpt: tuple[float, ...], lmsys: tuple[float, ...]) -> tuple[ClaimCase, ...]:
    return ClaimCase(profile, 1.0, "sharegpt", sharegpt), ClaimCase(profile, 1.0, "lmsys", lmsys)


def full() -> BrosPlan:
    """Return the whole evaluation: figures 10 to 13, the slower engine, and single choices."""
    in_twos, in_threes = (2.0, 4.0, 6.0, 8.0, 10.0), (3.0, 6.0, 9.0, 12.0, 15.0)
    slower = ClaimCase(OPT_13B, 1.6, "sharegpt", (2.0, 3.0, 4.0))
    theirs = tuple(ClaimCase(OPT_13B, factor, "sharegpt", (1.0, 2.0, 3.0, 4.0)) for factor in AUTHORS_TIMES)
    lmsys = tuple(ClaimCase(OPT_13B, factor, "lmsys", (2.0, 3.0, 4.0, 5.0)) for factor in AUTHORS_TIMES)
    alone = (
        ClaimCase(OPT_13B, 1.0, "sharegpt", (4.0, 5.0, 6.0, 7.0), "real-time only"),
        ClaimCase(OPT_30B, 1.0, "sharegpt", (6.0, 8.0, 10.0, 12.0), "real-time only"),
    )
    each = tuple(
        ClaimCase(OPT_13B, factor, "sharegpt", (rate,), "choices") for factor, rate in ((1.0, 4.0), (1.6, 3.0))
    )
    experiments = (
        PaperPart("opt-13b", _both(OPT_13B, (2.0, 3.0, 4.0, 5.0, 6.0), (3.0, 4.0, 5.0, 6.0, 7.0)), SYSTEMS),
        PaperPart("opt-30b", _both(OPT_30B, in_twos, in_twos), _COMPARED),
        PaperPart("llama-3-70b", _both(LLAMA_3, in_threes, in_threes), _COMPARED),
        PaperPart("slower", (slower,), (*_COMPARED, "bros-no-parts")),
        PaperPart("authors", theirs, _COMPARED),
        PaperPart("authors-lmsys", lmsys, _COMPARED),
        PaperPart("real-time", alone, _ALONE),
        PaperPart("shared-blocks", (_SHARED_CASE,), _SHARED),
        PaperPart("choices", each, bros_choices.SYSTEMS),
    )
    return BrosPlan(experiments, 600.0, 3)


def quick_plan() -> BrosPlan:
    """Return one rate per kind of case, with 30 seconds and one seed."""
    usual, slower = (ClaimCase(OPT_13B, factor, "sharegpt", (3.0,)) for factor in (1.0, 1.6))
    alone = ClaimCase(OPT_13B, 1.0, "sharegpt", (6.0,), "real-time only")
    experiments = (
        PaperPart("opt-13b", (usual,), QUICK_SYSTEMS),
        PaperPart("slower", (slower,), _COMPARED),
        PaperPart("real-time", (alone,), _ALONE),
        PaperPart("shared-blocks", (_SHARED_CASE,), _SHARED),
    )
    return BrosPlan(experiments, 30.0, 1)


@experiment("papers bros", "sim", f"BROS, its ablations and its baselines ({SIMULATED})")
def main(ask: Ask, only: Sequence[str] = (), plan: BrosPlan | None = None, seeds: int | None = None) -> Result:
    """Simulate every system at every rate. `quick`: few systems, one rate, 30 seconds, one seed."""
    plan = part(plan or (quick_plan() if ask.quick else full()), only, _MEASURED)
    plan = plan if seeds is None else replace(plan, seeds=seeds)
    points = sweep(plan, ask.seed, bar=not ask.as_json)
    workload = (
        f"{SIMULATED}: batch limit {RUNNING}, {BUDGET} tokens an iteration, {plan.duration:g} s; rate = "
        f"real-time requests/s, Poisson (TTFT 0.4 s, TPOT 0.2 s), beside a closed loop of {BATCH} "
        "best-effort ones (512-1024 in, 32-128 out); throughput counts requests that end within that time."
    )
    notes = ("Claims are averages over the rates and seeds; .least and .most are those of one seed.",)
    return Result([*measured(points), *claims(points)], workload, lambda: plots(points), notes=notes)


def sweep(plan: BrosPlan, seed: int, *, bar: bool) -> list[ClaimPoint]:
    """Run every system in every case of a plan, at every rate and with every seed, without repetitions."""
    jobs = dict.fromkeys(
        (case, rate, seed + i, system)
        for one in plan.experiments
        for case in one.settings
        for rate in case.rates
        for i in range(plan.seeds)
        for system in one.systems
    )
    loads: dict[tuple[ClaimCase, float, int], Workload] = {}
    points = []
    for case, rate, number, system in track([*jobs], "simulating", disable=not bar):
        if (case, rate, number) not in loads:
            loads = {(case, rate, number): traffic(case, rate, plan.duration, number)}
        load = loads[case, rate, number]
        points.append(measure(system, case, load, rate, plan.duration, number))
    return points


def traffic(case: ClaimCase, rate: float, duration: float, seed: int) -> Workload:
    """Return real-time requests at `rate`, then the batches' best-effort requests; drop those that are too long."""
    rng = np.random.default_rng(seed)
    at = poisson(rate, duration, rng)
    prompt, output = table_2(case.lengths, at.size, rng)
    real_time = single(at, prompt, output, slo=SLO, tier="rt")
    real_time = real_time.take(np.flatnonzero(prompt + output <= LONGEST))
    if case.kind == "real-time only":
        return real_time
    size = BATCH * (int(_MOST * duration) // BATCH + 2)
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


def measure(system: str, case: ClaimCase, workload: Workload, rate: float, duration: float, seed: int) -> ClaimPoint:
    """Run a system on the workload, for at most three times the seconds of arrivals."""
    clock, tokens = list[float](), TokenDeadlines(workload)
    outcome = closed_loop.run(
        inside(bros_choices.system(system), clock),
        instance(case),
        workload,
        open=int(np.count_nonzero(np.isfinite(workload.ttft))),
        batch=BATCH,
        stop=duration,
        until=3 * duration,
        observer=tokens,
    )
    return ClaimPoint(system, case, rate, seed, judge(workload, outcome, tokens, duration, clock[1:]))


def instance(case: ClaimCase) -> InstanceSpec:
    """Return the case's engine, with host memory for the systems that copy KV."""
    profile = profiles.load(case.profile)
    assert profile.kv_tokens is not None
    shape = Instance("e0", "default", RUNNING, profile.kv_tokens // profile.block_size, profile.block_size, LONGEST)
    latency = SlowerLatency(profile, case.slower)
    return InstanceSpec(shape, latency, SLOTS, BUDGET, profile.copy_seconds(), host_tokens=HOST_TOKENS)


def judge(
    workload: Workload, outcome: Outcome, tokens: TokenDeadlines, duration: float, deciding: Sequence[float]
) -> dict[str, float | None]:
    """Return the figures of one run.

    deciding: wall seconds of each decision

    preemptions: how often a request lost all of its KV, to the host or to be computed again, per request that
    ended.
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
        "kv.preemptions": int(outcome.evictions.sum()) / max(int(np.count_nonzero(ended)), 1),
        "sched.share_pct": share,
    }


# ---- plots


_STYLE: dict[str, tuple[str, str]] = {
    "bros": ("#D55E00", "-"),
    FIXED: ("#009E73", "-."),
    "bros-paper": ("#D55E00", "-."),
    "bros-no-parts": ("#009E73", "--"),
    "bros-recompute": ("#009E73", ":"),
    "bros-plain-blocks": ("#D55E00", ":"),
    "bros-no-replacement": ("#E69F00", "--"),
    "bros-no-sizing": ("#E69F00", ":"),
    LATE_LAST: ("#D55E00", "--"),
    "vllm-v0": ("#0072B2", "-"),
    "vllm-v0-swap": ("#0072B2", ":"),
    "rr": ("#999999", "-"),
    "tgi": ("#CC79A7", "-"),
    "vllm-priority": ("#56B4E9", "--"),
    "slack": ("#009E73", "-"),
}
_DRAWN = ("rt.normalized_latency", "rt.ttft_attainment", "rt.tpot_attainment", "be.req_per_s")


def plots(points: Sequence[ClaimPoint]) -> dict[str, bytes]:
    """Return {name: PNG} per case: four figures against the rate, of the first seed."""
    return {
        _name(case): _plot([p for p in points if p.case == case], case)
        for case in dict.fromkeys(point.case for point in points)
        if case.kind in ("hybrid", "real-time only")
    }


def _name(case: ClaimCase) -> str:
    model = "" if case.profile == OPT_13B else f"-{case.profile.partition('-a100')[0]}"
    slower = "" if case.slower == 1 else f"-x{case.slower:g}"
    return f"bros{model}-{case.lengths}{slower}" + {"real-time only": "-real-time"}.get(case.kind, "")


def _plot(points: Sequence[ClaimPoint], case: ClaimCase) -> bytes:
    figure, panels = sheet(2, 2, 11, 7)
    figure.suptitle(f"{SIMULATED}: {case.setting}", fontsize=10)
    seed = points[0].seed
    for axes, name in zip(panels, _DRAWN, strict=True):
        for system, (colour, line) in _STYLE.items():
            mine = sorted((p for p in points if (p.system, p.seed) == (system, seed)), key=lambda point: point.rate)
            if not mine:
                continue
            values: Floats = np.array([p.figures[name] for p in mine], float)
            axes.plot([p.rate for p in mine], values, line, color=colour, marker="o", ms=3, label=system)
        axes.set(xlabel="real-time requests/s", ylabel=UNITS[name], title=name)
        if name == "rt.normalized_latency":
            axes.set_yscale("log")
    line_legend(figure, 6)
    return png(figure)
