"""The table [up] of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Up:
    """What `headway up` runs on a Ray cluster beside an agent for each of [[engines]].

    address: of the Ray cluster; "auto" = the one that this machine belongs to.
    gateways, controllers: how many. The ports of gateways are server.port and those after it.
    cpus, memory_gib: that each of these reserves on its node; agents have engines.resources.
    """

    address: Annotated[str, Field(min_length=1)] = "auto"
    gateways: Count = 2
    controllers: Count = 2
    cpus: Amount = 1.0
    memory_gib: Amount = 1.0
