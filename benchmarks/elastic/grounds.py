"""Grounds of `headway bench elastic`: half an hour of traffic whose load changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from headway.simulate.fleet import spec
from headway.simulate.instance import InstanceSpec
from headway.simulate.workload.arrivals import diurnal, phases, poisson, recorded
from headway.simulate.workload.traffic import TrafficClass, Workload, make
from headway.types import Floats, Slo

PROFILE, MODEL = "llama-2-70b-a100-tp4", "default"
CHAT = Slo(ttft=3.0, tpot=0.1)
DOCUMENTS = Slo(ttft=15.0, tpot=0.15)
DAY_S = 1800.0  # of the diurnal ground: a day in half an hour
_AZURE_FROM_S = 900.0
_NONE = np.empty(0)


@dataclass(frozen=True, slots=True)
class Ground:
    """Traffic by seed and length; what came before it and is known to the forecast, in negative seconds.

    seconds: how long it is. recorded: its trace in HEADWAY_DATA, "" = generated. longest: tokens of a request.
    day_s: after which its traffic's day begins again.
    """

    make: Callable[[float, np.random.Generator], tuple[Workload, Floats]]
    seconds: float = 1800.0
    recorded: str = ""
    longest: int = 8192
    day_s: float = 86_400.0

    def workload(self, seconds: float, seed: int) -> tuple[Workload, Floats]:
        """Return the requests that an engine can hold, and the arrivals before them."""
        work, before = self.make(seconds, np.random.default_rng(seed))
        return work.take(work.prompt + work.output < self.longest), before


def fleet(count: int, longest: int, start_s: float) -> list[InstanceSpec]:
    """Return equal engines without prefix caches."""
    text = f"{PROFILE}:{count},max_model_len={longest},host_kv_gib=0,model={MODEL},start_s={start_s}"
    return spec(text).instances()


def _chat(at: Floats, rng: np.random.Generator) -> Workload:
    return make([TrafficClass("chat", slo=CHAT, lengths="sharegpt-multiround", model=MODEL)], at, rng)


def _azure(seconds: float, rng: np.random.Generator) -> tuple[Workload, Floats]:
    """Return the busiest half of the trace's hour, after the quarter before it."""
    trace = recorded("azure_conv_2023", rng=rng)
    work = make([TrafficClass("chat", slo=CHAT, lengths=None, model=MODEL)], trace, rng)
    before = work.arrival[work.arrival < _AZURE_FROM_S] - _AZURE_FROM_S
    work = work.between(_AZURE_FROM_S, _AZURE_FROM_S + seconds)
    return replace(work, arrival=work.arrival - _AZURE_FROM_S), before


def _mooncake(seconds: float, rng: np.random.Generator) -> tuple[Workload, Floats]:
    """Return every fourth conversation request of Mooncake's trace."""
    trace = recorded("mooncake_conversation", rng=rng)
    work = make([TrafficClass("documents", slo=DOCUMENTS, lengths=None, model=MODEL)], trace, rng)
    return work.take(slice(0, None, 4)).between(0, seconds), _NONE


def _diurnal(seconds: float, rng: np.random.Generator) -> tuple[Workload, Floats]:
    """Return a day, after two that were seen."""
    both = diurnal(2.2, 1.8, DAY_S, DAY_S + seconds, rng)
    work = _chat(both[both >= DAY_S] - DAY_S, rng)
    first = diurnal(2.2, 1.8, DAY_S, DAY_S, rng)
    return work, np.concatenate([first - 2 * DAY_S, both[both < DAY_S] - DAY_S])


def _step(seconds: float, rng: np.random.Generator) -> tuple[Workload, Floats]:
    """Return a load that is four times as high in the middle third."""
    return _chat(phases([1.0, 4.0, 1.0], seconds / 3, rng), rng), _NONE


def _bursty(seconds: float, rng: np.random.Generator) -> tuple[Workload, Floats]:
    """Return Poisson arrivals whose rate changes every few minutes."""
    at, now = [_NONE], 0.0
    while now < seconds:
        lasts = min(rng.exponential(240.0) + 30.0, seconds - now + 1.0)
        at.append(now + poisson(float(rng.choice([1.0, 1.5, 2.0, 3.0, 4.0])), lasts, rng))
        now += lasts
    times = np.concatenate(at)
    return _chat(times[times < seconds], rng), _NONE


GROUNDS = {
    "azure": Ground(_azure, recorded="azure_conv_2023"),
    "mooncake": Ground(_mooncake, recorded="mooncake_conversation", longest=49_152),
    "diurnal": Ground(_diurnal, day_s=DAY_S),
    "bursty": Ground(_bursty),
    "step": Ground(_step),
}
