"""Protocols that policies implement; a policy that is a function stays a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from headway.events import Event
from headway.policy.core.engine_spec import KvUse
from headway.types import Batch, Forecast, Jobs, Plan, Request, Step

if TYPE_CHECKING:
    from headway.policy.apps.demand import Knowledge
    from headway.policy.apps.prewarming import Prewarming
    from headway.policy.core.cluster import Cluster
    from headway.policy.core.engine_spec import PackerParams
    from headway.policy.memory.budget import KvBudget


class Planner(Protocol):
    """Assigns requests to instances: in what order, with which model loaded.

    Implementations inherit from it and override what differs from the defaults.
    """

    __slots__ = ()

    @property
    def pull(self) -> bool:
        """Tell whether requests stay outside until an engine has room (else they queue inside the engine)."""
        return True

    @property
    def swaps(self) -> bool:
        """Tell whether plans load other models."""
        return False

    @property
    def restricts(self) -> bool:
        """Tell whether it keeps to `Request.engines`; other planners send to any instance of the model."""
        return False

    @property
    def thinks(self) -> bool:
        """Tell whether it has decisions that take long (`deliberate`)."""
        return False

    @property
    def reranks(self) -> bool:
        """Tell whether it changes ranks inside engines also while nothing is queued outside them."""
        return False

    @property
    def wake_at(self) -> float:
        """The instant at which it wants to plan even if nothing happens before, inf = none."""
        return math.inf

    @property
    def gauges(self) -> Mapping[str, float]:
        """What it sees at the moment, for reports."""
        return {}

    @property
    def knowledge(self) -> Knowledge | None:
        """The demand graphs of applications that it learns and plans by; a host loads and stores them."""
        return None

    @property
    def prewarming(self) -> Prewarming | None:
        """What it plans to warm ahead; a host sets how readily."""
        return None

    def rank(self, id: str) -> float:
        """Return the rank of a request that has not ended: lower is served first, equal ones as they came."""
        return 0.0

    def run_rest(self, tenant: str, app: str, run: str, now: float) -> float | None:
        """Return the expected seconds of service that an application's live run still needs, if known."""
        return None

    def take_turns(self) -> None:
        """Be fair between tenants; a host that has several calls this before the first event.

        Planners that have no order of their own for tenants, or are fair anyway, ignore it.
        """
        return

    def prepare(self) -> None:
        """Compile what it needs; a host calls this before it serves, because compiling takes seconds."""
        return

    def plan(self, cluster: Cluster, now: float) -> Plan: ...

    def deliberate(self, cluster: Cluster, now: float) -> Callable[[], object] | None:
        """Return a computation that takes long, if one is due; None = none is.

        The host asks after every event, runs one at a time beside the event loop, hands what it returned to
        `conclude` and then asks for a plan. Events go on meanwhile, so the computation must not read what
        they change: it holds copies of all it needs (`Cluster.snapshot` copies everything).
        """
        return None

    def conclude(self, result: object, cluster: Cluster, now: float) -> None:
        """Take note of what a computation of `deliberate` returned; the cluster is that of now."""
        return

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Take note of an event; for planners that keep an account of their own (tokens served, rates).

        The controller calls it once per event, while the request that it is about is in the backlog: for an
        arrival just after it was added, for an end just before it is removed.
        """
        return


class Packer(Protocol):
    """Decides what one engine runs in the next iteration. Implementations inherit from it."""

    __slots__ = ()

    @property
    def kv(self) -> KvUse:
        """How this packer uses the KV of the engine it was made for."""
        return KvUse()

    @property
    def params(self) -> PackerParams | None:
        """What compiled loops take in its place; None = it is known to Python only."""
        return None

    @property
    def own_order(self) -> bool:
        """Tell whether an engine may keep to its own order as long as no rank comes from outside."""
        return False

    @property
    def counters(self) -> Mapping[str, int]:
        """What it has done so far, for reports."""
        return {}

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step: ...


class Lengths(Protocol):
    """Forecasts the output tokens of a request."""

    def forecast(self, request: Request) -> Forecast: ...

    def learn(self, request: Request, output_tokens: int) -> None: ...


class LatencyModel(Protocol):
    """Forecasts the seconds of an iteration from its shape."""

    def seconds(self, batch: Batch) -> float: ...

    def learn(self, batch: Batch, seconds: float) -> None: ...
