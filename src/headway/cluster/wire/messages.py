"""Messages between gateways, controllers and agents other than events and commands.

They keep each process's view of the others complete although any process or connection may end at any moment: a
controller lists the processes that it knows (`Standing`), and a process that is not listed reports all that it
has (`Present`, `EngineState`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from headway.events import Event
from headway.types import Command, Instance, Leaving, Progress, Request


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request of a gateway.

    instance: where it was sent, None = it is queued. started: it has its first token.
    since: instant from which the gateway has it; of two gateways that claim a request, the later one has it.
    keys: as in `Arrived`.
    """

    request: Request
    instance: str | None
    started: bool
    since: float
    keys: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Present:
    """Requests that a gateway has, in the order of their arrival. last: it has no more."""

    requests: tuple[InFlight, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine as its agent sees it; from agents, every second and when it changes.

    url, key: its address and API key. instance: None = it is down.
    current: the model that it serves, or is to serve. given_up: models that it cannot load, and why.
    failure: why it is down, None = it is up or starting. prefix_caching, fatal: as in `EngineView`.
    leaving, stopped: as in `EngineView`. settings: as JSON, None = as in the configuration.
    """

    id: str
    url: str
    key: str | None
    instance: Instance | None
    current: str
    loading: str | None
    given_up: Mapping[str, str]
    prefix_caching: bool
    restarts: int
    failure: str | None
    fatal: tuple[str, ...]
    leaving: Leaving | None
    stopped: bool
    settings: str | None


@dataclass(frozen=True, slots=True)
class AgentEngines:
    """Ids of all engines of an agent, with each report of them; one that is missing has been removed."""

    ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """An operator's order, from a gateway to the agent that carries it out. number: of the order at that gateway.

    add: settings as JSON, with ids. roll: settings as JSON by id. now: those that are removed stop at once.
    """

    number: int
    add: tuple[str, ...] = ()
    roll: Mapping[str, str] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    now: bool = False


@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """An agent's answer to an `EngineOrder`. status: of the error that refused it, 0 = it has begun."""

    number: int
    status: int = 0
    message: str = ""
    hint: str = ""
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A gateway or an agent has ended or starts over: it has no requests or engines now."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """An engine's answer to `Asked`. progress: by request. asked: an instant before that of the answer."""

    instance: str
    progress: Mapping[str, Progress]
    asked: float


@dataclass(frozen=True, slots=True)
class Asked:
    """The controller asks for the progress of requests at an instance."""

    instance: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests of one tenant and class that wait outside the engines. count: their places."""

    tenant: str
    tier: str
    count: int


@dataclass(frozen=True, slots=True)
class Alive:
    """A gateway's heartbeat, twice a second. waiting: its requests outside engines. count: all its requests."""

    waiting: tuple[Waiting, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Standing:
    """A leading controller's heartbeat, twice a second, to all gateways and agents.

    known: gateways and agents whose requests or engines it knows. waiting: as in `Alive`, by gateway.
    """

    known: frozenset[str]
    waiting: Mapping[str, tuple[Waiting, ...]]


Orders = AgentEngines | EngineOrder | OrderAnswer
Report = Present | EngineState | Gone | Alive | Progressed | Asked | Standing | Orders
Item = Event | Command | Report


Role = Literal["gateway", "controller", "agent"]
To = str | Literal["controller", "gateways", "all"]
"""The name of a gateway or an agent, the controller that leads, all gateways, or all gateways and agents."""


@dataclass(frozen=True, slots=True)
class Message:
    """A received message, with one or several items that were sent together.

    sender: name of the process that sent it.
    epoch: term of the controller that sent it, 0 from others; in messages to a controller, its own term.
    apart: seconds by which this process's clock is ahead of the sender's, transit time included.
    number: grows by one with each message from a sender to the same receiver; a gap means a lost message.
    """

    sender: str
    epoch: int
    items: tuple[Item, ...]
    apart: float
    number: int = 0


class WireLink(Protocol):
    """A process's link to the wire.

    Messages from one process to another arrive in order, or are lost when a connection breaks in between: the
    receiver sees a gap in the numbers, and a process whose own connection broke sees that in `connections`. A
    controller gets messages only while it leads, and at most one leads.
    """

    @property
    def name(self) -> str:
        """Return the unique name of this process."""
        ...

    @property
    def connected(self) -> bool:
        """Tell whether messages can be sent."""
        ...

    @property
    def connections(self) -> int:
        """Return how often this process has connected so far."""
        ...

    def send(self, to: To, *items: Item) -> None:
        """Send items soon, together; without a connection they are lost."""
        ...

    def messages(self) -> AsyncIterator[Message]:
        """Yield messages until the link is closed."""
        ...
