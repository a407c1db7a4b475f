"""Planned requests (`Call`) and their outcomes (`Record`), in real and simulated runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.types import Slo

Gaps = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Call:
    """One request of an open-loop load, sent `at` seconds after the start.

    tier: class of the request
    priority: lower is more urgent, as in vLLM
    model: requested model, None = the model of the run
    """

    at: float
    tier: str
    prompt: str
    max_tokens: int
    ignore_eos: bool = False
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    model: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One request as the client measured it; times are seconds after the start of the run.

    at: planned arrival, from which ttft and e2el count, so that a late sender does not hide queueing
    first: first visible token, or the arrival of an answer that is not streamed
    last: end of the response, or of the attempt
    gaps: seconds between visible chunks
    status: HTTP status, None = no response
    error: None = completed; the text up to the first colon is the kind of failure
    counted: the endpoint did not report usage, so output_tokens counts chunks and prompt_tokens is 0
    id: x-request-id of the response, None without one
    model: as in `Call`
    longest_gap: of `gaps`, where single gaps are not known
    """

    tier: str
    at: float
    sent: float
    first: float | None
    last: float | None
    prompt_tokens: int
    output_tokens: int
    gaps: Gaps
    status: int | None
    error: str | None
    slo: Slo
    counted: bool = False
    id: str | None = None
    model: str | None = None
    longest_gap: float | None = None

    @property
    def ok(self) -> bool:
        """Tell whether the whole response arrived."""
        return self.error is None and self.first is not None and self.last is not None

    @property
    def ttft(self) -> float:
        """Seconds from the planned arrival to the first visible token; inf when there was none."""
        return math.inf if self.first is None else self.first - self.at

    @property
    def e2el(self) -> float:
        """Seconds from the planned arrival to the end of the response; inf when it did not complete."""
        return math.inf if not self.ok or self.last is None else self.last - self.at

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None below two tokens or if it did not complete."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.ok and self.output_tokens > 1 else None

    @property
    def gap(self) -> float | None:
        """Longest silence between visible chunks in seconds; None where there was none or it is not known."""
        return float(self.gaps.max()) if self.gaps.size else self.longest_gap

    @property
    def met(self) -> bool:
        """Tell whether it completed within its SLO (as in vLLM, the tpot of one token is 0)."""
        return self.ok and self.slo.met(self.ttft, self.tpot or 0.0, self.e2el, self.gap or 0.0)


# Counters of an engine during a run, by name: preemptions; those of `scheduler_stats.py` and `hook.py` in
# `engines/vllm/plugin`; of simulated engines engine_hours and, with prefix caches, prompt.hit_pct. A missing one is
# unknown.
Counters = Mapping[str, float]
# {system: (its records, its counters)}; the first system is the baseline.
Results = Mapping[str, tuple[Sequence[Record], Counters]]
