"""The tables [log] and [tracing] of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_STRICT)
class Log:
    """What the gateway logs, to stderr.

    level: of the least important lines that are written.
    format: "text", or "json": one object per line.
    access: a line for every HTTP request but probes (/health, /ready, /metrics), when it has ended.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    access: bool = False


@dataclass(frozen=True, config=_STRICT)
class Tracing:
    """OpenTelemetry: a span for every request and each of its states, by OTLP over HTTP.

    endpoint: of a collector, such as "http://localhost:4318"; unset = no tracing.
    service: the name that the spans have there.
    sample: share of the requests without a parent that get one; of others the parent decides.
    """

    endpoint: str | None = None
    service: Annotated[str, Field(min_length=1)] = "headway"
    sample: Annotated[float, Field(ge=0, le=1, strict=False)] = 1.0
