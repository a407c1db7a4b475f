"""Grounds on which the default recipe was not tuned: each one an operator's case that the sixteen lack.

Promises that no engine could keep or only just, engines with dear prompts, plain requests beside batches,
weights, wrong hints, runs of applications, tenants, and overloads that end or last. As on all grounds,
lengths are the built-in published statistics.
"""

from __future__ import annotations

from benchmarks.simulated.grounds import Calm, Ground
from headway.policy.forecast.latency.laws import Additive
from headway.simulate.workload.traffic import TrafficClass
from headway.types import Slo

_OPT, _LLAMA, _LLAMA_70B, _A40 = "opt-13b-a100", "llama-2-7b-a100", "llama-2-70b-a100-tp4", "llama-2-7b-a40"
_CPU = "smollm2-135m-cpu2"
_BASE = 0.0103  # seconds of an iteration of `_LLAMA` with one answer
_DEAR = Additive(base=0.05, decodes=0.004, context=5e-6, prefill=0.002, prefill_context=0.0)  # seconds
_DEAR_KV = 180 * 128  # tokens
_TWO, _BOTH_SIDES = (0.7, 1.3), (0.5, 1.3)
_SOFT = 600.0  # seconds: the soft target of class batch
_CHAT = Slo(ttft=1.0, tpot=0.06)

_BEST_EFFORT = TrafficClass("be", 2, priority=10, lengths="bros-best-effort")
_SHORT_PLAIN = TrafficClass("plain", 3, lengths="alpaca")
_BATCH = TrafficClass("batch", 1, Slo(soft=_SOFT), 10, "bros-best-effort")
_MIX = (
    TrafficClass("chat", 5, _CHAT),
    TrafficClass("code", 3, Slo(e2e=10.0), lengths="alpaca"),
    TrafficClass("batch", 2, Slo(soft=_SOFT), 10, "bros-best-effort"),
)


def _tpot(name: str, seconds: float) -> Ground:
    """Return a ground where chats are promised this pace."""
    chat = TrafficClass("chat", 3, Slo(ttft=1.0, tpot=seconds))
    return Ground(name, _LLAMA, (chat, _BEST_EFFORT), held=True)


def _dear(name: str, *classes: TrafficClass) -> Ground:
    """Return a ground with an engine like a small CPU: 16 slots, 2 ms per prompt token, a base of 50 ms."""
    return Ground(
        name, _CPU, classes, max_running=16, kv_tokens=_DEAR_KV, law=_DEAR, requests=600, most=2400.0, held=True
    )


def _hinted(name: str, *factors: float) -> Ground:
    """Return a ground where forecasts of lengths are off by these factors and claim to be exact."""
    classes = (
        TrafficClass("chat", 2, Slo(ttft=1.0, tpot=0.1)),
        TrafficClass("job", 2, Slo(e2e=30.0)),
        TrafficClass("be", 1, priority=10, lengths="bros-best-effort"),
    )
    return Ground(name, _OPT, classes, _BOTH_SIDES, hints=factors, held=True)


HELD = (
    _tpot("tpot-impossible", 0.8 * _BASE),
    _tpot("tpot-edge", 2 * _BASE),
    _dear("dear-prompts", _SHORT_PLAIN, _BATCH),
    _dear(
        "dear-prompts-chat", TrafficClass("chat", 3, Slo(ttft=2.0, tpot=0.15), lengths="alpaca"), _SHORT_PLAIN, _BATCH
    ),
    Ground("five-times-slower", _LLAMA, _MIX, pace=5.0, requests=1000, held=True),
    Ground(
        "day-lines",
        _LLAMA,
        (TrafficClass("plain", 3), TrafficClass("line", 2, Slo(e2e=86_400.0), 10, "bros-best-effort")),
        _TWO,
        at_once=("line",),
        held=True,
    ),
    Ground("mostly-plain", _LLAMA, (TrafficClass("chat", 1, _CHAT), TrafficClass("plain", 9)), held=True),
    Ground(
        "one-of-four",
        _LLAMA,
        (
            TrafficClass("chat", 1, _CHAT),
            TrafficClass("plain", 1, lengths="alpaca"),
            _BATCH,
            TrafficClass("writing", 1, lengths="bookcorpus"),
        ),
        longest=4096,
        held=True,
    ),
    Ground(
        "weighted-tiers",
        _A40,
        (
            TrafficClass("gold", 1, Slo(ttft=0.5, tpot=0.06, weight=4.0)),
            TrafficClass("silver", 2, Slo(ttft=2.0, tpot=0.1, weight=2.0), 1, "lmsys"),
            _BEST_EFFORT,
        ),
        (0.5, 0.9, 1.3, 2.0),
        held=True,
    ),
    _hinted("hints-long", 3.0),
    _hinted("hints-short", 1 / 3),
    _hinted("hints-both", 3.0, 1 / 3),
    Ground(
        "runs",
        _A40,
        (
            TrafficClass("chat", 1, _CHAT),
            TrafficClass("agent", 2, Slo(e2e=15.0), requests_per_run=4),
            TrafficClass("tool", 1, requests_per_run=3),
        ),
        _TWO,
        rivals=("hermes", "hermes-ddl"),
        requests=300,
        held=True,
    ),
    Ground(
        "tenants",
        _A40,
        (
            TrafficClass("chat", 2, _CHAT, tenants=("large", "small")),
            TrafficClass("be", 4, priority=10, lengths="bros-best-effort", tenants=("large",)),
            TrafficClass("be", 1, priority=10, lengths="bros-best-effort", tenants=("small",)),
        ),
        _TWO,
        rivals=("vtc",),
        requests=300,
        held=True,
    ),
    Ground(
        "surge",
        _A40,
        (*_MIX, TrafficClass("plain", 3)),
        (3.0,),
        calm=Calm(0.3, 7.0),
        requests=100_000,
        most=600.0,
        held=True,
    ),
    Ground(
        "long-overload",
        _LLAMA_70B,
        (
            TrafficClass("chat", 1, Slo(ttft=6.0, tpot=0.05), lengths="sharegpt-multiround"),
            TrafficClass("soon", 1, Slo(e2e=600.0), lengths="sharegpt-multiround"),
            TrafficClass("later", 1, Slo(e2e=1800.0), lengths="sharegpt-multiround"),
        ),
        (1.2,),
        longest=8192,
        requests=100_000,
        most=3600.0,
        held=True,
    ),
)
