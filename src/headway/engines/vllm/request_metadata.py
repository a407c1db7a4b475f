"""What does the engine's scheduler know about a request? What travels with it in `vllm_xargs`.

vLLM carries a flat dict from the HTTP body to `SamplingParams.extra_args`. The gateway writes our facts
there, the hook reads them; one place spells their names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headway.types import Forecast, Request

_PREFIX = "headway_"


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """Our id, the arrival (instant), the promises (seconds, inf = none) and the expected output tokens."""

    id: str
    arrival: float
    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf
    left: float = 1.0


def write_metadata(request: Request, forecast: Forecast, rank: float = 0.0) -> dict[str, str | float]:
    """Return the facts of a request as a flat dict for `vllm_xargs`; promises not made are left out."""
    slo = request.slo
    facts = {"ttft": slo.ttft, "tpot": slo.tpot, "e2e": slo.e2e, "left": forecast.mean, "urgency": rank}
    numbers = {_PREFIX + name: float(value) for name, value in facts.items() if value is not None}
    return {_PREFIX + "id": request.id, _PREFIX + "arrival": request.arrival, **numbers}


def read_metadata(request: Any) -> RequestMetadata:
    """Return the facts of a vLLM request; one that came past the gateway is best effort from its arrival.

    Values of a wrong type are ignored: a stranger's extra argument must not stop the engine.
    """
    params = request.sampling_params
    extra = (params.extra_args if params is not None else None) or {}
    limit = params.max_tokens if params is not None else None
    return RequestMetadata(
        id=str(extra.get(_PREFIX + "id", request.request_id)),
        arrival=_number(extra, "arrival", request.arrival_time),
        ttft=_number(extra, "ttft", math.inf),
        tpot=_number(extra, "tpot", math.inf),
        e2e=_number(extra, "e2e", math.inf),
        left=_number(extra, "left", float(limit or 1)),
    )


def _number(extra: dict[str, Any], name: str, default: float) -> float:
    value = extra.get(_PREFIX + name)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else default  # type: ignore[arg-type]
