"""The table [grammars] of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Grammars:
    """Limits of what one request's structured output may have: to compile it takes the engine's cores.

    max_kib: of schemas, regular expressions, grammars and choices, as JSON.
    max_depth: objects and arrays within each other in a schema.
    max_regex: characters of all regular expressions, with what they repeat written out: "[a-z]{3}" has 3.
    max_repeats: sum of the bounds of a schema, minLength, maxLength, minItems, maxItems and the like, and of a
        grammar's counted repetitions.
    """

    max_kib: Count = 64
    max_depth: Count = 64
    max_regex: Count = 1024
    max_repeats: Count = 10_000
