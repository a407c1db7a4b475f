"""What units of application runs need beside an engine, and the command to have it ready (Hermes 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that must be warm before a unit can begin.

    kind: "prefix" (KV of what a unit's prompts have in common), "adapter" (LoRA) or "backend" (a sandbox, a
        model, a tool outside the LLM).
    name: of the adapter or backend; of a prefix "application/unit".
    """

    kind: Literal["prefix", "adapter", "backend"]
    name: str


@dataclass(frozen=True, slots=True)
class Prewarm:
    """Warm a resource for a unit of a tenant's run that has not begun; ends with `Prewarmed`.

    until: instant from which on the unit is not expected any more.
    """

    tenant: str
    resource: Resource
    until: float
