"""Which questions do policies answer? One Protocol each; a policy that is a function stays a function."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from headway.types import Backlog, Batch, Event, Forecast, Instance, Jobs, Plan, Request, Step

if TYPE_CHECKING:
    from headway.forecast.pace import OnlinePace
    from headway.memory.ledger import Ledger


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

    def pack(self, jobs: Jobs, ledger: Ledger, now: float) -> Step: ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """planner() and packer(max_running, token_budget, pace) make fresh policies; `about`: one line.

    pull: as in `Cluster`. saves: the packer uses `Step.save`, which needs an engine that can copy KV to the
    host; reserves: `Step.reserve` and `Step.lend`, which need an engine that shares no prefixes
    (`engines/vllm/reserve.py`). swaps: the planner loads other models where instances can. lengths: whose
    forecasts it is meant for: those that the host has, those padded, or an oracle's, which only a simulation
    has. kv: how an engine with a host pool keeps KV for it: in two-ended blocks, or in plain ones, copies (in
    simulations) before or beside the computation.
    """

    name: str
    about: str
    planner: Callable[[], Planner]
    packer: Callable[[int, int, OnlinePace], Packer]
    pull: bool = True
    saves: bool = False
    swaps: bool = False
    reserves: bool = False
    lengths: Literal["host", "padded", "oracle"] = "host"
    kv: Literal["before", "beside", "two-ended"] = "before"


class Lengths(Protocol):
    """How many tokens will the answer have?"""

    def forecast(self, request: Request) -> Forecast: ...

    def learn(self, request: Request, made: int) -> None: ...


class Pace(Protocol):
    """How long does an iteration of this shape take, in seconds?"""

    def seconds(self, batch: Batch) -> float: ...

    def learn(self, batch: Batch, seconds: float) -> None: ...


@dataclass(slots=True)
class Job:
    """One accepted request as the broker keeps it: what is needed to run it again after a crash.

    `request` is the core's view (as JSON-able fields), `body` what goes to the engine at `path`.
    state: open -> done | failed. Background jobs are run again after a crash and answered once.
    """

    id: str
    tenant: str
    path: str
    body: bytes
    request: str
    arrival: float
    background: bool = False
    state: str = "open"
    attempts: int = 0
    result: bytes | None = None
    reason: str | None = None
    finished: float | None = None


class Broker(Protocol):
    """What has been promised? Nothing accepted is forgotten; nothing is answered twice."""

    async def put(self, job: Job) -> None:
        """Store a new open job; when this returns it survives a crash. A known id is an error."""

    async def done(self, id: str, result: bytes | None, now: float) -> bool:
        """Close an open job as done. False when it was closed before: the caller's answer is a second one."""

    async def fail(self, id: str, reason: str, now: float) -> bool:
        """Close an open job as failed with its reason. False when it was closed before."""

    async def attempt(self, id: str) -> int:
        """Count one more try to run the job; return how many there have been."""

    async def get(self, id: str) -> Job | None:
        """Return one job, closed ones too, None when it is unknown or forgotten."""

    def open(self) -> AsyncIterator[Job]:
        """Yield every open job, oldest first: what a restarted gateway owes."""

    async def forget(self, before: float) -> int:
        """Delete jobs closed before that instant; return how many."""

    async def close(self) -> None:
        """Write what is pending and let go of files and threads."""
