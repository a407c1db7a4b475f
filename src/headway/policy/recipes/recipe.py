"""A recipe: one planner for the slow loop and one packer for the fast loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headway.policy.core.engine_spec import EngineSpec, KvUse
from headway.ports import Packer, Planner


@dataclass(frozen=True, slots=True)
class Recipe:
    """Factories of fresh policies under a name.

    name: as in the registry.
    about: one line for people.
    planner: makes a planner.
    packer: makes a packer for one engine.
    lengths: the length forecasts that it is meant for: learned while serving, those padded, one drawn from each
        task's normal distribution, or an oracle's true lengths, which only a simulation has.
    """

    name: str
    about: str
    planner: Callable[[], Planner]
    packer: Callable[[EngineSpec], Packer]
    lengths: Literal["learned", "padded", "drawn", "oracle"] = "learned"

    @property
    def wants(self) -> KvUse:
        """How its packer uses the KV of an engine that can do everything."""
        able = EngineSpec(1, 1, copy_seconds=0.0, host_tokens=1 << 40, two_ended=True, reservations=True)
        return self.packer(able).kv
