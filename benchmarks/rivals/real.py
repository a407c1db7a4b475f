"""`headway bench rivals --real`: the default, two rivals and stock vLLM on real engines, on one trace each.

Two grounds, scaled to what the engine of this machine does with one request at a time (`Alone`): SLOs-Serve's
first turns (G2-chat-short) and QoServe's three tiers (G1), whose deadlines are the published parts of the
seconds of arrivals. Requests arrive at 1.2 times what stock vLLM completes of a burst.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.real.beside import without_prefixes
from benchmarks.rivals.systems import DEFAULT
from headway.simulate.workload.arrivals import poisson
from headway.types import Slo
from headway.whatif.load import metrics, mix, report
from headway.whatif.load.records import Call, Record
from headway.whatif.measured import compare
from headway.whatif.measured.systems import standard_engine
from headway.whatif.output.results import Ask, Row

# Name in the rows -> what is started: a stock policy or a recipe.
SYSTEMS = {
    "vllm-fcfs": "vllm-fcfs",
    "vllm-priority": "vllm-priority",
    "qoserve": "benchmarks.rivals.qoserve:RECIPE",
    "scorpio": "benchmarks.rivals.scorpio:RECIPE",
    DEFAULT: DEFAULT,
}
LOAD = 1.2
_QUICK_SECONDS, _QUICK_TOKENS, _QUICK_CAPACITY = 4.0, 24, 6.0
_GAPS = 3.0  # tpot as a multiple of a step with one answer: about 1.2 times a step with a full batch here
_PROMPTS = 5.0  # G2: ttft as a multiple of the prompt alone
_G1_SECONDS = 240.0  # of arrivals, which the deadlines of G1 belong to
_CHAT = mix.TrafficTier("chat", prompts="sharegpt_first_turn", max_tokens=128)
_TIERS = {"q1": 6.0, "q2": 60.0, "q3": 180.0}  # G1: ttft, and two deadlines, as on the simulated ground
_ALONE = (8, 4.0)  # requests that are measured one at a time, and seconds from one to the next

Found = dict[tuple[str, str], list[Record]]


@dataclass(frozen=True, slots=True)
class Alone:
    """What an idle engine does: seconds to a first token = base + char x characters; gap: between tokens."""

    base: float
    char: float
    gap: float

    @classmethod
    def of(cls, calls: Sequence[Call], records: Sequence[Record]) -> Alone:
        """Fit it to requests that were sent one at a time."""
        size = {call.at: float(len(call.prompt)) for call in calls}
        x = np.array([size[record.at] for record in records])
        char, base = np.polyfit(x, [record.ttft for record in records], 1)
        gap = float(np.median(metrics.values(records, "itl")))
        return cls(max(float(base), gap), max(float(char), 0.0), gap)

    def first(self, call: Call) -> float:
        """Return the seconds to the first token of a call."""
        return self.base + self.char * len(call.prompt)


def grounds(chat: mix.TrafficTier, alone: Alone, seconds: float) -> dict[str, mix.Mix]:
    """Return the classes of each ground; the ttft of `chat` is set call by call (`calls`)."""
    part, tpot = seconds / _G1_SECONDS, _GAPS * alone.gap
    tiers = [
        replace(
            chat,
            name=name,
            priority=place,
            slo=Slo(ttft=due * part, tpot=tpot) if name == "q1" else Slo(e2e=due * part),
        )
        for place, (name, due) in enumerate(_TIERS.items())
    ]
    chat = replace(chat, slo=Slo(ttft=_PROMPTS * alone.base, tpot=tpot))
    return {"G2-chat-short": mix.Mix("chat", (chat,)), "G1-conv": mix.Mix("tiers", tuple(tiers))}


def calls(ground: mix.Mix, alone: Alone, rate: float, seconds: float, seed: int) -> list[Call]:
    """Return the requests of a ground."""
    rng = np.random.default_rng(seed)
    made = mix.calls(ground, poisson(rate, seconds, rng), rng)
    return [
        replace(call, slo=replace(call.slo, ttft=_PROMPTS * alone.first(call))) if call.tier == "chat" else call
        for call in made
    ]


async def run(chat: mix.TrafficTier, seconds: float, seed: int, *, quick: bool) -> tuple[Found, Alone, float]:
    """Run every system on every ground; return records by system and ground, and the measured capacity."""
    names = (DEFAULT, "qoserve") if quick else tuple(SYSTEMS)
    everything = mix.Mix("rivals", (chat, *(replace(chat, name=name) for name in _TIERS)))
    engine = without_prefixes(standard_engine("smollm2", max_running=16, blocks=None))
    started = tuple(SYSTEMS[name] for name in names)
    found: Found = {}
    async with compare.started(compare.CompareSetup(everything, engine, started, seed=seed, together=True)) as systems:
        count, gap = (3, 1.5) if quick else _ALONE
        at = np.arange(count, dtype=np.float64) * gap
        single = mix.calls(everything, at, np.random.default_rng(seed))
        records, _ = await systems.send(started[0], single, "one request at a time")
        alone = Alone.of(single, records)
        capacity = _QUICK_CAPACITY if quick else await systems.capacity()
        for ground, classes in grounds(chat, alone, seconds).items():
            asked = calls(classes, alone, LOAD * capacity, seconds, seed)
            for name in names:
                found[name, ground] = (await systems.send(SYSTEMS[name], asked, ground))[0]
    return found, alone, capacity


def rows_of(found: Found) -> list[Row]:
    """Return the figures of every system and ground."""
    rows: list[Row] = []
    for (name, ground), records in found.items():
        setting, span = f"{ground}, {LOAD:g}x", metrics.makespan(records) or np.inf
        late = [_late(record) for record in records]
        rows += [
            Row("attainment.promised", name, setting, metrics.attainment(records), "%"),
            Row("attainment.line", name, setting, 100.0 * float(np.mean([on_line(r) for r in records])), "%"),
            Row("tardiness.p99", name, setting, float(np.quantile(late, 0.99)), "s"),
            Row("tokens_per_s", name, setting, sum(r.output_tokens for r in records) / span, "tokens/s"),
            Row("e2e.p99", name, setting, float(np.quantile([r.e2el for r in records], 0.99)), "s"),
        ]
    return rows


def on_line(record: Record) -> bool:
    """Tell whether a request was on time where ttft and tpot promise the token line."""
    line = record.slo.ttft is not None and record.slo.tpot is not None
    return replace(record, slo=replace(record.slo, line=line)).met


def _late(record: Record) -> float:
    """Return the seconds by which a request missed its targets, those of its pace over the whole answer."""
    slo, tokens = record.slo, max(record.output_tokens - 1, 0)
    over = [record.ttft - slo.ttft if slo.ttft else 0.0, record.e2el - slo.e2e if slo.e2e else 0.0]
    return max(0.0, *over, ((record.tpot or 0.0) - slo.tpot) * tokens if slo.tpot else 0.0)


@experiment("rivals", "vllm", "The default recipe beside the SLO schedulers of other papers on real engines")
def main(ask: Ask, seconds: float) -> Result:
    """Run; `quick`: the default and one rival, some seconds of short answers, a given capacity."""
    # Engines of rivals import `benchmarks`, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    )
    chat = replace(_CHAT, max_tokens=_QUICK_TOKENS) if ask.quick else _CHAT
    seconds = _QUICK_SECONDS if ask.quick else seconds
    found, alone, capacity = asyncio.run(run(chat, seconds, ask.seed, quick=ask.quick))
    rows = rows_of(found)
    classes = "; ".join(mix.describe(one) for one in grounds(chat, alone, seconds).values())
    about = (
        f"{classes}. The ttft of class chat is {_PROMPTS:g} times its own prompt alone (given: the least). "
        f"{LOAD:g} x {capacity:.2f} requests/s for {seconds:g} s on each ground, batch limit 16."
    )
    notes = report.warnings({f"{name}, {ground}": (records, {}) for (name, ground), records in found.items()})
    return Result(rows, about, notes=notes)
