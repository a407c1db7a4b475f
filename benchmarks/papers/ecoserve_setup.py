"""The set-up of EcoServe's evaluation: data sets (Table 2, 2.2, 2.3, 4), engine (2.1), systems and settings.

It also bounds the requests per second and the mean JCT of any schedule on that engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush

import numpy as np

from benchmarks.papers.quoted import quoted
from benchmarks.papers.recipes import ECOSERVE, find
from benchmarks.papers.slower import SlowerLatency
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.forecast.latency import profiles
from headway.policy.pack.baselines.arrival_order import Chunked, MultiRes, Orca
from headway.policy.pack.baselines.fastserve import FastServe
from headway.policy.pack.baselines.srtf import Srtf
from headway.policy.pack.ecoserve.packer import EcoServe
from headway.policy.pack.ecoserve.step_buffer import Options
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer
from headway.simulate.instance import InstanceSpec
from headway.simulate.workload.arrivals import poisson
from headway.simulate.workload.lengths import SOURCES, Quantiles, tied
from headway.simulate.workload.traffic import Workload, single
from headway.types import Batch, Floats, Instance, Ints

PROFILE = "opt-13b-a100"
KV_BYTES = quoted(12e9, "ecoserve", "2.1", 72, "12GB", 1e9)
BLOCK = int(quoted(32, "ecoserve", "2.1", 72, "set to 32"))
MAX_RUNNING, SLOTS, BUDGET, TFS = 256, 512, 2048, 512
LONGEST = 3200  # tokens of a request: BookCorpus chunks with their answers
ORCA_BATCH = int(quoted(8, "ecoserve", "2.1", 72, "set to 8"))
LEVELS = int(quoted(5, "ecoserve", "2.1", 84, "5-level"))
SLO_SCALE = quoted(2.0, "ecoserve", "4", 255, "set to 2")
PAPER_TEXT = "ecoserve-paper"
MAX_ALLOCATION = ("orca", "srtf", "fastserve")
TRUE_LENGTHS = ("srtf", "multires")  # 2.1: their answers' lengths are known in advance
_GRID = (np.arange(20_000) + 0.5) / 20_000


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Prompt or output lengths of Table 2: mean, shortest and longest, in tokens."""

    mean: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Data:
    """A data set of the evaluation.

    name: of its length distribution, whose shape is kept
    rate: Table 2's rate, req/s
    rates: of the sweep, around this engine's saturation, req/s
    low: the same for systems with max-allocation, req/s
    swept: of the sweeps of options, req/s
    seconds: of arrivals
    prompt, output: Table 2's lengths; BookCorpus prompts are cut into chunks of 2048
    padding: sweet spot of 2.3, a share of the prediction
    accuracy: share of outputs within it (2.3)
    over, under: unused and missing tokens, as shares of the allocated ones (figure 5a)
    pool: share of the KV in reserve (2.2)
    buffer: share of the predicted length (4)
    """

    name: str
    rate: float
    rates: tuple[float, ...]
    low: tuple[float, ...]
    swept: float
    seconds: float
    prompt: TokenCounts
    output: TokenCounts
    padding: float
    accuracy: float
    over: float
    under: float
    pool: float
    buffer: float


def _share(share: float, section: str, line: int, printed: str | None = None) -> float:
    return quoted(share, "ecoserve", section, line, printed or f"{100 * share:g}%", 0.01)


def _lengths(line: int, mean: float, least: int, most: int, printed: str | None = None) -> TokenCounts:
    """Return the lengths in a line of Table 2. printed: the longest, as the line has it."""
    cell = partial(quoted, paper="ecoserve", section="Table 2", line=line)
    return TokenCounts(cell(mean), int(cell(least)), int(cell(most, printed=printed)))


