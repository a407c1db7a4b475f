"""The table [broker.postgres] of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headway.config.keys import Secret


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Postgres:
    """The postgres broker's own settings.

    url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE, or better where it is: "env:NAME" or "file:PATH". It
        may ask for TLS (?sslmode=verify-full); what it leaves out is taken from PGPASSWORD and the like.
    schema: of the database, for the queue alone; gateways that name the same one share it.
    timeout_s: that the server may take for a connection or a commit.
    """

    url: Secret | None = None
    schema: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,62}$")] = "headway"
    timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=False)] = 5.0
