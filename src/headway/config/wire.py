"""The table [wire] of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headway.config.keys import Secret


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Wire:
    """The RabbitMQ over which gateways, controllers and agents find each other; `headway serve` needs none.

    url: amqp://USER:PASSWORD@HOST:PORT/VHOST, or amqps:// for TLS, or better where it is: "env:NAME" or
        "file:PATH"; those of several nodes of a cluster with commas between.
    name: of this Headway; several may share one RabbitMQ.
    lease_seconds: a gateway or an agent that was silent for this long is taken for gone.
    host: the address by which gateways reach the engines of an agent.
    """

    url: Secret | None = None
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] = "headway"
    lease_seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=False)] = 10.0
    host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
