"""The rows of `headway bench papers bros`: our figures beside the paper's (7.2 to 7.4).

The paper's figures are averages over rates and models. It does not say whether "times" is the ratio of the
averages or the average of the ratios. Its own averages (TPOT attainment of 65.49 against 47.34 %, called
1.47x) contradict the first, and ratios to 0 contradict the second. Both are printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from benchmarks.papers.quoted import quoted
from headway.whatif.output.results import Row

BROS, FIXED, LATE_LAST = "bros", "bros, fixed bound", "bros-lost-last"
# Factors of the step time of vLLM's at that time. At the first one `vllm-v0` keeps about as many TPOTs as in the paper.
AUTHORS_TIMES = (1.9, 2.2)
Kind = Literal["hybrid", "real-time only", "shared blocks", "choices"]
UNITS = {
    "rt.normalized_latency": "s/token",
    "rt.ttft_attainment": "%",
    "rt.tpot_attainment": "%",
    "rt.token_attainment": "%",
    "rt.token_due_attainment": "%",
    "rt.req_per_s": "req/s",
    "be.req_per_s": "req/s",
    "kv.preemptions": "",
    "sched.share_pct": "%",
}
# Least scheduling share of an iteration in %.
_OVERHEAD = {"opt-13b": quoted(9.12, BROS, "7.4.2", 323), "opt-30b": quoted(7.56, BROS, "7.4.2", 323)}
_HYBRID, _ALONE, _SHARED = "hybrid", "real-time only", "shared blocks"


@dataclass(frozen=True, slots=True)
class ClaimCase:
    """A model, a data set and the rates that a claim averages over.

    slower: factor of the profile's iteration times.
    kind: with best-effort batches (7.2), without (7.3); the ablation of 7.4.1, single choices: with them.
    """

    profile: str
    slower: float
    lengths: str
    rates: tuple[float, ...]
    kind: Kind = "hybrid"

    @property
    def setting(self) -> str:
        return f"{self.profile} {self.apart}"

    @property
    def apart(self) -> str:
        """The part of the setting that the models of a claim share."""
        speed = f"x{self.slower:g}" + (", authors' speed" if self.slower in AUTHORS_TIMES else "")
        return f"{speed}, {self.lengths}" + ("" if self.kind == _HYBRID else f", {self.kind}")


@dataclass(frozen=True, slots=True)
class ClaimPoint:
    """The figures of one system at one rate.

    figures: by the names of `UNITS`; None = no request finished
    """

    system: str
    case: ClaimCase
    rate: float
    seed: int
    figures: dict[str, float | None]

    @property
    def setting(self) -> str:
        return f"{self.case.setting}, {self.rate:g} req/s, seed {self.seed}"


# The paper's claims on BROS: figure, other system, comparison, {(data set, kind): the paper's}.
Papers = Mapping[tuple[str, str], float]
_latency = partial(quoted, paper=BROS, section="7.2.1", line=294)
_slos = partial(quoted, paper=BROS, section="7.2.2", line=298)
CLAIMS: tuple[tuple[str, str, str, Papers], ...] = (
    (
        "rt.normalized_latency",
        "vllm-v0",
        "change",
        {
            ("sharegpt", _HYBRID): _latency(-74.20, printed="74.20%"),
            ("lmsys", _HYBRID): _latency(-69.61),
            ("sharegpt", _ALONE): quoted(-29.36, BROS, "7.3", 302),
        },
    ),
    ("rt.ttft_attainment", "vllm-v0", "times", {("sharegpt", _HYBRID): _slos(36.38), ("lmsys", _HYBRID): _slos(21.42)}),
    ("rt.tpot_attainment", "vllm-v0", "times", {("sharegpt", _HYBRID): _slos(1.73), ("lmsys", _HYBRID): _slos(2.62)}),
    (
        "be.req_per_s",
        "vllm-v0",
        "change",
        {("sharegpt", _HYBRID): _latency(-11.29), ("lmsys", _HYBRID): _latency(-17.67)},
    ),
    ("rt.req_per_s", "vllm-v0", "times", {("sharegpt", _ALONE): quoted(1.08, BROS, "7.3", 302)}),
    (
        "rt.normalized_latency",
        "rr",
        "change",
        {("sharegpt", _HYBRID): _latency(-54.31), ("lmsys", _HYBRID): _latency(-25.77)},
    ),
    ("rt.ttft_attainment", "rr", "times", {("sharegpt", _HYBRID): _slos(11.75), ("lmsys", _HYBRID): _slos(14.23)}),
    ("rt.tpot_attainment", "rr", "times", {("sharegpt", _HYBRID): _slos(1.47), ("lmsys", _HYBRID): _slos(2.28)}),
    (
        "be.req_per_s",
        "rr",
        "change",
        {("sharegpt", _HYBRID): _latency(-8.80, printed="8.80%"), ("lmsys", _HYBRID): _latency(-15.18)},
    ),
    ("rt.ttft_attainment", "bros-recompute", "times", {("sharegpt", _SHARED): quoted(1.23, BROS, "7.4.1", 313)}),
    ("rt.tpot_attainment", "bros-recompute", "times", {("sharegpt", _SHARED): quoted(1.63, BROS, "7.4.1", 313)}),
)
# Of `bros` with the bound of 4.2 as the text has it, and with late first tokens last, against `bros` itself.
_CHANGES = (("be.req_per_s", BROS, "change", None), ("rt.tpot_attainment", BROS, "times", None))
# TGI is only in figure 12, for which the text states no number.
UNSTATED = (("rt.normalized_latency", "tgi", "change", _ALONE), ("rt.req_per_s", "tgi", "times", _ALONE))
# Averages of 7.2.2. The paper does not state the data set of the first two.
AVERAGES: Mapping[tuple[str, str, str], float | None] = {
    ("rt.tpot_attainment", "vllm-v0", "sharegpt"): None,
    ("rt.tpot_attainment", "vllm-v0", "lmsys"): None,
    ("rt.ttft_attainment", "vllm-v0", "sharegpt"): _slos(1.28),
    ("rt.ttft_attainment", "rr", "sharegpt"): _slos(10.55),
    ("rt.tpot_attainment", BROS, "sharegpt"): _slos(65.49),
    ("rt.tpot_attainment", BROS, "lmsys"): _slos(75.38),
    ("rt.tpot_attainment", "rr", "sharegpt"): _slos(47.34),
    ("rt.tpot_attainment", "rr", "lmsys"): _slos(42.81),
}


def measured(points: Sequence[ClaimPoint]) -> list[Row]:
    """Return a row per system, setting and figure."""
    return [
        Row(name, point.system, point.setting, value, UNITS[name], _overhead(point, name))
        for point in points
        for name, value in point.figures.items()
    ]


def _overhead(point: ClaimPoint, name: str) -> float | None:
    if (point.system, name, point.case.kind) != (BROS, "sched.share_pct", _HYBRID):
        return None
    return next((share for model, share in _OVERHEAD.items() if point.case.profile.startswith(model)), None)


def claims(points: Sequence[ClaimPoint]) -> list[Row]:
    """Return our figures for the paper's claims: averages over the rates and models that were run.

    change: the mean of the changes in %
    times: the ratio of the means
    times_each: the mean of the ratios, where the other is not 0

    Ours is the mean over the seeds; of several seeds, `.least` and `.most` are the extremes. Of several
    models each also has rows of its own, without the paper's figure. Variants of BROS have them where they were run.
    """
    found = list[Row]()
    for apart in dict.fromkeys(point.case.apart for point in points):
        mine = [point for point in points if point.case.apart == apart]
        cases = list(dict.fromkeys(point.case for point in mine))
        together = f"{' + '.join(case.profile for case in cases)} {apart}"
        found += _group(mine, together, stated=True)
        for other in (FIXED, LATE_LAST):
            if other in {point.system for point in mine}:
                found += _group(mine, together, stated=True, system=other)
        if len(cases) > 1:
            for case in cases:
                found += _group([p for p in mine if p.case == case], case.setting, stated=False)
    return found


def _group(points: Sequence[ClaimPoint], setting: str, *, stated: bool, system: str = BROS) -> list[Row]:
    """Return the claims on a system, and averages, over these points."""
    case, found = points[0].case, []
    wanted = [(*claim[:3], claim[3].get((case.lengths, case.kind))) for claim in CLAIMS]
    wanted = [claim for claim in wanted if claim[3] is not None]
    wanted += [(name, other, how, None) for name, other, how, kind in UNSTATED if case.kind == kind]
    wanted += _CHANGES if system != BROS else ()
    for name, other, how, paper in wanted:
        for end in ("",) if how == "change" else ("", "_each"):
            each = [_compared(of, name, (system, other), how + end) for of in _by_seed(points)]
            unit = "%" if how == "change" else "x"
            found += _spread(
                f"{name}.{how}{end}", f"{system} vs {other}", setting, each, unit, paper if stated else None
            )
    for (name, one, lengths), paper in AVERAGES.items():
        if (case.lengths, case.kind) == (lengths, _HYBRID) and system == BROS:
            each = [_mean(of, name, one) for of in _by_seed(points)]
            found += _spread(f"{name}.mean", one, setting, each, UNITS[name], paper if stated else None)
    return found


def _by_seed(points: Sequence[ClaimPoint]) -> list[list[ClaimPoint]]:
    return [[p for p in points if p.seed == seed] for seed in dict.fromkeys(p.seed for p in points)]


def _spread(
    id: str, system: str, setting: str, each: Sequence[float | None], unit: str, paper: float | None
) -> list[Row]:
    """Return the mean over seeds and, for several seeds, the least and the most."""
    known = [one for one in each if one is not None]
    if not known:
        return []
    rows = [Row(id, system, setting, float(np.mean(known)), unit, paper)]
    if len(known) > 1:
        rows.append(Row(f"{id}.least", system, setting, min(known), unit))
        rows.append(Row(f"{id}.most", system, setting, max(known), unit))
    return rows


def _mean(points: Sequence[ClaimPoint], name: str, system: str) -> float | None:
    values = [p.figures[name] for p in points if p.system == system]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _compared(points: Sequence[ClaimPoint], name: str, systems: tuple[str, str], how: str) -> float | None:
    """Compare one system's figure with another's; None if one is missing or 0."""
    ours, theirs = ({(p.case, p.rate): p.figures[name] for p in points if p.system == system} for system in systems)
    pairs = [(mine, theirs[at]) for at, mine in ours.items() if theirs.get(at) is not None]
    both = np.array([pair for pair in pairs if pair[0] is not None], float).reshape(-1, 2)
    if how == "times":
        return float(both[:, 0].sum() / both[:, 1].sum()) if both[:, 1].any() else None
    both = both[both[:, 1] > 0]
    if not both.size:
        return None
    ratio = float(np.mean(both[:, 0] / both[:, 1]))
    return ratio if how == "times_each" else 100 * (ratio - 1)
