"""Metrics of a load by class and over all requests: SLO attainment, latency, goodput and throughput.

Latencies are those of completed requests and count from the planned arrival. Attainment is the share of the
requests with an SLO that met it, and goodput their rate; failed requests count as missed, and best effort is left
out, as in /metrics. Rates divide by the makespan, the time from the system's first planned arrival to its last
completion, for all classes alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from headway.types import Floats
from headway.whatif.load.records import Counters, Record, Results
from headway.whatif.output.results import Row

ALL = "all"
METRICS = ("ttft", "tpot", "itl", "e2el")
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Counters that `memory` does not repeat as engine.NAME.
_NAMED = ("preemptions", "preempted", "alloc_failures", "recomputed", "busy_seconds", "kv_seconds")

Figure = tuple[str, float | None, str]


def figures(results: Results) -> list[Row]:
    """Return every figure of every system: classes with an SLO first, then the others, then `all`.

    Per class: requests, failed, attainment.CLASS, promised_share (of a class that promises less than all),
    goodput.req_per_s, throughput.tokens_per_s (prompt and output), throughput.output_tokens_per_s,
    {ttft,tpot,itl,e2el}.{mean,p50,p90,p99} in ms, and gap.max, the longest silence of a stream in ms.
    Once per system: lateness.{mean,p50,p90,p99} (ms by which the generator sent late), preemptions, prompt.hit_pct
    (share of the prompts' tokens that prefix caches had; of simulated engines that have one), engine_hours (of a
    simulation: of all engines, each from its start until it has stopped), be.tokens_per_s (prompt and output of classes
    without an SLO, if any) and the figures of `memory`.
    Percentiles are interpolated linearly, as in vLLM. No value is NaN or infinite.
    """
    rows: list[Row] = []
    for system, (records, counters) in results.items():
        span = makespan(records)
        for setting, part in split(records).items():
            rows += [Row(id, system, setting, ours, unit) for id, ours, unit in _of(setting, part, span)]
        late = _spread("lateness", lateness(records))
        rows += [Row(id, system, ALL, ours, unit) for id, ours, unit in late]
        rows.append(Row("preemptions", system, ALL, counters.get("preemptions"), "count"))
        for id, unit in (("prompt.hit_pct", "%"), ("engine_hours", "h")):
            if id in counters:
                rows.append(Row(id, system, ALL, counters[id], unit))
        once = [*_best_effort(records, span), *memory(counters, len(records))]
        rows += [Row(id, system, ALL, ours, unit) for id, ours, unit in once]
    return rows


def memory(counters: Counters, requests: int) -> list[Figure]:
    """Return the figures of an engine's KV counters; none for an engine without counters.

    recomputed_tokens: tokens computed a second time
    kv.alloc_failures_pct: failed block allocations of running requests, per 100 requests
    kv.utilization: share of the KV slots that hold a token while the engine computes, mean over time, %
    engine.NAME: every other counter of the scheduler hook
    """
    if "alloc_failures" not in counters:
        return []
    busy = counters.get("busy_seconds", 0.0)
    return [
        ("recomputed_tokens", counters.get("recomputed"), "tokens"),
        ("kv.alloc_failures_pct", _per(100 * counters["alloc_failures"], requests), "%"),
        ("kv.utilization", _per(100 * counters.get("kv_seconds", 0.0), busy), "%"),
        *(
            (f"engine.{name}", value, "s" if name.endswith("_seconds") else "count")
            for name, value in counters.items()
            if name not in _NAMED
        ),
    ]


def tiers(records: Sequence[Record]) -> list[str]:
    """Return the classes of the records: those with an SLO first, then by name."""
    with_slo = {record.tier for record in promised(records)}
    return sorted({record.tier for record in records}, key=lambda tier: (tier not in with_slo, tier))


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
    """Return the percentage of requests with an SLO that met it; None without such requests."""
    part = promised(records)
    return 100.0 * sum(record.met for record in part) / len(part) if part else None


def promised_share(records: Sequence[Record]) -> float | None:
    """Return the percentage of the requests of one class that is promised to be on time; None = all, or none."""
    return next((100.0 * record.slo.share for record in promised(records) if record.slo.share is not None), None)


def promised(records: Sequence[Record]) -> list[Record]:
    """Return the records with an SLO."""
    return [record for record in records if record.slo.objective != "best_effort"]


def values(records: Sequence[Record], metric: str) -> Floats:
    """Return one of METRICS, or gap, in seconds for each completed request (itl: every gap; tpot: from 2 tokens)."""
    done = [record for record in records if record.ok]
    if metric == "itl":
        return np.concatenate([np.empty(0), *(record.gaps for record in done)])
    seen = [getattr(record, metric) for record in done]
    return np.array([value for value in seen if value is not None], float)


def lateness(records: Sequence[Record]) -> Floats:
    """Return the seconds by which the generator itself sent each request late."""
    return np.array([max(record.sent - record.at, 0.0) for record in records], float)


def failures(records: Sequence[Record]) -> dict[str, int]:
    """Count the failed requests by kind (the error up to its first colon), most frequent first."""
    kinds = Counter(record.error.partition(":")[0] for record in records if record.error is not None)
    return dict(kinds.most_common())


def _of(setting: str, records: Sequence[Record], span: float | None) -> Iterator[Figure]:
    done = [record for record in records if record.ok]
    out = sum(record.output_tokens for record in done)
    yield "requests", float(len(records)), "count"
    yield "failed", float(len(records) - len(done)), "count"
    yield f"attainment.{setting}", attainment(records), "%"
    if setting != ALL and (share := promised_share(records)) is not None:
        yield "promised_share", share, "%"
    part = promised(records)
    yield "goodput.req_per_s", _per(sum(record.met for record in part), span) if part else None, "req/s"
    total = out + sum(record.prompt_tokens for record in done)
    yield "throughput.tokens_per_s", _per(total, span), "tokens/s"
    yield "throughput.output_tokens_per_s", _per(out, span), "tokens/s"
    for metric in METRICS:
        yield from _spread(metric, values(done, metric))
    gaps = values(done, "gap")
    yield "gap.max", float(gaps.max() * 1000) if gaps.size else None, "ms"


def _best_effort(records: Sequence[Record], span: float | None) -> Iterator[Figure]:
    part = [record for record in records if record.slo.objective == "best_effort"]
    if part:
        tokens = sum(record.prompt_tokens + record.output_tokens for record in part if record.ok)
        yield "be.tokens_per_s", _per(tokens, span), "tokens/s"


def _spread(name: str, seconds: Floats) -> Iterator[Figure]:
    seen = seconds.size > 0
    yield f"{name}.mean", float(seconds.mean() * 1000) if seen else None, "ms"
    for label, p in _QUANTILES.items():
        yield f"{name}.{label}", float(np.quantile(seconds, p) * 1000) if seen else None, "ms"


def _per(amount: float, span: float | None) -> float | None:
    return amount / span if span else None
