"""The metadata of a request, written by the gateway and read by the scheduler inside the engine.

vLLM carries `vllm_xargs`, a flat dict, from the HTTP body to `SamplingParams.extra_args`. Requests of pooling
models have none: theirs comes in a header (`plugin/metadata_header.py`). The names of Headway's entries are spelled
here only.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.policy.apps.run import number_of
from headway.types import Forecast, Request

HEADER = "x-headway-metadata"
_PREFIX = "headway_"
_SAID = _PREFIX + "said"
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """What the scheduler learns about one request.

    id: Headway's request id.
    arrival: instant at which the gateway got the request.
    ttft, tpot, e2e, itl: SLO in seconds, inf = none.
    line: as in `Slo`. weight, soft: as in `Jobs`.
    tokens_left: expected output tokens.
    spread: `Jobs.spread`.
    urgency: `Jobs.urgency` at entry, lower first, 0 = the packer's own order.
    first: instant of its first token, of an answer that another engine began (`said_before`); 0 = there is none.
    run: number of its application run (`prefix.run_number`), 0 = none.
    """

    id: str
    arrival: float
    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf
    itl: float = math.inf
    line: float = 0.0
    weight: float = 1.0
    soft: float = 0.0
    tokens_left: float = 1.0
    spread: float = 1.0
    urgency: float = 0.0
    first: float = 0.0
    run: int = 0


def client_xargs(xargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client's `vllm_xargs` without entries of Headway's names, which only the gateway writes."""
    return {name: value for name, value in xargs.items() if not name.lower().startswith(_PREFIX)}


def write_metadata(
    request: Request,
    forecast: Forecast,
    rank: float = 0.0,
    ahead: float = 0.0,
    soft: float | None = None,
    *,
    said: Sequence[int] = (),
    first: float | None = None,
) -> dict[str, str | float | list[int]]:
    """Return the metadata as a flat dict for `vllm_xargs`; SLOs that a request does not have are left out.

    rank, soft: as in `Send`. ahead: seconds by which the engine's clock is ahead of the gateway's.
    said: token ids of an answer that another engine began, and that is to go on behind them. first: instant of
    its first token.
    """
    slo = request.slo
    values = {
        "ttft": slo.ttft,
        "tpot": slo.per_token,
        "e2e": slo.e2e,
        "itl": slo.itl,
        "soft": slo.soft if soft is None else soft,
        "weight": slo.weight if slo.weight != 1.0 else None,
        "line": 1.0 if slo.line else None,
        "tokens_left": max(forecast.mean - len(said), 1.0),
        "spread": forecast.spread,
        "urgency": finite(rank),
        "first": first + ahead if said and first is not None else None,
        "run": number_of(request) or None,
    }
    numbers = {_PREFIX + name: float(value) for name, value in values.items() if value is not None}
    ids = {_SAID: list(said)} if said else {}
    return {_PREFIX + "id": request.id, _PREFIX + "arrival": request.arrival + ahead, **numbers, **ids}


def said_before(params: Any) -> list[int]:
    """Return the tokens of an answer that another engine began, empty = none. params: vLLM's `SamplingParams`."""
    said: list[int] = ((params.extra_args if params is not None else None) or {}).get(_SAID) or []
    return said


def begin_anew(params: Any) -> None:
    """Forget those tokens, for the model's workers, too."""
    del params.extra_args[_SAID]


def as_header(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the header that carries the metadata of a request without `vllm_xargs`."""
    return {HEADER: json.dumps(metadata)}


def from_header(text: str) -> dict[str, Any]:
    """Return the metadata in a header, empty when it is malformed: a client may send anything."""
    try:
        metadata = json.loads(text)
    except ValueError:
        return {}
    items = metadata.items() if isinstance(metadata, dict) else ()
    return {name: value for name, value in items if name.startswith(_PREFIX)}


def read_metadata(request: Any) -> RequestMetadata:
    """Return the metadata of a vLLM request; one that bypassed the gateway is best effort from its arrival.

    Values of a wrong type are ignored: a client's own extra argument must not stop the engine.
    """
    params, pooling = request.sampling_params, request.pooling_params
    extra = (params.extra_args if params is not None else None) or {}
    if pooling is not None:
        extra = pooling.extra_kwargs or {}
    limit = params.max_tokens if params is not None else None
    return RequestMetadata(
        id=str(extra.get(_PREFIX + "id", request.request_id)),
        arrival=_number(extra, "arrival", request.arrival_time),
        ttft=_positive(extra, "ttft", math.inf),
        tpot=_positive(extra, "tpot", math.inf),
        e2e=_positive(extra, "e2e", math.inf),
        itl=_positive(extra, "itl", math.inf),
        line=_number(extra, "line", 0.0),
        weight=_positive(extra, "weight", 1.0),
        soft=_number(extra, "soft", 0.0),
        tokens_left=_number(extra, "tokens_left", float(limit or 1)),
        spread=_number(extra, "spread", 1.0),
        urgency=_number(extra, "urgency", 0.0),
        first=_number(extra, "first", 0.0),
        run=int(_number(extra, "run", 0.0)),
    )


def finite(rank: float) -> float:
    """Return a rank as JSON can carry it: infinities become the largest floats. ValueError for NaN."""
    if math.isnan(rank):
        raise ValueError("a rank is a number")
    return max(min(float(rank), _LARGEST), -_LARGEST)


def _number(extra: dict[str, Any], name: str, default: float) -> float:
    value = extra.get(_PREFIX + name)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else default  # type: ignore[arg-type]


def _positive(extra: dict[str, Any], name: str, default: float) -> float:
    value = _number(extra, name, default)
    return value if value > 0.0 else default
