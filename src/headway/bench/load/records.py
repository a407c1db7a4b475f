"""What was asked, and what came back when?

A `Call` is one planned request, a `Record` what became of it. Both are all that reports read, so that records
of a simulated run and of a real one are judged by the same code.
"""

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
    """One request to send `at` seconds after the start, whatever became of the earlier ones."""

    at: float
    tier: str
    prompt: str
    max_tokens: int
    ignore_eos: bool = False
    slo: Slo = field(default_factory=Slo)
    priority: int = 0  # as in vLLM: lower is more urgent


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One request as the client saw it; instants are seconds after the start of the run.

    at: planned arrival, from which ttft and e2el count, so that a late sender hides no queueing.
    last: end of the answer, or of the attempt. itl: seconds between visible chunks. status: HTTP status,
    None = no answer. error: None = completed; its text up to the first colon is the kind of failure.
    counted: the endpoint reported no usage, so output_tokens counts chunks and prompt_tokens is 0.
    id: what the endpoint called it (x-request-id), None when it did not say.
    """

    tier: str
    at: float
    sent: float
    first: float | None
    last: float | None
    prompt_tokens: int
    output_tokens: int
    itl: Gaps
    status: int | None
    error: str | None
    slo: Slo
    counted: bool = False
    id: str | None = None

    @property
    def ok(self) -> bool:
        """Tell whether the whole answer arrived."""
        return self.error is None and self.first is not None and self.last is not None

    @property
    def ttft(self) -> float:
        """Seconds from the planned arrival to the first visible token; inf when there was none."""
        return math.inf if self.first is None else self.first - self.at

    @property
    def e2el(self) -> float:
        """Seconds from the planned arrival to the end of the answer; inf when it did not complete."""
        return math.inf if not self.ok or self.last is None else self.last - self.at

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None below two tokens or when not completed."""
        return (
            (self.e2el - self.ttft) / (self.output_tokens - 1) if self.ok and self.output_tokens > 1 else None
        )

    @property
    def met(self) -> bool:
        """Tell whether it completed and kept every promise (as in vLLM, one token has a tpot of 0)."""
        return self.ok and self.slo.met(self.ttft, self.tpot or 0.0, self.e2el)


# What an engine counted during a run, by name: preemptions, and what `engines/vllm/plugin/scheduler_stats.py` and `hook.py`
# count. What is not there is unknown.
Counters = Mapping[str, float]
# {system: (its records, its counters)}; the first system is the one compared to.
Results = Mapping[str, tuple[Sequence[Record], Counters]]
