"""Which questions do policies answer? One Protocol each; a policy that is a function stays a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headway.types import Batch, Event, Forecast, Jobs, Plan, Request, Step

if TYPE_CHECKING:
    from headway.core.cluster import Cluster
    from headway.memory.budget import KvBudget


class Planner(Protocol):
    """Which instance, in what order, with which model?"""

    def plan(self, cluster: Cluster, now: float) -> Plan: ...


@runtime_checkable
class Listener(Protocol):
    """What has happened? Asked for by planners that keep an account of their own (tokens served, rates).

    The controller tells each event once, while the request that it is about stands in the backlog: an
    arrival just after it was added, an end just before it is taken out.
    """

    def on(self, event: Event, cluster: Cluster, now: float) -> None: ...


class Packer(Protocol):
    """What runs in the next iteration of one engine?"""

    def pack(self, jobs: Jobs, ledger: KvBudget, now: float) -> Step: ...


class Lengths(Protocol):
    """How many tokens will the answer have?"""

    def forecast(self, request: Request) -> Forecast: ...

    def learn(self, request: Request, output_tokens: int) -> None: ...


class LatencyModel(Protocol):
    """How long does an iteration of this shape take, in seconds?"""

    def seconds(self, batch: Batch) -> float: ...

    def learn(self, batch: Batch, seconds: float) -> None: ...
