"""How many were on time, how fast was it, and how much got done?

Records become figures per class and over all. Latencies are those of completed requests, counted from the
planned arrival; attainment is the share of all requests, so a failed one is a missed one. Rates divide by the
makespan: from the first planned arrival to the last completion of the system, the same for all its classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headway.bench.records import Record, Results
from headway.types import Floats

ALL = "all"
METRICS = ("ttft", "tpot", "itl", "e2el")
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: `ours` in `unit` for a class (or `all`) of a system; None = cannot be computed."""

    id: str
    system: str
    setting: str
    ours: float | None
    unit: str
    paper: float | None = None


def figures(results: Results) -> list[Row]:
    """Return every figure of every system: classes with promises first, then the others, then `all`.

    ids: requests, failed, attainment.CLASS, goodput.req_per_s, throughput.tokens_per_s (prompt + output),
    throughput.output_tokens_per_s, {ttft,tpot,itl,e2el}.{mean,p50,p90,p99} (ms); lateness.{mean,p50,p90,p99}
    (ms by which the generator itself sent late) and preemptions stand once per system. Percentiles are
    linear, as in vLLM. No value is NaN or infinite.
    """
    rows: list[Row] = []
    for system, (records, preemptions) in results.items():
        span = makespan(records)
        for setting, part in split(records).items():
            rows += [Row(id, system, setting, ours, unit) for id, ours, unit in _of(setting, part, span)]
        late = _spread("lateness", lateness(records))
        rows += [Row(id, system, ALL, ours, unit) for id, ours, unit in late]
        rows.append(Row("preemptions", system, ALL, preemptions, "count"))
    return rows


def tiers(records: Sequence[Record]) -> list[str]:
    """Return the classes of the records: those that were promised something first, then by name."""
    promised = {record.tier for record in records if record.slo.objective != "best_effort"}
    return sorted({record.tier for record in records}, key=lambda tier: (tier not in promised, tier))


def split(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each class, in the order of `tiers`, and of `all`."""
    parts = {tier: [record for record in records if record.tier == tier] for tier in tiers(records)}
    return parts | {ALL: list(records)}


def makespan(records: Sequence[Record]) -> float | None:
    """Return seconds from the first planned arrival to the last completion; None when nothing completed."""
    ends = [record.last for record in records if record.ok and record.last is not None]
    span = max(ends) - min(record.at for record in records) if ends else 0.0
    return span if span > 0 else None


def attainment(records: Sequence[Record]) -> float | None:
    """Return the percentage that kept every promise; None when there are no records."""
    return 100.0 * sum(record.met for record in records) / len(records) if records else None


def values(records: Sequence[Record], metric: str) -> Floats:
    """Return one of METRICS in seconds for every completed request (itl: every gap; tpot: from 2 tokens)."""
    done = [record for record in records if record.ok]
    if metric == "itl":
        return np.concatenate([np.empty(0), *(record.itl for record in done)])
    seen = [getattr(record, metric) for record in done]
    return np.array([value for value in seen if value is not None], float)


def lateness(records: Sequence[Record]) -> Floats:
    """Return the seconds by which the generator itself sent each request late."""
    return np.array([max(record.sent - record.at, 0.0) for record in records], float)


def failures(records: Sequence[Record]) -> dict[str, int]:
    """Count the failed requests by kind (the error up to its first colon), most frequent first."""
    kinds = Counter(record.error.partition(":")[0] for record in records if record.error is not None)
    return dict(kinds.most_common())


Figure = tuple[str, float | None, str]


def _of(setting: str, records: Sequence[Record], span: float | None) -> Iterator[Figure]:
    done = [record for record in records if record.ok]
    out = sum(record.output_tokens for record in done)
    yield "requests", float(len(records)), "count"
    yield "failed", float(len(records) - len(done)), "count"
    yield f"attainment.{setting}", attainment(records), "%"
    yield "goodput.req_per_s", _per(sum(record.met for record in records), span), "req/s"
    total = out + sum(record.prompt_tokens for record in done)
    yield "throughput.tokens_per_s", _per(total, span), "tokens/s"
    yield "throughput.output_tokens_per_s", _per(out, span), "tokens/s"
    for metric in METRICS:
        yield from _spread(metric, values(done, metric))


def _spread(name: str, seconds: Floats) -> Iterator[Figure]:
    seen = seconds.size > 0
    yield f"{name}.mean", float(seconds.mean() * 1000) if seen else None, "ms"
    for label, p in _QUANTILES.items():
        yield f"{name}.{label}", float(np.quantile(seconds, p) * 1000) if seen else None, "ms"


def _per(amount: float, span: float | None) -> float | None:
    return amount / span if span else None
