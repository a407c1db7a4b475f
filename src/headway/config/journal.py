"""The table [journal] of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Journal:
    """The journal: a row per request that ended, and the engines' iterations, without text of prompts.

    dir: its folder, which gateways on one machine may share; unset, beside the queue if that is on disk;
        "none" = no journal is kept.
    max_mib: of all its files; the oldest are deleted first. days: files older than this are deleted, too.
    """

    dir: Annotated[str, Field(min_length=1)] | None = None
    max_mib: Annotated[int, Field(ge=16)] = 256
    days: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)] = 14.0
