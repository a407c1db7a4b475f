"""One planner for fleets that serve what they serve, and another for fleets that can load other models.

Which one it is follows from what the instances announce: `Instance.loaded` tells that one can load another
model. The planner that swaps is made ready beside the event loop, since it may have to be compiled, and takes
over whatever is queued and inside the engines then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.events import Event, InstanceUp, Swapped
from headway.policy.apps.demand import Knowledge
from headway.policy.apps.prewarming import Prewarming
from headway.policy.core.cluster import Cluster
from headway.policy.plan.qlm import Qlm
from headway.ports import Planner
from headway.types import Plan


class ByFleet(Planner):
    """`still` plans until an instance says that it can load another model; from then on `swapping()` does.

    It does not change back: an instance that is down, or has nothing that it may load at the moment, is of
    the same kind when it is up again.

    still: plans for fleets without model swaps. swapping: makes the planner for the others.
    """

    swaps = True

    def __init__(self, still: Planner, swapping: Callable[[], Qlm]) -> None:
        self.still = still
        self._make = swapping
        self._planner: Planner = still
        self._next: Qlm | None = None  # not ready yet
        self._thinker: Planner = still  # whose computation is under way

    @property
    def pull(self) -> bool:
        """Tell whether requests stay outside until an engine has room."""
        return self._planner.pull

    @property
    def restricts(self) -> bool:
        """Tell whether the current planner keeps to `Request.engines`."""
        return self._planner.restricts

    @property
    def thinks(self) -> bool:
        """Tell whether an instance can load another model."""
        return self._next is not None or self._planner.thinks

    @property
    def wake_at(self) -> float:
        """The instant at which the planner at work wants to plan."""
        return self._planner.wake_at

    @property
    def knowledge(self) -> Knowledge | None:
        """The applications' graphs, which the planner for fleets without model swaps learns."""
        return self.still.knowledge

    @property
    def prewarming(self) -> Prewarming | None:
        """What that planner plans to warm ahead."""
        return self.still.prewarming

    def run_rest(self, tenant: str, app: str, run: str, now: float) -> float | None:
        """Return the expected seconds of service that a live run still needs, if that planner is at work."""
        return self._planner.run_rest(tenant, app, run, now)

    @property
    def gauges(self) -> Mapping[str, float]:
        """What the planner at work sees."""
        return self._planner.gauges

    def take_turns(self) -> None:
        """Be fair between tenants as long as no instance swaps models."""
        self.still.take_turns()

    def prepare(self) -> None:
        """Compile what fleets without model swaps need."""
        self.still.prepare()

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Tell the planner at work, and look whether it is the right one."""
        match event:
            case InstanceUp(instance) | Swapped(instance):
                if instance.loaded is not None and self._planner is self.still and self._next is None:
                    self._next = self._make()
        self._planner.on(event, cluster, now)

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return the plan of the planner at work."""
        return self._planner.plan(cluster, now)

    def deliberate(self, cluster: Cluster, now: float) -> Callable[[], object] | None:
        """Return what makes the planner that swaps ready, or what this one computes."""
        self._thinker = self._next or self._planner
        return self._thinker.prepare if self._next is not None else self._planner.deliberate(cluster, now)

    def conclude(self, result: object, cluster: Cluster, now: float) -> None:
        """Let the planner that swaps take over, or hand it its result."""
        if self._next is not None and self._thinker is self._next:
            self._next.take_over(cluster, now)
            self._planner, self._next = self._next, None
        else:
            self._thinker.conclude(result, cluster, now)
