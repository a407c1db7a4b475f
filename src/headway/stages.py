"""The words of application runs: what a request serves, what it needs, the command to have that ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Stage:
    """Which unit of which application run a request serves; `final` = the run ends with it.

    target: seconds that the whole run may take from its first request on, None = no deadline.
    """

    app: str
    run: str
    unit: str
    target: float | None = None
    final: bool = False


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
    run: which may have more to warm than what all runs share, such as its conversation.
    """

    tenant: str
    resource: Resource
    until: float
    run: str = ""
