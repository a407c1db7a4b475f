"""The state that the slow loop keeps: the instances and every request that is not finished."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.types import Backlog, Instance


@dataclass(slots=True)
class Cluster:
    """All the slow loop knows. `Controller` is its only writer; planners read it.

    instances: those that take work. loading: those in a swap, as they were, and the model that they load.
    warming: instance -> model that is on its way into its host memory.
    pull: requests stay ours to order until an engine has room for them; otherwise they go in at once and wait
    there, as with an engine that nobody stands in front of.
    """

    instances: dict[str, Instance] = field(default_factory=dict)
    backlog: Backlog = field(default_factory=Backlog)
    codes: dict[str, int] = field(default_factory=dict)  # names of models, instances, tenants -> column code
    loading: dict[str, tuple[Instance, str]] = field(default_factory=dict)
    warming: dict[str, str] = field(default_factory=dict)
    pull: bool = True

    def code(self, name: str) -> int:
        """Return the number that stands for a model, an instance or a tenant in the backlog's columns."""
        return self.codes.setdefault(name, len(self.codes))
