"""The table [batches] of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Batches:
    """Files of requests that are answered within hours (`/v1/files`, `/v1/batches`).

    dir: the directory of the files and of their progress, which gateways that share the queue share, too;
        unset, beside the queue in sqlite, or within the one in PostgreSQL. "none", or a queue in memory =
        there are no batches.
    max_file_mib, max_lines: of one file. tenant_mib: of all files of a tenant.
    max_open: batches of a tenant that have not ended.
    lines: of a tenant's batches that wait for an engine or are in one at a time; unset, twice what the
        engines compute at a time (engines.max_running).
    """

    dir: Annotated[str, Field(min_length=1)] | None = None
    max_file_mib: Count = 200
    max_lines: Count = 50_000
    tenant_mib: Count = 4096
    max_open: Count = 100
    lines: Count | None = None