_CHUNK = int(quoted(2048, "ecoserve", "2.1", 72, "2048-token"))  # into which BookCorpus' prompts are cut
DATA = (
    Data(
        "alpaca",
        quoted(36.0, "ecoserve", "Table 2", 78, "36 reqs/s"),
        (24.0, 36.0, 48.0, 60.0, 72.0, 84.0, 96.0),
        (1.0, 2.0, 3.0, 4.0),
        60.0,
        60.0,
        _lengths(78, 19.31, 9, 2470, "2.47K"),
        _lengths(78, 58.41, 13, 292),
        _share(0.10, "2.3", 139),
        _share(0.775, "2.3", 139),
        _share(0.0262, "2.3", 141),
        _share(0.0930, "2.3", 141, "9.30%"),
        _share(0.012, "2.2", 119),
        _share(0.15, "4", 255),
    ),
    Data(
        "sharegpt",
        quoted(28.0, "ecoserve", "Table 2", 79, "28 reqs/s"),
        (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
        (0.2, 0.35, 0.5, 0.7),
        4.0,
        150.0,
        _lengths(79, 161.31, 16, 3200, "3.2K"),
        _lengths(79, 337.99, 19, 991),
        _share(0.15, "2.3", 139),
        _share(0.732, "2.3", 139),
        _share(0.0562, "2.3", 141),
        _share(0.1342, "2.3", 141),
        _share(0.03, "2.2", 119),
        _share(0.15, "4", 255),
    ),
    Data(
        "bookcorpus",
        quoted(1.2, "ecoserve", "Table 2", 80, "1.2 reqs/s"),
        (0.1, 0.2, 0.25, 0.3, 0.4, 0.5),
        (0.1, 0.15, 0.2, 0.3),
        0.3,
        450.0,
        replace(_lengths(80, 1952.11, 18, 461_000, "461K"), most=_CHUNK),
        _lengths(80, 681.2, 32, 1041),
        _share(0.20, "2.3", 139),
        _share(0.698, "2.3", 139),
        _share(0.0512, "2.3", 141),
        _share(0.2192, "2.3", 141),
        _share(0.05, "2.2", 119),
        _share(0.10, "4", 255),
    ),
)


# ---- requests


def table(source: Quantiles, side: TokenCounts) -> Quantiles:
    """Return a source's lengths, scaled to `side.mean` within `side`'s limits."""
    low, high = 0.01, 100.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        below = float(_times(source, middle, side).at(_GRID).mean()) < side.mean
        low, high = (middle, high) if below else (low, middle)
    return _times(source, high, side)


def _times(source: Quantiles, factor: float, side: TokenCounts) -> Quantiles:
    tokens = np.clip(np.rint(np.array(source.tokens) * factor), side.least, side.most)
    return Quantiles(tuple(int(one) for one in tokens), source.shares)


def chunks(side: TokenCounts) -> Quantiles:
    """Return chunks of the longest length, and as many last chunks, log-uniform, as the mean requires."""
    last = (side.most - side.least) / math.log(side.most / side.least)
    share = (side.most - side.mean) / (side.most - last)
    return Quantiles((side.least, side.most, side.most), (0.0, share, 1.0))


def tables(data: Data) -> tuple[Quantiles, Quantiles]:
    """Return the distributions of prompts and outputs."""
    source = SOURCES[data.name]
    assert isinstance(source.prompt, Quantiles)
    assert isinstance(source.output, Quantiles)
    # 98 % of a book's chunks are full; scaling would make them shorter than a chunk.
    prompt = chunks(data.prompt) if data.name == "bookcorpus" else table(source.prompt, data.prompt)
    return prompt, table(source.output, data.output)


def workload(data: Data, rate: float, seconds: float, seed: int, steps: float = 1.0) -> Workload:
    """Return Poisson arrivals with Table 2's lengths, of at most `LONGEST` tokens, and SLOs of `SLO_SCALE`.

    steps: of the engine, as in `instance`.
    """
    rng = np.random.default_rng(seed)
    at = poisson(rate, seconds, rng)
    shares, (prompts, outputs) = tied(SOURCES[data.name].rho, at.size, rng), tables(data)
    prompt, output = _whole(prompts.at(shares[0])), _whole(outputs.at(shares[1]))
    kept = np.flatnonzero(prompt + output <= LONGEST)
    return with_slo(single(at, prompt, output).take(kept), instance(steps=steps), SLO_SCALE)


def _whole(tokens: Floats) -> Ints:
    return np.asarray(np.maximum(np.rint(tokens), 1), np.int64)


def with_slo(workload: Workload, spec: InstanceSpec, scale: float) -> Workload:
    """Return the workload with an e2e SLO of `scale` x the seconds on an idle engine (section 4)."""
    never = np.full(len(workload), np.inf)
    return replace(workload, ttft=never, tpot=never, e2e=scale * alone(workload, spec)[0])


def alone(workload: Workload, spec: InstanceSpec) -> tuple[Floats, Floats]:
    """Return each request's seconds on an idle engine, and those of one of its output tokens.

    t_p and t_g of section 4 come from the latency profile: a prefill alone, and one decode per token at the
    context in the middle of the output.
    """
    lengths = list(zip(workload.prompt.tolist(), workload.output.tolist(), strict=True))
    prefill = np.array([spec.latency.seconds(Batch(0, 0, p, p * p // 2)) for p, _ in lengths])
    token = np.array([spec.latency.seconds(Batch(1, p + o // 2, 0)) for p, o in lengths])
    return prefill + workload.output * token, token


# ---- engine and systems


def instance(copies: float = 1.0, steps: float = 1.0) -> InstanceSpec:
    """Return the engine of 2.1: OPT-13B on an A100 with 12 GB of KV in blocks of 32 tokens.

    copies: factor of the copy times to the host
    steps: factor of the iterations' times
    """
    profile = profiles.load(PROFILE)
    blocks = int(KV_BYTES // (profile.kv_bytes_per_token * BLOCK))
    shape = Instance("e0", "default", MAX_RUNNING, blocks, BLOCK, LONGEST)
    return InstanceSpec(shape, SlowerLatency(profile, steps), SLOTS, BUDGET, profile.copy_seconds() * copies)


def _allocations() -> int:
    """Return the number of requests with KV for the longest sequence each (max-allocation, 2.1)."""
    shape = instance().instance
    return shape.blocks_total // math.ceil(LONGEST / BLOCK)


_SETTINGS: dict[str, Callable[[EngineSpec], Packer]] = {
    "orca": lambda spec: Orca(ORCA_BATCH, spec.token_budget, spec.max_model_len),
    "srtf": lambda spec: Srtf(_allocations(), spec.token_budget, spec.latency),
    "fastserve": lambda spec: FastServe(
        min(ORCA_BATCH, _allocations()), spec.token_budget, spec.latency, levels=LEVELS
    ),
    "fastgen": lambda spec: Chunked(spec.max_running, TFS),
    "multires": lambda spec: MultiRes(spec.max_running, TFS),
}


def options_of(name: str, data: Data) -> Options | None:
    """Return the options of an EcoServe variant with a data set's numbers; None for other systems."""
    base = name.removesuffix("-oracle")
    if base not in ECOSERVE:
        return None
    chosen = ECOSERVE[base][0]._replace(reserve=data.pool)
    return chosen._replace(buffer_share=data.buffer) if chosen.buffer_share else chosen


def system(name: str, data: Data, options: Options | None = None) -> Recipe:
    """Return a recipe with the paper's settings; `options` replace those of an EcoServe variant."""
    recipe, chosen = find(name), options or options_of(name, data)
    if chosen is not None:
        return replace(recipe, packer=lambda spec: EcoServe(spec, chosen))
    return replace(recipe, packer=_SETTINGS.get(name, recipe.packer))


# ---- the bound


def bound(load: Workload, *, exact: bool) -> float:
    """Return an upper bound on the requests per second of any schedule of this workload.

    Over a long time the iterations must hold KV x iterations of every request (its answer takes one
    iteration per token), so there are at least sum(KV x iterations) / KV of the engine, and sum(iterations) /
    `MAX_RUNNING`, each with the cost of an iteration; the requests' own costs come on top. Copies, padding
    and waiting cost nothing here.

    exact: a request holds prompt + answer from its first iteration on; else only what it has written, which
        is what lending to the last token or allocation in blocks could reach at best.
    """
    own, held = _work(load, instance(), exact=exact)
    return 1.0 / (float(own.mean()) + float(np.mean(held, axis=1).max()))


def jct_bound(load: Workload, spec: InstanceSpec) -> float:
    """Return a lower bound on the mean JCT of any schedule of this workload.

    By the argument of `bound`, no schedule is faster than a server that works on one request at a time, where each
    takes its own seconds and its share, by KV or by batch, of the iterations' fixed cost. There, shortest remaining
    time first has the least mean JCT. Nor is any request faster than alone on the engine.
    """
    own, held = _work(load, spec, exact=False)
    least = float(alone(load, spec)[0].mean())
    return max(least, *(_shortest_first(load.arrival, own + each) for each in held))


def _shortest_first(arrival: Floats, seconds: Floats) -> float:
    """Return the mean JCT of preemptive shortest remaining time first. arrival: sorted."""
    left, now, total, i = list[tuple[float, float]](), 0.0, 0.0, 0
    while left or i < arrival.size:
        if not left:
            now = max(now, float(arrival[i]))
        while i < arrival.size and arrival[i] <= now:
            heappush(left, (float(seconds[i]), float(arrival[i])))
            i += 1
        rest, came = heappop(left)
        until = float(arrival[i]) if i < arrival.size else math.inf
        if now + rest <= until:
            now += rest
            total += now - came
        else:
            heappush(left, (rest - (until - now), came))
            now = until
    return total / arrival.size


def _work(load: Workload, spec: InstanceSpec, *, exact: bool) -> tuple[Floats, Floats]:
    """Return each request's own seconds, and its share of the iterations' fixed cost by KV and by batch (2 x n)."""
    one, two = spec.latency.seconds(Batch(1, 0, 0)), spec.latency.seconds(Batch(2, 0, 0))
    token, base = two - one, 2 * one - two
    context = (spec.latency.seconds(Batch(1, 1000, 0)) - one) / 1000
    prompt_token = spec.latency.seconds(Batch(1, 0, 1)) - one
    pair = (spec.latency.seconds(Batch(1, 0, 1, 1000)) - one - prompt_token) / 1000
    p, o = load.prompt.astype(float), load.output.astype(float)
    read = o * p + o * o / 2
    own = token * o + context * read + prompt_token * p + pair * p * p / 2
    kv = spec.instance.blocks_total * spec.instance.block_size
    return own, base * np.array([(o * (p + o) if exact else read) / kv, o / MAX_RUNNING])
